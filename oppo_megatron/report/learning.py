"""The sections of the page about learning: held-out metrics, the policy's update, the critic's, optimizers.

A note at each chart describes a healthy curve, and the meaning of an unhealthy one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oppo_megatron.report.charts import Line, LineChart, Style
from oppo_megatron.report.colours import run_colour
from oppo_megatron.report.page import Section
from oppo_megatron.report.plots import moving_mean
from oppo_megatron.report.run_records import RunRecord, number

STYLES: tuple[Style, ...] = ("plain", "dashed", "dotted")


@dataclass(frozen=True)
class Curve:
    """A chart of fields of `metrics.jsonl`, each of them with the word that the legend has for it ("": the run's name alone)."""

    name: str
    title: str
    unit: str
    fields: Mapping[str, str]
    note: str
    from_zero: bool = False


POLICY = (
    Curve(
        "kl", "KL to the reference", "nats a response", {"kl_mean": ""},
        "Healthy: it rises slowly from 0 and levels off, or stays near `ppo.kl.target`. A climb that does not end, "
        "above all with a rising reward and a falling held-out metric, is reward hacking: raise `ppo.kl.coefficient`, or lower "
        "the learning rate. "
        "With the estimator `k1` it may be a little below 0.",
    ),
    Curve(
        "kl-coefficient", "KL coefficient", "β", {"kl_coefficient": ""},
        "A fixed one is a flat line. An adaptive one settles; if it grows without end, the policy runs away from the reference "
        "faster than the penalty can hold it: lower the learning rate.", from_zero=True,
    ),
    Curve(
        "entropy", "Entropy of the policy", "nats a token", {"entropy": ""},
        "Healthy: it falls slowly. A fall to nearly 0 within some steps is collapse, where all samples of a prompt are alike and "
        "nothing more can be learned: raise `ppo.entropy_coefficient` or the KL coefficient. A rise means that noise is "
        "learned: lower the learning rate.", from_zero=True,
    ),
    Curve(
        "clip-fraction", "Clipped tokens", "share of tokens", {"clip_fraction": ""},
        "Healthy: 0.01 to 0.1. Above 0.2 the updates go too far: lower the actor's learning rate, or make fewer `ppo.epochs`. "
        "Always 0: the policy hardly moves, and the learning rate may be raised.", from_zero=True,
    ),
    Curve(
        "lost-gradient", "Gradient lost to clipping", "share, by advantage",
        {"lost_gradient_fresh": "fresh responses", "lost_gradient_stale": "with tokens of older policies"},
        "Healthy: both alike. If much more is lost of responses with tokens of older policies, which are the long ones, training "
        "is biased towards short responses: set `ppo.staleness: decoupled`.", from_zero=True,
    ),
    Curve(
        "approx-kl", "Change of the policy in an update", "KL(old, new), nats a token", {"approx_kl": ""},
        "Healthy: below about 0.02, and even. Jumps are updates that went too far; look at the gradient norm of the same step.",
        from_zero=True,
    ),
    Curve(
        "actor-loss", "Policy loss", "clipped surrogate a token; of pairs their loss", {"actor_loss": ""},
        "Healthy: noise around a value near 0. It need not fall, for each batch has new advantages; a drift, or noise that "
        "grows, means that advantages or ratios do. DPO's begins at 0.69 and stays near it, for the "
        "pairs of each batch are new.",
    ),
    Curve(
        "response-length", "Response length", "mean tokens of a trained response", {"trained_len_mean": ""},
        "Healthy: it moves to what the task needs and stays. Growth along with the reward while held-out metrics stand still is "
        "the reward model's liking for long answers; a fall to a few tokens is a policy that has learned to say nothing.",
        from_zero=True,
    ),
    Curve(
        "truncated", "Responses cut at the limit", "share of the batch", {"truncated_fraction": ""},
        "Healthy: near 0, or falling. A rise means that responses no longer end: raise `rollout.max_response_tokens` if they "
        "are good ones, or reward ending.", from_zero=True,
    ),
    Curve(
        "groups", "Groups that teach", "share of groups", {"keep_rate": "kept by the filter", "equal_groups": "all the same"},
        "Of groups whose responses all score the same nothing is learned; a filter drops them. Healthy: most are kept. A fall "
        "means that the prompts have become too easy, or are too hard: take others, or a larger `rollout.group_size`.",
        from_zero=True,
    ),
    Curve(
        "implicit-rewards", "Implicit rewards of pairs", "β times the log-ratio to the reference",
        {"implicit_reward_chosen": "chosen", "implicit_reward_rejected": "rejected"},
        "Of pairs that have just been drawn, so the lines need not part: what the policy has learned to prefer it draws more "
        "often. Where both fall, better responses become unlikely, too: raise `dpo.beta`, lower the learning rate, or set "
        "`dpo.nll`.",
    ),
    Curve(
        "pair-accuracy", "Pairs on their right side", "share of pairs", {"pair_accuracy": ""},
        "How often the better response has the larger implicit reward, before each optimizer step; 0 without a pair. Noise "
        "around 0.5 is usual, for the pairs are new, and it grows as pairs get few. The reward tells whether the policy learns.",
        from_zero=True,
    ),
)  # fmt: skip
VALUE = (
    Curve(
        "explained-variance", "Explained variance of the critic", "1 - var(return - value) / var(return)",
        {"explained_variance": ""},
        "Healthy: it climbs from about 0 (below 0 at the start is usual) to 0.3 and more. If it stays at or below 0, the critic "
        "is no help: raise the critic's learning rate, or start it from the reward model.",
    ),
    Curve(
        "value", "Values and returns", "mean a token", {"value_mean": "value", "return_mean": "return"},
        "Healthy: the two lines come together and move together. A gap that stays means that the critic lags behind the reward.",
    ),
    Curve(
        "critic-loss", "Value loss", "clipped squared error a token", {"critic_loss": ""},
        "Healthy: it falls in the first steps, then stays level. A rise follows rewards whose scale has changed, or a learning "
        "rate that is too high for the critic.", from_zero=True,
    ),
    Curve(
        "critic-clip-fraction", "Clipped values", "share of values", {"critic_clip_fraction": ""},
        "Healthy: below 0.3. If most values are clipped, `ppo.value_clip` is narrow for the scale of the returns, and the critic "
        "learns slowly.", from_zero=True,
    ),
)  # fmt: skip
OPTIMIZER = (
    Curve(
        "grad-norm", "Gradient norm", "before clipping", {"grad_norm": "actor", "critic_grad_norm": "critic"},
        "Healthy: even, with small peaks. Peaks of ten times the usual and more, or steady growth, come before divergence: lower "
        "the learning rate, or `optimizer.clip_grad`.", from_zero=True,
    ),
    Curve(
        "lr", "Learning rate", "at the step's last update", {"lr": ""},
        "As the schedule says: a warm-up, then a flat line or a fall. If the reward stops with a learning rate near 0, the "
        "schedule ended too early.", from_zero=True,
    ),
)  # fmt: skip
SUPERVISED = (
    Curve(
        "pair-accuracy", "Accuracy on the batch's pairs", "share of pairs", {"accuracy": ""},
        "Healthy: from 0.5 up to 0.65 to 0.8 on human preferences. Near 1 on human data means that pairs are learned by heart, "
        "or differ in something trivial such as length.",
    ),
    Curve(
        "pair-margin", "Margin", "chosen - rejected", {"margin": ""},
        "Healthy: it grows slowly. Growth without end, while held-out accuracy stands still, is overconfidence: fewer epochs.",
    ),
    Curve(
        "implicit-rewards", "Implicit rewards", "beta (log-prob - reference's)",
        {"reward_chosen": "chosen", "reward_rejected": "rejected", "reward": "of all rows"},
        "Healthy: chosen stays level or rises, rejected falls. If both fall, chosen answers grow unlikely, too: lower the "
        "learning rate, raise beta, or add `dpo.nll`.",
    ),
    Curve(
        "grad-norm", "Gradient norm", "before clipping", {"grad_norm": ""},
        "Healthy: even, with small peaks. Peaks of ten times the usual and more, or steady growth, come before divergence: lower "
        "the learning rate.", from_zero=True,
    ),
    Curve(
        "lr", "Learning rate", "at each step", {"lr": ""},
        "As the schedule says: a warm-up, then a flat line or a fall.", from_zero=True,
    ),
)  # fmt: skip
HELDOUT_NOTE = (
    "Healthy: it follows the training curve, at some distance. If it turns back while the training curve still improves, the "
    "model learns what does not generalise, or exploits the reward: take the best step's weights, and stop earlier."
)
HELDOUT_NOTES = {
    "response_tokens": "Healthy: it settles. Growth without a better held-out metric is length that earns reward for nothing.",
    "truncated": "Healthy: near 0. A rise means that responses no longer end within the limit.",
    "loss": "Healthy: it falls with the training loss. When it turns up, the rows are being learned by heart: take the best "
    "step's weights, and train fewer epochs.",
}


def learning_section(records: Sequence[RunRecord]) -> Section:
    """How far the policy moves, and how well the critic follows; of supervised runs accuracy and gradients."""
    section = Section(
        "learning",
        "Does it learn well?",
        "What each update did to policy and critic. Below each chart stands what a healthy curve looks like. Figures of a model "
        "and a task differ: compare with a run that went well. Strong: moving mean over a tenth of the steps.",
    )
    kinds = {record.kind for record in records if record.lines}
    curves = (POLICY + VALUE + OPTIMIZER if "train" in kinds else ()) + (SUPERVISED if "supervised" in kinds else ())
    drawn: dict[str, LineChart] = {}
    for curve in curves:
        lines = [line for i, record in enumerate(records) for line in _lines(record, curve, i)]
        if lines:  # of PPO and supervised runs beside each other one chart of a name has both
            drawn.setdefault(
                curve.name, LineChart(curve.name, curve.title, "step", curve.unit, lines, curve.from_zero, curve.note)
            )
    section.charts.extend(drawn.values())
    for i, record in enumerate(records):
        if not any(_lines(record, curve, i) for curve in curves):
            section.lacks(record, "figures of its updates", "" if not record.lines else "no step has them")
    return section


def _lines(record: RunRecord, curve: Curve, place: int) -> list[Line]:
    found = []
    for style, (key, word) in zip(STYLES, curve.fields.items(), strict=False):
        known = [(line["step"], number(line, key)) for line in record.lines]
        steps = [step for step, value in known if value is not None]
        values = [value for _, value in known if value is not None]
        if not values:
            continue
        smooth, name = moving_mean(values, window=max(1, len(values) // 10)), f"{record.name}, {word}"
        if style == "plain":
            found.append(Line(record.name, steps, values, run_colour(place), "faint"))
        found.append(Line(name if word else record.name, steps, smooth, run_colour(place), style))
    return found


def heldout_section(records: Sequence[RunRecord]) -> Section:
    """Held-out metrics over the steps, step 0 (before training) included where the run has ended."""
    section = Section(
        "heldout",
        "Held-out metrics",
        "Means over rows that are not trained on. A mean over n rows is uncertain by its standard error, which the pointer "
        "shows: differences of less than two of them mean little.",
    )
    found = {i: heldout_of(record) for i, record in enumerate(records)}
    for i, record in enumerate(records):
        if not found[i]:
            why = "" if not record.lines else "it was made without held-out rows: see `evaluation`"
            section.lacks(record, "held-out metrics", why)
    for place, metric in enumerate(sorted({metric for metrics in found.values() for metric in metrics})):
        lines = []
        for i, metrics in found.items():
            if metric in metrics:
                points = metrics[metric]
                notes = [f"± {error:.3g}" if error is not None else "" for _, _, error in points]
                steps, means = [step for step, _, _ in points], [mean for _, mean, _ in points]
                lines.append(Line(records[i].name, steps, means, run_colour(i), notes=notes))
        note = HELDOUT_NOTES.get(metric, HELDOUT_NOTE)
        section.charts.append(
            LineChart(f"heldout-{place}", f"Held out: {metric}", "step", f"mean {metric}", lines, note=note)
        )
    return section


def heldout_of(record: RunRecord) -> dict[str, list[tuple[int, float, float | None]]]:
    """Step, mean and standard error of each held-out metric: of `metrics.jsonl`, and of the summary's `heldout`."""
    by_step: dict[int, tuple[Any, Any]] = {}
    for step, entry in _of_summary(record).items():
        by_step[step] = entry
    for line in record.lines:
        if isinstance(line.get("heldout"), Mapping):
            by_step[line["step"]] = line["heldout"], line.get("heldout_error")
    found: dict[str, list[tuple[int, float, float | None]]] = {}
    for step in sorted(by_step):
        means, errors = by_step[step]
        for metric in means if isinstance(means, Mapping) else ():
            mean = number({"value": means[metric]}, "value")
            error = number({"value": errors.get(metric)}, "value") if isinstance(errors, Mapping) else None
            if mean is not None:
                found.setdefault(str(metric), []).append((step, mean, error))
    return found


def _of_summary(record: RunRecord) -> dict[int, tuple[Any, Any]]:
    summary = record.summary or {}
    whole, accuracy = summary.get("heldout"), summary.get("heldout_accuracy")
    if isinstance(whole, Mapping):
        return {
            int(step): (entry.get("mean"), entry.get("error"))
            for step, entry in whole.items()
            if str(step).isdecimal() and isinstance(entry, Mapping)
        }
    if isinstance(accuracy, Mapping):
        return {int(step): ({"accuracy": value}, None) for step, value in accuracy.items() if str(step).isdecimal()}
    return {}

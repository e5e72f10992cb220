"""Learning curves: fields of `metrics.jsonl`, each with a note on its healthy course."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oppo_megatron.report.charts import Line, LineChart, Style, run_colour, smooth
from oppo_megatron.report.page import Section
from oppo_megatron.report.run_records import RunRecord, number

STYLES: tuple[Style, ...] = ("plain", "dashed", "dotted")


@dataclass(frozen=True)
class Curve:
    """Fields with their words in the legend ("": only the run's name); unless `raw`, the moving mean is strong."""

    name: str
    title: str
    unit: str
    fields: Mapping[str, str]
    note: str = ""
    from_zero: bool = False
    x_key: str = "step"
    raw: Style | None = None


X_LABELS = {"step": "step", "time_s": "seconds since the start"}
LOSS_NOTE = (
    "Healthy: it falls fast, then slowly. A step down at each new epoch means that rows are memorised; peaks or a rise mean "
    "that the learning rate is too high."
)
REWARD_NOTE = (
    "Healthy: it rises, then levels off while the KL stays small. A sudden rise together with KL or response length means "
    "that the policy exploits the reward; a fall means that an update went too far or the critic lags."
)
REWARD = (
    Curve("reward-steps", "Reward against steps", "mean reward", {"reward_mean": ""}, REWARD_NOTE),
    Curve("reward-seconds", "Reward against seconds", "mean reward", {"reward_mean": ""}, REWARD_NOTE, x_key="time_s"),
)
LOSS = (
    Curve("loss-steps", "Loss against steps", "loss (nats)", {"loss": ""}, LOSS_NOTE),
    Curve("loss-seconds", "Loss against seconds", "loss (nats)", {"loss": ""}, LOSS_NOTE, x_key="time_s"),
)
CONTROL = (
    Curve("delta", "Δ by step", "Δ (sequences)", {"delta": ""}, from_zero=True, raw="stepped"),
    Curve("chunk", "Chunk size by step", "chunk (decode steps)", {"chunk_tokens": ""}, from_zero=True, raw="stepped"),
)
LENGTHS = (
    Curve(
        "lengths", "Response lengths", "response tokens",
        {"trained_len_mean": "trained, mean", "submitted_len_mean": "submitted, mean", "trained_len_max": "trained, longest"},
        from_zero=True, raw="plain",
    ),
    Curve("length-gap", "Gaps between lengths", "gap (share)",
          {"length_gap": "", "group_length_gap": "within groups"}, raw="plain"),
)  # fmt: skip
QUARTERS = {"q1": "shortest quarter", "q2": "second quarter", "q3": "third quarter", "q4": "longest quarter"}
BINS = Curve("bins-steps", "Reward by length over the steps", "mean reward",
             {f"reward_by_quarter.{quarter}": QUARTERS[quarter] for quarter in ("q1", "q4")})  # fmt: skip
GRAD_NORM = Curve(
    "grad-norm", "Gradient norm", "before clipping", {"grad_norm": "", "critic_grad_norm": "critic"},
    "Healthy: even, with small peaks. Peaks of ten times the usual value, or steady growth, precede divergence: lower the "
    "learning rate or `optimizer.clip_grad`.", from_zero=True,
)  # fmt: skip
LEARNING_RATE = Curve(
    "lr", "Learning rate", "at the step's last update", {"lr": ""},
    "As the schedule says: a warm-up, then a flat line or a fall. If the reward stops rising with a learning rate near 0, the "
    "schedule ended too early.", from_zero=True,
)  # fmt: skip
PPO = (
    Curve(
        "kl", "KL to the reference", "nats per response", {"kl_mean": ""},
        "Healthy: it rises slowly from 0 and levels off, or stays near `ppo.kl.target`. An endless rise, above all with a "
        "rising reward and a falling held-out metric, is reward hacking: raise `ppo.kl.coefficient` or lower the learning "
        "rate. The estimator `k1` may give values just below 0.",
    ),
    Curve(
        "kl-coefficient", "KL coefficient", "β", {"kl_coefficient": ""},
        "A fixed coefficient is a flat line; an adaptive one levels off. Endless growth means that the policy leaves the "
        "reference faster than the penalty can hold it: lower the learning rate.", from_zero=True,
    ),
    Curve(
        "entropy", "Entropy of the policy", "nats per token", {"entropy": ""},
        "Healthy: it falls slowly. A fall to nearly 0 is collapse: all responses to a prompt are the same and nothing more is "
        "learned; raise `ppo.entropy_coefficient` or the KL coefficient. A rise means that noise is learned: lower the "
        "learning rate.", from_zero=True,
    ),
    Curve(
        "clip-fraction", "Clipped tokens", "share of tokens", {"clip_fraction": ""},
        "Healthy: 0.01 to 0.1. Above 0.2 the updates go too far: lower the actor's learning rate or `ppo.epochs`. Always 0: "
        "the policy hardly moves, and the learning rate may be raised.", from_zero=True,
    ),
    Curve(
        "lost-gradient", "Gradient lost to clipping", "share, by advantage",
        {"lost_gradient_fresh": "fresh responses", "lost_gradient_stale": "with tokens of older policies"},
        "Healthy: both are equal. If responses with tokens of older policies (the long ones) lose much more, training is "
        "biased towards short responses: set `ppo.staleness: decoupled`.", from_zero=True,
    ),
    Curve(
        "approx-kl", "Change of the policy in an update", "KL(old, new), nats per token", {"approx_kl": ""},
        "Healthy: even and below about 0.02. Jumps are updates that went too far; compare the gradient norm of the same step.",
        from_zero=True,
    ),
    Curve(
        "actor-loss", "Policy loss", "clipped surrogate per token (pairs: their loss)", {"actor_loss": ""},
        "Healthy: noise around a value near 0 (DPO: near 0.69). It need not fall, because each batch is new; drift or growing "
        "noise means that advantages or ratios grow.",
    ),
    Curve(
        "response-length", "Response length", "mean tokens of a trained response", {"trained_len_mean": ""},
        "Healthy: it moves to the length that the task needs. Growth with the reward while held-out metrics stay level means "
        "that the reward model prefers long answers; a fall to a few tokens means that the policy has learned to say nothing.",
        from_zero=True,
    ),
    Curve(
        "truncated", "Responses cut at the limit", "share of the batch", {"truncated_fraction": ""},
        "Healthy: near 0, or falling. A rise means that responses no longer end: raise `rollout.max_response_tokens` if they "
        "are good, or reward ending.", from_zero=True,
    ),
    Curve(
        "groups", "Groups that teach", "share of groups", {"keep_rate": "kept by the filter", "equal_groups": "all the same"},
        "A group whose responses all score the same teaches nothing, and a filter drops it. Healthy: most are kept. A fall "
        "means that the prompts have become too easy or too hard: use others, or a larger `rollout.group_size`.",
        from_zero=True,
    ),
    Curve(
        "tokens-kept", "Carried tokens that new weights draw again", "share of tokens", {"tokens_kept": ""},
        "With `overlap.carry: redraw`. The rest is decoded again: a lower learning rate or fewer carried responses keep more.",
        from_zero=True,
    ),
    Curve(
        "queue", "Complete batches that wait for training", "batches", {"queued_batches": ""},
        "With `overlap.continuous`. Above 0 for long, training is the bottleneck: give it more ranks.", from_zero=True,
    ),
    Curve(
        "implicit-rewards", "Implicit rewards of pairs", "β times the log-ratio to the reference",
        {"implicit_reward_chosen": "chosen", "implicit_reward_rejected": "rejected"},
        "The pairs are new in each step, so the lines need not part. If both fall, better responses become unlikely, too: "
        "raise `dpo.beta`, lower the learning rate, or set `dpo.nll`.",
    ),
    Curve(
        "pair-accuracy", "Pairs in the right order", "share of pairs", {"pair_accuracy": ""},
        "How often the better response has the larger implicit reward, before each optimizer step. Noise around 0.5 is usual, "
        "because the pairs are new. The reward shows whether the policy learns.", from_zero=True,
    ),
    Curve(
        "explained-variance", "Explained variance of the critic", "1 - var(return - value) / var(return)",
        {"explained_variance": ""},
        "Healthy: it climbs from about 0 (below 0 at the start is usual) to 0.3 and more. If it stays at or below 0, the critic "
        "does not help: raise the critic's learning rate, or start it from the reward model.",
    ),
    Curve("value", "Values and returns", "mean per token", {"value_mean": "value", "return_mean": "return"},
          "Healthy: the lines meet and move together. A lasting gap means that the critic lags the reward."),
    Curve(
        "critic-loss", "Value loss", "clipped squared error per token", {"critic_loss": ""},
        "Healthy: it falls in the first steps, then stays level. It rises when the scale of rewards changes or the critic's "
        "learning rate is too high.", from_zero=True,
    ),
    Curve(
        "critic-clip-fraction", "Clipped values", "share of values", {"critic_clip_fraction": ""},
        "Healthy: below 0.3. If most values are clipped, `ppo.value_clip` is narrow for the scale of the returns, and the "
        "critic learns slowly.", from_zero=True,
    ),
    GRAD_NORM,
    LEARNING_RATE,
)  # fmt: skip
SUPERVISED = (
    Curve(
        "pair-accuracy", "Accuracy on the batch's pairs", "share of pairs", {"accuracy": ""},
        "Healthy: from 0.5 up to 0.65 to 0.8 on human preferences. Near 1 on human data, pairs are memorised or differ in "
        "something trivial such as length.",
    ),
    Curve("pair-margin", "Margin", "chosen - rejected", {"margin": ""},
          "Healthy: it grows slowly. Endless growth with a level held-out accuracy is overconfidence: train fewer epochs."),
    Curve(
        "implicit-rewards", "Implicit rewards", "β (log-prob - reference's)",
        {"reward_chosen": "chosen", "reward_rejected": "rejected", "reward": "all rows"},
        "Healthy: chosen stays level or rises, rejected falls. If both fall, chosen answers grow unlikely, too: lower the "
        "learning rate, raise beta, or add `dpo.nll`.",
    ),
    GRAD_NORM,
    LEARNING_RATE,
)  # fmt: skip
CURVES = {"train": PPO, "supervised": SUPERVISED}
HELDOUT_NOTE = (
    "Healthy: it follows the training curve at some distance. If it turns back while the training curve still improves, the "
    "model overfits or exploits the reward: take the best step's weights, and stop earlier."
)
HELDOUT_NOTES = {
    "response_tokens": "Healthy: it levels off. Growth without a better held-out metric is length that earns reward for nothing.",
    "truncated": "Healthy: near 0. A rise means that responses no longer end within the limit.",
    "loss": "Healthy: it falls with the training loss. When it turns up, rows are memorised: take the best step's weights, and "
    "train fewer epochs.",
}


def curve_chart(records: Sequence[RunRecord], curve: Curve) -> LineChart | None:
    """Chart of the runs that have the curve, or None."""
    lines = []
    for place, record in enumerate(records):
        for style, (key, word) in zip(STYLES, curve.fields.items(), strict=False):
            xs, ys = record.known(key, curve.x_key)
            if not ys:
                continue
            name = f"{record.name}, {word}" if word else record.name
            if curve.raw is None and style == "plain":
                lines.append(Line(record.name, xs, ys, run_colour(place), "faint"))
            drawn = curve.raw if curve.raw == "stepped" else style
            lines.append(Line(name, xs, smooth(ys) if curve.raw is None else ys, run_colour(place), drawn))
    if not lines:
        return None
    return LineChart(curve.name, curve.title, X_LABELS[curve.x_key], curve.unit, lines, curve.from_zero, curve.note)


def learning_section(records: Sequence[RunRecord]) -> Section:
    section = Section(
        "learning",
        "Does it learn well?",
        "The effect of each update on policy and critic. The note below each chart describes a healthy curve; the figures "
        "depend on model and task, so compare with a run that went well. Strong: moving mean over a tenth of the steps.",
    )
    kinds = {record.kind for record in records if record.lines}
    curves = [curve for kind in CURVES if kind in kinds for curve in CURVES[kind]]
    drawn: dict[str, LineChart] = {}
    for curve in curves:  # a name that PPO and supervised runs share has one chart
        if (chart := curve_chart(records, curve)) is not None:
            drawn.setdefault(curve.name, chart)
    section.charts.extend(drawn.values())
    for record in records:
        if not any(record.has(key) for curve in curves for key in curve.fields):
            section.lacks(record, "figures of its updates")
    return section


def heldout_section(records: Sequence[RunRecord]) -> Section:
    """Held-out metrics; step 0 appears once a run has ended."""
    section = Section(
        "heldout",
        "Held-out metrics",
        "Means over rows that are not trained on, with their standard errors as bars: differences below two of them mean little.",
    )
    found = [heldout_of(record) for record in records]
    for record, metrics in zip(records, found, strict=True):
        if not metrics:
            section.lacks(record, "held-out metrics", "it ran without held-out rows: see `evaluation`")
    for place, metric in enumerate(sorted({metric for metrics in found for metric in metrics})):
        lines = []
        for number_of_run, (record, metrics) in enumerate(zip(records, found, strict=True)):
            if metric in metrics:
                steps, means, errors = zip(*metrics[metric], strict=True)
                lines.append(Line(record.name, steps, means, run_colour(number_of_run), errors=errors))
        note = HELDOUT_NOTES.get(metric, HELDOUT_NOTE)
        title, label = f"Held out: {metric}", f"mean {metric}"
        section.charts.append(LineChart(f"heldout-{place}", title, "step", label, lines, note=note))
    return section


def heldout_of(record: RunRecord) -> dict[str, list[tuple[int, float, float | None]]]:
    """Step, mean and standard error of each metric."""
    by_step: dict[int, tuple[Any, Any]] = {}
    whole = (record.summary or {}).get("heldout")
    for step, entry in whole.items() if isinstance(whole, Mapping) else ():
        if str(step).isdecimal() and isinstance(entry, Mapping):
            by_step[int(step)] = entry.get("mean"), entry.get("error")
    for line in record.lines:
        if "heldout" in line:
            by_step[line["step"]] = line["heldout"], line.get("heldout_error")
    found: dict[str, list[tuple[int, float, float | None]]] = {}
    for step, (means, errors) in sorted(by_step.items()):
        for metric in means if isinstance(means, Mapping) else ():
            mean = number({"value": means[metric]}, "value")
            error = number({"value": errors.get(metric)}, "value") if isinstance(errors, Mapping) else None
            if mean is not None:
                found.setdefault(str(metric), []).append((step, mean, error))
    return found

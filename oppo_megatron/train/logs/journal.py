"""Metrics, progress, trackers and summary of a run: PPO (`Journal`) and supervised training (`Report`); docs/metrics.md."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from oppo_megatron.algorithms.experience import PAIRED, Experience
from oppo_megatron.columns import columns_of
from oppo_megatron.config.derived import best_standard, members
from oppo_megatron.config.evaluation import ACCURACY
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.config.supervised import SupervisedConfig
from oppo_megatron.control.chunk_tuner import group_length_gap
from oppo_megatron.control.estimates import Figures
from oppo_megatron.data.rows import Quarantine
from oppo_megatron.data.supervised_rows import describe_seen, num_duplicates
from oppo_megatron.data.tokenizer import Tokenizer
from oppo_megatron.layout.placements import role_placements
from oppo_megatron.layout.role_memory import planned_memory
from oppo_megatron.records import Rollout
from oppo_megatron.rundir.checkpoints import Position
from oppo_megatron.rundir.directory import RunDirectory, encode_json, write_json
from oppo_megatron.rundir.metrics_log import MetricsLog, read_metrics, summarise
from oppo_megatron.rundir.trace import SpanRecorder
from oppo_megatron.train.heldout import HeldoutLog
from oppo_megatron.train.logs.console import Progress
from oppo_megatron.train.logs.trackers import Tracker
from oppo_megatron.train.memory_meter import MemoryByRank
from oppo_megatron.train.score_exchange import ScoreReport

ROLLOUT_FIELDS = ("tokens", "logprobs", "versions", "deferrals", "finish_clock", "finish_reason")
NUM_LENGTH_BINS = 4
MUCH_LOST = 0.2
"""Share of stale responses' gradient lost to clipping above which the run warns once."""

LATER_FACTS = ("scores", "actor", "rewards", "greedy_rewards", "figures", "tokens_kept")
"""Facts known after the rollout phase, within which a checkpoint may interrupt a step."""

OTHER_FACTS = (
    *LATER_FACTS, "step", "version", "decode_steps", "drain_s", "local_score_s", "critic_exposed_s", "kl_coefficient",
)  # fmt: skip
"""Facts that a metrics line does not have, or has only at times."""


@dataclass
class StepFacts:
    step: int
    delta: int
    chunk_tokens: int | None
    tokens: int = 0  # decoded
    decode_steps: int = 0
    tail_waste: float = 0.0
    length_gap: float = 0.0
    backfilled: int = 0  # rollouts admitted after the step had begun
    prefilled_tokens: int = 0  # computed by prefills of all roles on all ranks
    forked_tokens: int = 0  # of prompts, that no role on any rank has computed again
    step_s: float = 0.0
    decode_s: float = 0.0  # rounds that decoded
    drain_s: float = 0.0  # rounds after the last decoded chunk
    planning_s: float = 0.0  # scheduler, buffer, planner, checker and controllers
    local_score_s: float = 0.0  # scoring on the rank that keeps the journal
    critic_exposed_s: float = 0.0  # of the wait for scores: for the critic's update of the step before
    kl_coefficient: float = 0.0
    delta_reason: str = ""
    chunk_reason: str = ""
    version: int = 0
    tokens_kept: float | None = None  # of carried tokens that were drawn again, the share that came out the same
    skipped: str | None = None  # why nothing was trained
    rewards: list[float] = field(default_factory=list)  # of what is trained
    greedy_rewards: list[float] = field(default_factory=list)
    checkpoint_s: float = 0.0  # waiting for checkpoints before this step
    checkpoint_bytes: int = 0  # of those that became whole
    checkpoint_hidden_s: float = 0.0  # and what of their writing the run did not wait for
    scores: ScoreReport | None = None
    actor: dict[str, float] = field(default_factory=dict)
    figures: dict[str, float | None] = field(default_factory=dict)  # of a filter, and of the queue

    def fields(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in OTHER_FACTS}

    @contextlib.contextmanager
    def planning(self) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.planning_s += time.monotonic() - started


class RunLog:
    """Kept by one rank, from `__enter__` on.  `elapsed_s` includes the time before a resume."""

    def __init__(
        self, config: TrainConfig | SupervisedConfig, total_steps: int | None, title: str, device: torch.device,
        trackers: Tracker, elapsed_s: float = 0.0,
    ):  # fmt: skip
        self.run_dir, self.trackers = RunDirectory(config.run_dir), trackers
        self.planned_bytes = planned_memory(config, on_cpu=device.type == "cpu")
        self.log = MetricsLog(self.run_dir.metrics)
        self.progress = Progress(config.logging.console, total_steps, title)
        self.note = self.progress.note
        self.heldout = HeldoutLog(best_standard(config))
        self.stopped: str | None = None
        self.started = time.monotonic() - elapsed_s

    def __enter__(self) -> None:
        self.progress.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self.progress.__exit__(*exception)
        self.log.close()
        self.trackers.close()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    def begin_line(self, step: int, fields: dict[str, Any]) -> None:
        self.log.stage(step, fields)
        self.trackers.log(step, fields)
        self.progress.update(step, fields)

    def evaluation(self, step: int, figures: Figures) -> None:
        fields = self.heldout.record(step, figures)
        if step:
            self.log.extend(step, fields)
        self.trackers.log(step, fields)
        self._note_heldout(step, figures)

    def _note_heldout(self, step: int, figures: Figures) -> None:
        means = ", ".join(f"{name} {mean:.4g}" for name, (mean, _) in figures.items())
        self.note(f"held out after {step} steps: {means}")

    def complete(self, step: int, late: dict[str, Any]) -> None:
        self.log.complete(step, late)
        self.trackers.log(step, late)

    def end(self, stopped: str | None) -> None:
        self.stopped = stopped
        if stopped is not None:
            self.note(stopped)
        if (best := self.heldout.best()) is not None and self.heldout.standard is not None:
            self.note(f"best step {best[0]}: {self.heldout.standard.metric} {best[1]:.4g}")

    def finish(self, figures: dict[str, Any], memory: MemoryByRank, best: tuple[float, Position] | None) -> None:
        """Write the summary, which marks the run as finished.  `best`: a checkpoint."""
        self.log.close()
        self.note(memory.describe(self.planned_bytes))
        ends = {**self.heldout.summary(best), "stopped_early": self.stopped, **memory.summary(self.planned_bytes)}
        write_json(self.run_dir.summary, figures | ends)


class Journal(RunLog):
    """Kept by the actor's first output rank.  A step's line waits for its critic update's statistics."""

    def __init__(
        self, config: TrainConfig, total_steps: int | None, tokenizer: Tokenizer, device: torch.device, trackers: Tracker
    ):
        super().__init__(config, total_steps, config.algorithm.preset, device, trackers)
        self.tokenizer, self.keep_rollouts = tokenizer, config.logging.rollouts
        self.members = members(config)
        self.single_stage = role_placements(config)["actor"].pp == 1
        self.staleness, self.warned = config.ppo.staleness, False

    def step(
        self, facts: StepFacts, batch: Sequence[Rollout], carried: Sequence[Rollout], experience: Experience, spans: SpanRecorder
    ) -> None:
        trained = self.members.to_train(batch)
        fields = facts.fields() | self._timing(facts, spans) | _experience(facts, experience)
        fields |= _lengths(facts, trained, self.members.to_train(carried))
        fields["group_length_gap"] = group_length_gap(columns_of(trained).response_tokens, self.members.trained)
        fields |= facts.figures | facts.actor
        if facts.tokens_kept is not None:
            fields["tokens_kept"] = facts.tokens_kept
        if facts.skipped is not None:
            self.note(f"step {facts.step} is skipped: {facts.skipped}")
        if not self.warned and (warning := lost_gradient(fields, self.staleness)):
            self.warned = True
            self.note(f"step {facts.step}: {warning}")
        self.begin_line(facts.step, fields)
        if not self.keep_rollouts:
            return
        rewards = iter(facts.rewards), iter(facts.greedy_rewards)
        with self.run_dir.rollouts.open("a", encoding="utf-8") as file:
            for rollout in batch:
                greedy = self.members.is_greedy(rollout.seq_id)
                line = {
                    "step": facts.step,
                    "seq_id": rollout.seq_id,
                    "prompt": rollout.prompt.text,
                    "prompt_tokens": rollout.prompt.tokens,
                    "response": self.tokenizer.decode(rollout.tokens),
                    "reward": next(rewards[greedy]),
                    **{name: getattr(rollout, name) for name in ROLLOUT_FIELDS},
                } | ({"greedy": greedy} if self.members.greedy else {})
                file.write(encode_json(line) + "\n")

    def state_dict(self) -> dict[str, Any]:
        return {"elapsed_s": self.elapsed_s, "heldout": self.heldout.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.started = time.monotonic() - state["elapsed_s"]
        self.heldout.load_state_dict(state["heldout"])

    def _note_heldout(self, step: int, figures: Figures) -> None:
        if ACCURACY in figures:
            self.note(f"held-out accuracy after {step} steps: {figures[ACCURACY][0]:.1%}")
        super()._note_heldout(step, {name: figure for name, figure in figures.items() if name != ACCURACY})

    def write_summary(
        self, counts: Mapping[str, Any], memory: MemoryByRank, rollbacks: Mapping[str, int], best: tuple[float, Position] | None
    ) -> None:
        self.log.close()
        accuracy = self.heldout.means(ACCURACY)
        by_step = [accuracy[step] for step in sorted(accuracy)]
        figures = {
            **summarise(read_metrics(self.run_dir.metrics)),
            "accuracy_before": by_step[0] if by_step else None,
            "accuracy_after": by_step[-1] if by_step else None,
            "heldout_accuracy": {str(step): value for step, value in accuracy.items()},
            "total_s": self.elapsed_s,
            "rows": counts,
            **rollbacks,
        }
        self.finish(figures, memory, best)

    def _timing(self, facts: StepFacts, spans: SpanRecorder) -> dict[str, Any]:
        actor = spans.totals(facts.step, "actor")
        assert facts.scores is not None
        # Decoding waits for the scoring of the actor's own rank: after decoding, and also during it if there are no
        # pipeline bubbles to hide it.
        own = facts.local_score_s if self.single_stage else facts.drain_s
        exposed = actor.get("wait_scores", 0.0) - facts.critic_exposed_s + own
        waits = actor.get("wait", 0.0)
        return {
            "time_s": self.elapsed_s,
            "score_exposed_s": exposed,
            "score_hidden_s": max(0.0, facts.scores.score_busy_s - exposed),
            "score_busy_s": facts.scores.score_busy_s,
            "train_s": actor.get("update", 0.0),
            "idle_s": ({"trainer": max(0.0, facts.step_s - facts.actor["train_s"])} if "train_s" in facts.actor else {})
            | {
                "actor": waits + actor.get("wait_scores", 0.0) + actor.get("wait_update", 0.0),
                "scorer": facts.scores.scorer_idle_s,
            },
            "bubble_share": waits / facts.decode_s if facts.decode_s else 0.0,
            "running_mean": facts.tokens / facts.decode_steps if facts.decode_steps else 0.0,
        }


def lost_gradient(fields: Mapping[str, Any], staleness: str) -> str | None:
    fresh, stale = (fields.get(f"lost_gradient_{rows}") or 0.0 for rows in ("fresh", "stale"))
    if not (stale > MUCH_LOST and stale > 2 * fresh):
        return None
    remedy = "set ppo.staleness to decoupled" if staleness == "behaviour" else "lower overlap.max_staleness or delta"
    return (
        f"clipping takes {stale:.0%} of the gradient of responses with tokens of an older policy ({fresh:.0%} of others'), "
        f"mostly long ones, so that training is biased towards short responses; {remedy}"
    )


def _experience(facts: StepFacts, experience: Experience) -> dict[str, Any]:
    stats = experience.stats
    assert facts.scores is not None
    return {
        "reward_mean": stats.score_mean,
        "reward_std": stats.score_std,
        "greedy_reward_mean": stats.greedy_score_mean,
        "reward_parts": facts.scores.parts,
        "penalised_reward_mean": stats.reward_mean,
        "kl_mean": stats.kl_mean,
        "kl_coefficient": None if stats.kl_mean is None or stats.pairs is not None else facts.kl_coefficient,
        "value_mean": stats.value_mean,
        "return_mean": stats.return_mean,
        "advantage_std": stats.advantage_std,
        "explained_variance": stats.explained_variance,
        "equal_groups": stats.equal_groups,
        **({} if stats.pairs is None else {name: getattr(stats, name) for name in PAIRED}),
    }


def _lengths(facts: StepFacts, batch: Sequence[Rollout], carried: Sequence[Rollout]) -> dict[str, Any]:
    """Deferrals (the paper's Table 2), lengths, and mean length and reward by length quarter.

    An unfinished rollout counts with its tokens so far, so `submitted_len_mean` is a lower bound.
    """
    trained = [len(r.tokens) for r in batch]
    submitted = trained + [len(r.tokens) for r in carried]
    stale = sum(version < facts.version for r in batch for version in r.versions)
    order = sorted(range(len(trained)), key=lambda i: trained[i])
    count = min(NUM_LENGTH_BINS, len(order))
    bins = {f"q{k + 1}": order[k * len(order) // count : (k + 1) * len(order) // count] for k in range(count)}
    return {
        "deferred": {str(times): count for times, count in sorted(Counter(r.deferrals for r in batch).items())},
        "carried": len(carried),
        "carried_finished": sum(rollout.finished for rollout in carried),
        "prompt_len_mean": sum(len(r.prompt.tokens) for r in batch) / len(batch),
        "trained_len_mean": sum(trained) / len(trained),
        "trained_len_max": max(trained),
        "submitted_len_mean": sum(submitted) / len(submitted),
        "truncated_fraction": sum(r.finish_reason == "length" for r in batch) / len(batch),
        "stale_token_fraction": stale / sum(trained),
        "length_by_quarter": {name: sum(trained[i] for i in rows) / len(rows) for name, rows in bins.items()},
        "reward_by_quarter": {name: sum(facts.rewards[i] for i in rows) / len(rows) for name, rows in bins.items()},
    }


class Report(RunLog):
    """Kept by the model's output rank in supervised training."""

    def begin(self, start: Sequence[str], rows: Sequence[Any], held: Sequence[Any], quarantine: Quarantine) -> None:
        duplicates = num_duplicates(rows)
        self.counts = {"rows": len(rows), "duplicates": duplicates, "quarantined": len(quarantine)}
        notes = [*start, *quarantine.notes]
        if held:
            notes.append(f"{len(held)} rows are held out and measured, {len(rows)} are there to train on")
        notes += describe_seen((row[0] for row in held), (row[0] for row in rows))
        if quarantine:
            left = "held-out ones counted" if held else f"{len(rows)} left"
            notes.append(f"{len(quarantine)} rows set aside, {left}; see {self.run_dir.quarantine}")
        if duplicates:
            notes.append(f"{duplicates} of {len(rows)} rows are duplicates of others")
        for note in notes:
            self.note(note)

    def write_summary(self, title: str, memory: MemoryByRank, best: tuple[float, Position] | None) -> None:
        """Include metrics of the first and last tenth."""
        lines = read_metrics(self.run_dir.metrics)
        tenth = max(1, len(lines) // 10)
        tokens, seconds = sum(line["tokens"] for line in lines), sum(line["step_s"] for line in lines)
        summary = {"kind": title, "steps": len(lines), **self.counts, "time_s": lines[-1]["time_s"]}
        summary |= {"tokens": tokens, "tokens_per_s": tokens / seconds}
        for name in (name for name in ("loss", "accuracy", "margin") if name in lines[0]):
            for end, part in {"first": lines[:tenth], "last": lines[-tenth:]}.items():
                summary[f"{name}_{end}"] = sum(line[name] for line in part) / len(part)
        self.finish(summary, memory, best)

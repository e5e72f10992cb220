"""A run in virtual time: the real buffer, scheduler, controllers and planner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from oppo_megatron.columns import Ints
from oppo_megatron.config.derived import batch_rows, members, usual_prompt_tokens
from oppo_megatron.config.load import config_yaml
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.control.chunk_tuner import DecodeLaw, StepCost, group_length_gap
from oppo_megatron.cores import uncollected
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.placements import round_placements, training_placements
from oppo_megatron.records import Decision, Rollout, StepSignals
from oppo_megatron.rundir.directory import RunDirectory, write_json
from oppo_megatron.rundir.metrics_log import MetricsLog, read_metrics, summarise
from oppo_megatron.rundir.trace import Span, SpanRecorder, merge_traces
from oppo_megatron.schedule.links import moving
from oppo_megatron.schedule.plan import new_planner, plan_step, round_generator, scoring_delay
from oppo_megatron.schedule.rounds import Site
from oppo_megatron.schedule.weaving.costs import Linear
from oppo_megatron.sim.runs.loop import PureLoop, Recorded, StepEnd, made_up_prompts
from oppo_megatron.sim.runs.player import Floats, Player
from oppo_megatron.sim.runs.step_costs import FORWARDS, StepCosts


class Parts(NamedTuple):
    """Seconds of a step on the actor's output rank; their sum is the step. `decode_s` excludes scoring on that rank."""

    decode_s: float
    score_exposed_s: float
    update_s: float
    critic_exposed_s: float
    reallocate_s: float
    idle_s: float

    @property
    def total(self) -> float:
        return sum(self)


@dataclass(frozen=True)
class VirtualStep:
    """Arrays are of the trained rows. `clock`: logical clock afterwards; `tokens`: decoded.

    `line`: for metrics.jsonl, without the critic's exposed seconds. These are at most `waited_s` (infinite if it shares ranks
    with the actor) and the `critic_delay_s` of the next step, or `lag_s` after the last step.
    """

    step: int
    begun_s: float
    step_s: float
    parts: Parts
    decode_steps: int
    clock: int
    delta: int
    chunk_tokens: int
    seq_ids: Ints
    lengths: Ints
    deferrals: Ints
    tokens: int
    waited_s: float
    critic_delay_s: float
    lag_s: float
    line: Mapping[str, Any] = field(repr=False)


@dataclass
class _Times:
    """Times of a step on the actor's output rank and at the scorers. `arrivals`, `work`: for `scoring_delay`."""

    begun: float
    met: float
    decode_s: float = 0.0
    own_score_s: float = 0.0
    own_drain_s: float = 0.0
    busy_s: float = 0.0
    scorer_idle_s: float = 0.0
    tokens: int = 0
    prefilled: int = 0
    forked: int = 0
    wait_s: float = 0.0
    critic_delay_s: float = 0.0
    lag_s: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    work: list[float] = field(default_factory=list)
    law: DecodeLaw = field(default_factory=DecodeLaw)


class VirtualRun(PureLoop):
    """`lengths(seq_id)`: response tokens; `prompt_tokens`: of all prompts, or each in turn; `signals` replaces delta's constant
    rewards; `endless`: prompts never end; `spans`: the first `traced_steps`, of each unit's first rank.
    """

    player: type[Player] = Player

    def __init__(
        self, config: TrainConfig, costs: StepCosts, lengths: Callable[[int], int], *,
        prompt_tokens: int | Sequence[int] | None = None, signals: Callable[[int, StepSignals], StepSignals] | None = None,
        endless: bool = False, traced_steps: int = 0,
    ):  # fmt: skip
        self.costs, self.site, self.signals = costs, Site(round_placements(config)), signals
        if prompt_tokens is None:
            prompt_tokens = usual_prompt_tokens(config)
        planner = new_planner(config, self.site, round_generator(config.overlap, self.site), lengths, costs=costs.actions)
        count = None if endless or config.steps is None else config.steps * batch_rows(config)
        super().__init__(config, made_up_prompts(prompt_tokens, count), lengths, planner)
        self.rounds = self.player(planner, costs.round_s)
        self.units = self.rounds.units
        self.now: Floats = np.zeros(len(self.units))
        self.plan, self._last_update_s = plan_step(config), 0.0  # of the critic
        self._shares = bool((self.units.holds("actor") & self.units.holds("critic")).any())
        serving, training = self.site.placements["actor"], training_placements(config)["actor"]
        self._replicas_trained = training.dp
        self.trains = self.units.of_ranks(training.ranks)
        if moving(serving, training):  # ranks agree on the success of all updates
            self.plan = replace(self.plan, wait_for_critic=True)
        self._times = _Times(0.0, 0.0)
        self._ended: list[VirtualStep] = []
        self.traced_steps, self.spans = traced_steps, list[Span]()

    def steps(self, count: int) -> Iterator[VirtualStep]:
        """Yield `count` steps, or until the prompts end. Raises ConfigError for less than one."""
        if count < 1:
            raise ConfigError(f"{count} steps are asked for; ask for 1 or more")
        for rounds in self._steps():
            times = self._times = _Times(float(self.now[self.units.source]), self._times.met)
            times.work.append(float(self.now[self.units.scorer]) - times.met)
            times.prefilled, times.forked = self.planner.prefilled_tokens, self.planner.forked_tokens
            with uncollected():  # a step has many records, freed with it
                for _ in rounds:
                    pass
            yield self._ended.pop()
            count -= 1
            if not count:
                return

    def _plan(self, active: Sequence[Rollout], score: Sequence[Rollout], chunk: int, readable: Ints | None) -> Any:
        return self.rounds.plan(self.num_rounds, active, score, chunk, readable)

    def _recorded(self, done: Recorded) -> None:
        times, source, scorer = self._times, self.units.source, self.units.scorer
        played = self.rounds.play(done, self.now)
        seconds, own_s = float(played.ends[source] - self.now[source]), float(played.scored[source])
        times.busy_s += float(played.scored[scorer])
        times.scorer_idle_s += float(played.waited[scorer])
        times.work.append(float(played.ends[scorer] - self.now[scorer] - played.waited[scorer]))
        times.own_score_s += own_s
        if done.chunk is None:
            times.own_drain_s += own_s
        else:
            tokens = done.chunk.rows.num_tokens
            times.decode_s += seconds
            times.tokens += tokens
            if times.arrivals:  # the first round also reads the step's prompts
                times.law.add(done.chunk.clock - done.begun, tokens, seconds)
            assert played.arrived is not None
            times.arrivals.append(played.arrived - times.met)
        self.now = played.ends
        if done.step <= self.traced_steps:
            self.spans += played.spans()

    def _trace(self, step: int, role: str, name: str, starts: Floats, ends: Floats) -> None:
        if step <= self.traced_steps:
            found = zip(self.units.first.tolist(), starts.tolist(), ends.tolist(), strict=True)
            self.spans += [Span(rank, role, name, step, start, end) for rank, start, end in found if end > start]

    def _signals(self, step: int, signals: StepSignals) -> StepSignals:
        return signals if self.signals is None else self.signals(step, signals)

    def _cost(self, end: StepEnd) -> StepCost:
        times, ahead_s, holds = self._times, self._ahead_s(end), self.units.holds("actor")
        arrived = self.now + ahead_s * self.trains
        begun_s = float(self.now[self.units.source]) + ahead_s  # on ranks that only train
        times.met = max(float(arrived.max()), begun_s)
        times.wait_s = times.met - begun_s
        if self._last_update_s and not (self.plan.wait_for_critic or self._shares):
            times.critic_delay_s = min(times.wait_s, scoring_delay(self._last_update_s, times.work, times.arrivals))
        met = np.full(len(self.units), times.met)
        self._trace(end.step, "actor", "update", self.now, np.where(holds, arrived, self.now))
        self._trace(end.step, "actor", "wait_scores", arrived, np.where(holds, met, arrived))
        self._trace(end.step, "scorer", "send", arrived, np.where(holds, arrived, met))
        spent_s = max(0.0, times.met - times.begun - ahead_s)  # a step without decoding may round below 0
        return StepCost(spent_s, end.occupancy.num_steps, times.tokens, times.law)

    def _ahead_s(self, end: StepEnd) -> float:
        """Seconds of the actor's update before the scores: its first micro-batch's forward."""
        if not (self.plan.forward_ahead and self.trains_actor(end.step)):
            return 0.0
        lines = self.costs.actions.prefill_of("actor")
        lines = (lines,) if isinstance(lines, Linear) else lines
        share = int(end.batch.num_tokens.sum()) // (self.config.ppo.minibatches * self._replicas_trained)
        tokens = min(share, self.config.runtime.micro_batch_tokens)
        return min(self._actor_update_s(end), sum(line(tokens) for line in lines))

    def _actor_update_s(self, end: StepEnd) -> float:
        tokens = int(end.batch.response_tokens.sum())
        return self.costs.update_s("actor", tokens) if self.trains_actor(end.step) else 0.0

    def _apart_critic_s(self, tokens: int) -> float:
        """Seconds of a critic whose ranks only train (else 0): a forward pass for values, and its update."""
        own_s = 0.0 if "critic" in self.site.placements else self.costs.update_s("critic", tokens)
        return own_s * (1 + 1 / (FORWARDS * self.config.ppo.epochs))

    def _decided(self, end: StepEnd, delta: Decision, chunk: Decision | None) -> None:
        times, units, source, lengths = self._times, self.units, self.units.source, end.batch.response_tokens
        tokens = int(lengths.sum())
        actor_s, critic_s = self._actor_update_s(end), self.costs.update_s("critic", tokens)
        apart_s = self._apart_critic_s(tokens)
        moved_s = self.costs.moves.get("actor", 0.0) if self.trains_actor(end.step) else 0.0
        met, own_critic = np.full(len(units), times.met), self.costs.moves.get("critic", 0.0) + critic_s
        busy_s = actor_s + apart_s - self._ahead_s(end) + moved_s
        updated = met + (units.holds("actor") | self.trains) * busy_s
        ends = np.maximum(updated, met + self.trains * busy_s + units.holds("critic") * own_critic)
        self._trace(end.step, "actor", "update", met, np.where(self.trains, updated, met))
        self._trace(end.step, "actor", "wait_update", met, np.where(self.trains, met, updated))
        self._trace(end.step, "critic", "update", updated, ends)
        waited_s = float(ends.max() - ends[source]) if self.plan.wait_for_critic else 0.0
        times.lag_s = float(ends.max() - ends[source]) - waited_s
        self.now = (np.full(len(units), ends.max()) if self.plan.wait_for_critic else ends) + self.costs.step_s
        self._last_update_s = 0.0 if apart_s else own_critic
        step_s = float(self.now[source]) - times.begun
        own_critic_s = float(ends[source] - updated[source]) + apart_s
        scored_s = times.own_score_s + times.wait_s - times.critic_delay_s
        decode_s = times.decode_s - (times.own_score_s - times.own_drain_s)
        spent = decode_s, scored_s, actor_s, times.critic_delay_s + waited_s + own_critic_s, moved_s
        parts = Parts(*spent, round(step_s - sum(spent), 12) + 0.0)  # without the rounding errors of the sums
        own_s = times.own_score_s if self.site.placements["actor"].pp == 1 else times.own_drain_s
        exposed_s = own_s + times.wait_s - times.critic_delay_s
        line = self._line(end, delta, chunk, step_s, exposed_s) | {
            "train_s": actor_s + moved_s, "reallocate_s": moved_s,
            "idle_s": {"actor": times.wait_s + waited_s, "scorer": times.scorer_idle_s}, "critic_update_s": own_critic,
        }  # fmt: skip
        self._ended.append(
            VirtualStep(
                end.step, times.begun, step_s, parts, end.occupancy.num_steps, end.clock, end.delta, end.chunk_tokens,
                end.batch.seq_ids, lengths, end.deferrals, times.tokens,
                np.inf if self._shares else waited_s, times.critic_delay_s, times.lag_s, line,
            )
        )  # fmt: skip

    def _line(self, end: StepEnd, delta: Decision, chunk: Decision | None, step_s: float, exposed_s: float) -> dict[str, Any]:
        """Return a line of metrics, but for updates and waits."""
        times, lengths, num_steps = self._times, end.batch.response_tokens, end.occupancy.num_steps
        carried, group_size = end.carried, members(self.config).trained
        return {
            "step": end.step, "time_s": times.begun + step_s, "step_s": step_s, "decode_s": times.decode_s,
            "score_exposed_s": exposed_s, "score_hidden_s": max(0.0, times.busy_s - exposed_s), "score_busy_s": times.busy_s,
            "tokens": times.tokens, "prefilled_tokens": self.planner.prefilled_tokens - times.prefilled,
            "forked_tokens": self.planner.forked_tokens - times.forked,
            "running_mean": times.tokens / num_steps if num_steps else 0.0, "tail_waste": end.occupancy.tail_waste,
            "delta": end.delta, "delta_reason": delta.reason,
            "chunk_tokens": end.chunk_tokens, "chunk_reason": chunk.reason if chunk else "",
            "deferred": {str(deferred): number for deferred, number in sorted(Counter(end.deferrals.tolist()).items())},
            "carried": len(carried.seq_ids), "carried_finished": int(carried.finished.sum()), "backfilled": end.backfilled,
            "prompt_len_mean": float(end.batch.prompt_tokens.mean()),
            "trained_len_mean": float(lengths.mean()), "trained_len_max": int(lengths.max()),
            "submitted_len_mean": float(np.concatenate([lengths, carried.response_tokens]).mean()), "length_gap": end.length_gap,
            "group_length_gap": group_length_gap(lengths, group_size), "skipped": None,
        }  # fmt: skip


ROUNDED = 9
"""Decimal places: nanoseconds."""


def metrics_lines(steps: Sequence[VirtualStep]) -> Iterator[dict[str, Any]]:
    """Lines (docs/metrics.md) with the delay that the critic's update causes in the next step."""
    for step, after in pairwise([*steps, None]):
        assert step is not None
        update_s = step.line["critic_update_s"]
        exposed_s = min(update_s, step.waited_s + (step.lag_s if after is None else after.critic_delay_s))
        yield _rounded({**step.line, "critic_exposed_s": exposed_s, "critic_hidden_s": update_s - exposed_s})


def write_run(
    config: TrainConfig, path: Path, lines: Sequence[dict[str, Any]], spans: Sequence[Span], about: Sequence[str]
) -> None:
    run = RunDirectory(path).prepare()
    run.config.write_text(config_yaml(config.model_copy(update={"run_dir": path})) + "\n", encoding="utf-8")
    with MetricsLog(run.metrics) as log:
        for line in lines:
            log.write(line["step"], {key: value for key, value in line.items() if key != "step"})
    recorders = {rank: SpanRecorder(rank, path) for rank in sorted({span.rank for span in spans})}
    for span in spans:
        recorders[span.rank].write(span)
    for recorder in recorders.values():
        recorder.flush()
    merge_traces(path)
    total_s = lines[-1]["time_s"]
    write_json(run.summary, summarise(read_metrics(run.metrics)) | {"total_s": total_s, "simulated": list(about)})


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return round(value, ROUNDED) if isinstance(value, float) else value

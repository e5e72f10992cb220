"""Runs in virtual time: beside real ones, by an oracle that carries out every rank's list, and drawn at random."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from random import Random
from typing import Any

import numpy as np
import pytest

from benchmarks.dry_run import MODEL_70B
from oppo_megatron.columns import Ints
from oppo_megatron.config.derived import switched
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.placements import role_placements
from oppo_megatron.records import Rollout, StepSignals
from oppo_megatron.rundir.trace import Span as TraceSpan
from oppo_megatron.schedule.actions import Action, Op, Payload, Schedule
from oppo_megatron.schedule.checking.timeline import Running, Span, Timeline, simulate
from oppo_megatron.schedule.planning.planner import PlannedRound
from oppo_megatron.schedule.weaving.costs import Costs, Linear, Lines
from oppo_megatron.sim.runs.loop import Growing, Recorded
from oppo_megatron.sim.runs.player import Floats, Played, Player
from oppo_megatron.sim.runs.step_costs import StepCosts
from oppo_megatron.sim.runs.virtual import VirtualRun, metrics_lines
from tests.support.configs import run_of
from tests.support.ppo import Outcome

COUNTED = (
    "tokens", "prefilled_tokens", "forked_tokens", "delta", "deferred", "carried", "carried_finished", "backfilled",
    "trained_len_max",
)  # fmt: skip
MEASURED = (
    "running_mean", "tail_waste", "prompt_len_mean", "trained_len_mean", "submitted_len_mean", "length_gap", "group_length_gap",
)  # fmt: skip


def shown(outcome: Outcome) -> Callable[[int, StepSignals], StepSignals]:
    def signals(step: int, seen: StepSignals) -> StepSignals:
        ess = outcome.metrics[step - 2].get("ess", 1.0) if step > 1 else 1.0
        return replace(seen, reward_mean=outcome.metrics[step - 1]["reward_mean"], ess=ess)

    return signals


def assert_unfolds_alike(config: dict[str, Any], outcome: Outcome, *players: type[VirtualRun]) -> None:
    parsed = run_of(config)
    rows = {row["seq_id"]: row for row in [*outcome.rollouts, *outcome.greedy]}
    prompts = [len(rows[seq_id]["prompt_tokens"]) for seq_id in range(len(rows))]
    lengths = {seq_id: len(row["tokens"]) for seq_id, row in rows.items()}
    for player in players or (VirtualRun,):
        run = player(parsed, StepCosts(), lengths.__getitem__, prompt_tokens=prompts, signals=shown(outcome))
        steps = list(run.steps(len(outcome.metrics)))
        assert [step.seq_ids.tolist() for step in steps] == outcome.batches()
        deferrals = [times for step in steps for times in step.deferrals.tolist()]
        assert deferrals == [row["deferrals"] for row in outcome.rollouts]
        for step, line, made in zip(steps, outcome.metrics, metrics_lines(steps), strict=True):
            batch = [row for row in outcome.rollouts if row["step"] == step.step]
            assert max(row["finish_clock"] for row in batch) <= step.clock
            assert {key: made[key] for key in COUNTED} == {key: line[key] for key in COUNTED}, step.step
            assert {k: made[k] for k in MEASURED} == pytest.approx({k: line[k] for k in MEASURED}, abs=1e-8), step.step
            reason = made["delta_reason"].replace("reward 0 ", "")
            assert reason == line["delta_reason"]


SCORING = (Op.PREFILL, Op.SCORE)

Lanes = list[list[Ints]]
"""By replica and decode micro-batch, the tokens that each of its sequences gets, ascending."""


class Ordered(Player):
    single_ranks = True

    def plan(
        self, index: int, active: Sequence[Rollout], score: Sequence[Rollout], chunk: int, readable: Ints | None
    ) -> PlannedRound:
        return self.planner.plan(index, active, score, chunk, list, readable)

    def play(self, done: Recorded, begun: Floats) -> Played:
        ranks, planned = self.units.first.tolist(), done.planned
        starts = dict(zip(ranks, (begun + self.round_s).tolist(), strict=True))
        running, schedule = None, planned.schedule
        if done.grown is not None:
            lanes = self._lanes(done, done.grown)
            running, schedule = _running(lanes), self._live(schedule, lanes)
        timeline = simulate(schedule, planned.round, self.planner.site, self.costs, begun=starts, running=running)
        assert not timeline.stuck, "the planner has checked it"
        ends = [own[-1].end_s if (own := timeline.spans[rank]) else starts[rank] for rank in ranks]
        scored, waited = (np.array([of(timeline, rank) for rank in ranks]) for of in (_scored_s, _waited_s))
        arrived = None if done.chunk is None else ends[self.units.source]
        return Played(np.array(ends), scored, waited, arrived, lambda: _spans(timeline, done.step))

    def _lanes(self, done: Recorded, grown: Growing) -> Lanes:
        """A sequence that ends leaves its micro-batch; a single replica stops when the batch is complete."""
        by_id = dict(zip(grown.columns.seq_ids.tolist(), self.tokens(done).tolist(), strict=True))
        return [[np.sort([by_id[each.seq_id] for each in batch]) for batch in own] for own in done.planned.round.decode]

    def _live(self, schedule: Schedule, lanes: Lanes) -> Schedule:
        """Leaves out void micro-steps and their messages, which all ranks of a replica skip."""
        ended = [[int(lane[-1]) for lane in replica] for replica in lanes]
        placement, actions = self.planner.site.placements["actor"], dict(schedule.actions)
        for rank in placement.ranks:
            coords = placement.coords(rank)
            assert coords is not None
            last = ended[coords.replica]
            actions[rank] = tuple(a for a in schedule.of(rank) if a.step is None or a.step < last[a.micro_batch])
        return Schedule(actions)


def _running(lanes: Lanes) -> Running:
    def running(action: Action, replica: int) -> int:
        lane = lanes[replica][action.micro_batch]
        assert action.step is not None
        return len(lane) - int(np.searchsorted(lane, action.step, side="right"))

    return running


def _spans(timeline: Timeline, step: int) -> Iterator[TraceSpan]:
    for rank, spans in timeline.spans.items():
        kinds = ((_kind(span), span) for span in spans if span.end_s > span.start_s)
        for (role, name), own in groupby(kinds, key=itemgetter(0)):
            stretch = [span for _, span in own]
            yield TraceSpan(rank, role, name, step, stretch[0].start_s, stretch[-1].end_s)


def _kind(span: Span) -> tuple[str, str]:
    action = span.action
    if action.op in SCORING and action.role != "actor":
        return action.role, "score"
    if action.op is Op.RECV:
        chunk = action.payload is Payload.CHUNK
        return ("scorer", "wait_tokens") if chunk else (action.role, "wait")
    return "actor", "decode"


def _scored_s(timeline: Timeline, rank: int) -> float:
    own = (span for span in timeline.spans[rank] if span.action.op in SCORING and span.action.role != "actor")
    return sum(span.end_s - span.start_s for span in own)


def _waited_s(timeline: Timeline, rank: int) -> float:
    """Wait of a rank without the actor for the chunk, the last thing in its list that can make it wait."""
    own = timeline.spans[rank]
    return sum(s.end_s - s.start_s for s in own if s.action.payload is Payload.CHUNK and s.action.op is Op.RECV)


class OrderedRun(VirtualRun):
    player = Ordered


Layout = tuple[int, int, int]
"""tp, pp, dp."""
SIZES = ("tp", "pp", "dp")
SCORERS = ("reference", "critic", "reward")


def tree(actor: Layout = (1, 1, 1), scorer: Layout | None = None, **changes: Any) -> dict[str, Any]:
    mode = "single" if actor == (1, 1, 1) and scorer is None else "colocated" if scorer is None else "disaggregated"
    pools = {name: dict(zip(SIZES, own, strict=True)) for name, own in (("actor", actor), ("scorer", scorer)) if own is not None}
    config: dict[str, Any] = {
        "run_dir": "none", "steps": 6, "placement": {"mode": mode, **pools}, "tokenizer": {"path": "none"},
        "data": {"path": "none", "max_prompt_tokens": 64}, **dict.fromkeys(("actor", "critic", "reward"), {"init": MODEL_70B}),
        "rewards": [{"kind": "model"}], "rollout": {"batch_size": 16, "max_response_tokens": 96, "forced_lengths": [30.0, 0.8]},
        "overlap": {"chunk": 16, "delta": {"rule": "fixed", "initial": 4, "max": 4}}, "runtime": {"micro_batch_tokens": 2048},
    }  # fmt: skip
    for key, value in changes.items():
        config[key] = config.get(key, {}) | value if isinstance(value, dict) else value
    return config


def plain(**changes: Any) -> TrainConfig:
    return TrainConfig.model_validate(tree(**changes))


def drawn(seed: int) -> tuple[TrainConfig, StepCosts]:
    random = Random(seed)
    actor, scorer, roles = _placed(random)
    group, limit = random.choice((1, 1, 1, 2, 4)), random.choice((48, 96, 160, 256))
    batch = random.choice((8, 16, 32, 64))
    chunk = random.choice((4, 8, 16, 64))
    sizes = list(dict.fromkeys([chunk, 16, 32, 64])) if random.random() < 0.2 else chunk
    delta = random.choice((0, 2, 4, batch // 4, batch // 2))
    weave = random.choice((["auto", "auto"],) * 3 + (["auto", 256], [2, "auto"], [3, 128]))
    overlap = {
        "chunk": sizes, "delta": {"rule": "fixed", "initial": delta, "max": max(1, delta)}, "weave": weave,
        "schedule": random.choice(("auto", "woven", "intra")), "backfill": random.random() < 0.2,
        "carry": random.choice(("recompute", "recompute", "keep")),
    }  # fmt: skip
    lengths = [float(limit // random.choice((2, 3, 6))), random.choice((0.0, 0.4, 0.8, 1.2))]
    overlap["without"] = random.choice(([], [], [], ["critic"], ["scores"])) + ([] if random.random() < 0.8 else ["fork"])
    config = tree(
        actor, scorer, overlap=overlap, seed=seed, data={"max_prompt_tokens": random.choice((32, 64, 128))},
        runtime={"micro_batch_tokens": random.choice((256, 512, 1024, 2048, 8192))},
        rollout={"batch_size": batch, "max_response_tokens": limit, "group_size": group, "forced_lengths": lengths},
    )  # fmt: skip
    if group > 1 and random.random() < 0.7:
        config["algorithm"] = {"preset": random.choice(("grpo", "rloo", "remax"))}
        del config["critic"]
        roles.pop("critic", None)
    config |= {role: {"init": MODEL_70B, **own} for role, own in roles.items()}
    mode = random.choice(("sequential", "intra", "inter", "full", "full"))
    parsed = switched(TrainConfig.model_validate(config), mode)
    return parsed, _priced(random, {role: placement.pp for role, placement in role_placements(parsed).items()})


def _placed(random: Random) -> tuple[Layout, Layout | None, dict[str, dict[str, Any]]]:
    """Layouts of the actor and the scorers (None: on its ranks), and ranks and layouts of the roles that have their own."""
    mode, roles = random.choice(("single", "colocated", "disaggregated", "custom", "custom")), dict[str, dict[str, Any]]()
    if mode == "single":
        return (1, 1, 1), None, roles
    size = random.choice((2, 4, 8, 16) if mode == "colocated" else (1, 2, 4, 8))
    if mode == "colocated":
        for role in SCORERS:
            if random.random() < 0.3:
                roles[role] = {"parallel": dict(zip(SIZES, _layout(random, size), strict=True))}
        return _layout(random, size), None, roles
    other = random.choice([each for each in (1, 2, 4, 8) if size + each <= 16])
    for role in SCORERS if mode == "custom" else ():
        if random.random() < 0.5:
            count = random.choice([each for each in (1, 2, 4, 8) if each <= size + other])
            first = random.randrange(size + other - count + 1)
            ranks = f"{first}-{first + count - 1}" if count > 1 else str(first)
            roles[role] = {"ranks": ranks, "parallel": dict(zip(SIZES, _layout(random, count), strict=True))}
    return _layout(random, size), _layout(random, other), roles


def _layout(random: Random, ranks: int) -> Layout:
    tp, pp = random.choice([(tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4, 8) if ranks % (tp * pp) == 0])
    return tp, pp, ranks // tp // pp


def _priced(random: Random, stages: Mapping[str, int]) -> StepCosts:
    def line(fixed: tuple[float, float], each: tuple[float, float]) -> Linear:
        """Log-uniform between powers of ten; now and then nothing is fixed."""
        return Linear(10 ** random.uniform(*fixed) if random.random() < 0.9 else 0.0, 10 ** random.uniform(*each))

    def lines(role: str, fixed: tuple[float, float], each: tuple[float, float]) -> Lines:
        if random.random() < 0.5:
            return line(fixed, each)
        return tuple(line(fixed, each) for _ in range(stages[role]))

    costs = Costs()
    if random.random() < 0.7:
        costs = Costs(
            lines("actor", (-3.3, -2), (-5, -4)), line((-4.5, -3), (-6, -4.5)),
            {role: lines(role, (-4, -2), (-5.5, -4)) for role in stages if random.random() < 0.7},
            line((-4, -2), (-5.5, -4)), line((-4.5, -3), (-7, -5.5)), 10 ** random.uniform(-6, -3),
        )  # fmt: skip
    updates = {"actor": Linear(random.choice((0.0, 0.05, 0.2)), 1e-5), "critic": Linear(random.choice((0.0, 0.3)), 2e-5)}
    moves = {"actor": 0.05} if random.random() < 0.5 else {}
    return StepCosts(costs, updates, moves, random.choice((0.0, 1e-3)), random.choice((0.0, 0.01)))

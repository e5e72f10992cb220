"""Steps of 8 to 16,384 ranks in virtual time: where their seconds go, which part stops scaling first, and what mends it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any

from oppo_megatron.bench.studies.assumptions import LONG, ROUND_S
from oppo_megatron.bench.studies.layouts import MODELS, NIC_GB_PER_S, Layout, cluster_of, least_layout
from oppo_megatron.bench.studies.sampled import Sampled
from oppo_megatron.config.forced_limits import ForcedLimits
from oppo_megatron.config.modes import switched
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.placements import role_placements
from oppo_megatron.schedule.weaving.costs import at_stage
from oppo_megatron.sim.pricing.decoding import Decoding
from oppo_megatron.sim.pricing.prices import Prices
from oppo_megatron.sim.runs.sources import cluster_costs
from oppo_megatron.sim.runs.step_costs import StepCosts
from oppo_megatron.sim.runs.virtual import VirtualRun, VirtualStep

RANKS: Sequence[int] = (8, 32, 128, 512, 2048, 8192, 16384)
WEAK, STRONG = 4, 1024
"""Sequences of a batch for each rank; and of the batch that stays."""
STEPS, WARM_UP, BATCHES = 8, 3, 4
HALF, FREE = 0.5, 1e6
"""A part stops scaling where it has lost more than this; GB/s of a network that takes no time."""
PARTS = {
    "decode_s": "decoding", "score_exposed_s": "scoring", "update_s": "update", "critic_exposed_s": "critic", "idle_s": "idle",
}  # fmt: skip
LEAST_SHARE = 0.02
"""Of a step: what takes less decides nothing."""
COLUMNS = {
    "model": "model", "ranks": "ranks", "batch": "batch", "actor": "actor", "reference": "reference", "GB": "gb",
    "sequential s": "sequential_s", "full s": "step_s", "speed-up": "speedup", "decoding %": "decode_percent",
    "of it fixed %": "fixed_percent", "scoring %": "score_percent", "update %": "update_percent",
    "network %": "network_percent", "critic %": "critic_percent", "tokens/s/rank": "rate", "efficiency %": "efficiency",
}  # fmt: skip
STOP_COLUMNS = {
    "model": "model", "batch": "scaling", "from": "first", "stops first": "part", "at ranks": "ranks", "kept %": "kept",
    "kept % at the most ranks": "at_most",
}  # fmt: skip
MEND_COLUMNS = {
    "model": "model",
    "ranks": "ranks",
    "batch": "batch",
    "with": "with",
    "s a step": "step_s",
    "tokens/s x": "gain",
}


@dataclass(frozen=True)
class Point:
    """A model on so many ranks with a batch; `layout` as it sits there.  `delta_share`: delta is the batch over this."""

    model: str
    ranks: int
    batch: int
    layout: Layout
    seed: int
    nic_gb_per_s: float = NIC_GB_PER_S
    delta_share: int = 8

    @cached_property
    def config(self) -> TrainConfig:
        return self.layout.config(self.model, self.ranks, self.batch, self.seed, self.delta_share)

    @cached_property
    def lengths(self) -> ForcedLimits:
        forced = self.config.debug.lengths
        assert forced is not None
        return ForcedLimits.of(forced, LONG.limit, self.seed)

    @cached_property
    def typical(self) -> Sequence[int]:
        return Sampled(self.lengths, self.batch, BATCHES).middle()

    @cached_property
    def costs(self) -> StepCosts:
        cluster = cluster_of(self.ranks, self.nic_gb_per_s)
        return replace(cluster_costs(self.config, cluster, LONG.prompt, self.typical), round_s=ROUND_S)

    def run(self, mode: str, costs: StepCosts | None = None) -> list[VirtualStep]:
        """The steps after the first few."""
        run = VirtualRun(
            switched(self.config, mode), costs or self.costs, self.lengths, prompt_tokens=LONG.prompt, endless=True
        )
        return list(run.steps(STEPS))[WARM_UP:]

    def network_s(self) -> float:
        """Of the actor's update: what a network between nodes that takes no time would save."""
        if self.ranks <= 8:
            return 0.0
        seconds = []
        for nic in (self.nic_gb_per_s, FREE):
            decoding = Decoding(LONG.prompt, self.typical)
            priced = Prices(self.config, cluster_of(self.ranks, nic), decoding)
            seconds.append(
                next(row.seconds for row in priced.updates() if (row.role, row.phase) == ("actor", "update"))
            )
        return seconds[0] - seconds[1]

    def fixed_s(self, decode_steps: float) -> float:
        """Of so many decode steps, what does not depend on how many sequences there are: weights read, layers launched."""
        stages = range(self.layout.actor[1])
        return decode_steps * sum(at_stage(self.costs.actions.decode, stage).fixed_s for stage in stages)


def points(
    models: Sequence[str], ranks: Sequence[int], batch: Callable[[int], int], seed: int
) -> Iterator[tuple[Point, float]]:
    """With the GB of the fullest rank; where no layout fits there is none."""
    for model in models:
        for number in ranks:
            found = least_layout(model, number, batch(number))
            if found is not None:
                yield Point(model, number, batch(number), found[0], seed), found[1]


def study(
    models: Sequence[str], ranks: Sequence[int], seed: int, say: Callable[[str], None]
) -> dict[str, list[dict[str, Any]]]:
    """Rows of COLUMNS with a batch that grows with the ranks (`weak`) and one that stays (`strong`), of STOP_COLUMNS and
    MEND_COLUMNS."""
    rows: dict[str, list[dict[str, Any]]] = {}
    largest: dict[str, Point] = {}
    for scaling, batch in {"weak": lambda number: WEAK * number, "strong": lambda number: STRONG}.items():
        rows[scaling] = []
        for point, gb in points(models, ranks, batch, seed):
            say(f"{scaling}: {point.model} on {point.ranks} ranks")
            rows[scaling].append(_row(point, gb))
            largest[point.model] = point
        _compare(rows[scaling])
    stops = [stop for scaling in ("weak", "strong") for stop in _stops(scaling, rows[scaling])]
    mends = [row for point in largest.values() for row in _mends(point)]
    return {**rows, "stops": stops, "mends": mends}


def _row(point: Point, gb: float) -> dict[str, Any]:
    steps, sequential = point.run("full"), point.run("sequential")
    step_s = fmean(step.step_s for step in steps)
    seconds = {part: fmean(getattr(step.parts, part) for step in steps) for part in PARTS}
    before = fmean(step.step_s for step in sequential)
    dp = role_placements(point.config)["actor"].dp
    fixed_s = point.fixed_s(fmean(step.decode_steps for step in steps))
    return {
        "model": point.model, "ranks": point.ranks, "batch": point.batch, "gb": gb, "replicas": dp,
        "actor": _layout(point.layout.actor), "reference": _layout(point.layout.reference),
        "sequential_s": before, "step_s": step_s, "speedup": before / step_s, **seconds,
        "decode_percent": 100 * seconds["decode_s"] / step_s, "fixed_percent": 100 * min(1.0, fixed_s / seconds["decode_s"]),
        "score_percent": 100 * seconds["score_exposed_s"] / step_s, "update_percent": 100 * seconds["update_s"] / step_s,
        "network_percent": 100 * point.network_s() / step_s, "critic_percent": 100 * seconds["critic_exposed_s"] / step_s,
        "rate": _rate(point, steps),
    }  # fmt: skip


def _rate(point: Point, steps: Sequence[VirtualStep]) -> float:
    """Response tokens trained a second and rank."""
    return sum(float(step.lengths.sum()) for step in steps) / sum(step.step_s for step in steps) / point.ranks


def _layout(sizes: tuple[int, int]) -> str:
    return f"{sizes[0]}x{sizes[1]}"


def _compare(rows: Sequence[dict[str, Any]]) -> None:
    """Each row gets its efficiency: tokens a second and rank relative to the model's fewest ranks."""
    for row in rows:
        first = next(each for each in rows if each["model"] == row["model"])
        row["efficiency"] = 100 * row["rate"] / first["rate"]


def kept(part: str, first: Mapping[str, Any], row: Mapping[str, Any]) -> float:
    """What a part keeps of perfect scaling, 1 where it scales: its rank seconds a sequence at first over those now."""
    now = row[part] * row["ranks"] / row["batch"]
    return float(first[part] * first["ranks"] / first["batch"] / now) if now else 1.0


def _stops(scaling: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The part that is the first to keep less than half; where none does, the one that keeps least."""
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        held = [
            (row, {part: kept(part, own[0], row) for part in PARTS if row[part] > LEAST_SHARE * row["step_s"]})
            for row in own
        ]
        lost = [(row, part, share) for row, shares in held[1:] for part, share in shares.items() if share < HALF]
        at_most = ", ".join(f"{PARTS[part]} {100 * share:.0f}" for part, share in held[-1][1].items())
        found = {"model": model, "scaling": scaling, "first": own[0]["ranks"], "at_most": at_most}
        if not lost:
            yield found | {"part": "none", "ranks": None, "kept": None}
            continue
        row, part, share = min(lost, key=lambda each: (each[0]["ranks"], each[2]))
        yield found | {"part": PARTS[part], "ranks": row["ranks"], "kept": 100 * share}


def _mends(point: Point) -> Iterator[dict[str, Any]]:
    """One change at a time; `gain` is in trained tokens a second, against none."""
    base = _rate(point, point.run("full"))
    for name, other, costs, mode in _changes(point):
        steps = other.run(mode, costs)
        yield {
            "model": point.model, "ranks": point.ranks, "batch": other.batch, "with": name,
            "step_s": fmean(step.step_s for step in steps), "gain": _rate(other, steps) / base,
        }  # fmt: skip


def _changes(point: Point) -> Iterator[tuple[str, Point, StepCosts | None, str]]:
    yield "no overlap", point, None, "sequential"
    yield "both overlaps, delta an eighth of the batch", point, None, "full"
    yield "delta a quarter", replace(point, delta_share=4), None, "full"
    yield "a batch of four times as many", replace(point, batch=4 * point.batch), None, "full"
    tp, pp = point.layout.actor
    if tp < 8:
        yield f"actor at tp {2 * tp}", replace(point, layout=replace(point.layout, actor=(2 * tp, pp))), None, "full"
    yield "a network twice as fast", replace(point, nic_gb_per_s=2 * NIC_GB_PER_S), None, "full"
    yield "decode steps that cost the host nothing", point, _without_host(point), "full"


def _without_host(point: Point) -> StepCosts:
    """As if a captured decode step took no time beyond its kernels."""
    stages = point.layout.actor[1]
    host_s = MODELS[point.model]["num_hidden_layers"] // stages * cluster_of(point.ranks).engine.replay_s
    lines = [at_stage(point.costs.actions.decode, stage) for stage in range(stages)]
    decode = tuple(replace(line, fixed_s=max(0.0, line.fixed_s - host_s)) for line in lines)
    return replace(point.costs, actions=replace(point.costs.actions, decode=decode))

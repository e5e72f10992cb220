"""Steps of 8 to 16,384 ranks in virtual time: where their seconds go, which part stops scaling first, and what improves it.

    python -m benchmarks.scale_study --models 8B,70B --ranks 8,32,128 --out runs/bench/scale-study

PPO steps of Llama 3.1's three sizes on H200 nodes, with a batch that grows with the ranks and a constant one, each in the least
layout that fits.  Needs no GPU; takes two minutes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any

from benchmarks.common import add_out, run_script, write_figures
from benchmarks.paper.assumptions import CHUNK, LONG, MICRO_BATCH_TOKENS, ROUND_S, Sampled
from benchmarks.published.tables import llama_shape
from oppo_megatron.cli.bench import chosen, names, refuse_figures
from oppo_megatron.cli.parser import counts
from oppo_megatron.config.derived import switched
from oppo_megatron.config.ppo import ForcedLimits
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.placements import role_placements
from oppo_megatron.layout.role_memory import rank_memory, train_holdings
from oppo_megatron.layout.shape import Shape
from oppo_megatron.report.comparison import format_table
from oppo_megatron.schedule.weaving.costs import at_stage
from oppo_megatron.sim.clusters.cluster import Cluster
from oppo_megatron.sim.clusters.reading import ClusterConfig, build_cluster
from oppo_megatron.sim.pricing.model import Decoding
from oppo_megatron.sim.pricing.prices import Prices
from oppo_megatron.sim.runs.step_costs import StepCosts, cluster_costs
from oppo_megatron.sim.runs.virtual import VirtualRun, VirtualStep

NODE, GPU, NIC_GB_PER_S, MARGIN = 8, "h200", 50, 0.1
"""A node has a 400 Gb/s NIC for each GPU; MARGIN: the share of memory that stays free."""
VOCABULARY = 128256
MODELS: Mapping[str, Shape] = {
    name: {**llama_shape(*sizes, VOCABULARY), "tie_word_embeddings": False}
    for name, sizes in {
        "8B": (4096, 14336, 32, 32, 8),
        "70B": (8192, 28672, 80, 64, 8),
        "405B": (16384, 53248, 126, 128, 8),
    }.items()
}
"""Llama 3.1 in its three sizes."""
SCORER = "8B"
"""The size of critic and reward model; the reference is as large as the actor."""
SPLIT = 4
"""One rank in SPLIT scores."""
TENSOR, PIPELINE = (1, 2, 4, 8), (1, 2, 3, 4, 6, 8)
DELTA_SHARE = 8
"""Delta is an eighth of the batch."""
RANKS: Sequence[int] = (8, 32, 128, 512, 2048, 8192, 16384)
WEAK, STRONG = 4, 1024
"""Sequences per rank of the growing batch, and of the constant batch."""
STEPS, WARM_UP, BATCHES = 8, 3, 4
HALF, FREE = 0.5, 1e6
"""A part stops scaling if it keeps less than HALF; FREE: GB/s of a network that takes no time."""
PARTS = {
    "decode_s": "decoding", "score_exposed_s": "scoring", "update_s": "update", "critic_exposed_s": "critic", "idle_s": "idle",
}  # fmt: skip
LEAST_SHARE = 0.02
"""Parts with a smaller share of a step are ignored."""
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
MEND_COLUMNS = {"model": "model", "ranks": "ranks", "batch": "batch", "with": "with", "s a step": "step_s", "tokens/s x": "gain"}
TITLES = {
    "weak": "a batch of 4 sequences per rank",
    "strong": "a batch of 1024 sequences at any number of ranks",
    "stops": "the first part to keep less than half of perfect scaling, in rank seconds per sequence",
    "mends": "the most ranks with the constant batch, one change at a time",
}


@dataclass(frozen=True)
class Layout:
    """tp and pp of the actor and of the reference; critic and reward model have the latter's tp, in one stage."""

    actor: tuple[int, int]
    reference: tuple[int, int]

    def config(self, model: str, ranks: int, batch: int, seed: int, delta_share: int = DELTA_SHARE) -> TrainConfig:
        """Return PPO with a critic, one epoch of one minibatch."""
        scoring = ranks // SPLIT
        train = {"recompute": "full"}
        delta = max(1, batch // delta_share)
        tree: dict[str, Any] = {
            "run_dir": "none", "seed": seed, "tokenizer": {"path": "none"},
            "data": {"path": "none", "max_prompt_tokens": LONG.prompt},
            "placement": {"actor": _sizes(*self.actor, ranks - scoring), "scorer": _sizes(self.reference[0], 1, scoring)},
            "actor": {"init": MODELS[model], "train": {**train, "sequence_parallel": self.actor[0] > 1}},
            "critic": {"init": MODELS[SCORER], "train": {**train, "sequence_parallel": self.reference[0] > 1}},
            "reference": {"init": MODELS[model], "parallel": _sizes(*self.reference, scoring)},
            "reward": {"init": MODELS[SCORER]}, "rewards": [{"kind": "model"}],
            "rollout": {
                "batch_size": batch, "max_response_tokens": LONG.limit, "forced_lengths": [LONG.median, LONG.sigma],
            },
            "overlap": {
                "chunk": CHUNK,
                "delta": {"rule": "fixed", "initial": delta, "max": delta},
            },
            "runtime": {"micro_batch_tokens": MICRO_BATCH_TOKENS, "dtype": "bfloat16"},
        }  # fmt: skip
        return TrainConfig.model_validate(tree)


def cluster_of(ranks: int, nic_gb_per_s: float = NIC_GB_PER_S) -> Cluster:
    between = {"gb_per_s": nic_gb_per_s, "nics": NODE} if ranks > NODE else None
    nodes = max(1, ranks // NODE)
    return build_cluster(ClusterConfig.model_validate({"nodes": nodes, "gpus_per_node": NODE, "gpu": GPU, "between": between}))


def least_layout(model: str, ranks: int, batch: int) -> tuple[Layout, float] | None:
    """Return the least tp x pp of both pools that fits, tensor ranks first, and the GB of the fullest rank; None if none fits."""
    room, scoring = (1 - MARGIN) * cluster_of(ranks).gpu.memory_bytes / 1e9, ranks // SPLIT
    actors, references = (list(_layouts(model, size, batch)) for size in (ranks - scoring, scoring))
    while actors and references:
        layout = Layout(actors[0], references[0])
        actor_gb, scorer_gb = _fullest(layout.config(model, ranks, batch, 0), ranks - scoring)
        if max(actor_gb, scorer_gb) <= room:
            return layout, max(actor_gb, scorer_gb)
        actors, references = actors[actor_gb > room :], references[scorer_gb > room :]
    return None


def _layouts(model: str, ranks: int, batch: int) -> Iterator[tuple[int, int]]:
    """Yield tp and pp over `ranks` ranks with a sequence for each replica, the least first."""
    for tp, pp in ((tp, pp) for tp in TENSOR for pp in PIPELINE if pp == 1 or tp == NODE):
        whole = ranks % (tp * pp) == 0 and MODELS[model]["num_hidden_layers"] % pp == 0
        if whole and ranks // (tp * pp) <= batch and ranks // tp <= batch:
            yield tp, pp


def _fullest(config: TrainConfig, decoding: int) -> list[float]:
    """Return the GB of the fullest rank of each pool; the first `decoding` ranks are the actor's."""
    held = rank_memory(train_holdings(config, on_cpu=False))
    sides = [[memory.total for rank, memory in held.items() if (rank < decoding) is own] for own in (True, False)]
    return [max(side) / 1e9 for side in sides]


def _sizes(tp: int, pp: int, ranks: int) -> dict[str, int]:
    return {"tp": tp, "pp": pp, "dp": ranks // (tp * pp)}


@dataclass(frozen=True)
class Point:
    """A model on a number of ranks with a batch; delta is the batch over `delta_share`."""

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
        forced = self.config.rollout.lengths
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
        """Play the steps and return those after the first few."""
        run = VirtualRun(switched(self.config, mode), costs or self.costs, self.lengths, prompt_tokens=LONG.prompt, endless=True)
        return list(run.steps(STEPS))[WARM_UP:]

    def network_s(self) -> float:
        """Return what a network that takes no time would save of the actor's update."""
        if self.ranks <= 8:
            return 0.0
        seconds = []
        for nic in (self.nic_gb_per_s, FREE):
            decoding = Decoding(LONG.prompt, self.typical)
            seconds.append(Prices(self.config, cluster_of(self.ranks, nic), decoding).updates()["actor", "update"])
        return seconds[0] - seconds[1]

    def fixed_s(self, decode_steps: float) -> float:
        """Return the part of decode steps that does not depend on the sequences: weights read, layers launched."""
        stages = range(self.layout.actor[1])
        return decode_steps * sum(at_stage(self.costs.actions.decode, stage).fixed_s for stage in stages)


def points(models: Sequence[str], ranks: Sequence[int], batch: Callable[[int], int], seed: int) -> Iterator[tuple[Point, float]]:
    """Yield points that fit, with the GB of the fullest rank."""
    for model in models:
        for number in ranks:
            found = least_layout(model, number, batch(number))
            if found is not None:
                yield Point(model, number, batch(number), found[0], seed), found[1]


def study(models: Sequence[str], ranks: Sequence[int], seed: int, say: Callable[[str], None]) -> dict[str, list[dict[str, Any]]]:
    """Return rows with a batch that grows with the ranks (`weak`) and a constant one (`strong`), `stops` and `mends`."""
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
    """Return the trained response tokens per second and rank."""
    return sum(float(step.lengths.sum()) for step in steps) / sum(step.step_s for step in steps) / point.ranks


def _layout(sizes: tuple[int, int]) -> str:
    return f"{sizes[0]}x{sizes[1]}"


def _compare(rows: Sequence[dict[str, Any]]) -> None:
    """Add the efficiency: tokens per second and rank, relative to the model's fewest ranks."""
    for row in rows:
        first = next(each for each in rows if each["model"] == row["model"])
        row["efficiency"] = 100 * row["rate"] / first["rate"]


def kept(part: str, first: Mapping[str, Any], row: Mapping[str, Any]) -> float:
    """Return the share of perfect scaling that a part keeps: its rank seconds per sequence at first over the same of `row`."""
    now = row[part] * row["ranks"] / row["batch"]
    return float(first[part] * first["ranks"] / first["batch"] / now) if now else 1.0


def _stops(scaling: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield for each model the part that first keeps less than half."""
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        held = [
            (row, {part: kept(part, own[0], row) for part in PARTS if row[part] > LEAST_SHARE * row["step_s"]}) for row in own
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
    """Yield one change at a time; `gain`: trained tokens per second over those without it."""
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
    """Return costs without any time of a captured decode step beyond its kernels."""
    stages = point.layout.actor[1]
    host_s = MODELS[point.model]["num_hidden_layers"] // stages * cluster_of(point.ranks).engine.replay_s
    lines = [at_stage(point.costs.actions.decode, stage) for stage in range(stages)]
    decode = tuple(replace(line, fixed_s=max(0.0, line.fixed_s - host_s)) for line in lines)
    return replace(point.costs, actions=replace(point.costs.actions, decode=decode))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", type=names, metavar="M,M", help="of 8B, 70B, 405B; default all")
    default = ",".join(map(str, RANKS))
    parser.add_argument("--ranks", type=counts, default=RANKS, metavar="N,N", help=f"multiples of 8; default {default}")
    add_out(parser, "scale-study")


def measure(args: argparse.Namespace) -> int:
    models, ranks = chosen("--models", args.models, list(MODELS)), sorted(set(args.ranks))
    if odd := [number for number in ranks if number % NODE]:
        raise ConfigError(f"--ranks {odd[0]}: nodes have {NODE} GPUs; give multiples of {NODE}")
    refuse_figures(args.out / "scale.json")
    tables = study(models, ranks, 0, lambda line: print(line, file=sys.stderr, flush=True))
    if not tables["weak"] and not tables["strong"]:
        numbers = ", ".join(map(str, ranks))
        raise ConfigError(f"{', '.join(models)} on {numbers} ranks: no layout fits an H200's memory; give more ranks")
    columns = {"weak": COLUMNS, "strong": COLUMNS, "stops": STOP_COLUMNS, "mends": MEND_COLUMNS}
    for name, rows in tables.items():
        print(f"\n{TITLES[name]}:\n{format_table(columns[name], rows)}")
    write_figures(args.out, "scale", {"models": models, "ranks": ranks, **tables})
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    return run_script("benchmarks.scale_study", __doc__, add_arguments, measure, arguments)


if __name__ == "__main__":
    sys.exit(main())

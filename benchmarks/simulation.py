"""One round of a run, planned by every rank for itself and then played by all of them together, without models or processes.

Each rank goes through the earlier rounds as in a run (`rank_run.py`), with its own buffer, books and planner.  Then all lists are
combined.  This finds ranks that planned another round than their peers (`agreement.py`), everything that the checker finds in the
lists of all ranks (`checking/checker.py`), and messages whose two ends expect different bytes.
"""

from __future__ import annotations

import gc
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from benchmarks.agreement import Records, agree
from benchmarks.dry_run import Cluster
from benchmarks.rank_run import Carried, RankRound, RankRun, Traffic, token_bytes, traffic_of
from oppo_megatron.config.derived import max_context
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.placements import role_placements
from oppo_megatron.schedule.actions import Op, Schedule
from oppo_megatron.schedule.checking.checker import Fault, FaultKind, check_timeline
from oppo_megatron.schedule.checking.timeline import simulate
from oppo_megatron.schedule.links import NCCL, Link, Transport, link_of
from oppo_megatron.schedule.plan import cache_slots
from oppo_megatron.schedule.rounds import KVBudget, Round, Site
from oppo_megatron.schedule.weaving.costs import Costs, Linear

COLUMNS = {
    "mode": "mode", "ranks": "ranks", "round": "round", "actions": "actions", "chain": "chain", "messages": "messages",
    "MB": "megabytes", "hidden MB": "hidden", "tokens MB": "tokens", "chunks MB": "chunk", "most messages": "most_messages",
    "most MB": "most", "gathers": "gathers", "gathered MB": "gather", "results": "results", "results MB": "results_mb",
    "faults": "faults", "cpu s": "seconds",
}  # fmt: skip
"""`most`: of the rank that sends most.  `gathers`: collectives of all groups.  `results`: broadcasts of a step."""

NOTHING = Linear(0.0, 0.0)
ONLY_MESSAGES = Costs(NOTHING, NOTHING, {}, NOTHING, NOTHING, message_s=1.0)
"""With these costs the time of a round is the length of its longest chain of messages and gathers."""

MakeRun = Callable[[int], RankRun]
"""Make the run of a rank."""


@dataclass(frozen=True)
class Simulated:
    """A round of all ranks: their lists, faults, message contents and traffic by rank, and the longest chain of messages."""

    step: int
    round: Round
    schedule: Schedule
    faults: Sequence[Fault]
    carried: Mapping[int, Carried]
    traffic: Mapping[int, Traffic]
    chain: int

    @property
    def num_actions(self) -> int:
        """Planned actions, including void ones."""
        return sum(map(len, self.schedule.actions.values()))


def simulate_rounds(
    config: TrainConfig,
    make_run: MakeRun,
    first: int,
    last: int,
    transport: Transport = NCCL,
    progress: Callable[[int], object] = int,
) -> Iterator[Simulated]:
    """Yield rounds `first` .. `last` of the run, from 1.  `progress(n)`: n ranks have planned.

    Raises ConfigError if a rank has fewer rounds.
    """
    site = Site(role_placements(config))
    made: dict[int, list[RankRound]] = {}
    known: dict[Records, Records] = {}
    for rank in site.ranks:
        with _collecting_the_young():
            made[rank] = [_once(each, known) for each in islice(make_run(rank).rank_rounds(), first - 1, last)]
        if len(made[rank]) <= last - first:
            raise ConfigError(f"round {last}: rank {rank} has {first - 1 + len(made[rank])}; ask for one of these")
        progress(len(made))
    for number in range(last - first + 1):
        with _collecting_the_young():
            simulated = _together(config, site, {rank: rounds[number] for rank, rounds in made.items()}, transport)
        yield simulated


@contextmanager
def _collecting_the_young() -> Iterator[None]:
    """Collect no garbage in the block, which holds millions of actions, and only new objects at its end."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.collect(1)
        if enabled:
            gc.enable()


def simulate_all(
    cluster: Cluster, modes: Sequence[str], ranks: Sequence[int], sequences: int, number: int, say: Callable[[str], None]
) -> Iterator[tuple[dict[str, Any], Sequence[Fault]]]:
    """Yield a row and the faults of round `number` of the first step, for each number of ranks; `say` gets the progress.

    Raises ConfigError before the first if a number does not fit.
    """
    cases = [(mode, size, cluster.config(mode, size, sequences)) for mode in modes for size in ranks]
    for mode, size, config in cases:
        started, first_step = time.process_time(), config.model_copy(update={"steps": 1})

        def make_run(rank: int, config: TrainConfig = first_step) -> RankRun:
            return RankRun(config, cluster.prompt_tokens, rank)

        def progress(done: int, mode: str = mode, size: int = size, started: float = started) -> None:
            if done % -(-size // 8) == 0 or done == size:
                say(f"{mode}: {done} of {size} ranks have planned, {time.process_time() - started:.0f} s")

        for simulated in simulate_rounds(first_step, make_run, number, number, progress=progress):
            own = {"mode": mode, "ranks": size, "round": number, **_results(make_run(0)), **_figures(simulated)}
            yield own | {"seconds": time.process_time() - started}, simulated.faults


def _figures(simulated: Simulated) -> dict[str, Any]:
    every = list(simulated.traffic.values())
    by_payload = sum((traffic.num_bytes for traffic in every), Counter[str]())
    replicas = max(1, len(simulated.round.decode))
    return {
        "actions": simulated.num_actions, "chain": simulated.chain,
        "messages": sum(traffic.messages.total() for traffic in every),
        "megabytes": sum(traffic.sent_bytes for traffic in every) / 1e6,
        **{name: by_payload[name] / 1e6 for name in ("hidden", "tokens", "chunk", "gather")},
        "most_messages": max(traffic.messages.total() for traffic in every),
        "most": max(traffic.sent_bytes for traffic in every) / 1e6,
        "gathers": sum(traffic.gathers for traffic in every) // replicas, "faults": len(simulated.faults),
    }  # fmt: skip


def _results(run: RankRun) -> dict[str, Any]:
    """Return the broadcasts of the first step."""
    for _ in run.rank_rounds():
        pass
    first = run.results[0]
    return {"results": len(first), "results_mb": sum(first) / 1e6}


def _once(made: RankRound, known: dict[Records, Records]) -> RankRound:
    """Return the same round; equal records are shared between ranks."""
    records = known.setdefault(made.plan.records, made.plan.records)
    return replace(made, plan=replace(made.plan, records=records))


def _together(config: TrainConfig, site: Site, made: Mapping[int, RankRound], transport: Transport) -> Simulated:
    whole, schedule, faults = agree({rank: each.plan for rank, each in made.items()}, site)
    timeline = simulate(schedule, whole, site, ONLY_MESSAGES, transport)
    faults += check_timeline(schedule, whole, site, _budgets(config, site), timeline)
    widths = token_bytes(config)
    carried = {rank: Carried.of(rank, each, site, widths) for rank, each in made.items()}
    faults += _unequal_ends(schedule, carried)
    longest = max(each.words for each in carried.values())
    traffic = {rank: traffic_of(schedule.of(rank), own, longest) for rank, own in carried.items()}
    step = Counter(each.step for each in made.values()).most_common(1)[0][0]
    return Simulated(step, whole, schedule, faults, carried, traffic, round(timeline.makespan_s))


def _budgets(config: TrainConfig, site: Site) -> dict[str, list[KVBudget]]:
    return {
        role: [KVBudget(cache_slots(config, role, placement), max_context(config))] * placement.dp
        for role, placement in site.placements.items()
    }


def _unequal_ends(schedule: Schedule, carried: Mapping[int, Carried]) -> Iterator[Fault]:
    """Yield the links whose two ends expect different bytes."""
    ends: dict[Link, list[int]] = defaultdict(lambda: [0, 0])
    for rank, own in carried.items():
        for action in schedule.of(rank):
            if action.peer is not None and own.live(action):
                ends[link_of(action)][action.op is Op.RECV] += sum(own.parts(action))
    for (source, destination, role, payload), (given, taken) in ends.items():
        if given != taken:
            assert payload is not None
            found = f"rank {source} sends {given} bytes of {role}'s {payload.value} to it, and it expects {taken}"
            rule = "both ends of a message know its size by their own plans"
            remedy = "see which of the two ranks is named above, or has other lengths than its peers"
            yield Fault(FaultKind.PLAN, destination, len(schedule.of(destination)), None, f"{found}; {rule}; {remedy}")

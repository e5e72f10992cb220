"""The cost of planning, checking and bookkeeping for one rank of a large run, without models, GPUs or processes.

    python -m benchmarks.planning --ranks 128 1024 --sequences 512 --mode disaggregated colocated
    python -m benchmarks.planning --count --ranks 4096       process groups and messages of a rank
    python -m benchmarks.planning --simulate --ranks 4096    every rank plans a round for itself; all play it together

Drives one rank's part of the loop's pure half (`dry_run.py`), for rank 0 and the last rank, and prints processor seconds per
step.  Their share refers to the shortest step that the peaks of an H100 allow, so it is an upper bound.
--simulate plays all ranks' plans by the rules of NCCL and counts what they send (`simulation.py`); a fault is exit code 2.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from benchmarks.common import run_script
from benchmarks.dry_run import Cluster, DryRun
from benchmarks.limit import forward_flops, training_flops
from benchmarks.simulation import COLUMNS as SIMULATED_COLUMNS
from benchmarks.simulation import simulate_all
from oppo_megatron.cli.parser import count
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.placements import role_placements, training_placements, world_size
from oppo_megatron.layout.shape import causal_pairs, weight_bytes
from oppo_megatron.modeldir.headers import read_hf_config
from oppo_megatron.records import Prompt
from oppo_megatron.report.comparison import format_table
from oppo_megatron.schedule.actions import Op, Payload
from oppo_megatron.schedule.checking.proof import require_provable
from oppo_megatron.schedule.links import TRANSPORTS, calls_of, groups_by_rank, run_groups
from oppo_megatron.schedule.planning import planner
from oppo_megatron.schedule.planning.planner import PlannedRound
from oppo_megatron.sim.runs.loop import Recorded

MODES = ("disaggregated", "colocated")
SHOWN = 20
"""Faults printed at most."""
COLUMNS = {
    "mode": "mode", "ranks": "ranks", "B": "sequences", "of rank": "rank", "rounds": "rounds", "shapes": "shapes",
    "plan s": "planning", "check s": "checking", "books s": "bookkeeping", "sum s": "total", "first step s": "first",
    "stream s": "stream", "step s at least": "step_s", "share %": "percent",
}  # fmt: skip
"""Medians of the steps after the first; `first`: the sum of the first step; `shapes`: newly made shapes of rounds."""
COUNTED_COLUMNS = {
    "mode": "mode", "ranks": "ranks", "groups of a rank": "groups", "calls of new_group": "calls",
    "messages a round": "messages", "of them chunks": "chunks", "to ranks": "peers",
}  # fmt: skip
"""The largest number of groups of a rank; messages of the actor's output rank in a round, and the ranks that it sends them to."""


def bench_planning(
    cluster: Cluster, modes: Sequence[str], ranks: Sequence[int], sequences: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Yield a row for rank 0 and one for the last rank of each combination.  Raises ConfigError before the first."""
    cases = [(m, n, batch, cluster.config(m, n, batch)) for m in modes for n in ranks for batch in sequences]
    for mode, number, batch, config in cases:
        for rank in (0, number - 1):
            yield {"mode": mode, "ranks": number, "sequences": batch, "rank": rank, **measure(config, cluster, rank)}


def measure(config: TrainConfig, cluster: Cluster, rank: int) -> dict[str, Any]:
    """Return the processor seconds per step on `rank`."""
    run = _Measured(config, cluster, rank)
    run.run()
    later = run.rows[1:] or run.rows
    row: dict[str, Any] = {key: median(each[key] for each in later) for key in later[0]}
    least_s = least_step_s(config, cluster, run.scheduler.buffer.clock / len(run.rows), run.mean_response())
    return row | {"first": run.rows[0]["total"], "step_s": least_s, "percent": 100 * row["total"] / least_s}


def least_step_s(config: TrainConfig, cluster: Cluster, decode_steps: float, response_tokens: float) -> float:
    """Return the least seconds of a step: every decode step reads the weights, stage after stage, and all devices compute at
    their peak what four roles read and two train.
    """
    model, length = read_hf_config(config.actor), round(response_tokens) + cluster.prompt_tokens
    work = length, causal_pairs(0, length), length
    forwards = 4 * forward_flops(model, *work, scalar=True) + 2 * training_flops(model, *work, scalar=True)
    reading_s = weight_bytes(model, "bfloat16", scalar=True) / cluster.tp / cluster.bytes_per_s
    devices = world_size(config) * cluster.flops
    return decode_steps * reading_s + config.rollout.batch_size * forwards / devices


class _Measured(DryRun):
    """A dry run that times the checks apart and keeps a row per step."""

    def __init__(self, config: TrainConfig, cluster: Cluster, rank: int):
        super().__init__(config, cluster.prompt_tokens, rank, time.process_time, transport=cluster.transport)
        self.rows: list[dict[str, float]] = []
        self._checking_s, self._shapes = 0.0, 0

        def timed(*args: Any) -> None:
            started = self.clock()
            require_provable(*args)
            self._checking_s += self.clock() - started
            self._shapes += 1

        planner.require_provable = timed

    def _prompts(self, count: int, num_tokens: int | Sequence[int]) -> Iterator[Prompt]:
        """Make the prompts before the timing."""
        return iter(list(super()._prompts(count, num_tokens)))

    def mean_response(self) -> float:
        """Return the mean tokens of a response."""
        return sum(map(self.limit, range(self.scheduler.num_consumed))) / self.scheduler.num_consumed

    def _step(self, step: int) -> Iterator[Recorded]:
        checking_s, shapes, rounds = self._checking_s, self._shapes, self.num_rounds
        yield from super()._step(step)
        spent, checking_s = self.watch.seconds, self._checking_s - checking_s
        row = {
            "planning": spent["planner and checker"] - checking_s,
            "checking": checking_s,
            "bookkeeping": spent["scheduler and buffer"] + spent["controllers"],
        }
        whole = {"rounds": self.num_rounds - rounds, "shapes": self._shapes - shapes, "stream": spent["stream"]}
        self.rows.append({**row, "total": sum(row.values()), **whole})


def count_all(cluster: Cluster, modes: Sequence[str], ranks: Sequence[int], sequences: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of ranks.  Raises ConfigError before the first if one does not fit."""
    cases = [(mode, number, cluster.config(mode, number, sequences)) for mode in modes for number in ranks]
    for mode, number, config in cases:
        groups = run_groups(role_placements(config), training_placements(config))
        yield {
            "mode": mode, "ranks": number,
            "groups": max(groups_by_rank(groups).values()), "calls": calls_of(groups),
            **_messages(config, cluster),
        }  # fmt: skip


def _messages(config: TrainConfig, cluster: Cluster) -> dict[str, int]:
    """Count the messages of the actor's output rank in the first step's longest round."""
    first = config.model_copy(update={"steps": 1})
    run = _Counted(first, cluster.prompt_tokens)
    run.run()
    return run.most


class _Counted(DryRun):
    """A dry run that counts its rank's messages.  A chunk is two, header and payload; so is a gather."""

    most: dict[str, int] = {"messages": 0}

    def _plan(self, *args: Any) -> PlannedRound:
        planned = super()._plan(*args)
        own = planned.schedule.of(self.planner.rank or 0)
        sends = Counter(action.payload for action in own if action.op is Op.SEND)
        gathers = sum(action.op is Op.GATHER for action in own)
        messages = sends.total() + sends[Payload.CHUNK] + 2 * gathers
        if messages > self.most["messages"]:
            peers = {action.peer for action in own if action.op is Op.SEND}
            self.most = {"messages": messages, "chunks": 2 * sends[Payload.CHUNK], "peers": len(peers)}
        return planned


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=count, nargs="+", default=[128, 1024], metavar="N", help="default 128 1024")
    parser.add_argument("--sequences", type=count, nargs="+", default=[512], metavar="N", help="rollouts per step; default 512")
    parser.add_argument("--mode", choices=MODES, nargs="+", default=["disaggregated"], help="default disaggregated")
    parser.add_argument("--tp", type=count, default=8, metavar="N", help="tensor-parallel size of all roles; default 8")
    parser.add_argument("--pp", type=count, default=8, metavar="N", help="pipeline-parallel size; default 8")
    parser.add_argument("--chunk", type=count, default=128, metavar="N", help="decode steps per round; default 128")
    parser.add_argument("--steps", type=count, default=4, metavar="N", help="PPO steps; default 4")
    parser.add_argument(
        "--transport", choices=TRANSPORTS, default="nccl",
        help="rules to plan by; nccl-one-queue: CUDA_DEVICE_MAX_CONNECTIONS=1; default nccl",
    )  # fmt: skip
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--count", action="store_true", help="count groups and messages instead")
    instead.add_argument("--simulate", action="store_true", help="play a round of all ranks instead")
    parser.add_argument("--round", type=count, default=2, metavar="N", help="with --simulate: which; default 2")


def measure_planning(args: argparse.Namespace) -> int:
    cluster = Cluster(tp=args.tp, pp=args.pp, chunk=args.chunk, steps=args.steps, transport=TRANSPORTS[args.transport])
    if args.count:
        print(format_table(COUNTED_COLUMNS, list(count_all(cluster, args.mode, args.ranks, args.sequences[0]))))
        return 0
    if args.simulate:
        return _simulate(cluster, args)
    print(format_table(COLUMNS, list(bench_planning(cluster, args.mode, args.ranks, args.sequences))))
    print(
        f"70B, tp {args.tp}, pp {args.pp}, prompts of {cluster.prompt_tokens}, responses of up to {cluster.response_tokens} "
        f"(log-normal, median {cluster.lengths[0]:g}), chunks of {args.chunk}, rules of {args.transport}; medians of "
        f"{max(1, args.steps - 1)} steps"
    )
    return 0


def _simulate(cluster: Cluster, args: argparse.Namespace) -> int:
    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    simulated = list(simulate_all(cluster, args.mode, args.ranks, args.sequences[0], args.round, say))
    print(format_table(SIMULATED_COLUMNS, [row for row, _ in simulated]))
    faults = [fault for _, found in simulated for fault in found]
    if not faults:
        print("OK: all ranks have planned the same round, and the checker finds no fault in it")
        return 0
    shown = f", the first {SHOWN} of them" if len(faults) > SHOWN else ""
    print(f"the simulation finds {'1 fault' if len(faults) == 1 else f'{len(faults)} faults'}{shown}:")
    print("\n".join(f"  - {fault}" for fault in faults[:SHOWN]))
    return 2


def main(arguments: Sequence[str] | None = None) -> int:
    return run_script("benchmarks.planning", __doc__, add_arguments, measure_planning, arguments)


if __name__ == "__main__":
    sys.exit(main())

"""`oppo bench planning`: what planning, checking and bookkeeping cost a rank of a large run, without a model or a GPU."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from oppo_megatron.cli.lengths import count
from oppo_megatron.cli.plan.schedule import EXIT_FAULT

HELP = "processor seconds that a rank of a large run plans, checks and books in a step"
ABOUT = """Drives one rank's part of the loop's pure half, for rank 0 and for the last rank of each number of ranks, and prints
its processor seconds a step. The model is a 70B whose step is bounded from below by the peaks of an H100. With --count it
counts instead: process groups, messages and watchdogs' notes of a rank; with --memory bytes by kind. With --simulate every
rank plans a round for itself; then all of them play it together, by the rules of NCCL, and what they send is counted: exit
code 2 if there is a fault. Loads no torch."""

MODES = ("disaggregated", "colocated")
TRANSPORTS = ("gloo", "nccl", "nccl-one-queue")
SHOWN = 20
"""Faults: one rank that plans otherwise leaves many behind it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=count, nargs="+", default=[128, 1024], metavar="N", help="default 128 1024")
    parser.add_argument(
        "--sequences", type=count, nargs="+", default=[512], metavar="N", help="rollouts a step; default 512"
    )
    parser.add_argument(
        "--mode", choices=MODES, nargs="+", default=["disaggregated"], help="of the placement; default disaggregated"
    )
    parser.add_argument("--tp", type=count, default=8, metavar="N", help="tensor-parallel size of all roles; default 8")
    parser.add_argument("--pp", type=count, default=8, metavar="N", help="pipeline-parallel size; default 8")
    parser.add_argument("--chunk", type=count, default=128, metavar="N", help="decode steps of a round; default 128")
    parser.add_argument("--steps", type=count, default=4, metavar="N", help="PPO steps; default 4")
    parser.add_argument(
        "--transport",
        choices=TRANSPORTS,
        default="nccl",
        help="whose rules are planned by; nccl-one-queue is that of CUDA_DEVICE_MAX_CONNECTIONS=1; default nccl",
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--count", action="store_true", help="count groups, messages of a round and notes, instead of timing anything"
    )
    instead.add_argument(
        "--memory",
        action="store_true",
        help="show what the fullest rank is to hold, by kind, instead of timing anything",
    )
    instead.add_argument(
        "--simulate", action="store_true", help="play a round of all ranks, each of which has planned it for itself"
    )
    parser.add_argument(
        "--round", type=count, default=2, metavar="N", help="with --simulate: round of the first step; default 2"
    )
    parser.add_argument(
        "--odd",
        type=rank,
        metavar="RANK",
        help="with --simulate: a rank whose prompts are a token shorter, to see it found",
    )
    parser.set_defaults(measure=_planning)


def rank(text: str) -> int:
    """A whole number from 0 on."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no rank; ranks are numbered from 0")
    return int(text)


def _planning(args: argparse.Namespace) -> int:
    from oppo_megatron.bench.figures import format_table
    from oppo_megatron.bench.planning import COLUMNS, Cluster, bench_planning
    from oppo_megatron.schedule.checking.transport import TRANSPORTS as BY_NAME

    cluster = Cluster(tp=args.tp, pp=args.pp, chunk=args.chunk, steps=args.steps, transport=BY_NAME[args.transport])
    if args.count:
        return _count(cluster, args)
    if args.memory:
        return _memory(cluster, args)
    if args.simulate:
        return _simulate(cluster, args)
    rows = list(bench_planning(cluster, args.mode, args.ranks, args.sequences))
    print(format_table(COLUMNS, rows))
    print(
        f"70B, tp {args.tp}, pp {args.pp}, prompts of {cluster.prompt_tokens}, responses of up to {cluster.response_tokens} "
        f"(log-normal, median {cluster.lengths[0]:g}), chunks of {args.chunk}, "
        f"rules of {args.transport}; medians of {max(1, args.steps - 1)} steps"
    )
    return 0


def _count(cluster: Any, args: argparse.Namespace) -> int:
    from oppo_megatron.bench.counting import COLUMNS, count_all
    from oppo_megatron.bench.figures import format_table

    print(format_table(COLUMNS, list(count_all(cluster, args.mode, args.ranks, args.sequences[0]))))
    print(
        f"70B, tp {args.tp}, pp {args.pp}, {args.sequences[0]} sequences, chunks of {args.chunk}; groups: the most of a rank; "
        "messages: of the actor's output rank"
    )
    return 0


def _memory(cluster: Any, args: argparse.Namespace) -> int:
    from oppo_megatron.bench.figures import format_table
    from oppo_megatron.bench.memory import COLUMNS, bench_memory

    print(format_table(COLUMNS, list(bench_memory(cluster, args.mode, args.ranks, args.sequences))))
    print(
        f"70B in bfloat16 on GPUs, tp {args.tp}, pp {args.pp}, sequences of up to "
        f"{cluster.prompt_tokens + cluster.response_tokens} tokens, micro-batches of 8192, updates with "
        "sequence parallelism"
    )
    return 0


def _simulate(cluster: Any, args: argparse.Namespace) -> int:
    from oppo_megatron.bench.figures import format_table
    from oppo_megatron.bench.simulation import COLUMNS, simulate_all

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    cases = cluster, args.mode, args.ranks, args.sequences[0]
    simulated = list(simulate_all(*cases, args.round, say, args.odd))
    print(format_table(COLUMNS, [row for row, _ in simulated]))
    print(
        f"70B, tp {args.tp}, pp {args.pp}, {args.sequences[0]} sequences, chunks of {args.chunk}; most: of the rank that gives "
        "most; gathers: collectives of all groups; results: broadcasts of a step"
    )
    faults = [fault for _, found in simulated for fault in found]
    if not faults:
        print("OK: all ranks have planned the same round, and the checker finds no fault in it")
        return 0
    shown = f", the first {SHOWN} of them" if len(faults) > SHOWN else ""
    print(f"the simulation finds {'1 fault' if len(faults) == 1 else f'{len(faults)} faults'}{shown}:")
    print("\n".join(f"  - {fault}" for fault in faults[:SHOWN]))
    return EXIT_FAULT

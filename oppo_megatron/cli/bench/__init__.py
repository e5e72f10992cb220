"""`oppo bench KIND`: one table of benchmarks, each in a module beside this one that declares arguments and calls `bench/`."""

from __future__ import annotations

import argparse
import signal
import sys

from oppo_megatron.cli.bench import (
    chunk,
    decode,
    delta,
    fork,
    gpu,
    laws,
    machine,
    overhead,
    overlap,
    paper,
    planning,
    prices,
    real,
    scale_study,
    scaling,
    seeds,
    weave,
)
from oppo_megatron.cli.parser import add_debug_argument
from oppo_megatron.cli.signals import ending_by_signal

KINDS = {
    "decode": decode, "overlap": overlap, "weave": weave, "chunk": chunk, "delta": delta, "fork": fork, "scaling": scaling,
    "overhead": overhead, "planning": planning, "seeds": seeds, "gpu": gpu,
    "laws": laws, "machine": machine, "prices": prices, "real": real, "paper": paper,
    "scale-study": scale_study,
}  # fmt: skip
"""Each module has HELP (a line), ABOUT (what its help begins with) and `add_arguments`, which names the function to call."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "docs/benchmarks.md says what each one measures and how to read it."
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    for name, module in KINDS.items():
        kind = kinds.add_parser(
            name,
            help=module.HELP,
            description=module.ABOUT,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_debug_argument(kind)
        module.add_arguments(kind)


def run(args: argparse.Namespace) -> int:
    from oppo_megatron.bench.outcomes import BenchStopped

    with ending_by_signal():
        try:
            return int(args.measure(args))
        except BenchStopped as stop:
            print(f"oppo bench: {stop}", file=sys.stderr)
            return 128 + signal.SIGTERM

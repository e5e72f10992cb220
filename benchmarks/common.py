"""Runs a script of this folder: its arguments, its errors as messages and exit codes, its figures as a file."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from oppo_megatron.bench.suite import BenchStopped
from oppo_megatron.cli.bench import refuse_figures
from oppo_megatron.cli.parser import Parser
from oppo_megatron.cli.signals import ending_by_signal
from oppo_megatron.errors import EXIT_INTERRUPTED, OppoError
from oppo_megatron.rundir.directory import write_json


def run_script(
    name: str,
    about: str | None,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    measure: Callable[[argparse.Namespace], int],
    arguments: Sequence[str] | None = None,
) -> int:
    """Parse the arguments (the command line's by default), call `measure` and return the exit code."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog=f"python -m {name}", description=about, formatter_class=raw)
    add_arguments(parser)
    args = parser.parse_intermixed_args(arguments)
    try:
        with ending_by_signal():
            return measure(args)
    except BenchStopped as stop:
        print(f"{name}: {stop}", file=sys.stderr)
        return 128 + signal.SIGTERM
    except OppoError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.filename is None:
            raise
        print(f"{name}: {error.filename}: {error.strerror}; correct its rights, or name another path", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def add_out(parser: argparse.ArgumentParser, folder: str) -> None:
    parser.add_argument("--out", type=Path, default=Path("runs/bench") / folder, metavar="DIR", help="default %(default)s")


def write_figures(out: Path, name: str, figures: Mapping[str, Any]) -> None:
    """Write `out/NAME.json`.  Raises ConfigError if it exists."""
    path = out / f"{name}.json"
    refuse_figures(path)
    out.mkdir(parents=True, exist_ok=True)
    write_json(path, dict(figures))
    print(f"figures: {path}")


def whole_numbers(text: str) -> list[int]:
    """Return whole numbers from 0 on, separated by commas."""
    parts = text.split(",")
    if not all(part.isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers; give some like 0,4,8")
    return [int(part) for part in parts]


def numbers(text: str) -> list[float]:
    """Return positive numbers separated by commas."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < number < float("inf") for number in found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of positive numbers; give some like 0.5,1,2")
    return found

"""`oppo`: a table of commands, whose modules are imported when called.  Each has two functions:

    add_arguments(parser: argparse.ArgumentParser) -> None     declares its arguments
    run(args: argparse.Namespace) -> int                       does the work, returns the exit code

Exit codes: 0 done, 1 a defect, 2 wrong input (any `OppoError`, an unusable path, a wrong argument), 75 stopped and saved
(start it again with --resume), 130 interrupted and not saved.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NamedTuple

from oppo_megatron import __version__
from oppo_megatron.cli.launch import EXIT_DEFECT, importing, is_among_peers, leave, quiet_torch
from oppo_megatron.cli.parser import Parser, add_debug_argument
from oppo_megatron.errors import DISK_FULL, EXIT_BROKEN_PIPE, EXIT_INTERRUPTED, OppoError
from oppo_megatron.processes import outlive_terminal

EXIT_WRONG_INPUT = 2


class Command(NamedTuple):
    name: str
    module: str
    help: str


COMMANDS = (
    Command("train", "oppo_megatron.cli.run", "train a policy with PPO, both overlaps on or off"),
    Command("sft", "oppo_megatron.cli.run", "fine-tune an actor on prompt/completion rows"),
    Command("rm", "oppo_megatron.cli.run", "train a reward model on chosen/rejected rows, or on steps with labels"),
    Command("dpo", "oppo_megatron.cli.run", "train an actor on chosen/rejected rows (DPO), or on judged ones (KTO)"),
    Command("generate", "oppo_megatron.cli.generate", "let a trained policy answer prompts or chat"),
    Command("eval", "oppo_megatron.cli.eval", "judge trained policies on held-out prompts, side by side"),
    Command("data", "oppo_megatron.cli.data", "show rows as the model reads them; train a tokenizer on rows"),
    Command("convert", "oppo_megatron.cli.convert", "rewrite weights: Hugging Face, Megatron, NeMo-Aligner"),
    Command("plan", "oppo_megatron.cli.plan", "search placements, simulate runs, draw schedules, measure"),
    Command("config", "oppo_megatron.cli.config", "write a file to start from, explain settings, print a file resolved"),
    Command("validate", "oppo_megatron.cli.validate", "check a configuration and its files; without one, this machine"),
    Command("launch", "oppo_megatron.cli.slurm", "write the job script of a configuration: `oppo launch slurm`"),
    Command("report", "oppo_megatron.cli.report", "show what runs did: an HTML page and pictures, or the terminal"),
    Command("serve", "oppo_megatron.cli.serve", "serve rewards over HTTP: verifiers, functions, a reward model"),
    Command("bench", "oppo_megatron.cli.bench", "measure what overlaps save, decoding, or one GPU"),
    Command("demo", "oppo_megatron.cli.demo", "run the whole chain on generated arithmetic, and compare"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code. A failed rank with peers does not return."""
    outlive_terminal()
    quiet_torch()
    try:
        code = _serve(parse_arguments(list(sys.argv[1:] if argv is None else argv)))
    except KeyboardInterrupt:  # during the choice of the command
        print("oppo: interrupted", file=sys.stderr)
        code = EXIT_INTERRUPTED
    except Exception:
        if not is_among_peers():
            raise
        sys.excepthook(*sys.exc_info())
        code = EXIT_DEFECT
    if code and is_among_peers():
        leave(code)
    return code


def _serve(args: argparse.Namespace) -> int:
    """Turn errors that the user can correct into a message and exit code."""
    try:
        return int(args.run(args))
    except OppoError as error:
        if args.debug:
            traceback.print_exc()
        message = str(error)
    except BrokenPipeError:  # the reader of our output, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return EXIT_BROKEN_PIPE
    except OSError as error:
        is_full = error.errno in DISK_FULL
        if args.debug or not (is_full or error.filename):
            raise
        where = f"{error.filename}: " if error.filename else ""
        message = f"{where}{error.strerror}; it must be readable, or writable; correct its rights, or name another path"
        if is_full:
            message = f"{where}the disk has no place ({error.strerror}); free some, or write to another disk, then start again"
    except KeyboardInterrupt as interrupt:
        print(f"oppo {args.command}: {'; '.join(['interrupted', *map(str, interrupt.args)])}", file=sys.stderr)
        return EXIT_INTERRUPTED
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID")  # if another program started the ranks, each names itself
    print(f"oppo {args.command}{f' [rank {rank}]' if rank else ''}: {message}", file=sys.stderr)
    return EXIT_WRONG_INPUT


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Parse a command line (without `oppo`); its `run` does the work. Exits if invalid."""
    parser = Parser(prog="oppo", description="PPO-based RLHF on Megatron-core, overlapped.")
    parser.add_argument("--version", action="version", version=f"oppo {__version__}")
    parser.set_defaults(debug=False)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((argument for argument in arguments if not argument.startswith("-")), None)
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.name, help=command.help, description=f"{command.help}.")
        if command.name == chosen:
            with importing():  # extension modules do not expect KeyboardInterrupt: pydantic makes a SchemaError of it
                module = importlib.import_module(command.module)
            add_debug_argument(subparser)
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    args, left = parser.parse_known_args(arguments)
    if left:
        # argparse gives `overrides` only the words directly after the configuration; also take the words after an option.
        if not hasattr(args, "overrides") or any(argument.startswith("-") for argument in left):
            subparsers.choices[args.command].error(f"unrecognized arguments: {' '.join(left)}")
        args.overrides = [*args.overrides, *left]
    return args

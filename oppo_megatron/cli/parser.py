"""The argument parser, which suggests the nearest known word, and arguments that several commands have."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

CHOICE = re.compile(r"(?P<head>.*)invalid choice: '?(?P<given>.*?)'? \(choose from (?P<choices>.*)\)", re.DOTALL)
UNKNOWN = re.compile(r"unrecognized arguments: (?P<given>.*)", re.DOTALL)


class Parser(argparse.ArgumentParser):
    """A parser whose subparsers have this class, too."""

    def error(self, message: str) -> NoReturn:
        super().error(self._with_nearest(message))

    def _with_nearest(self, message: str) -> str:
        if found := CHOICE.fullmatch(message):
            choices = [choice.strip("'") for choice in found["choices"].split(", ")]
            if near := difflib.get_close_matches(found["given"], choices, n=1):
                return f"{found['head']}`{found['given']}` is none of them; did you mean `{near[0]}`?"
        if found := UNKNOWN.fullmatch(message):
            options = re.findall(r"--[\w-]+", self.format_help())
            near = [
                nearest
                for word in found["given"].split()
                if word.startswith("-")
                for nearest in difflib.get_close_matches(word.partition("=")[0], options, n=1)
            ]
            if near:
                return f"{message}; did you mean {', '.join(f'`{each}`' for each in near)}?"
            if "CONFIG.yaml" in self.format_usage():
                return f"{message}; settings are given as a.b=c, without dashes (--help shows the options)"
        return message


def add_debug_argument(parser: argparse.ArgumentParser) -> None:
    """Add --debug, without a default: a subcommand's parser keeps a value given before its name."""
    parser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error")


def add_config_arguments(parser: argparse.ArgumentParser, **config: Any) -> None:
    """Add CONFIG (`config`: its argparse options) and overrides."""
    parser.add_argument("config", type=Path, metavar="CONFIG.yaml", **config)
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="a.b=c", help="settings that replace the file's; a.b=null takes one out"
    )


def add_modes(parser: argparse.ArgumentParser, modes: Mapping[str, Any]) -> None:
    """Add subcommands; each module has HELP (one line), `add_arguments` and `run`, which becomes `run_mode`."""
    subparsers = parser.add_subparsers(dest="mode", metavar="MODE", required=True)
    for name, module in modes.items():
        mode = subparsers.add_parser(name, help=module.HELP, description=f"{module.HELP}.")
        add_debug_argument(mode)
        module.add_arguments(mode)
        mode.set_defaults(run_mode=module.run)


def at_least(least: int) -> Callable[[str], int]:
    """Type of an argument that is a whole number from `least` on."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return number


count = at_least(1)


def counts(text: str) -> list[int]:
    return [count(part) for part in text.split(",")]

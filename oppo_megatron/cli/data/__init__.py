"""`oppo data`: show rows as the model reads them, train a tokenizer on rows."""

from __future__ import annotations

import argparse

from oppo_megatron.cli.data import show, tokenizer
from oppo_megatron.cli.parser import add_modes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_modes(parser, {"show": show, "tokenizer": tokenizer})


def run(args: argparse.Namespace) -> int:
    return int(args.run_mode(args))

"""`oppo serve-scorer`: a reward model as a service that keeps the cache of every sequence while it grows."""

from __future__ import annotations

import argparse

from oppo_megatron.cli.serving import add_serving_arguments, run_service


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_serving_arguments(parser, path="/extend", settings="`reward`", page="docs/nemo_aligner.md")


def run(args: argparse.Namespace) -> int:
    return run_service(args)

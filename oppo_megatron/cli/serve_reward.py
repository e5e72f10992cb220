"""`oppo serve-reward`: a verifier, a Python function or a reward model as a service for runs of `kind: http`."""

from __future__ import annotations

import argparse

from oppo_megatron.cli.serving import add_serving_arguments, run_service


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_serving_arguments(parser, path="/score", settings="`rewards`", page="docs/rewards.md")


def run(args: argparse.Namespace) -> int:
    return run_service(args)

"""`oppo serve-scorer`: a reward model as a service that keeps the cache of every sequence while it grows."""

from __future__ import annotations

import argparse

from oppo_megatron.cli.serving import add_serving_arguments, run_service


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_serving_arguments(parser, path="/extend", settings="`reward`", page="docs/nemo_aligner.md")


def run(args: argparse.Namespace) -> int:
    """Raises ConfigError before anything is served."""
    from oppo_megatron.config.serve import ServeScorerConfig, check_serve_scorer

    return run_service(args, ServeScorerConfig, check_serve_scorer)

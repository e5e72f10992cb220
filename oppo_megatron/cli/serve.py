"""`oppo serve`: rewards over HTTP, for `kind: http` and for runs that stream sequences."""

from __future__ import annotations

import argparse
import os
from functools import partial

from oppo_megatron.cli.load import load_service
from oppo_megatron.cli.parser import add_config_arguments
from oppo_megatron.cli.ready import require_service_packages


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "With `rewards` in the file: POST /score (docs/rewards.md has the format); with the model `reward` alone, to which "
        "sequences are streamed: POST /extend (docs/nemo_aligner.md). GET /health in both. Listens on 127.0.0.1 unless `host` "
        "says otherwise, which needs `token_env`: the name of an environment variable that holds a bearer token."
    )
    add_config_arguments(parser, help="`rewards`, `reward`, and where to listen")


def run(args: argparse.Namespace) -> int:
    """Serve until stopped. Raises ConfigError before."""
    config = load_service(args.config, args.overrides)
    require_service_packages()
    from oppo_megatron.serving.server import serve

    serve(config, os.environ, partial(print, flush=True))
    return 0

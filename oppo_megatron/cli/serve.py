"""`oppo serve`: rewards over HTTP, for runs of `kind: http` and for runs that stream sequences."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from oppo_megatron.cli.kinds import require_kind
from oppo_megatron.cli.parser import add_config_arguments

if TYPE_CHECKING:
    from oppo_megatron.config.serve import ServeConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "With `rewards` in the file: POST /score (docs/rewards.md has the format); with the model `reward` alone, to which "
        "sequences are streamed: POST /extend (docs/nemo_aligner.md). GET /health in both. Listens on 127.0.0.1 unless `host` "
        "says otherwise, which needs `token_env`: the name of an environment variable that holds a bearer token."
    )
    add_config_arguments(parser, help="`rewards`, `reward`, and where to listen")


def load_service(path: Path, overrides: Sequence[str]) -> ServeConfig:
    """Load the configuration and check it.  Raises ConfigError with all problems."""
    from oppo_megatron.config.load import load_config
    from oppo_megatron.config.serve import ServeConfig
    from oppo_megatron.preflight.validate import service_problems

    require_kind("serve", path, overrides)
    return load_config(ServeConfig, path, overrides, check=service_problems)


def run(args: argparse.Namespace) -> int:
    """Serve until stopped.  Raises ConfigError before anything is served."""
    from oppo_megatron.cli.ready import require_service_packages

    config = load_service(args.config, args.overrides)
    require_service_packages()
    from oppo_megatron.serving.server import serve

    serve(config, os.environ, partial(print, flush=True))
    return 0

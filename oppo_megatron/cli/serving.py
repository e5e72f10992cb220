"""Common parts of the commands that serve a reward: arguments, loading, and the start of the service."""

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
    from oppo_megatron.config.serve import ServeRewardConfig, ServeScorerConfig


def add_serving_arguments(parser: argparse.ArgumentParser, *, path: str, settings: str, page: str) -> None:
    """`path`: where requests are posted; `settings`: the ones that a file must have; `page`: the page of docs with the rest."""
    parser.epilog = (
        "Listens on 127.0.0.1 unless `host` says otherwise, which needs `token_env`: the name of an environment variable "
        f"that holds a bearer token.  POST {path}, GET /health; {page} has the format."
    )
    add_config_arguments(parser, help=f"{settings}, and what {page} lists")


def load_service(kind: str, path: Path, overrides: Sequence[str]) -> ServeRewardConfig | ServeScorerConfig:
    """The configuration of one of `SERVICES`, every check made.  Raises ConfigError with all problems."""
    from oppo_megatron.config.load import load_config
    from oppo_megatron.config.serve import ServeRewardConfig, ServeScorerConfig
    from oppo_megatron.preflight.validate import service_problems

    require_kind(kind, path, overrides)
    if kind == "serve-reward":
        return load_config(ServeRewardConfig, path, overrides, check=service_problems)
    return load_config(ServeScorerConfig, path, overrides, check=service_problems)


def run_service(args: argparse.Namespace) -> int:
    """Serve until told to stop.  Raises ConfigError before anything is served."""
    from oppo_megatron.cli.ready import require_service_packages

    config = load_service(args.command, args.config, args.overrides)
    require_service_packages(args.command)
    from oppo_megatron.serving.server import serve

    serve(config, os.environ, partial(print, flush=True))
    return 0

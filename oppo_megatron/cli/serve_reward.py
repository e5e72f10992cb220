"""`oppo serve-reward`: a verifier, a Python function or a reward model as a service for runs of `kind: http`."""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Listens on 127.0.0.1 unless `host` says otherwise, which needs `token_env`: the name of an environment variable "
        "that holds a bearer token.  POST /score, GET /health; docs/rewards.md has the format."
    )
    parser.add_argument("config", type=Path, metavar="CONFIG.yaml", help="`rewards`, and what docs/rewards.md lists")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="a.b=c", help="settings that replace those of the file"
    )


def run(args: argparse.Namespace) -> int:
    """Raises ConfigError before anything is served."""
    from oppo_megatron.config.load import load_config
    from oppo_megatron.config.serve import ServeRewardConfig, check_serve
    from oppo_megatron.errors import ConfigError

    config = load_config(ServeRewardConfig, args.config, args.overrides, check=check_serve)
    try:
        from oppo_megatron.serving.server import serve
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"`oppo serve-reward` needs the package {error.name}; install it: pip install 'oppo-megatron[serve]'"
        ) from error
    serve(config, os.environ, partial(print, flush=True))
    return 0

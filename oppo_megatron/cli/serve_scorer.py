"""`oppo serve-scorer`: a reward model as a service that keeps the cache of every sequence while it grows."""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Listens on 127.0.0.1 unless `host` says otherwise, which needs `token_env`: the name of an environment variable "
        "that holds a bearer token.  POST /extend, GET /health; docs/nemo_aligner.md has the format."
    )
    parser.add_argument(
        "config", type=Path, metavar="CONFIG.yaml", help="`reward`, and what docs/nemo_aligner.md lists"
    )
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="a.b=c", help="settings that replace those of the file"
    )


def run(args: argparse.Namespace) -> int:
    """Raises ConfigError before anything is served."""
    from oppo_megatron.config.load import load_config
    from oppo_megatron.config.serve import ServeScorerConfig, check_serve_scorer
    from oppo_megatron.errors import ConfigError

    config = load_config(ServeScorerConfig, args.config, args.overrides, check=check_serve_scorer)
    try:
        from oppo_megatron.serving.server import serve
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"`oppo serve-scorer` needs the package {error.name}; install it: pip install 'oppo-megatron[serve]'"
        ) from error
    serve(config, os.environ, partial(print, flush=True))
    return 0

"""`oppo validate`: every check of a configuration that can be made without loading a model."""

from __future__ import annotations

import argparse
from pathlib import Path

from oppo_megatron.cli.rank_table import rank_table
from oppo_megatron.cli.run import KINDS, load_settings, placed, unplaced


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG.yaml")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="a.b=c", help="settings that replace those of the file"
    )
    parser.add_argument("--kind", choices=KINDS, help="the command it is for; default: told from its keys")


def run(args: argparse.Namespace) -> int:
    kind = args.kind or guess_kind(args.config)
    settings = load_settings(kind, args.config, args.overrides)
    config = placed(settings, measure=False)
    print("\n".join(unplaced(settings) if config is None else rank_table(config)))
    print(f"OK: {args.config} is a valid configuration for `oppo {kind}`")
    return 0


def guess_kind(path: Path) -> str:
    """The command that most of the file's keys belong to; `rm` where a model starts from a fresh scalar head."""
    from oppo_megatron.config.load import read_tree
    from oppo_megatron.config.run import SFTConfig, TrainConfig

    tree = read_tree(path)
    keys = set(tree)
    if len(keys & set(TrainConfig.model_fields)) >= len(keys & set(SFTConfig.model_fields)):
        return "train"
    model = tree.get("model")
    return "rm" if isinstance(model, dict) and model.get("fresh_head") else "sft"

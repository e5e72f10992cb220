"""`oppo validate`: every check of a configuration and of its data that can be made without loading a model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from oppo_megatron.cli.rank_table import rank_table
from oppo_megatron.cli.run import KINDS, load_settings, placed, unplaced

if TYPE_CHECKING:
    from oppo_megatron.config.run import SupervisedConfig, TrainSettings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG.yaml")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="a.b=c", help="settings that replace those of the file"
    )
    parser.add_argument("--kind", choices=KINDS, help="the command it is for; default: told from its keys")
    parser.add_argument("--skip-data", action="store_true", help="leave the rows of the data unread")


def run(args: argparse.Namespace) -> int:
    kind = args.kind or guess_kind(args.config)
    settings = load_settings(kind, args.config, args.overrides)
    config = placed(settings, measure=False)
    print("\n".join(unplaced(settings) if config is None else rank_table(config)))
    if not args.skip_data:
        print("\n".join(data_lines(settings)))
    print(f"OK: {args.config} is a valid configuration for `oppo {kind}`")
    return 0


def data_lines(settings: TrainSettings | SupervisedConfig) -> list[str]:
    """Read all rows as the run would.  Raises DataError or RewardError; returns what became of them."""
    from oppo_megatron.config.run import TrainSettings
    from oppo_megatron.train.inputs import describe_inputs, read_inputs

    if not isinstance(settings, TrainSettings):
        return _supervised_lines(settings)
    inputs = read_inputs(settings)
    inputs.rewards.close()
    return describe_inputs(inputs)


def _supervised_lines(settings: SupervisedConfig) -> list[str]:
    from oppo_megatron.config.run import SFTConfig
    from oppo_megatron.data.rows import Quarantine
    from oppo_megatron.data.supervised import load_completions, load_pairs, num_duplicates
    from oppo_megatron.data.tokenizer import load_tokenizer
    from oppo_megatron.train.inputs import describe_quarantine

    quarantine, load = Quarantine(), load_completions if isinstance(settings, SFTConfig) else load_pairs
    rows = load(
        settings.data,
        load_tokenizer(settings.tokenizer),
        max_tokens=settings.max_tokens,
        long_rows=settings.long_rows,
        quarantine=quarantine,
    )
    found = f"data: {len(rows)} rows, {num_duplicates(rows)} of them duplicates; {len(quarantine)} rows set aside"
    return [found, *describe_quarantine(quarantine)]


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

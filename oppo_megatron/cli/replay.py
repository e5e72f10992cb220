"""`oppo replay`: repeats one update from a batch that a guard rejected."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("batch", type=Path, metavar="FILE", help="rejected/step-N.safetensors of a run directory")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="a.b=c", help="settings that replace those of the run"
    )
    parser.add_argument("--config", type=Path, metavar="C.yaml", help="configuration in place of the run's own")


def run(args: argparse.Namespace) -> int:
    from oppo_megatron.config.load import load_config
    from oppo_megatron.config.paths import missing_path
    from oppo_megatron.config.run import TrainSettings
    from oppo_megatron.errors import ConfigError

    if not args.batch.is_file() and not args.batch.with_suffix(".jsonl").is_file():
        raise ConfigError(missing_path("the rejected batch", args.batch))
    from oppo_megatron.train.guards.rejected import read_rejected
    from oppo_megatron.train.guards.replay import one_process, replay

    rejected = read_rejected(args.batch)
    with tempfile.TemporaryDirectory(prefix="oppo-") as folder:
        own = Path(folder) / "config.yaml"
        own.write_text(rejected.facts.config, encoding="utf-8")
        config = one_process(load_config(TrainSettings, args.config or own, args.overrides))
    found = replay(rejected, config)
    print(f"step {rejected.facts.step}, {len(rejected.batch)} rollouts; the run: {rejected.facts.reason}")
    print("\n".join(found.table()))
    print(f"the replay: {'within all guards' if found.breach is None else found.breach.reason}")
    return 0

"""Repeats one update from a batch that a guard rejected, in one process.

python -m tools.replay RUN/rejected/step-N.safetensors [a.b=c ...] [--config C.yaml]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import run_script
from oppo_megatron.config.load import load_config
from oppo_megatron.config.paths import missing_path
from oppo_megatron.config.run import TrainSettings
from oppo_megatron.errors import ConfigError
from oppo_megatron.train.guards.rejected import read_rejected
from oppo_megatron.train.guards.replay import one_process, replay


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("batch", type=Path, metavar="FILE", help="rejected/step-N.safetensors of a run directory")
    parser.add_argument("overrides", nargs="*", default=[], metavar="a.b=c", help="settings that replace the run's")
    parser.add_argument("--config", type=Path, metavar="C.yaml", help="a configuration in place of the run's")


def measure(args: argparse.Namespace) -> int:
    if not args.batch.is_file() and not args.batch.with_suffix(".jsonl").is_file():
        raise ConfigError(missing_path("the rejected batch", args.batch))
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


def main(arguments: Sequence[str] | None = None) -> int:
    return run_script("tools.replay", __doc__, add_arguments, measure, arguments)


if __name__ == "__main__":
    sys.exit(main())

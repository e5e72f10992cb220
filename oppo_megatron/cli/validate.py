"""`oppo validate`: every check of a configuration and of its data that needs no model; without a file, of this machine."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oppo_megatron.cli.kinds import guess_kind
from oppo_megatron.cli.parser import add_config_arguments
from oppo_megatron.cli.rank_table import rank_table
from oppo_megatron.cli.ready import require_ready, require_service_packages, unreached_services
from oppo_megatron.cli.run import KINDS, load_settings, placed, unplaced
from oppo_megatron.cli.serve import load_service

if TYPE_CHECKING:
    from oppo_megatron.config.run import TrainSettings
    from oppo_megatron.config.supervised import SupervisedConfig
    from oppo_megatron.data.supervised_rows import RowLoader


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, nargs="?", help="default: none; then versions, devices and what this machine lacks are shown")
    parser.add_argument(
        "--kind", choices=(*KINDS, "serve"), help="the command it is for; default: by its keys"
    )
    parser.add_argument(
        "--skip-data", action="store_true", help="leave the rows of the data unread, and rewards and tokens unasked for"
    )


def run(args: argparse.Namespace) -> int:
    if args.config is None:
        from oppo_megatron.cli.machine import check_machine

        return check_machine()
    kind = args.kind or guess_kind(args.config, args.overrides)
    if kind == "serve":
        lines = service_lines(args.config, args.overrides, skip_data=args.skip_data)
    else:
        lines = run_lines(kind, args.config, args.overrides, skip_data=args.skip_data)
    for line in lines:
        print(line)
    print(f"OK: {args.config} is a valid configuration for `oppo {kind}`")
    return 0


def run_lines(kind: str, path: Path, overrides: Sequence[str], *, skip_data: bool) -> Iterator[str]:
    """Check the configuration of a run; return lines about its ranks and rows."""
    settings = load_settings(kind, path, overrides)
    config = placed(settings, measure=False)
    require_ready(settings, config)
    yield from unplaced(settings) if config is None else rank_table(config)
    yield from tokenizer_lines(settings)
    if not skip_data:
        yield from data_lines(settings)


def tokenizer_lines(settings: TrainSettings | SupervisedConfig) -> list[str]:
    """Return the lines that name what the tokenizer was compared with; the checks found no difference."""
    from oppo_megatron.config.model import PlacementConfig
    from oppo_megatron.config.run import TrainSettings
    from oppo_megatron.preflight.validate import Role, compare_with_roles, train_roles

    if isinstance(settings, TrainSettings):
        roles = list(train_roles(settings.settled() or settings.with_placement(PlacementConfig(mode="single"))))
    else:
        roles = [Role(name, model, scalar=settings.SCALAR) for name, model in settings.models.items()]
    return compare_with_roles(settings.tokenizer, roles)[1]


def service_lines(path: Path, overrides: Sequence[str], *, skip_data: bool) -> Iterator[str]:
    """Check the configuration of a service; return lines about its address and scoring."""
    from oppo_megatron.preflight.validate import Role, compare_with_roles
    from oppo_megatron.serving.scorers import try_parts

    config = load_service(path, overrides)
    require_service_packages()
    yield f"listens on {config.host}, port {config.port}, {'with' if config.token_env else 'without'} a token"
    if config.reward is not None and config.tokenizer is not None:
        yield from compare_with_roles(config.tokenizer, [Role("reward", config.reward, scalar=True)])[1]
    if not skip_data:
        yield from try_parts(config, os.environ)


def data_lines(settings: TrainSettings | SupervisedConfig) -> list[str]:
    """Read all rows as the run does; return lines about rows used and dropped.  Raises DataError or RewardError."""
    from oppo_megatron.clock import by_time
    from oppo_megatron.config.derived import describe_batch
    from oppo_megatron.config.run import TrainSettings
    from oppo_megatron.train.inputs import describe_first, describe_inputs, read_inputs, try_answers

    if not isinstance(settings, TrainSettings):
        return _supervised_lines(settings)
    inputs = read_inputs(settings, by_time())
    refused = try_answers(inputs, settings)
    found = [*describe_inputs(inputs), *refused, *describe_first(inputs.quarantine), *unreached_services(settings)]
    return [describe_batch(settings), *found]


def _load(settings: SupervisedConfig, loader: RowLoader) -> list[Any]:
    """Read rows as the command of this configuration does."""
    from oppo_megatron.config.supervised import DPOConfig, KTOConfig, ProcessRewardModelConfig, SFTConfig

    if isinstance(settings, DPOConfig):
        return loader.unequal_pairs()
    if isinstance(settings, KTOConfig):
        return loader.marked()
    if isinstance(settings, ProcessRewardModelConfig):
        return loader.steps(settings.separator)
    return loader.completions() if isinstance(settings, SFTConfig) else loader.pairs()


def _supervised_lines(settings: SupervisedConfig) -> list[str]:
    from oppo_megatron.clock import by_time
    from oppo_megatron.config.data import DataConfig
    from oppo_megatron.data.rows import Quarantine
    from oppo_megatron.data.supervised_rows import RowLoader, describe_seen, num_duplicates, read_heldout
    from oppo_megatron.data.tokenizer import load_tokenizer
    from oppo_megatron.train.inputs import describe_first, describe_quarantine

    quarantine = Quarantine(progress=by_time())
    tokenizer = load_tokenizer(settings.tokenizer, settings.model.checkpoint)

    def read(data: DataConfig) -> list[Any]:
        return _load(settings, RowLoader(data, tokenizer, settings.max_tokens, quarantine))

    every = read(settings.data)
    set_aside = len(quarantine)
    rows, held = read_heldout(settings.evaluation, settings.seed, every, read)
    found = f"data: {len(rows)} rows, {num_duplicates(rows)} of them duplicates; {set_aside} rows set aside"
    if settings.evaluation is not None:
        found += f"; {len(held)} rows held out, {min(len(held), settings.evaluation.max_rows)} of them measured"
    if further := len(quarantine) - set_aside:
        found += f"; {further} more of the held-out files set aside"
    seen = describe_seen((row[0] for row in held), (row[0] for row in rows))
    return [found, *seen, *describe_quarantine(quarantine), *describe_first(quarantine)]

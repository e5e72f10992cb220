"""`oppo validate`: every check of a configuration and its data that needs no model; without a file, of this machine."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from oppo_megatron.cli.load import guess_kind, load_service, load_settings
from oppo_megatron.cli.machine import check_machine
from oppo_megatron.cli.measure import describe_options, settle
from oppo_megatron.cli.parser import add_config_arguments
from oppo_megatron.cli.rank_table import rank_table
from oppo_megatron.cli.ready import require_ready, require_service_packages, unreached_services
from oppo_megatron.clock import by_time
from oppo_megatron.config.data import DataConfig
from oppo_megatron.config.derived import describe_batch
from oppo_megatron.config.describe import COMMANDS
from oppo_megatron.config.model import PlacementConfig
from oppo_megatron.config.run import TrainSettings
from oppo_megatron.config.supervised import SupervisedConfig
from oppo_megatron.data.rows import Quarantine
from oppo_megatron.data.supervised_rows import describe_seen, load_rows, num_duplicates, read_heldout
from oppo_megatron.data.tokenizer import load_tokenizer
from oppo_megatron.preflight.validate import Role, compare_with_roles, train_roles
from oppo_megatron.serving.scorers import try_parts
from oppo_megatron.train.inputs import describe_first, describe_inputs, describe_quarantine, read_inputs, try_answers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, nargs="?", help="default: none; then versions, devices and what this machine lacks are shown")
    parser.add_argument("--kind", choices=COMMANDS, help="the command it is for; default: by its keys")
    parser.add_argument(
        "--skip-data", action="store_true", help="leave the rows of the data unread, and rewards and tokens unasked for"
    )


def run(args: argparse.Namespace) -> int:
    if args.config is None:
        return check_machine()
    kind = args.kind or guess_kind(args.config, args.overrides)
    if kind == "serve":
        lines = _service_lines(args.config, args.overrides, skip_data=args.skip_data)
    else:
        lines = _run_lines(kind, args.config, args.overrides, skip_data=args.skip_data)
    for line in lines:
        print(line)
    print(f"OK: {args.config} is a valid configuration for `oppo {kind}`")
    if args.kind is None and kind in ("sft", "rm"):
        print("the kind is by its keys and its first row; --kind sft or --kind rm checks it for that command")
    return 0


def _run_lines(kind: str, path: Path, overrides: Sequence[str], *, skip_data: bool) -> Iterator[str]:
    """Check a run's configuration; yield lines about its ranks, tokenizer and rows."""
    settings = load_settings(kind, path, overrides)
    config = settle(settings, measure=False)
    require_ready(settings, config)
    yield from describe_options(settings) if config is None else rank_table(config)
    if isinstance(settings, TrainSettings):
        roles = list(train_roles(settings.settled() or settings.with_placement(PlacementConfig(mode="single"))))
    else:
        roles = [Role(name, model, scalar=settings.SCALAR) for name, model in settings.models.items()]
    yield from compare_with_roles(settings.tokenizer, roles)[1]
    if skip_data:
        return
    if not isinstance(settings, TrainSettings):
        yield from _supervised_rows(settings)
        return
    inputs = read_inputs(settings, by_time())
    refused = try_answers(inputs, settings)
    yield describe_batch(settings)
    yield from (*describe_inputs(inputs), *refused, *describe_first(inputs.quarantine), *unreached_services(settings))


def _service_lines(path: Path, overrides: Sequence[str], *, skip_data: bool) -> Iterator[str]:
    config = load_service(path, overrides)
    require_service_packages()
    yield f"listens on {config.host}, port {config.port}, {'with' if config.token_env else 'without'} a token"
    if config.reward is not None and config.tokenizer is not None:
        yield from compare_with_roles(config.tokenizer, [Role("reward", config.reward, scalar=True)])[1]
    if not skip_data:
        yield from try_parts(config, os.environ)


def _supervised_rows(settings: SupervisedConfig) -> list[str]:
    """Read all rows as the run does; return lines about them."""
    quarantine, tokenizer = Quarantine(progress=by_time()), load_tokenizer(settings.tokenizer, settings.model.checkpoint)

    def read(data: DataConfig) -> list[Any]:
        return load_rows(settings, data, tokenizer, quarantine)

    every = read(settings.data)
    set_aside = len(quarantine)
    rows, held = read_heldout(settings.evaluation, settings.seed, every, read)
    found = f"data: {len(rows)} rows, {num_duplicates(rows)} of them duplicates; {set_aside} rows set aside"
    if settings.evaluation is not None:
        found += f"; {len(held)} rows held out, {min(len(held), settings.evaluation.most_rows)} of them measured"
    if further := len(quarantine) - set_aside:
        found += f"; {further} more of the held-out files set aside"
    seen = describe_seen((row[0] for row in held), (row[0] for row in rows))
    return [found, *seen, *describe_quarantine(quarantine), *describe_first(quarantine)]

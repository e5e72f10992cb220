"""`oppo plan measure`: measure the placements that are possible on this machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

import yaml

from oppo_megatron.cli.launch import refuse_given_ranks
from oppo_megatron.cli.load import load_settings
from oppo_megatron.cli.measure import AUTO, ONE_MACHINE, measure_placements, this_machine
from oppo_megatron.cli.parser import add_config_arguments
from oppo_megatron.config.run import TrainSettings
from oppo_megatron.layout.candidates import find_candidates
from oppo_megatron.report.comparison import format_table
from oppo_megatron.rundir.directory import RunDirectory

HELP = "measure the placements that are possible on this machine, and say which is fastest"
COLUMNS = {
    "placement": "name", "ranks": "ranks", "runs": "runs", "s/step": "step_seconds", "decode s": "step_decode_s",
    "update s": "step_train_s", "other s": "step_other_s", "tokens/s": "tokens_per_s", "x fastest": "times_fastest",
    "spread %": "spread_percent",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, help="its placement is ignored")


def run(args: argparse.Namespace) -> int:
    refuse_given_ranks(ONE_MACHINE.format("`oppo plan measure` starts ranks of its own"))
    settings = load_settings("train", args.config, [*args.overrides, *AUTO])
    assert isinstance(settings, TrainSettings)
    directory = RunDirectory(settings.run_dir)
    directory.require_unfinished()
    options = find_candidates(settings, this_machine(settings.runtime))
    record = measure_placements(settings, options, _tell, _tell)
    print("\n".join(report(record)))
    print(f"figures: {directory.placement}")
    return 0


def report(record: Mapping[str, Any]) -> list[str]:
    measured = [each for each in record["candidates"] if each.get("seconds_per_token")]
    fastest = min((each["seconds_per_token"] for each in measured), default=1.0)
    rows = [
        {
            **each, "runs": len(each["runs"]), "tokens_per_s": 1 / each["seconds_per_token"],
            "times_fastest": each["seconds_per_token"] / fastest, "spread_percent": 100 * each["spread"],
        }
        for each in measured
    ]  # fmt: skip
    failed = [(each["name"], each["failure"]) for each in record["candidates"] if each.get("failure")]
    left_out = [(each["name"], each["reason"]) for each in record["left_out"]]
    placement = yaml.safe_dump({"placement": record["chosen"]["placement"]}, sort_keys=False, default_flow_style=None)
    return [
        *([format_table(COLUMNS, sorted(rows, key=lambda row: float(row["times_fastest"])))] if rows else []),
        *(f"failed: {name}: {reason}" for name, reason in failed),
        *(f"left out: {name}: {reason}" for name, reason in left_out),
        f"{record['reason']}.",
        "",
        placement,
    ]


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

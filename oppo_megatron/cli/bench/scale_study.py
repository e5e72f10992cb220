"""`oppo bench scale-study`: steps of 8 to 16,384 ranks in virtual time, where their seconds go, and what stops scaling first."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oppo_megatron.cli.bench.common import chosen, counts, names, refuse_figures

HELP = "steps of 8 to 16,384 ranks in virtual time: where their seconds go, and what stops scaling first"
ABOUT = """Plays PPO steps of Llama 3.1's three sizes on H200 nodes in virtual time, with a batch that grows with the ranks and
with one that stays, each in the least layout that fits. Shows where the seconds of a step go, which part is the first to keep
less than half of what perfect scaling would give, and what a few changes would mend. Needs no GPU and no file; a few minutes.
docs/scale_study.md has the result."""
TITLES = {
    "weak": "a batch of 4 sequences a rank",
    "strong": "a batch of 1024 sequences, whatever the ranks",
    "stops": "the first part to keep less than half of perfect scaling, in rank seconds a sequence",
    "mends": "the most ranks with the batch that stays, one change at a time",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", type=names, metavar="M,M", help="of 8B, 70B, 405B; default all")
    parser.add_argument(
        "--ranks", type=counts, metavar="N,N", help="multiples of 8; default 8,32,128,512,2048,8192,16384"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/bench/scale-study"), metavar="DIR", help="default %(default)s"
    )
    parser.set_defaults(measure=_study)


def _study(args: argparse.Namespace) -> int:
    from oppo_megatron.bench.studies.layouts import MODELS
    from oppo_megatron.bench.studies.scale import RANKS, study
    from oppo_megatron.errors import ConfigError
    from oppo_megatron.rundir.directory import write_json, write_text

    models = chosen("--models", args.models, list(MODELS))
    ranks = sorted(set(args.ranks or RANKS))
    if odd := [number for number in ranks if number % 8]:
        raise ConfigError(f"--ranks {odd[0]}: nodes have 8 GPUs; give multiples of 8")
    refuse_figures(args.out / "scale.json")
    tables = study(models, ranks, 0, lambda line: print(line, file=sys.stderr, flush=True))
    if not tables["weak"] and not tables["strong"]:
        raise ConfigError(
            f"{', '.join(models)} on {', '.join(map(str, ranks))} ranks: no layout fits into an H200's memory; give more ranks"
        )
    _print(tables)
    args.out.mkdir(parents=True, exist_ok=True)
    write_json(args.out / "scale.json", {"models": models, "ranks": ranks, **tables})
    write_text(args.out / "scale.md", _markdown(tables))
    print(f"figures: {args.out / 'scale.json'}, the same as tables for a page in scale.md")
    return 0


def _columns() -> Mapping[str, Mapping[str, str]]:
    from oppo_megatron.bench.studies.scale import COLUMNS, MEND_COLUMNS, STOP_COLUMNS

    return {"weak": COLUMNS, "strong": COLUMNS, "stops": STOP_COLUMNS, "mends": MEND_COLUMNS}


def _print(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    from oppo_megatron.bench.figures import format_table

    for name, columns in _columns().items():
        print(f"\n{TITLES[name]}:")
        print(format_table(columns, tables[name]))


def _markdown(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """The same cells with bars between them."""
    from oppo_megatron.bench.figures import format_table

    parts = []
    for name, columns in _columns().items():
        cells = [
            [format_table({"": key}, [row]).splitlines()[-1].strip() for key in columns.values()]
            for row in tables[name]
        ]
        lines = [list(columns), ["---"] * len(columns), *cells]
        parts.append(
            f"{TITLES[name][0].upper()}{TITLES[name][1:]}:\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)
        )
    return "\n\n".join(parts) + "\n"

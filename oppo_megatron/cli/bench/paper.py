"""`oppo bench paper`: the figures of OPPO's paper, simulated, beside those that are printed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oppo_megatron.cli.bench.common import count, refuse_figures

if TYPE_CHECKING:
    from oppo_megatron.bench.studies.paper import Paper

HELP = "OPPO's published figures, simulated: how near a run in virtual time comes to them"
ABOUT = """Plays the settings of OPPO's paper in virtual time: the product's own scheduler, buffer, controllers and planner,
with seconds from the cost laws. Each figure stands beside what is printed. What the paper does not state is assumed once, is
listed with reasons, and is not changed to match. Then whether the printed figures go together. Needs no GPU and no
file, and takes a minute or two."""
ASSUMED_COLUMNS = {"assumed": "what", "value": "value", "because": "why"}
CHECK_COLUMNS = {"where": "where", "printed": "printed", "computed": "computed", "they": "verdict", "how": "arithmetic"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps",
        type=count,
        default=100,
        metavar="N",
        help="PPO steps of a run, a fifth of them to warm up; default 100",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the lengths of responses; default 0")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/paper"), metavar="DIR", help="default %(default)s")
    parser.set_defaults(measure=_paper)


def _paper(args: argparse.Namespace) -> int:
    from oppo_megatron.bench.studies.beside import all_tables
    from oppo_megatron.bench.studies.paper import Paper
    from oppo_megatron.errors import ConfigError

    if args.steps < 5:
        raise ConfigError(f"--steps is {args.steps}; give 5 or more, so that a step is left after the warm-up")
    if args.seed < 0:
        raise ConfigError(f"--seed is {args.seed}; give 0 or more")
    refuse_figures(args.out / "paper.json")
    paper = Paper(args.steps, args.seed)
    tables = all_tables(paper)
    assumed, checks = _said()
    _print(paper, tables, assumed, checks)
    _write(args.out, paper, tables, assumed, checks)
    return 0


def _said() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What is assumed, and how the printed figures go together."""
    from oppo_megatron.bench.studies.assumptions import ASSUMED
    from oppo_megatron.sim.published.oppo_checks import checks

    return [dict(zip(("what", "value", "why"), row, strict=True)) for row in ASSUMED], [
        vars(check) for check in checks()
    ]


def _print(
    paper: Paper,
    tables: dict[str, list[dict[str, Any]]],
    assumed: Sequence[dict[str, Any]],
    checks: Sequence[dict[str, Any]],
) -> None:
    from oppo_megatron.bench.figures import format_table
    from oppo_megatron.bench.studies.beside import COLUMNS, TABLES, beside

    print("assumed, for the paper does not state it; one set for all figures, not changed to match them:")
    print(_left(ASSUMED_COLUMNS, assumed))
    for name, (title, columns) in TABLES.items():
        print(f"\n{title}:")
        print(format_table(columns, tables[name]))
        if name == "chunk":
            print(_law(paper.law_of_chunk()))
    print("\neach figure beside the paper's:")
    print(_left(COLUMNS, list(beside(tables))))
    print("\nwhether the paper's figures go together, computed from them:")
    print(_left(CHECK_COLUMNS, checks))


def _law(law: dict[str, float]) -> str:
    return (
        f"rounds and what goes on to the end of the last chunk cost least at {law['tokens']:.0f} tokens: the root of "
        f"{1e3 * law['round_s']:.0f} ms x {law['decode_steps']:.0f} decode steps / half of {1e3 * law['decode_step_s']:.1f} ms"
    )


def _left(columns: dict[str, str], rows: Sequence[dict[str, Any]]) -> str:
    """A table whose last column is text, from the left."""
    from oppo_megatron.bench.figures import format_table

    *head, (title, key) = columns.items()
    lines = format_table(dict(head), rows).splitlines()
    return "\n".join(f"{line}  {text}" for line, text in zip(lines, [title, *(row[key] for row in rows)], strict=True))


def _write(
    out: Path,
    paper: Paper,
    tables: dict[str, list[dict[str, Any]]],
    assumed: Sequence[dict[str, Any]],
    checks: Sequence[dict[str, Any]],
) -> None:
    from oppo_megatron.bench.pictures import draw_ablation, draw_chunks, draw_delta_costs
    from oppo_megatron.bench.studies.beside import beside
    from oppo_megatron.bench.studies.paper import pictures
    from oppo_megatron.rundir.directory import write_json

    out.mkdir(parents=True, exist_ok=True)
    draw_ablation(tables["ablation"], out / "ablation.png")
    draw_delta_costs(tables["inter"], out / "delta.png")
    draw_chunks(pictures(tables["chunk"]), out / "chunk.png")
    whole = {
        "steps": paper.steps,
        "seed": paper.seed,
        "assumed": assumed,
        "beside": list(beside(tables)),
        "checks": checks,
    }
    write_json(out / "paper.json", whole | tables | {"law_of_chunk": paper.law_of_chunk()})
    print(f"figures: {out / 'paper.json'}, ablation.png, delta.png, chunk.png")

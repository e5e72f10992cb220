"""The figures of OPPO's paper, simulated, and the printed ones.

    python -m benchmarks.paper --steps 100 --out runs/bench/paper

Plays the settings of the paper in virtual time: the scheduler, buffer, controllers and planner of a run, with seconds from the
cost laws.  Facts that the paper omits are assumed once (printed with reasons) and not changed to match.  Then computes whether
the printed figures agree with each other.  Needs no GPU; takes a minute.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.common import add_out, run_script, write_figures
from benchmarks.paper import printed as oppo
from benchmarks.paper.assumptions import ASSUMED, DELTA
from benchmarks.paper.figures import Paper, implied_delta
from oppo_megatron.cli.bench import refuse_figures
from oppo_megatron.cli.parser import count
from oppo_megatron.errors import ConfigError
from oppo_megatron.report.comparison import format_table

ASSUMED_COLUMNS = {"assumed": "what", "value": "value", "because": "why"}
CHECK_COLUMNS = {"where": "where", "printed": "printed", "computed": "computed", "they": "verdict", "how": "arithmetic"}
FIGURE_COLUMNS = {"figure": "figure", "what": "what", "simulated": "simulated", "paper": "printed", "may differ because": "why"}
TABLES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "speedups": (
        "figure 3: seconds per step",
        {
            "setup": "setup", "sequential s": "sequential_s", "padded s": "padded_s", "both s": "both_s",
            "speed-up": "speedup", f"at delta {implied_delta()}": "speedup_implied", "from padded": "speedup_padded",
            "paper": "stated", "GB": "gb", "of": "room_gb",
        },
    ),
    "ablation": (
        "figure 6: each overlap alone, and both",
        {
            "setup": "setup", "mode": "mode", "s per step": "step_s", "speed-up": "speedup", "paper": "printed",
            "at most": "bound", "at most, padded": "bound_padded", "product": "product", "paper ": "printed_product",
        },
    ),
    "inter": (
        "inter-step overlap alone by delta, se7b",
        {
            "delta": "delta", "s per step": "step_s", "speed-up": "speedup", "decode steps": "decode_steps",
            "times fewer": "fewer", "mean deferrals": "deferrals",
        },
    ),
    "delta": (
        "figure 7a: policies of delta, se7b",
        {
            "policy": "policy", "mean delta": "mean_delta", "steps": "steps", "minutes": "minutes", "place": "place",
            "paper": "printed",
        },
    ),
    "chunk": (
        "figure 7b: chunk sizes, se7b; more than the fastest in per cent",
        {
            "chunk": "chunk", "both s": "step_s", "more %": "more", "intra alone s": "intra_s", "more % ": "intra_more",
            "paper": "printed",
        },
    ),
    "deferral": (
        "table 2: steps that trained responses were deferred, %, se7b",
        {
            "delta": "delta", "0": "deferred_0", "1": "deferred_1", "2": "deferred_2", "3": "deferred_3", "more": "deferred_4",
            "mean": "mean", "delta / B": "law",
        },
    ),
    "utilization": (
        "figure 5: busy GPUs until the scores, %",
        {
            "setup": "setup", "sequential": "sequential", "both": "both", "gain": "gain", "speed-up": "speedup",
            "paper: TRL": "printed_baseline", "OPPO": "printed_oppo", "gain ": "printed_gain",
        },
    ),
}  # fmt: skip
"""Title and columns by method of Paper."""


def comparison(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Yield one row for each figure: simulated, printed, and why the two may differ."""
    yield from _speedups(tables["speedups"])
    yield from _utilization(tables["utilization"])
    yield from _ablation(tables["ablation"])
    yield from _sweeps(tables)
    yield from _deferral(tables["deferral"])
    for figure, seconds in ("table 1", oppo.MULTINODE_S), ("table 4", oppo.FRAMEWORKS_S):
        slow = next(iter(seconds))
        yield _row(
            figure,
            f"speed-up over {slow}",
            None,
            seconds[slow] / seconds["OPPO"],
            "not simulated: neither lengths nor stages are stated",
        )


def _row(figure: str, what: str, simulated: Any, printed: Any, why: str) -> dict[str, Any]:
    return {"figure": figure, "what": what, "simulated": simulated, "printed": printed, "why": why}


def _speedups(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        name, why = row["setup"], "lengths, delta and engine are assumed"
        yield _row("figure 3", f"{name}: speed-up at delta {DELTA}", row["speedup"], row["stated"], why)
        why = "the delta that table 2's mean implies"
        yield _row("figure 3", f"{name}: at delta {implied_delta()}", row["speedup_implied"], row["stated"], why)


def _utilization(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    why = "ours counts places of the batch in use; the paper does not say what its counter counts"
    for row in rows:
        yield _row("figure 5", f"{row['setup']}: gain in utilization", row["gain"], row["printed_gain"], why)


def _ablation(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    whys = {
        "intra": "by the laws scoring is a small share of a step; it grows if sequences are padded",
        "inter": f"delta {DELTA} is assumed; the tail of lengths decides",
        "full": "as both rows above",
    }
    for row in rows:
        yield _row("figure 6", f"{row['setup']}: {row['mode']}", row["speedup"], row["printed"], whys[row["mode"]])


def _sweeps(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[dict[str, Any]]:
    for row in tables["delta"]:
        why = "seconds of equal steps here, to a reward there; the bound of the dynamic rule is not stated"
        yield _row("figure 7a", f"{row['policy']}: place", row["place"], row["printed"], why)
    fastest = min(tables["chunk"], key=lambda row: row["step_s"])["chunk"]
    best = next(int(size) for size, said in oppo.CHUNKS.items() if said.startswith("best"))
    why = "cost of a round is assumed; only 10, 100, 500, 1000 to 3000 are named there"
    yield _row("figure 7b", "fastest chunk, tokens", fastest, best, why)


def _deferral(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        if "law" in row:
            why = f"mean delta / B = {row['law']:.3f}, whatever the lengths"
            yield _row("table 2", f"mean deferrals at delta {row['delta']}", row["mean"], oppo.DEFERRED_MEAN, why)


def left_aligned(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table whose last column is left-aligned text."""
    *head, (title, key) = columns.items()
    lines = format_table(dict(head), rows).splitlines()
    return "\n".join(f"{line}  {text}" for line, text in zip(lines, [title, *(row[key] for row in rows)], strict=True))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=count, default=100, metavar="N", help="PPO steps per run, a fifth warms up")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the lengths of responses; default 0")
    add_out(parser, "paper")


def measure(args: argparse.Namespace) -> int:
    if args.steps < 5:
        raise ConfigError(f"--steps is {args.steps}; give 5 or more, so that steps are left after the warm-up")
    if args.seed < 0:
        raise ConfigError(f"--seed is {args.seed}; give 0 or more")
    refuse_figures(args.out / "paper.json")
    paper = Paper(args.steps, args.seed)
    tables = {name: getattr(paper, name)() for name in TABLES}
    assumed = [dict(zip(("what", "value", "why"), row, strict=True)) for row in ASSUMED]
    rows, checks, law = list(comparison(tables)), [vars(check) for check in oppo.checks()], paper.law_of_chunk()
    print("assumed, since the paper does not state it:")
    print(left_aligned(ASSUMED_COLUMNS, assumed))
    for name, (title, columns) in TABLES.items():
        print(f"\n{title}:")
        print(format_table(columns, tables[name]))
    print(
        f"rounds and the rest of the last chunk cost least at {law['tokens']:.0f} tokens: the root of "
        f"{1e3 * law['round_s']:.0f} ms x {law['decode_steps']:.0f} decode steps / half of {1e3 * law['decode_step_s']:.1f} ms"
    )
    print("\neach figure and the paper's:")
    print(left_aligned(FIGURE_COLUMNS, rows))
    print("\nwhether the paper's figures agree, computed from them:")
    print(left_aligned(CHECK_COLUMNS, checks))
    facts = {"steps": args.steps, "seed": args.seed, "assumed": assumed, "comparison": rows, "checks": checks}
    write_figures(args.out, "paper", facts | tables | {"law_of_chunk": law})
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    return run_script("benchmarks.paper", __doc__, add_arguments, measure, arguments)


if __name__ == "__main__":
    sys.exit(main())

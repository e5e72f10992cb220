"""One row for each figure of OPPO's paper: simulated, printed, and why the two may differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from oppo_megatron.bench.studies.assumptions import DELTA
from oppo_megatron.bench.studies.paper import Paper, implied_delta
from oppo_megatron.sim.published import oppo

COLUMNS = {
    "figure": "figure",
    "what": "what",
    "simulated": "simulated",
    "paper": "printed",
    "may differ because": "why",
}
TABLES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "speedups": (
        "figure 3: seconds a step",
        {
            "setup": "setup", "sequential s": "sequential_s", "padded s": "padded_s", "both s": "both_s",
            "speed-up": "speedup", f"at delta {implied_delta()}": "speedup_implied", "from padded": "speedup_padded",
            "paper": "stated", "GB": "gb", "of": "room_gb",
        },
    ),
    "ablation": (
        "figure 6: each overlap alone, and both",
        {
            "setup": "setup", "mode": "mode", "s a step": "step_s", "speed-up": "speedup", "paper": "printed",
            "at most": "bound", "at most, padded": "bound_padded", "product": "product", "paper ": "printed_product",
        },
    ),
    "inter": (
        "inter-step overlap alone by delta, se7b",
        {
            "delta": "delta", "s a step": "step_s", "speed-up": "speedup", "decode steps": "decode_steps",
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
"""By method of Paper: a title, and columns."""


def beside(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[dict[str, Any]]:
    """`tables` by their names in TABLES."""
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
            "not simulated: neither lengths nor stages are told",
        )


def _row(figure: str, what: str, simulated: Any, printed: Any, why: str) -> dict[str, Any]:
    return {"figure": figure, "what": what, "simulated": simulated, "printed": printed, "why": why}


def _speedups(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        name, why = row["setup"], "lengths, delta and engine are assumed"
        yield _row("figure 3", f"{name}: speed-up at delta {DELTA}", row["speedup"], row["stated"], why)
        why = "the delta that table 2's mean stands for"
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
        why = "seconds of equal steps here, to a reward there; the bound of the dynamic rule is not told"
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


def all_tables(paper: Paper) -> dict[str, list[dict[str, Any]]]:
    return {name: getattr(paper, name)() for name in TABLES}

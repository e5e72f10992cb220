"""The tables and lines of `oppo plan`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

WIDE = 240
"""Columns where the output is no terminal."""
PARTS = {
    "step": "step_s", "decode": "decode_s", "exp. scoring": "scoring_s", "update": "update_s", "exp. critic": "critic_s",
    "weights": "weights_s", "idle": "idle_s",
}  # fmt: skip


TEXTS = ("roles on ranks", "actor", "trained", "bounded by")


def print_record(record: Mapping[str, Any], top: int) -> None:
    """The best plans, the layouts of the first, its reason, the bound, and the sources of the constants."""
    from oppo_megatron.sim.search.record import constants_of

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDE)
    plans, cluster, work = record["plans"], record["cluster"], record["work"]
    console.print(
        f"{cluster['nodes']} x {cluster['gpus_per_node']} {cluster['gpu']}; {work['responses']} responses of "
        f"{work['mean_tokens']:.0f} tokens on average, {work['longest']} at most, to prompts of {work['prompt_tokens']}; "
        + ("scoring streamed beside decoding" if work["overlapped"] else "phases one after the other")
    )
    console.print(_plans(plans[:top], cluster))
    console.print(_roles(plans[0]))
    first = plans[0]
    how = "in virtual time" if first["played"] else "by prices of phases"
    console.print(
        f"seconds are {how}; micro-batches of {first['micro_batch_tokens']} tokens, chunks of {first['chunk']}, "
        f"delta {first['delta']}"
    )
    console.print(f"{record['reason']}.")
    console.print(_bound(record))
    if "as_configured" in record:
        console.print(f"the configuration with its own placement: {record['as_configured']['told']}")
    for line in [*record["beyond_fits"], *constants_of(record)]:
        console.print(line)


def _plans(plans: list[Mapping[str, Any]], cluster: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE, title="seconds a step, predicted", title_justify="left")
    for name in ("", "roles on ranks", "actor", "trained", *PARTS, "fullest GB", "free GB", "bounded by", "slower"):
        table.add_column(name, justify="left" if name in TEXTS else "right")
    for number, plan in enumerate(plans):
        slower = plan["step_s"] / plans[0]["step_s"] - 1
        seconds = [f"{plan[key]:.2f}" for key in PARTS.values()]
        memory = [f"{plan['fullest_gb']:.1f}", f"{plan['margin_gb']:.1f}"]
        row = [str(number + 1), plan["name"], *_actor(plan), *seconds, *memory, plan["bounded_by"], f"{slower:.1%}"]
        table.add_row(*row)
    return table


def _actor(plan: Mapping[str, Any]) -> tuple[str, str]:
    """Its layouts, without sizes of 1: `tp 4 dp 2`."""
    return _short(plan["roles"]["actor"]["layout"]), _short(plan["roles"]["actor"]["training"])


def _short(layout: str) -> str:
    parts = [part for part in layout.replace(" with ", " x ").split(" x ") if not part.endswith(" 1")]
    return " ".join(parts) or "1"


def _roles(plan: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE, title="the first plan", title_justify="left")
    for name in ("role", "ranks", "decodes, scores", "s", "trained", "recompute", "s ", "weights s"):
        table.add_column(name, justify="right" if name.strip() in ("s", "weights s") else "left")
    for role, own in plan["roles"].items():
        trained = "training" in own
        table.add_row(
            role, own["ranks"], own["layout"], f"{own['serving_s']:.2f}",
            own.get("training", "-"), own.get("recompute", "-"), f"{own['update_s']:.2f}" if trained else "-",
            f"{own['weights_s']:.2f}" if trained else "-",
        )  # fmt: skip
    return table


def _bound(record: Mapping[str, Any]) -> str:
    search, memory, contest = record["search"], record["cluster"], record["contest"]
    margin = f"a margin of {memory['margin']:.0%} of {memory['memory_gb']:g} GB stays free"
    if not search["ended"]:
        found = (
            f"the search ended after {search['seconds']:g} s: no plan takes less than {search['bound_s']:.3g} s by price, and "
            f"the first found may be {search['gap']:.1%} above the best"
        )
    elif search["kind"] == "exact":
        sizes = ", ".join(map(str, search["micro_batch_tokens"]))
        found = (
            f"of {search['places']} ways to place the roles, each with micro-batches of {sizes} tokens, none is faster by price "
            f"than {search['bound_s']:.3g} s: gap 0"
        )
    else:
        found = f"a chain proves nothing: no plan has a price below {search['bound_s']:.3g} s, gap {search['gap']:.1%}"
    if contest is None:
        return f"{found}; {margin}"
    return f"{found}; {margin}\n{_contest(record['plans'][0]['step_s'], contest)}"


def _contest(first_s: float, contest: Mapping[str, Any]) -> str:
    again = contest["finalists"] and contest["finalist_steps"] > contest["steps"]
    finals = f", and {contest['finalists']} of these for {contest['finalist_steps']}" if again else ""
    side, others = "above" if contest["gap"] >= 0 else "below", contest["others_s"]
    finals += "" if contest["ended"] else " (then time ran out)"
    rest = "no other ranks or layouts of the actor fit"
    if others is not None:
        rest = f"of plans with other ranks or layouts of the actor, not played, none has a price below {others:.3g} s"
    return (
        f"played in virtual time: {contest['plans']} of least price for {contest['steps']} steps{finals}; they took "
        f"{contest['least_ratio']:.2f} to {contest['most_ratio']:.2f} of their prices, and the first, {first_s:.3g} s, is "
        f"{abs(contest['gap']):.1%} {side} the least price, {contest['least_s']:.3g} s; {rest}"
    )

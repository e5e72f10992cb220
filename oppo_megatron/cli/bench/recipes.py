"""`oppo bench recipes`: the best plans of published models on several numbers of nodes, as the page docs/recipes.md."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oppo_megatron.cli.lengths import counts

if TYPE_CHECKING:
    from oppo_megatron.sim.search.planning import Task

HELP = "plans for published models on 1, 2, 8 and 64 nodes of 8 H100, predicted; writes docs/recipes.md"
ABOUT = """Searches the plan of PPO with four roles of one size for each published model and number of nodes, as `oppo plan`
does, and writes a table of them. Needs no GPU and no weights; takes minutes."""
MODELS = {
    "Qwen2.5-1.5B": "qwen2.5-1.5b.json", "Llama-3.1-8B": "llama-3.1-8b.json", "Qwen2.5-32B": "qwen2.5-32b.json",
    "Llama-3.1-70B": "llama-3.1-70b.json",
}  # fmt: skip
BATCH, BATCH_A_NODE = 512, 64
"""Responses of a step: so many, or so many a node where these are more."""
PROMPT_TOKENS, LENGTHS = 512, [700, 0.8]
COLUMNS = ("model", "nodes", "B", "roles on ranks", "actor decodes", "is trained", "s/step", "from, to", "GB", "free")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=counts, default=[1, 2, 8, 64], metavar="N,N", help="default 1,2,8,64")
    parser.add_argument(
        "--shapes", type=Path, default=Path("examples/planner"), metavar="DIR", help="default %(default)s"
    )
    parser.add_argument("--seconds", type=float, default=120.0, metavar="S", help="of each search (default 120)")
    parser.add_argument(
        "--out", type=Path, default=Path("docs/recipes.md"), metavar="PAGE.md", help="default %(default)s"
    )
    parser.set_defaults(measure=_recipes)


def _recipes(args: argparse.Namespace) -> int:
    from oppo_megatron.rundir.directory import write_text
    from oppo_megatron.sim.published.report import real_report

    worst = real_report().errors["left_out_worst"]
    rows = []
    for model, shape in MODELS.items():
        for nodes in args.nodes:
            rows.append(_row(args, model, args.shapes / shape, nodes, worst))
            print(" | ".join(rows[-1]), flush=True)
    table = [_line(COLUMNS), _line(["---"] * len(COLUMNS)), *(_line(row) for row in rows)]
    write_text(args.out, "\n".join([*_head(worst), *table, ""]))
    print(f"wrote {args.out}")
    return 0


def _head(worst: float) -> Iterator[str]:
    yield from (
        "# Recipes",
        "",
        "PPO with four roles of one size on nodes of eight H100 of 80 GB and eight 400 Gb/s NICs: the best",
        "plan that `oppo plan` finds for each ([planner](planner.md#the-best-plan)), by published",
        "constants. **Nothing here has been measured.** This page is written by",
        "",
        "```",
        "oppo bench recipes",
        "```",
        "",
        f"A step has B responses to prompts of {PROMPT_TOKENS} tokens, log-normal with median {LENGTHS[0]} and sigma",
        f"{LENGTHS[1]}, at most 2048; both overlaps, bfloat16, KV caches of at most 16 GiB a role and rank,",
        "the rest as in `examples/planner/ppo.yaml`. `GB`: the fullest rank; `free`: of 80. `from, to`: the",
        f"step, less and more by {worst:.0f} %, the worst error of a call of ReaL's published plans with the plan",
        "left out of the fit (`oppo bench real`).",
        "",
    )


def _line(cells: Any) -> str:
    return f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"


def _row(args: argparse.Namespace, model: str, shape: Path, nodes: int, worst: float) -> list[str]:
    from oppo_megatron.sim.search.finalists import finished
    from oppo_megatron.sim.search.planning import make_plan
    from oppo_megatron.sim.search.record import to_record
    from oppo_megatron.sim.search.shortage import find_shortage

    task, begun = _task(args, shape, nodes), time.monotonic()

    def out_of_time() -> bool:
        return time.monotonic() > begun + args.seconds

    batch = str(task.config.rollout.batch_size)
    planned = make_plan(task, "exact", 1, 1, out_of_time, lambda: time.monotonic() > begun + 5 * args.seconds)
    if planned.plans:
        plan = to_record(finished(planned, 1, out_of_time), "exact", 1, args.seconds)["plans"][0]
        return [model, str(nodes), batch, *_cells(plan, worst)]
    later = time.monotonic() + args.seconds
    shortage = find_shortage(planned.task, lambda: time.monotonic() > later)
    told = "no plan fits" if shortage is None else f"no plan fits: {shortage.fullest.held / 1e9:.0f} GB on a rank"
    if shortage is not None and shortage.nodes:
        told += f"; {shortage.nodes} nodes would do"
    return [model, str(nodes), batch, told, *["-"] * (len(COLUMNS) - 4)]


def _cells(plan: Mapping[str, Any], worst: float) -> list[str]:
    actor, seconds = plan["roles"]["actor"], plan["step_s"]
    least, most = seconds * (1 - worst / 100), seconds * (1 + worst / 100)
    return [
        plan["name"], actor["layout"], f"{actor['training']}, recompute {actor['recompute']}", f"{seconds:.1f}",
        f"{least:.0f}, {most:.0f}", f"{plan['fullest_gb']:.0f}", f"{plan['margin_gb']:.0f}",
    ]  # fmt: skip


def _task(args: argparse.Namespace, shape: Path, nodes: int) -> Task:
    from oppo_megatron.cli.plan.loading import task_of

    given = [f"{role}.init={shape}" for role in ("actor", "critic", "reward")]
    given += [
        f"data.max_prompt_tokens={PROMPT_TOKENS}",
        f"debug.forced_lengths={LENGTHS}",
        f"rollout.batch_size={max(BATCH, BATCH_A_NODE * nodes)}",
    ]
    task = task_of(args.shapes / "ppo.yaml", args.shapes / "cluster.yaml", given, [f"nodes={nodes}"])
    return replace(task, prompt=PROMPT_TOKENS)

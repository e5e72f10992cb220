"""Every layout trains alike: colocated and disaggregated, tensor-, pipeline- and data-parallel, up to eight ranks.

Three PPO steps (12 optimizer steps) on each of `LAYOUTS`, against the plain loop in one process: the same tokens, the same
batches, and weights within TOLERANCE (absolute; they move by about 1e-2, and sums over other groupings round differently).

A draw that falls within rounding of the border between two tokens may go either way; SEED is one whose draws stay clear of
the borders (by 2e-3 of probability at the least, in the one process).
"""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from tests.support.ppo import SHAPE, Outcome, Workspace, run_ppo_ranks, weight_distance

TOLERANCE = 2e-4
SEED = 23
DEEP = SHAPE | {"num_hidden_layers": 4}
STEADY_ADAM = {"lr": 2e-3, "eps": 1e-4}
Layout = tuple[int, int, int]
LAYOUTS: list[tuple[str, Layout, Layout]] = [
    # mode, actor and scorers as (tp, pp, dp)
    ("colocated", (1, 2, 1), (2, 1, 1)),
    ("colocated", (1, 4, 1), (1, 2, 2)),
    ("colocated", (1, 2, 2), (1, 4, 1)),
    ("colocated", (2, 1, 2), (2, 1, 2)),
    ("colocated", (2, 2, 1), (2, 2, 1)),
    ("colocated", (2, 4, 1), (2, 4, 1)),
    ("colocated", (1, 4, 2), (1, 4, 2)),
    ("disaggregated", (2, 1, 1), (2, 1, 1)),
    ("disaggregated", (1, 2, 1), (1, 1, 2)),
    ("disaggregated", (1, 1, 2), (1, 2, 1)),
    ("disaggregated", (2, 2, 1), (1, 2, 2)),
    ("disaggregated", (2, 1, 2), (1, 4, 1)),
    ("disaggregated", (1, 4, 1), (2, 1, 2)),
]
FACTORS = {"mode": ("colocated", "disaggregated")} | {
    f"{side} {what}": values
    for side in ("actor", "scorer")
    for what, values in (("tp", (1, 2)), ("pp", (1, 2, 4)), ("dp", (1, 2)))
}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace.create(tmp_path_factory.mktemp("layouts"))


def deep(workspace: Workspace, name: str, **changes: Any) -> dict[str, Any]:
    roles: dict[str, Any] = {
        "actor": {"init": DEEP, "optimizer": STEADY_ADAM},
        "critic": {"init": DEEP, "init_seed": 5, "optimizer": STEADY_ADAM},
        "reward": {"init": DEEP, "init_seed": 6},
    }
    return workspace.config(name, **roles, seed=SEED, **{"rollout.top_k": 6}, **changes)


@pytest.fixture(scope="module")
def plain(workspace: Workspace) -> Outcome:
    return run_ppo_ranks(deep(workspace, "plain"))


def parallel(layout: Layout) -> dict[str, int]:
    return dict(zip(("tp", "pp", "dp"), layout, strict=True))


def assert_same(outcome: Outcome, plain: Outcome) -> None:
    assert outcome.tokens() == plain.tokens()
    assert outcome.batches() == plain.batches()
    assert weight_distance(outcome.actor, plain.actor) < TOLERANCE
    assert weight_distance(outcome.critic, plain.critic) < TOLERANCE
    assert max(line["logprob_gap"] for line in outcome.metrics) < 1e-4
    for ours, theirs in zip(outcome.metrics, plain.metrics, strict=True):
        assert ours["actor_loss"] == pytest.approx(theirs["actor_loss"], abs=1e-4)
        assert ours["critic_loss"] == pytest.approx(theirs["critic_loss"], rel=1e-3)


def test_layouts_cover_every_pair_of_choices() -> None:
    rows = [dict(zip(FACTORS, (mode, *actor, *scorer), strict=True)) for mode, actor, scorer in LAYOUTS]
    for one, other in combinations(FACTORS, 2):
        seen = {(row[one], row[other]) for row in rows}
        assert seen == set(product(FACTORS[one], FACTORS[other])), (one, other)


@pytest.mark.parametrize(("mode", "actor", "scorer"), LAYOUTS, ids=str)
def test_layout_trains_as_one_process(
    workspace: Workspace, plain: Outcome, mode: str, actor: Layout, scorer: Layout
) -> None:
    placement = {"mode": mode, "actor": parallel(actor), "scorer": parallel(scorer)}
    name = "-".join(map(str, (mode, *actor, *scorer)))
    config = deep(workspace, name, placement=placement, **{"overlap.intra": True})
    assert_same(run_ppo_ranks(config), plain)
    assert (Path(config["run_dir"]) / "summary.json").exists()

"""Every layout trains alike: colocated and disaggregated, tensor-, pipeline- and data-parallel, up to eight ranks.

Three PPO steps (12 optimizer steps) on each of `LAYOUTS`, against the plain loop in one process: the same tokens, the same
batches, and weights within a tolerance (`tests/support/layouts.py`).
"""

from __future__ import annotations

import json
from itertools import combinations, pairwise, product
from pathlib import Path

import pytest

from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.placements import world_size
from oppo_megatron.rundir.metrics_log import read_metrics
from tests.support.layouts import Layout, assert_same, deep, parallel
from tests.support.ppo import Outcome, Workspace, run_ppo_ranks

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
WIDE: list[tuple[str, Layout, Layout]] = [
    # of eight processes, and of fewer whose parts others have: minutes together on two cores
    ("colocated", (2, 4, 1), (2, 4, 1)),
    ("colocated", (1, 4, 2), (1, 4, 2)),
    ("disaggregated", (2, 2, 1), (1, 2, 2)),
    ("disaggregated", (2, 1, 2), (1, 4, 1)),
    ("disaggregated", (1, 4, 1), (2, 1, 2)),
    ("colocated", (2, 2, 1), (2, 2, 1)),
    ("colocated", (1, 2, 1), (2, 1, 1)),
    ("colocated", (1, 2, 2), (1, 4, 1)),
    ("disaggregated", (2, 1, 1), (2, 1, 1)),
]
FACTORS = {"mode": ("colocated", "disaggregated")} | {
    f"{side} {what}": values
    for side in ("actor", "scorer")
    for what, values in (("tp", (1, 2)), ("pp", (1, 2, 4)), ("dp", (1, 2)))
}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace.create(tmp_path_factory.mktemp("layouts"))


@pytest.fixture(scope="module")
def plain(workspace: Workspace) -> Outcome:
    return run_ppo_ranks(deep(workspace, "plain"))


def test_layouts_cover_every_pair_of_choices() -> None:
    rows = [dict(zip(FACTORS, (mode, *actor, *scorer), strict=True)) for mode, actor, scorer in LAYOUTS]
    for one, other in combinations(FACTORS, 2):
        seen = {(row[one], row[other]) for row in rows}
        assert seen == set(product(FACTORS[one], FACTORS[other])), (one, other)


@pytest.mark.parametrize(
    ("mode", "actor", "scorer"),
    [pytest.param(*each, marks=[pytest.mark.long] if each in WIDE else []) for each in LAYOUTS],
    ids=str,
)
def test_layout_trains_as_one_process(
    workspace: Workspace, plain: Outcome, mode: str, actor: Layout, scorer: Layout
) -> None:
    placement = {"mode": mode, "actor": parallel(actor), "scorer": parallel(scorer)}
    name = "-".join(map(str, (mode, *actor, *scorer)))
    config = deep(workspace, name, placement=placement, **{"overlap.intra": True})
    assert_same(run_ppo_ranks(config), plain)
    assert_memory_of_every_rank(Path(config["run_dir"]), world_size(TrainConfig(**config)))


def assert_memory_of_every_rank(run: Path, ranks: int) -> None:
    """The plan and what was measured, for each rank; peaks only rise."""
    summary = json.loads((run / "summary.json").read_text())
    base, peak, planned, ratio = (summary[f"memory_{name}"] for name in ("base_mb", "peak_mb", "planned_mb", "ratio"))
    assert len(base) == len(peak) == len(planned) == len(ratio) == ranks
    for rank in range(ranks):
        assert peak[rank] >= base[rank] > 0 < planned[rank], rank  # this process may have held more before
        assert ratio[rank] == pytest.approx((peak[rank] - base[rank]) / planned[rank], rel=0.05, abs=2e-2)
    peaks = [line["memory_peak_mb"] for line in read_metrics(run / "metrics.jsonl")]
    for before, after in pairwise([*peaks, peak]):
        assert all(one <= other for one, other in zip(before, after, strict=True))

"""Every feature in every layout trains as one process without overlap does: same tokens and batches, weights to rounding."""

from __future__ import annotations

import json
from itertools import combinations, pairwise, product
from typing import Any

import pytest

from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.placements import world_size
from oppo_megatron.rundir.metrics_log import read_metrics
from tests.e2e.matrix import FEATURES, LAYOUTS, OPTIONS, WIDE, Matrix, run_dir
from tests.support.layouts import assert_same
from tests.support.ppo import run_ppo_ranks
from tests.support.virtual import assert_unfolds_alike

FACTORS = {"mode": ("colocated", "disaggregated")} | {
    f"{side} {what}": values
    for side in ("actor", "scorer")
    for what, values in (("tp", (1, 2)), ("pp", (1, 2, 4)), ("dp", (1, 2)))
}
IN_MAKE_TEST = (*LAYOUTS, "PP4, scorers PP2 x DP2")


def cases() -> list[Any]:
    """All pairs; options go round, so that each feature and each layout meets each of them."""
    pairs = [("plain", layout) for layout in (*LAYOUTS, *WIDE)]
    pairs += [(feature, layout) for feature in FEATURES if feature != "plain" for layout in LAYOUTS]
    found = []
    for feature, layout in pairs:
        option = (list(FEATURES).index(feature) + [*LAYOUTS, *WIDE].index(layout)) % len(OPTIONS)
        soon = layout in (IN_MAKE_TEST if feature == "plain" else FEATURES[feature].soon)
        found.append(pytest.param(feature, layout, option, marks=[] if soon else [pytest.mark.long]))
    return found


@pytest.mark.parametrize(("feature", "layout", "option"), cases())
def test_a_feature_in_a_layout_trains_as_one_process(matrix: Matrix, feature: str, layout: str, option: int) -> None:
    plain = matrix.reference(feature)
    config = matrix.in_layout(feature, layout, option=option)
    outcome = run_ppo_ranks(config)
    assert_same(outcome, plain)
    FEATURES[feature].also(outcome, plain)
    if "filter" not in feature:  # whose verdicts no simulation knows
        assert_unfolds_alike(config, outcome)
    assert_memory_of_every_rank(config)


def test_layouts_cover_every_pair_of_choices() -> None:
    places = [each["placement"] for each in (LAYOUTS | WIDE).values() if "scorer" in each["placement"]]
    rows = [{name: place[name.split()[0]] for name in FACTORS} for place in places]
    rows = [{n: v if n == "mode" else v[n.split()[1]] for n, v in row.items()} for row in rows]
    for one, other in combinations(FACTORS, 2):
        assert {(row[one], row[other]) for row in rows} == set(product(FACTORS[one], FACTORS[other])), (one, other)


def assert_memory_of_every_rank(config: dict[str, Any]) -> None:
    """The plan and what was measured, for each rank; peaks only rise."""
    summary = json.loads((run_dir(config) / "summary.json").read_text())
    base, peak, planned, ratio = (summary[f"memory_{name}"] for name in ("base_mb", "peak_mb", "planned_mb", "ratio"))
    ranks = world_size(TrainConfig(**config))
    assert len(base) == len(peak) == len(planned) == len(ratio) == ranks
    for rank in range(ranks):
        assert peak[rank] >= base[rank] > 0 < planned[rank], rank  # this process may have held more before
        assert ratio[rank] == pytest.approx((peak[rank] - base[rank]) / planned[rank], rel=0.05, abs=2e-2)
    peaks = [line["memory_peak_mb"] for line in read_metrics(run_dir(config) / "metrics.jsonl")]
    for before, after in pairwise([*peaks, peak]):
        assert all(one <= other for one, other in zip(before, after, strict=True))

"""Every feature in every layout trains as one process without overlap does, to rounding, and resumes to the bit."""

from __future__ import annotations

import json
from collections import Counter
from itertools import combinations, pairwise, product
from typing import Any

import pytest

from oppo_megatron.layout.placements import world_size
from oppo_megatron.rundir.metrics_log import read_metrics
from tests.e2e.matrix import FEATURES, FEW_ROUNDS, LAYOUTS, OPTIONS, WIDE, Matrix, calls_of, carries, option_of, run_dir
from tests.e2e.test_resume import assert_bit_equal, checkpoints, last_checkpoint, resumed, stop
from tests.support.configs import run_of
from tests.support.layouts import assert_same
from tests.support.virtual import assert_unfolds_alike

FACTORS = {"mode": ("colocated", "disaggregated")} | {
    f"{side} {what}": values
    for side in ("actor", "scorer")
    for what, values in (("tp", (1, 2)), ("pp", (1, 2, 4)), ("dp", (1, 2)))
}
STOPPED_IN_MAKE_TEST = ("backfill", "greedy baseline, carried", "filter", "prompts fork")


def pairs() -> list[Any]:
    found = []
    for name, feature in FEATURES.items():
        for layout in LAYOUTS | WIDE if name == "plain" else LAYOUTS:
            found.append(pytest.param(name, layout, marks=[] if layout in feature.soon else [pytest.mark.long]))
    return found


@pytest.mark.parametrize(("feature", "layout"), pairs())
def test_a_feature_in_a_layout_trains_as_one_process(matrix: Matrix, feature: str, layout: str) -> None:
    plain, config = matrix.reference(feature), matrix.in_layout(feature, layout, option_of(feature, layout))
    outcome = matrix.run(config)
    assert_same(outcome, plain)
    FEATURES[feature].also(outcome, plain)
    if "filter" not in feature:  # whose verdicts no simulation knows
        assert_unfolds_alike(config, outcome)
    assert_memory_of_every_rank(config)


@pytest.mark.parametrize(
    "feature", [each if each in STOPPED_IN_MAKE_TEST else pytest.param(each, marks=pytest.mark.long) for each in FEATURES]
)
def test_stopped_within_rollouts_and_resumed_is_the_run_that_never_stopped(matrix: Matrix, feature: str) -> None:
    layout = FEATURES[feature].stops
    option = option_of(feature, layout)
    option = 0 if OPTIONS[option] in FEW_ROUNDS else option
    option = 1 if FEATURES[feature].shows is carries else option  # else its first step has hardly a round
    whole, config = (matrix.in_layout(feature, layout, option, name) for name in ("", "stopped"))
    plain = matrix.run(whole)
    assert_same(plain, matrix.reference(feature))
    stop(config, rounds=FEATURES[feature].rounds, rank=int(layout != "1 | 1"))
    assert "clock" in checkpoints(config)[-1]
    if config["rollout"].get("group_size", 1) > 2:
        assert_within_a_group(config)
    config["checkpoint"] = {"resume": True}
    stop(config, rounds=4)
    assert_bit_equal(resumed(config), plain)
    if feature == "filter":
        once, again = (Counter(calls_of(each).read_text().splitlines()) for each in (whole, config))
        assert once == again


def assert_within_a_group(config: dict[str, Any]) -> None:
    ended: dict[int, set[bool]] = {}
    for row in map(json.loads, (last_checkpoint(config) / "rollouts.jsonl").read_text().splitlines()):
        group = row["seq_id"] // config["rollout"]["group_size"]
        ended.setdefault(group, set()).add(row["finish_clock"] is not None)
    assert {True, False} in ended.values()


def test_layouts_cover_every_pair_of_choices() -> None:
    places = [each["placement"] for each in (LAYOUTS | WIDE).values() if "scorer" in each["placement"]]
    rows = [{name: place[name.split()[0]] for name in FACTORS} for place in places]
    rows = [{n: v if n == "mode" else v[n.split()[1]] for n, v in row.items()} for row in rows]
    for one, other in combinations(FACTORS, 2):
        assert {(row[one], row[other]) for row in rows} == set(product(FACTORS[one], FACTORS[other])), (one, other)


def assert_memory_of_every_rank(config: dict[str, Any]) -> None:
    summary = json.loads((run_dir(config) / "summary.json").read_text())
    base, peak, planned, ratio = (summary[f"memory_{name}"] for name in ("base_mb", "peak_mb", "planned_mb", "ratio"))
    ranks = world_size(run_of(config))
    assert len(base) == len(peak) == len(planned) == len(ratio) == ranks
    for rank in range(ranks):
        assert peak[rank] >= base[rank] > 0 < planned[rank], rank  # this process may have held more before
        assert ratio[rank] == pytest.approx((peak[rank] - base[rank]) / planned[rank], rel=0.05, abs=2e-2)
    peaks = [line["memory_peak_mb"] for line in read_metrics(run_dir(config) / "metrics.jsonl")]
    for before, after in pairwise([*peaks, peak]):
        assert all(one <= other for one, other in zip(before, after, strict=True))

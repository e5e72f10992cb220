"""OPPO's printed figures: the package's copy against the files, and the arithmetic between them against sums written out."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.paper import printed as oppo
from benchmarks.paper.assumptions import SETTINGS
from benchmarks.paper.printed import Check, checks


@pytest.fixture
def printed(shared_data: Path) -> Mapping[str, list[list[str]]]:
    """The rows of each file without its head."""
    files = (shared_data / "oppo_paper").glob("*.csv")
    return {file.stem: list(csv.reader(file.read_text(encoding="utf-8").splitlines()))[1:] for file in files}


def number(text: str) -> float | None:
    return float(text) if text else None


def test_the_package_holds_what_is_printed(printed: Mapping[str, list[list[str]]]) -> None:
    constants = {row[0]: row[1] for row in printed["constants"]}
    assert str(oppo.BATCH) == constants["batch_size"]
    assert str(oppo.GPUS_TRAINING) == constants["gpus_generation_and_training"]
    assert str(oppo.GPUS_SCORING) == constants["gpus_scoring"]
    assert ";".join(map(str, oppo.CHUNK_CANDIDATES)) == constants["chunk_candidates"]
    assert str(oppo.SCORING_HIDDEN_PERCENT) == constants["scoring_latency_hidden_by_intra"]
    assert "-".join(map(str, oppo.HEADLINE_SPEEDUP)) == constants["headline_speedup"]
    assert [str(steps) for steps in oppo.EVAL_STEPS.values()] == [constants["eval_steps_7b"], constants["eval_steps_3b"]]
    assert [[row.setup, row.target_reward, row.baseline_minutes, row.oppo_minutes, row.stated] for row in oppo.SPEEDUPS] == [
        [row[0], *map(number, row[1:5])] for row in printed["speedups"]
    ]
    assert [[row.setup, row.variant, row.minutes, row.stated] for row in oppo.ABLATION] == [
        [row[0], row[1], *map(number, row[2:4])] for row in printed["ablation"]
    ]
    assert [[row.setup, row.baseline, row.oppo, row.stated] for row in oppo.UTILIZATION] == [
        [row[0], *map(float, row[1:4])] for row in printed["utilization"]
    ]
    *shares, (_, mean) = printed["table2_deferral"]
    assert oppo.DEFERRED_PERCENT == {int(steps): float(share) for steps, share in shares}
    assert float(mean) == oppo.DEFERRED_MEAN
    assert [list(policy) for policy in oppo.DELTA_POLICIES] == [row[1:3] for row in printed["figure7a_delta"]]
    assert oppo.CHUNKS == {row[0]: row[1] for row in printed["figure7b_chunk"]}
    assert oppo.MULTINODE_S == {row[0]: float(row[1]) for row in printed["table1_multinode"]}
    assert oppo.FRAMEWORKS_S == {row[0]: float(row[1]) for row in printed["table4_frameworks"]}
    (_, *first), *last = [(row[0], int(row[1]), float(row[2])) for row in printed["figure4_convergence"][:3]]
    assert oppo.REWARD_POINTS == {setup: (tuple(first), (step, reward)) for setup, step, reward in last}


def test_the_settings_that_are_played_are_the_printed_ones(printed: Mapping[str, list[list[str]]]) -> None:
    layers = {"Qwen2.5-7B": 28, "Qwen2.5-3B": 36}
    played = {row[0]: row for row in printed["setups"] if row[0] in SETTINGS}
    assert played.keys() == {name for name in SETTINGS if "rule-based" not in name}
    for name, setting in SETTINGS.items():
        _, _, model, gpus, _, memory_gb, _ = played[name.partition(" ")[0]]
        assert setting.actor["num_hidden_layers"] == layers[model.removesuffix("-Instruct")]
        assert setting.cluster().num_ranks == int(gpus)
        assert setting.cluster().gpu.memory_bytes == pytest.approx(1e9 * float(memory_gb))


@pytest.mark.parametrize(
    ("where", "printed_value", "computed", "verdict"),
    [
        ("table 2: shares, %", 100, 99.96, "contradict"),
        ("table 2: mean delta", 8, 26.88, "unexplained"),
        ("table 2: mean deferrals at delta 4", 0.24, 0.0357, "unexplained"),
        ("table 2: mean deferrals at delta 8", 0.24, 0.0714, "unexplained"),
        ("figure 6, se7b: product of both gains", 1.8696, 1.8667, "agree"),
        ("figure 6, se3b: product of both gains", 2.5, 2.6825, "unexplained"),
        ("section 4.3: per cent of scoring hidden", 17, 16.667, "contradict"),
        ("se7b: minutes of the baseline", 4300, 4200, "contradict"),
        ("GSM8K: speed-up in figure 3", 2.8, 2.35, "contradict"),
        ("table 1 against the abstract", 2.8, 4.486, "contradict"),
        ("figure 5, se7b: busy time left, %", 100, 75.05, "unexplained"),
        ("figure 5, se3b: busy time left, %", 100, 76.07, "unexplained"),
        ("figure 5, gsm8k7b: busy time left, %", 100, 52.59, "unexplained"),
        ("figure 5, code3b: busy time left, %", 100, 86.48, "unexplained"),
        ("eq. 4 against Algorithm 1, line 24", 1, -1, "contradict"),
    ],
)
def test_what_the_printed_figures_say_of_each_other(where: str, printed_value: float, computed: float, verdict: str) -> None:
    found: dict[str, Check] = {check.where: check for check in checks()}
    check = found[where]
    assert (check.printed, check.computed) == (pytest.approx(printed_value, rel=1e-3), pytest.approx(computed, rel=1e-3))
    assert check.verdict == verdict and check.arithmetic

"""OPPO's figures: the package's copy against the files, the arithmetic between them, and laws of them in virtual time."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.paper import figures as studies
from benchmarks.paper import printed as oppo
from benchmarks.paper.__main__ import main
from benchmarks.paper.assumptions import SETTINGS, Lengths
from benchmarks.paper.figures import INTER_DELTAS, Paper, implied_delta, least_chunk
from benchmarks.paper.printed import Check, checks
from benchmarks.paper.runs import Case
from oppo_megatron.schedule.weaving.costs import Costs, Linear
from oppo_megatron.sim.runs.step_costs import StepCosts
from oppo_megatron.sim.runs.virtual import VirtualRun


@pytest.fixture
def printed(shared_data: Path) -> Mapping[str, list[list[str]]]:
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


STEPS = 10


@pytest.fixture(scope="module")
def paper() -> Paper:
    return Paper(STEPS, 0)


@pytest.mark.parametrize("delta", [4, 8, implied_delta()])
def test_mean_deferrals_are_the_mean_delta_over_the_batch(paper: Paper, delta: int) -> None:
    """Every step carries delta rollouts, and each of them counts once, when it is trained or while it waits."""
    run = paper.mode("se7b", "full", delta)
    trained = sum(int(step.deferrals.sum()) for step in run.steps)
    carried = sum(step.line["carried"] for step in run.steps)
    assert carried == delta * STEPS and len(run.steady) == STEPS - STEPS // 5
    longest = paper.case("se7b").config.overlap.max_staleness
    assert carried - delta * longest <= trained <= carried
    assert run.deferrals == pytest.approx(delta / run.batch, abs=delta * longest / run.batch / len(run.steady))


def test_inter_step_overlap_gains_with_delta(paper: Paper) -> None:
    rows = paper.inter()
    assert [row["delta"] for row in rows] == list(INTER_DELTAS)
    assert np.all(np.diff([row["step_s"] for row in rows]) < 0)
    assert np.all(np.diff([row["decode_steps"] for row in rows]) < 0)
    assert rows[0]["speedup"] == 1 and rows[0]["deferrals"] == 0


@pytest.mark.parametrize("setup", ["se7b", "se3b"])
def test_intra_step_overlap_hides_scoring_and_no_more(paper: Paper, setup: str) -> None:
    """It cannot exceed 1 / (1 - scoring's share of the step); both overlaps gain more than either."""
    intra, inter, full = (row for row in paper.ablation() if row["setup"] == setup)
    base = paper.mode(setup, "sequential")
    assert 1 < intra["speedup"] <= intra["bound"] == pytest.approx(1 / (1 - base.scored_s / base.step_s))
    assert full["speedup"] > max(intra["speedup"], inter["speedup"])


def equal_lengths(chunk: int, length: int, lines: tuple[float, float, float]) -> float:
    """Seconds of a step with intra-step overlap alone: `lines` are of a round, a decode step and a token that is scored."""
    round_s, step_s, token_s = lines
    setting = replace(SETTINGS["se7b"], lengths=Lengths(1, length, 0.0, length), training=1, batch=8)
    case = Case(setting, 0)
    overlap = case.config.overlap.model_copy(update={"inter": False, "chunk": chunk})
    score = Linear(0.0, token_s)
    free = Linear(0.0, 0.0)
    costs = StepCosts(
        Costs(Linear(step_s, 0.0), free, {"actor": free, "reference": free, "reward": score}, score=free, message_s=0.0),
        round_s=round_s,
    )
    run = VirtualRun(case.config.model_copy(update={"overlap": overlap}), costs, lambda _: length, prompt_tokens=1, endless=True)
    return list(run.steps(3))[-1].step_s


def test_the_chunk_curve_is_a_u_with_its_least_where_the_law_says() -> None:
    """const + f T / C + s C: rounds cost f once, and the last chunk of all sequences is scored alone."""
    round_s, step_s, token_s, length = 0.01, 0.02, 1e-4, 1024
    chunks = [2**power for power in range(3, 11)]
    seconds = [equal_lengths(chunk, length, (round_s, step_s, token_s)) for chunk in chunks]
    law = [step_s * length + round_s * length / chunk + 8 * token_s * chunk for chunk in chunks]
    assert np.diff(seconds) == pytest.approx(np.diff(law), abs=2 * round_s + 8 * token_s)
    least = chunks[int(np.argmin(seconds))]
    assert 0 < np.argmin(seconds) < len(chunks) - 1
    assert np.all(np.diff(np.sign(np.diff(seconds))) >= 0)
    assert 0.5 <= least / least_chunk(round_s, length, 8 * token_s) <= 2


def test_the_command_prints_each_figure_beside_the_papers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(studies, "CHUNKS", (500, 4096))
    monkeypatch.setattr(studies, "INTER_DELTAS", (0, 8))
    assert main(["--steps", "5", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    for figure in ("figure 3", "figure 5", "figure 6", "figure 7a", "figure 7b", "table 1", "table 2", "table 4"):
        assert f" {figure}  " in said or f"\n{figure}  " in said, figure
    found = json.loads((tmp_path / "paper.json").read_text())
    assert {path.name for path in tmp_path.iterdir()} == {"paper.json"}
    printed = {row["what"]: row["printed"] for row in found["comparison"]}
    assert printed["se3b: inter"] == 13000 / 6300 and printed["speed-up over TRL"] == 498.30 / 111.08
    assert all(row["why"] for row in found["comparison"]) and all(row["why"] for row in found["assumed"])
    assert main(["--steps", "5", "--out", str(tmp_path)]) == 2
    assert "not overwritten" in capsys.readouterr().err


@pytest.mark.long
def test_the_page_has_the_figures_of_the_command() -> None:
    page, whole = (Path(__file__).resolve().parents[2] / "benchmarks" / "README.md").read_text(encoding="utf-8"), Paper(100, 0)
    for row in whole.speedups():
        cells = " | ".join(f"{row[key]:.2f}" for key in ("speedup", "speedup_implied", "speedup_padded"))
        assert f"| {cells} | {row['stated']:g} |" in page
    rows = whole.ablation()
    for three in (rows[:3], rows[3:]):
        simulated, printed = (", ".join(f"{row[key]:.2f}" for row in three) for key in ("speedup", "printed"))
        assert f"| {simulated} | {printed} |" in page
    means = ", ".join(f"{row['mean']:.2f}" for row in whole.deferral()[1:])
    assert f"| {means} | 0.24 |" in page

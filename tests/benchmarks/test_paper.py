"""OPPO's figures in virtual time: laws that hold whatever is assumed, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.paper import figures as studies
from benchmarks.paper.__main__ import main
from benchmarks.paper.assumptions import SETTINGS, Lengths
from benchmarks.paper.figures import INTER_DELTAS, Paper, implied_delta, least_chunk
from benchmarks.paper.runs import Case
from oppo_megatron.schedule.weaving.costs import Costs, Linear
from oppo_megatron.sim.runs.step_costs import StepCosts
from oppo_megatron.sim.runs.virtual import VirtualRun

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
    overlap = case.config.overlap.model_copy(
        update={"inter": False, "chunk": case.config.overlap.chunk.model_copy(update={"tokens": chunk})}
    )
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
    """With two chunks and two deltas, which leave the tables as they are."""
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
    """At its defaults, of figures 3 and 6 and table 2's mean."""
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

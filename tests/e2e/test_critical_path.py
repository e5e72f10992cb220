"""Hidden and exposed seconds of scoring and of the critic's update, in real runs, against their traces."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.rundir.metrics_log import read_metrics
from oppo_megatron.rundir.trace import read_trace
from tests.support.layouts import deep
from tests.support.ppo import Workspace
from tests.support.ranks import run_ranks

SLOW_S = 0.6
PAIR = {"placement.mode": "disaggregated", "overlap.intra": True}


def run(workspace: Workspace, name: str, ranks: int, **changes: Any) -> tuple[list[dict[str, Any]], list[Counter[str]]]:
    """The lines of a run whose critic is slow, and the seconds of the actor's spans by name in each step."""
    config = deep(workspace, name, steps=3, **changes)
    run_ranks(ranks, "tests.e2e.jobs:train_with_a_slow_critic", config=config, seconds=SLOW_S)
    lines = read_metrics(Path(config["run_dir"]) / "metrics.jsonl")
    spans = [Counter[str]() for _ in lines]
    for span in read_trace(Path(config["run_dir"]) / "trace.json"):
        if span.rank == 0 and span.role == "actor":
            spans[span.step - 1][span.name] += span.end - span.start
    for line in lines:
        assert line["critic_update_s"] > SLOW_S
        assert line["critic_exposed_s"] + line["critic_hidden_s"] == pytest.approx(line["critic_update_s"])
        assert min(line["critic_exposed_s"], line["critic_hidden_s"], line["score_exposed_s"]) >= 0
        assert line["score_hidden_s"] == pytest.approx(max(0.0, line["score_busy_s"] - line["score_exposed_s"]))
    return lines, spans


def test_a_hidden_update_is_exposed_where_the_actor_waits_for_it(workspace: Workspace) -> None:
    """The actor decodes for less time than the critic takes: what it then waits is the critic's and the scoring's, together
    the whole wait; after the last step it waits for the critic alone."""
    lines, spans = run(workspace, "hidden", 2, **PAIR)
    for before, line, seconds in zip(lines, lines[1:], spans[1:], strict=False):
        assert before["critic_exposed_s"] + line["score_exposed_s"] == pytest.approx(seconds["wait_scores"], abs=1e-4)
        busy_elsewhere = seconds["decode"] + spans[line["step"] - 2]["update"]
        assert before["critic_exposed_s"] > SLOW_S / 4 or busy_elsewhere > SLOW_S / 2
        assert before["critic_hidden_s"] > 0, "it began with the actor's own update"
    assert lines[0]["score_exposed_s"] == pytest.approx(spans[0]["wait_scores"], abs=1e-4), "no update is before step 1"
    assert lines[-1]["critic_exposed_s"] == pytest.approx(spans[-1]["wait_update"], abs=1e-3)


def test_a_critic_that_is_waited_for_is_exposed_but_for_the_actors_own_update(workspace: Workspace) -> None:
    lines, spans = run(workspace, "waited", 2, **PAIR, **{"overlap.without": ["critic"]})
    for line, seconds in zip(lines, spans, strict=True):
        assert line["critic_exposed_s"] == pytest.approx(min(seconds["wait_update"], line["critic_update_s"]), abs=1e-3)
        assert line["score_exposed_s"] == pytest.approx(seconds["wait_scores"], abs=1e-4)


def test_no_figure_goes_by_a_clock_that_somebody_sets(workspace: Workspace) -> None:
    """A step that took less than no time has stopped runs, by way of the chunk's tuner."""
    config = workspace.config("set-back", **{"overlap.intra": True, "overlap.chunk": [7, 16, 32, 64]})
    run_ranks(1, "tests.e2e.jobs:train_while_the_clock_is_set_back", config=config)
    lines = read_metrics(Path(config["run_dir"]) / "metrics.jsonl")
    times = [line[name] for line in lines for name in line if name.endswith("_s") and name != "idle_s"]
    assert len(lines) == 3 and all(0 <= seconds < 60 for seconds in times)
    assert all(0 <= span.end - span.start < 60 for span in read_trace(Path(config["run_dir"]) / "trace.json"))


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_on_the_actors_ranks_all_of_the_update_is_exposed(workspace: Workspace, ranks: int) -> None:
    mode = {"mode": "colocated", "actor": {"pp": ranks}}
    lines, _ = run(workspace, f"colocated-{ranks}", ranks, placement=mode, **{"overlap.intra": True})
    assert all(line["critic_hidden_s"] == 0 for line in lines)

"""The comparison over seeds: paired statistics by hand, and what the command refuses."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.seeds import compare, difference, main, remarks
from oppo_megatron.cli import demo


def figures(step_s: float, reward: float, accuracy: float) -> dict[str, Any]:
    return {"step_s": step_s, "reward_half": reward, "reward_last": reward, "accuracy_before": 0.2, "accuracy_after": accuracy}


def test_difference_by_hand() -> None:
    found = difference([1.0, 2.0, 3.0], [2.0, 2.5, 6.0])
    assert found["difference_mean"] == pytest.approx(1.5)
    assert found["difference_sd"] == pytest.approx((1.75) ** 0.5)
    assert found["base_mean"] == 2.0
    assert found["other_mean"] == 3.5
    assert found["p"] == pytest.approx(2 / 8), "only all plus and all minus are as far from 0"
    assert difference([1.0, 2.0], [2.0, 1.0])["p"] == 1.0
    assert difference([1.0, 1.0], [1.0, 1.0])["p"] == 1.0


def test_rows_and_remarks() -> None:
    demos = {
        1: {"sequential": figures(1.0, 0.5, 0.6), "oppo": figures(0.5, 0.5, 0.7)},
        2: {"sequential": figures(1.2, 0.8, 0.6), "oppo": figures(0.8, 0.4, 0.5)},
    }
    result = compare(demos)
    assert [row["speedup"] for row in result["results"]] == pytest.approx([2.0, 1.5])
    assert [row["reward_per_second"] for row in result["results"]] == pytest.approx([2.0, 0.75])
    rates = result["tests"]["reward per second"]
    assert (rates["base_mean"], rates["other_mean"]) == pytest.approx(((0.5 + 0.8 / 1.2) / 2, (1.0 + 0.5) / 2))
    assert result["tests"]["held-out accuracy"]["difference_mean"] == pytest.approx(0.0)
    text = "\n".join(remarks(result))
    assert "difference -0.200" in text
    assert "1.75 times as fast" in text


def test_one_seed_has_no_spread(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "3,3"]) == 2
    assert "needs two different seeds" in capsys.readouterr().err


@pytest.mark.parametrize(("code", "ends", "says"), [(75, 143, "stopped in the demo of seed 3"), (130, 130, "interrupted")])
def test_a_demo_that_was_ended_is_no_wrong_input(
    code: int, ends: int, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "run", lambda settings: code)
    assert main(["--seeds", "3,4"]) == ends
    assert says in capsys.readouterr().err

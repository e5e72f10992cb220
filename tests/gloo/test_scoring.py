"""Streamed rewards, reference log-probs and values equal those of the full-sequence forward."""

from __future__ import annotations

import pytest

from tests.gloo.jobs_scoring import ROLES, SIZES, STREAMED
from tests.support.ranks import run_ranks

TOLERANCE = 1e-5


LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2), (1, 2, 2)]
layouts = pytest.mark.parametrize(("tp", "pp", "dp"), LAYOUTS, ids=[f"tp{tp}-pp{pp}-dp{dp}" for tp, pp, dp in LAYOUTS])


@pytest.fixture
def chosen(models: dict[str, str]) -> dict[str, str]:
    return {
        "reward": models["qwen2-scalar"],
        "reference": models["llama"],
        "critic": models["qwen3-scalar"],
        "process": models["qwen2-scalar"],
    }


@layouts
def test_streamed_outputs_equal_the_full_forward(chosen: dict[str, str], tp: int, pp: int, dp: int) -> None:
    answers = run_ranks(tp * pp * dp, "tests.gloo.jobs_scoring:streamed_against_full", models=chosen, tp=tp, pp=pp)
    for answer in answers:
        assert set(answer) == {f"{role}/{slots}" for role in STREAMED for slots in (len(SIZES), 3, 1)}
        for name, report in answer.items():
            assert report["error"] < TOLERANCE, (name, report)
            assert report["taken"] == 1
    assert max(answer["reference/3"]["error"] for answer in answers) > 0
    if dp > 1:
        return
    # With too few slots sequences were evicted and admitted again; with enough they were not.
    assert answers[0]["reward/3"]["opened"] > len(SIZES) + 1
    assert answers[0][f"reward/{len(SIZES)}"]["opened"] == len(SIZES) + 1


@pytest.mark.parametrize(("tp", "pp", "dp"), [(1, 1, 1), (1, 2, 1), (1, 2, 2), (2, 2, 1)])
def test_three_roles_stream_side_by_side(chosen: dict[str, str], tp: int, pp: int, dp: int) -> None:
    answers = run_ranks(tp * pp * dp, "tests.gloo.jobs_scoring:together", models=chosen, tp=tp, pp=pp)
    for role in ROLES:
        errors = [answer[role] for answer in answers]
        assert max(errors) < TOLERANCE and sum(error > 0 for error in errors) >= tp * dp, (role, errors)

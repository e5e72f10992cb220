"""The paper's five tasks, with the harness's own prompts and figures: every answer equals its own Hugging Face model's."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: make test-lmeval")

import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from oppo_megatron.evaluation.tasks import TaskConfig, find_tasks, load_task
from tests.lmeval.data import write_data, write_policy
from tests.lmeval.jobs import responses_of
from tests.support.ranks import run_ranks

CASES = {"whole": (2048, False), "cut": (400, False), "chat": (2048, True)}
"""Tokens of the context, the smaller one cuts prompts with examples; whether prompts are put into a chat template."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TaskConfig]:
    return find_tasks(["paper"], write_data(tmp_path_factory.mktemp("data")), "--task-data", read=True)


@pytest.fixture(scope="module", params=CASES)
def reference(request: pytest.FixtureRequest, policy: Path, tasks: dict[str, TaskConfig]) -> Any:
    context, as_chat = CASES[request.param]
    model = HFLM(pretrained=str(policy), device="cpu", dtype="float32", batch_size=4, max_length=context)
    loaded = [load_task(config) for config in tasks.values()]
    harness = TaskManager(include_defaults=False)
    found = lm_eval.simple_evaluate(model, tasks=loaded, task_manager=harness, apply_chat_template=as_chat)
    return context, as_chat, found


def numbers(response: Any) -> tuple[float, bool]:
    """A log-likelihood and a greedy flag, as the harness keeps them."""
    return float(response[0]), str(response[1]) == "True"


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)], ids=["one", "TP2", "PP2", "DP2"])
def test_answers_and_figures_are_those_of_the_harness_own_model(
    reference: Any, policy: Path, tasks: dict[str, TaskConfig], layout: tuple[int, int, int]
) -> None:
    context, as_chat, expected = reference
    ranks = layout[0] * layout[1] * layout[2]
    found = run_ranks(
        ranks, "tests.lmeval.jobs:measured", directory=policy, tasks=tasks, layout=layout, context=context, as_chat=as_chat
    )
    ((responses, results, told),) = [each for each in found if each is not None]
    theirs = responses_of(expected)
    assert results.keys() == tasks.keys() and responses.keys() == theirs.keys()
    compared = worst = greedy = 0.0
    for name, rows in theirs.items():
        assert len(rows) == len(responses[name])
        for (*where, ours), (*there, own) in zip(responses[name], rows, strict=True):
            assert where == there
            if name == "gsm8k":
                assert ours == own
                continue
            for a, b in zip(ours, own, strict=True):
                (logp, flag), (logp_there, flag_there) = numbers(a[0]), numbers(b[0])
                worst, compared, greedy = max(worst, abs(logp - logp_there)), compared + 1, greedy + flag
                assert flag == flag_there
    assert worst < 1e-4 and compared > 150
    texts = {text for _, _, ((text,),) in responses["gsm8k"]}
    assert len(texts) > 3, "the tiny model writes various texts"
    for name, result in results.items():
        figures = expected["results"][name.partition("@")[0]]
        for label, figure in result["metrics"].items():
            metric, _, filtered = label.partition(" ")
            assert figure["mean"] == pytest.approx(figures[f"{metric},{filtered or 'none'}"], abs=1e-6)
            assert figure["error"] == pytest.approx(figures[f"{metric}_stderr,{filtered or 'none'}"], abs=1e-6)
            assert len(figure["documents"]) == 12
    assert any("WARNING" in line for line in told) == (context == 400)

"""The plugin against the real NeMo-Aligner: its `PPOTrainer` and our subclass drive the same `MegatronGPTActorModel`.

Runs in an environment of its own: `make test-aligner`.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("nemo_aligner") is None:
    pytest.skip("needs nemo_aligner, in an environment of its own: make test-aligner", allow_module_level=True)

import torch

from oppo_megatron.cli.main import main
from tests.aligner.job import Job
from tests.support.hf import SIZES, save_tiny
from tests.support.ranks import run_ranks

NO_DELTA = {"delta": {"rule": "fixed", "initial": 0, "max": 0}}
DELTA = {"delta": {"rule": "fixed", "initial": 4, "max": 8}, "chunk": {"tokens": 4, "adaptive": False}}
EVERY = list(range(32))


def run(job: Job, world: int = 1, entry: str = "run") -> list[dict[str, Any]]:
    return run_ranks(world, f"tests.aligner.jobs:{entry}", timeout_s=100.0, job=job)


def trained(results: list[dict[str, Any]], steps: slice = slice(None)) -> list[int]:
    """The prompts of these steps on all ranks, in order."""
    return sorted(prompt for result in results for batch in result["trained"][steps] for prompt in batch)


def same(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """The same training, to the last bit."""
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["trained"] == other["trained"] and mine["optim"] == other["optim"]
        assert all(torch.equal(mine["weights"][name], other["weights"][name]) for name in other["weights"])
        assert mine["draw"] == other["draw"], "as many random numbers were drawn"
        for a, b in zip(mine["rollouts"] + mine["validation"], other["rollouts"] + other["validation"], strict=True):
            assert {name: a[name] for name in b} == b


@pytest.mark.parametrize("world", [1, 2])
def test_without_delta_training_is_nemo_aligners(world: int) -> None:
    job = Job(val_every=2, warmup=1)
    same(run(replace(job, oppo=NO_DELTA), world), run(job, world))


@pytest.mark.parametrize(("world", "changes"), [(1, {}), (2, {}), (1, {"random_sampler": False})])
def test_with_delta_every_prompt_is_trained_once(world: int, changes: dict[str, Any]) -> None:
    results = run(Job(oppo=DELTA, **changes), world)
    assert trained(results) == EVERY
    rollouts = results[0]["rollouts"]
    assert [row["oppo_deferred"] for row in rollouts] == [4, 4, 4, 0], "the epoch's end drains the pool"
    assert any(row["oppo_stale_tokens"] > 0 for row in rollouts)
    assert results[0]["step"] == 4 and results[0]["consumed"] == 32


def test_each_epoch_has_every_prompt_once() -> None:
    results = run(Job(oppo=DELTA, epochs=2))
    assert trained(results, slice(0, 4)) == EVERY and trained(results, slice(4, 8)) == EVERY


def test_a_longer_answer_is_waited_for_in_the_end() -> None:
    results = run(Job(oppo=DELTA | {"max_deferrals": 1}))
    assert trained(results) == EVERY
    assert max(row["oppo_max_deferrals"] for row in results[0]["rollouts"]) == 1


def test_validation_leaves_the_pool_alone() -> None:
    job = Job(oppo=DELTA, greedy=True)
    plain, validated = run(job)[0], run(replace(job, val_every=1))[0]
    assert plain["trained"] == validated["trained"]
    assert len(validated["validation"]) == 4 and validated["validation"][0]["rollout_size"] == 8


def test_the_critics_warm_up_gives_its_rollouts_back() -> None:
    result = run(Job(oppo=DELTA, warmup=2))[0]
    warm, steps = result["trained"][:2], result["trained"][2:]
    assert len(warm) == 2 and len(steps) == 4
    later = [prompt for batch in steps[1:] for prompt in batch]
    # NeMo-Aligner goes back to one batch of consumed prompts: the other 24 come, once each, none from before the rewind.
    assert len(later) == len(set(later)) == 24
    unrewound = run(Job(warmup=2))[0]["trained"][3:]
    assert sorted(later) == sorted(prompt for batch in unrewound for prompt in batch)


@pytest.mark.parametrize("world", [1, 2])
def test_deferred_rows_survive_a_resume(world: int, tmp_path: Path) -> None:
    job = Job(oppo=DELTA, greedy=True, save_every=2, folder=tmp_path)
    whole = run(job, world)
    assert whole[0]["rollouts"][1]["oppo_deferred"] == 4
    resumed = run(replace(job, resume=2), world)
    assert sorted(trained(whole, slice(0, 2)) + trained(resumed)) == EVERY
    for before, after in zip(whole, resumed, strict=True):
        assert before["trained"][2:] == after["trained"]
        assert all(torch.equal(before["weights"][name], after["weights"][name]) for name in before["weights"])
    other = replace(job, resume=2, oppo=DELTA | {"delta": {"rule": "eq4"}})
    for text in run_ranks(world, "tests.aligner.jobs:refused_resume", job=other):
        assert "trainer.ppo.oppo.delta.rule is eq4, but the checkpoint's run has fixed" in text
    (tmp_path / "oppo" / "step-000002").rename(tmp_path / "oppo" / "step-000003")
    refused = run_ranks(world, "tests.aligner.jobs:refused_resume", job=replace(job, resume=2))
    for text in refused:
        assert text.startswith("CheckpointError") and "no rows of step 2, only of 3, 4" in text
    refused = run_ranks(3 - world, "tests.aligner.jobs:refused_resume", job=replace(job, resume=4))
    for text in refused:
        assert (
            text.startswith("CheckpointError")
            and f"rows of {world} data-parallel replicas, there are {3 - world}" in text
        )


@pytest.mark.parametrize("delta", [NO_DELTA, DELTA])
def test_rewards_that_are_streamed_are_those_of_whole_sequences(delta: dict[str, Any]) -> None:
    job = Job(oppo=delta | {"chunk": {"tokens": 4, "adaptive": False}}, val_every=2)
    plain, streamed = run(job), run(job, entry="run_streamed")
    same(streamed, plain)
    pieces = streamed[0]["pieces"]
    assert sum(count for _, count, _ in pieces) == sum(streamed[0]["lengths"].values()), "every token is sent once"
    assert sum(final for *_, final in pieces) == 32 + 2 * 8
    assert len(pieces) > 1.5 * 48, "most were begun before they were whole"


def test_what_generates_without_a_break_is_refused() -> None:
    job = Job(oppo=DELTA)
    refused = run_ranks(1, "tests.aligner.jobs:refusal", job=job, **{"trt_llm.enable": True})[0]
    assert "trainer.ppo.trt_llm.enable is true" in refused and "set it to false" in refused
    refused = run_ranks(1, "tests.aligner.jobs:refusal", job=job, batch_iterator_cls=dict)[0]
    assert "the batch iterator is dict" in refused and "use_flask" in refused
    refused = run_ranks(1, "tests.aligner.jobs:refusal", job=replace(job, oppo={"delta": {"max": 9}}))[0]
    assert "delta.max 9 is more than the batch of 8" in refused
    refused = run_ranks(1, "tests.aligner.jobs:refusal", job=replace(job, oppo={"dleta": {}}))[0]
    assert "ConfigError" in refused and "dleta" in refused and "delta" in refused
    refused = run_ranks(1, "tests.aligner.jobs:refusal", job=job, oppo=5)[0]
    assert "trainer.ppo.oppo is 5, but must be a section of keys" in refused
    assert run_ranks(1, "tests.aligner.jobs:refusal", job=job) == ["taken"]


@pytest.mark.parametrize("tied", [False, True])
def test_a_converted_reward_model_has_all_that_nemo_aligners_asks_for(tied: bool, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "hf", "llama", "scalar", tie_word_embeddings=tied)
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "nemo"), "--to", "nemo", "--as", "reward"]) == 0
    (found,) = run_ranks(
        1, "tests.aligner.jobs:load_reward_model", weights=str(tmp_path / "nemo" / "model_weights"), sizes=SIZES, tied=tied
    )  # fmt: skip
    assert torch.equal(found["model.rm_head.weight"], model.score.weight)
    assert torch.equal(found["model.embedding.word_embeddings.weight"], model.model.embed_tokens.weight)

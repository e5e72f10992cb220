"""Decoding: draws depend on nothing but seed, sequence and position; log-probs are those of the training forward."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from oppo_megatron.engine.sampler import Sampling
from tests.gloo.conftest import save_small
from tests.gloo.jobs_generation import EOS, MAX_RESPONSE, PROMPTS, VARIANTS
from tests.support.ranks import run_ranks
from tests.unit.test_engine_sampler import plain_truncation

SAMPLINGS = {
    "whole": Sampling(seed=7),
    "cool": Sampling(0.7, seed=7),
    "cool, truncated": Sampling(0.7, top_k=9, top_p=0.8, seed=7),
    "truncated": Sampling(1.0, top_k=9, seed=8),
    "greedy": Sampling(0.0),
}
LOGPROB_TOLERANCE = 1e-4


LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2), (1, 2, 2)]
layouts = pytest.mark.parametrize(
    ("tp", "pp", "dp"),
    [pytest.param(*layout, marks=[pytest.mark.long] if layout in LAYOUTS[3::2] else []) for layout in LAYOUTS],
    ids=[f"tp{tp}-pp{pp}-dp{dp}" for tp, pp, dp in LAYOUTS],
)


@pytest.fixture(scope="module")
def drawn() -> dict[str, Any]:
    return {}


@layouts
def test_draws_depend_on_seed_sequence_and_position_alone(
    models: dict[str, str], tp: int, pp: int, dp: int, drawn: dict[str, Any]
) -> None:
    chosen = {name: SAMPLINGS[name] for name in ("whole", "truncated")}
    few = ["plain", "two slots", "cache forgotten each round", "two micro-batches"]
    labels = list(VARIANTS) if (tp, pp, dp) == (1, 1, 1) else few
    answers = run_ranks(
        tp * pp * dp,
        "tests.gloo.jobs_generation:every_variant",
        directory=models["qwen2"],
        tp=tp,
        pp=pp,
        samplings=chosen,
        variants=labels,
    )
    assert all(answer == answers[0] for answer in answers)  # every rank keeps the same books
    for name in chosen:
        plain = drawn.setdefault(name, answers[0][f"{name}/plain/packed"])
        variants = {key: value for key, value in answers[0].items() if key.startswith(f"{name}/")}
        assert len(variants) == len(labels) + 2
        for label, rollouts in variants.items():
            assert rollouts == plain, label
        lengths = [len(tokens) for tokens, _ in plain.values()]
        assert len(set(lengths)) > 2 and len({tuple(tokens) for tokens, _ in plain.values()}) == len(PROMPTS)
        for tokens, reason in plain.values():
            assert EOS not in tokens[:-1]
            assert (tokens[-1] == EOS and reason == "eos") or (len(tokens) == MAX_RESPONSE and reason == "length")


@pytest.mark.long
def test_a_vocabulary_that_tensor_ranks_do_not_divide_is_drawn_from_alike(tmp_path: Path) -> None:
    """No draw falls on a row that belongs to no token, and none is moved by such rows."""
    save_small(tmp_path, "qwen3", vocab_size=67)
    found = {}
    for tp, pp in [(1, 1), (4, 1), (2, 2)]:
        job: dict[str, Any] = dict(directory=str(tmp_path), tp=tp, pp=pp, samplings=SAMPLINGS)
        answers = run_ranks(tp * pp, "tests.gloo.jobs_generation:every_variant", variants=["plain"], **job)
        assert all(answer == answers[0] for answer in answers)
        found[tp, pp] = answers[0]
    drawn = [token for tokens, _ in found[1, 1]["whole/plain/packed"].values() for token in tokens]
    assert max(drawn) > 51, "the last shard is drawn from"
    assert found[4, 1] == found[1, 1] == found[2, 2]


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2)])
def test_greedy_responses_through_a_window_are_those_of_transformers(models: dict[str, str], tp: int, pp: int) -> None:
    labels = ["plain", "two slots", "cache forgotten each round"] if tp == 1 else ["plain"]
    job: dict[str, Any] = dict(directory=models["mistral"], tp=tp, pp=pp, samplings={"greedy": Sampling(0.0)})
    (answer, *_) = run_ranks(tp * pp, "tests.gloo.jobs_generation:every_variant", variants=labels, **job)
    theirs = AutoModelForCausalLM.from_pretrained(models["mistral"], dtype=torch.float32)
    expected = []
    for prompt in PROMPTS:
        settings: dict[str, Any] = {"max_new_tokens": MAX_RESPONSE, "do_sample": False, "eos_token_id": EOS}
        expected.append(theirs.generate(torch.tensor([prompt]), **settings)[0, len(prompt) :].tolist())
    for label, rollouts in answer.items():
        assert [tokens for tokens, _ in rollouts.values()] == expected, label
    assert max(map(len, expected)) > 6, "the window leaves something out"


@layouts
def test_recorded_log_probs_are_those_of_the_training_forward(models: dict[str, str], tp: int, pp: int, dp: int) -> None:
    for model in ("qwen3", "llama", "mistral") if (tp, pp, dp) == (1, 1, 1) else ("qwen3",):
        answers = run_ranks(
            tp * pp * dp, "tests.gloo.jobs_generation:logprob_gaps", directory=models[model], tp=tp, pp=pp, samplings=SAMPLINGS
        )
        speakers = [answer for answer in answers if "training" in answer["whole"]]
        assert len(speakers) == tp * dp
        for answer in speakers:
            for name, sampling in SAMPLINGS.items():
                check_log_probs(answer[name], sampling)


def check_log_probs(answer: dict[str, Any], sampling: Sampling) -> None:
    assert answer["logprobs"] == pytest.approx(answer["training"], abs=LOGPROB_TOLERANCE)
    rows = zip(answer["tokens"], answer["sampling_logprobs"], answer["logits"], strict=True)
    if sampling.temperature == 0:
        for token, sampled, logits in rows:
            assert logits[token] == max(logits) and sampled == 0
    elif sampling.top_k or sampling.top_p < 1:
        for token, sampled, logits in rows:
            assert sampled == pytest.approx(math.log(plain_truncation(logits, sampling)[token]), abs=LOGPROB_TOLERANCE)
        assert answer["sampling_logprobs"] != answer["logprobs"]
    else:
        assert answer["sampling_logprobs"] == answer["logprobs"]


ENDS = [(1, 1, 1, 1), (1, 1, 1, 3), (1, 2, 1, 2), (2, 1, 2, 1), (1, 2, 2, 2)]


@pytest.fixture(scope="module")
def ended() -> dict[str, Any]:
    return {}


@pytest.mark.parametrize(("tp", "pp", "dp", "micro_batches"), ENDS)
def test_a_round_ends_with_the_batch_and_goes_on_under_new_weights(
    models: dict[str, str], tp: int, pp: int, dp: int, micro_batches: int, ended: dict[str, Any]
) -> None:
    answers = run_ranks(
        tp * pp * dp, "tests.gloo.jobs_generation:early_end", directory=models["qwen2"], tp=tp, pp=pp, micro_batches=micro_batches
    )
    cached: dict[int, int] = {}
    for answer in answers:
        cached |= answer.pop("cached")
        gaps = answer.pop("gaps", None)
        if gaps is not None:
            check_versions(gaps, answer["versions"])
    answer = answers[0]
    assert all(other == answer for other in answers), "each rank would send the same message, to the bit"
    assert len(answer.pop("sent")) == 4
    finished = {k: (n, clock) for k, (n, clock) in answer["summary"].items() if clock is not None}
    num_steps = answer["clock"] - 100
    assert len(finished) >= 2 and max(clock for _, clock in finished.values()) == answer["clock"]
    for num_tokens, clock in finished.values():
        assert clock == 100 + num_tokens  # one token a step from the first
    prompts = {50 + i: len(tokens) for i, tokens in enumerate(PROMPTS)}
    running = set(answer["summary"]) - set(finished)
    assert running and all(answer["summary"][k][0] == num_steps for k in running)
    assert cached == {k: prompts[k] + num_steps - 1 for k in running}
    assert ended.setdefault("answer", answer) == answer


def check_versions(gaps: list[float], versions: list[int]) -> None:
    """Tokens drawn after the weights changed have the log-probs of the new weights, those before do not."""
    fresh = [abs(gap) for gap, version in zip(gaps, versions, strict=True) if version == 1]
    stale = [abs(gap) for gap, version in zip(gaps, versions, strict=True) if version == 0]
    assert max(fresh) < LOGPROB_TOLERANCE < max(stale)

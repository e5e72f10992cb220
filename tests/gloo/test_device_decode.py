"""Tokens that stay on the device for a while: rounds come out as where each token is looked at, in dense and paged caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.engine.sampler import Sampling
from oppo_megatron.records import Members
from tests.gloo.conftest import save_small
from tests.gloo.jobs_device_decode import Course, Way
from tests.support.ranks import run_ranks

TOLERANCE = 1e-4
SAMPLINGS = [
    Sampling(seed=7),
    Sampling(0.7, seed=7),
    Sampling(1.0, top_k=9, seed=8),
    Sampling(0.8, top_p=0.8, seed=9),
    Sampling(0.0),
]
COURSES = [
    Course(seed, micro_batches, slots, SAMPLINGS[seed % len(SAMPLINGS)])
    for seed, micro_batches, slots in [
        (0, 1, 11),
        (1, 2, 11),
        (2, 1, 5),
        (13, 3, 7),
        (4, 1, 11),
        (5, 2, 3),
        (6, 1, 11),
    ]  # fmt: skip
]
COURSES.append(Course(7, 2, 5, Sampling(seed=7, members=Members(1, greedy=True))))  # every other sequence is greedy
PLAIN = Way()
WAYS = [Way(2), Way(4, "paged"), Way(64), Way(5, "dense", "module"), Way(3, "paged", "fused"), Way(1, "paged")]


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("model", ["qwen2", pytest.param("qwen3", marks=pytest.mark.long)])
def test_rounds_are_the_same_whenever_tokens_are_read(models: dict[str, str], tp: int, model: str) -> None:
    ways, courses = (WAYS, COURSES) if tp == 1 else (WAYS[:2], COURSES[:4])
    answers = run_ranks(
        tp,
        "tests.gloo.jobs_device_decode:beside_each_other",
        directory=models[model],
        tp=tp,
        courses=courses,
        ways=[PLAIN, *ways],
    )
    for answer in answers:
        cut_off = ended_early = by_text = 0
        for course, found in zip(courses, answer, strict=True):
            rounds, logprobs = found[PLAIN]
            ended_early += sum(row[5] == "eos" for facts in rounds for row in facts["rows"])
            by_text += sum(row[5] == "stop" for facts in rounds for row in facts["rows"])
            cut_off += sum(len({len(row[2]) for row in facts["rows"]}) > 1 for facts in rounds)
            for way in ways:
                assert found[way][0] == rounds, (course, way)
                assert found[way][1] == pytest.approx(logprobs, abs=TOLERANCE), (course, way)
        assert ended_early > 1 and cut_off > 5 and by_text > 1
    assert [[found[PLAIN][0] for found in answer] for answer in answers[1:]] == [[found[PLAIN][0] for found in answers[0]]] * (
        tp - 1
    )


@pytest.mark.parametrize(
    ("family", "changes", "ways"),
    [
        pytest.param(
            "qwen3", {"vocab_size": 67}, WAYS[1:2], id="tensor ranks do not divide the vocabulary", marks=pytest.mark.long
        ),
        pytest.param("mistral", {"sliding_window": 5}, WAYS[:2], id="sliding window", marks=pytest.mark.long),
        pytest.param("mistral", {"sliding_window": 1}, WAYS[1:2], id="a window of one token", marks=pytest.mark.long),
    ],
)
def test_shards_and_windows_are_the_same_on_the_device(
    tmp_path: Path, family: str, changes: dict[str, int], ways: list[Way]
) -> None:
    save_small(tmp_path, family, **changes)
    job: dict[str, Any] = dict(directory=str(tmp_path), courses=COURSES[:3], ways=[PLAIN, *ways])
    alone, *shards = (
        answer for tp in (1, 2) for answer in run_ranks(tp, "tests.gloo.jobs_device_decode:beside_each_other", tp=tp, **job)
    )
    for answer in (alone, *shards):
        for found, expected in zip(answer, alone, strict=True):
            for way in (PLAIN, *ways):
                assert found[way][0] == expected[PLAIN][0], way
                assert found[way][1] == pytest.approx(expected[PLAIN][1], abs=TOLERANCE)


@pytest.mark.parametrize(("sync_steps", "expected"), [(2, [2] * 10), (8, [8, 8, 4]), (64, [20])])
def test_the_host_looks_once_in_so_many_steps(models: dict[str, str], sync_steps: int, expected: list[int]) -> None:
    (seen,) = run_ranks(1, "tests.gloo.jobs_device_decode:looks", directory=models["qwen2"], sync_steps=sync_steps)
    assert seen == expected


def test_logits_that_are_no_distribution_are_the_same_error(models: dict[str, str]) -> None:
    (errors,) = run_ranks(1, "tests.gloo.jobs_device_decode:no_distribution", directory=models["qwen2"])
    assert len(errors) == 2 and errors[0] == errors[1]
    assert errors[0].startswith("sequence 5, response token 0: the logits at temperature 1 are not finite")

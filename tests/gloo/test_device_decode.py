"""Tokens that stay on the device for a while: rounds come out as where each token is looked at, in dense and paged caches."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from oppo_megatron.config.model import KVLayout
from oppo_megatron.engine import device_decode
from oppo_megatron.engine.round_runner import RoundRunner
from oppo_megatron.engine.sampler import Sampling
from oppo_megatron.engine.stopping import Stopping, StopText
from oppo_megatron.errors import NumericsError
from oppo_megatron.mcore.kv import sequence_cache
from oppo_megatron.mcore.kv.paged import PagedKVCache
from oppo_megatron.mcore.model import DecodePath, RoleModel
from oppo_megatron.records import Members, Prompt, Rollout
from tests.gloo.models import MAX_LENGTH, load, save_small, world_groups
from tests.gloo.test_generation import NEVER, decode_round, new_rounds
from tests.support.ranks import run_ranks

JOBS = "tests.gloo.test_device_decode:"
MAX_RESPONSE = 22
PIECES = ["".join(random.Random(i).choices("abcde", k=1 + i % 3)) for i in range(64)]
"""Texts of the tokens, of one to three letters."""
Facts = dict[str, Any]


class OwnLimits(Stopping):
    """A limit of its own for each sequence; EOS or a text where the model draws it."""

    def limit(self, seq_id: int) -> int:
        return 1 + seq_id * 7919 % self.max_response_tokens


@dataclass(frozen=True)
class Way:
    sync_steps: int = 1
    layout: KVLayout = "dense"
    path: DecodePath = "packed"


@dataclass(frozen=True)
class Course:
    seed: int
    micro_batches: int
    slots: int
    sampling: Sampling


def _runner(model: RoleModel, course: Course, way: Way) -> RoundRunner:
    cache = model.new_cache(course.slots, layout=way.layout)
    draws, text = random.Random(course.seed), StopText(["cad", "eb"], lambda ids: "".join(PIECES[i % 64] for i in ids))
    eos_ids = (draws.randrange(64), *draws.sample(range(64), 2 * (course.seed % 2)))
    stopping = OwnLimits(eos_ids, MAX_RESPONSE, text=text if course.seed % 3 == 1 else None)
    rounds = new_rounds(model, cache, course.sampling, stopping, sync_steps=way.sync_steps)
    rounds.planner.weave = (course.micro_batches, "auto")
    return rounds


def travel(model: RoleModel, course: Course, way: Way) -> tuple[list[Facts], list[float]]:
    """Rounds of random length until all have ended; returns each round's outcome, and all log-probs of both kinds."""
    draws, rounds = random.Random(course.seed), _runner(model, course, way)
    assert rounds.decode is not None
    cache, clock, version, found = rounds.decode.cache, 0, 0, []
    waiting = [
        Rollout(Prompt(i, i, "", tuple(draws.choices(range(64), k=draws.randint(1, MAX_LENGTH - MAX_RESPONSE)))), i)
        for i in draws.sample(range(1000), 11)
    ]
    rollouts: list[Rollout] = []
    while waiting or any(not r.finished for r in rollouts):
        while waiting and draws.random() < 0.7:
            rollouts.append(waiting.pop())
        active = [r for r in rollouts if not r.finished]
        if not active:
            continue
        needed = draws.randint(1, 3) if draws.random() < 0.5 else NEVER
        chunk = decode_round(rounds, active, draws.randint(1, 9), clock, version, needed)
        lengths = {i: cache.length(i) for i in cache.seq_ids}
        rows = [(r.seq_id, r.offset, r.tokens, r.version, r.finish_clock, r.finish_reason) for r in chunk.rows]
        told = {"index": chunk.index, "clock": chunk.clock, "rows": rows, "lengths": lengths}
        found.append({**told, "slots": cache.seq_ids if course.micro_batches == 1 else []})
        clock = chunk.clock
        if draws.random() < 0.2:
            version += 1
            rounds.actor_changed()
    rounds.executor.finish_sends()
    if isinstance(cache, PagedKVCache):
        assert cache.num_free_blocks == len(cache.k[0]), "ended sequences give all their blocks back"
    rollouts.sort(key=lambda r: r.seq_id)
    return found, [x for r in rollouts for x in (*r.logprobs, *r.sampling_logprobs)]


def beside_each_other(directory: str, tp: int, courses: list[Course], ways: list[Way]) -> list[dict[Way, Any]]:
    groups = world_groups(tp, 1)
    models = {path: load(directory, groups, path=path) for path in {way.path for way in ways}}
    with mock.patch.object(sequence_cache, "REACH", 4):  # so that these short sequences meet several bounds
        return [{way: travel(models[way.path], course, way) for way in ways} for course in courses]


def looks(directory: str, sync_steps: int) -> list[int]:
    """Steps per look at the device, in a round of 20 steps of rollouts that do not end before."""
    model = load(directory, world_groups(1, 1))
    rounds = new_rounds(model, model.new_cache(4), Sampling(seed=1), Stopping((), MAX_RESPONSE), sync_steps=sync_steps)
    seen: list[int] = []
    read = device_decode.DeviceLane.read

    def watched(lane: device_decode.DeviceLane) -> Any:
        rows, drawn = read(lane)
        seen.append(len(drawn))
        return rows, drawn

    with mock.patch.object(device_decode.DeviceLane, "read", watched):
        decode_round(rounds, [Rollout(Prompt(i, i, "", (3, i)), i) for i in range(4)], 20, 0, 0)
    return seen


def no_distribution(directory: str) -> list[str]:
    model, errors = load(directory, world_groups(1, 1)), []
    model.decoder.final_layernorm.weight.data.fill_(float("nan"))
    model.end_weight_update()
    for way in (Way(), Way(4)):
        rounds = _runner(model, Course(3, 1, 4, Sampling(seed=1)), way)
        try:
            decode_round(rounds, [Rollout(Prompt(5, 5, "", (3, 9)), 0)], 8, 0, 0)
        except NumericsError as error:
            errors.append(str(error))
    return errors


TOLERANCE = 1e-4
SAMPLINGS = [
    Sampling(seed=7), Sampling(0.7, seed=7), Sampling(1.0, top_k=9, seed=8), Sampling(0.8, top_p=0.8, seed=9), Sampling(0.0),
]  # fmt: skip
COURSES = [
    Course(seed, micro_batches, slots, SAMPLINGS[seed % len(SAMPLINGS)])
    for seed, micro_batches, slots in [(0, 1, 11), (1, 2, 11), (2, 1, 5), (13, 3, 7), (4, 1, 11), (5, 2, 3), (6, 1, 11)]
]
COURSES.append(Course(7, 2, 5, Sampling(seed=7, members=Members(1, greedy=True))))  # every other sequence is greedy
PLAIN = Way()
WAYS = [Way(2), Way(4, "paged"), Way(64), Way(5, "dense", "module"), Way(3, "paged", "fused"), Way(1, "paged")]


@pytest.mark.parametrize(("model", "tp", "courses", "ways"), [
    ("qwen2", 1, COURSES[1::2], WAYS), pytest.param("qwen2", 1, COURSES[::2], WAYS, marks=pytest.mark.long),
    pytest.param("qwen3", 1, COURSES, WAYS, marks=pytest.mark.long),
    *(pytest.param(each, 2, COURSES[:4], WAYS[:2], marks=pytest.mark.long) for each in ("qwen2", "qwen3")),
])  # fmt: skip
def test_rounds_are_the_same_whenever_tokens_are_read(
    models: dict[str, str], model: str, tp: int, courses: list[Course], ways: list[Way]
) -> None:
    answers = run_ranks(
        tp, f"{JOBS}beside_each_other", directory=models[model], tp=tp, courses=courses, ways=[PLAIN, *ways],
    )  # fmt: skip
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
    told = [[found[PLAIN][0] for found in answer] for answer in answers]
    assert told == [told[0]] * tp


@pytest.mark.parametrize(("family", "changes", "ways"), [
    pytest.param("qwen3", {"vocab_size": 67}, WAYS[1:2], id="odd vocabulary", marks=pytest.mark.long),
    pytest.param("mixtral", {}, WAYS[:2], id="experts", marks=pytest.mark.long),
    pytest.param("mistral", {"sliding_window": 5}, WAYS[:2], id="sliding window", marks=pytest.mark.long),
    pytest.param("mistral", {"sliding_window": 1}, WAYS[1:2], id="a window of one token", marks=pytest.mark.long),
])  # fmt: skip
def test_shards_and_windows_are_the_same(tmp_path: Path, family: str, changes: dict[str, int], ways: list[Way]) -> None:
    save_small(tmp_path, family, **changes)
    job: dict[str, Any] = dict(directory=str(tmp_path), courses=COURSES[:3], ways=[PLAIN, *ways])
    alone, *shards = (answer for tp in (1, 2) for answer in run_ranks(tp, f"{JOBS}beside_each_other", tp=tp, **job))
    for answer in (alone, *shards):
        for found, expected in zip(answer, alone, strict=True):
            for way in (PLAIN, *ways):
                assert found[way][0] == expected[PLAIN][0], way
                assert found[way][1] == pytest.approx(expected[PLAIN][1], abs=TOLERANCE)


@pytest.mark.parametrize(("sync_steps", "expected"), [(2, [2] * 10), (8, [8, 8, 4]), (64, [20])])
def test_the_host_looks_once_in_so_many_steps(models: dict[str, str], sync_steps: int, expected: list[int]) -> None:
    (seen,) = run_ranks(1, f"{JOBS}looks", directory=models["qwen2"], sync_steps=sync_steps)
    assert seen == expected


def test_logits_that_are_no_distribution_are_the_same_error(models: dict[str, str]) -> None:
    (errors,) = run_ranks(1, f"{JOBS}no_distribution", directory=models["qwen2"])
    assert len(errors) == 2 and errors[0] == errors[1]
    assert errors[0].startswith("sequence 5, response token 0: the logits at temperature 1 are not finite")

"""Decoding whose tokens are read once in some steps, beside decoding that reads each, over the same random rounds."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any
from unittest import mock

from oppo_megatron.chunks import Chunk
from oppo_megatron.config.model import KVLayout
from oppo_megatron.engine import device_decode
from oppo_megatron.engine.round_runner import RoundRunner
from oppo_megatron.engine.sampler import Sampling
from oppo_megatron.engine.stopping import Stopping, StopText
from oppo_megatron.errors import NumericsError
from oppo_megatron.mcore.kv import sequence_cache
from oppo_megatron.mcore.kv.paged import PagedKVCache
from oppo_megatron.mcore.model import DecodePath, RoleModel
from oppo_megatron.records import Prompt, Rollout
from tests.gloo.jobs_generation import NEVER, decode_round, new_rounds
from tests.gloo.models import MAX_LENGTH, load, world_groups

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


def _text(seed: int) -> StopText | None:
    return StopText(["cad", "eb"], lambda ids: "".join(PIECES[i % 64] for i in ids)) if seed % 3 == 1 else None


def _eos_ids(seed: int) -> tuple[int, ...]:
    draws = random.Random(seed)
    return tuple([draws.randrange(64), *draws.sample(range(64), 2 * (seed % 2))])


def _runner(model: RoleModel, course: Course, way: Way) -> RoundRunner:
    cache = model.new_cache(course.slots, layout=way.layout)
    stopping = OwnLimits(_eos_ids(course.seed), MAX_RESPONSE, text=_text(course.seed))
    rounds = new_rounds(model, cache, course.sampling, stopping, sync_steps=way.sync_steps)
    rounds.planner.weave = (course.micro_batches, "auto")
    return rounds


def _facts(chunk: Chunk) -> Facts:
    rows = [(r.seq_id, r.offset, r.tokens, r.version, r.finish_clock, r.finish_reason) for r in chunk.rows]
    return {"index": chunk.index, "clock": chunk.clock, "rows": rows}


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
        found.append({**_facts(chunk), "lengths": lengths, "slots": cache.seq_ids if course.micro_batches == 1 else []})
        clock = chunk.clock
        if draws.random() < 0.2:
            version += 1
            rounds.actor_changed()
    rounds.executor.drain()
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

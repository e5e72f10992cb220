"""Ragged decode and chunked prefill from the cache equal the full forward."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from unittest import mock

import pytest
import torch
from torch import Tensor

from oppo_megatron.mcore.fused import FusedStage
from oppo_megatron.mcore.kv.sequence_cache import KVCache
from oppo_megatron.mcore.model import RoleModel, step
from tests.gloo.models import MAX_LENGTH, PATHS, Whole, full_outputs, gather_logits, load, world_groups
from tests.support.ranks import run_ranks
from tests.support.stages import pass_on, stage_inputs


@dataclass
class Call:
    """A unit step: sequence `seq_ids[s]` grows by `lens[s]` of `tokens`; `rows` are the packed rows wanted (None: all)."""

    seq_ids: list[int]
    lens: list[int]
    tokens: list[int] = field(default_factory=list)
    rows: list[int] | None = None


@dataclass
class Walk:
    """Sequences that join, grow by decode and by ragged chunks, roll back and leave; every output is kept."""

    model: RoleModel
    cache: KVCache
    random: random.Random
    tokens: dict[int, list[int]] = field(default_factory=dict)
    visits: list[Whole] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    num_opened: int = 0
    num_rolled_back: int = 0

    def join_leave_roll_back(self) -> None:
        while self.cache.num_free and self.random.random() < 0.4:
            self._join()
        for seq_id in list(self.tokens):
            if len(self.tokens[seq_id]) > MAX_LENGTH - 8 or (len(self.tokens) > 1 and self.random.random() < 0.1):
                self._leave(seq_id)
            elif self.tokens[seq_id] and self.random.random() < 0.15:
                length = self.random.randint(0, len(self.tokens[seq_id]) - 1)
                self.cache.truncate(seq_id, length)
                del self.tokens[seq_id][length:]
                self.num_rolled_back += 1
        if not self.tokens:
            self._join()

    def _join(self) -> None:
        self.cache.open(self.num_opened)
        self.tokens[self.num_opened] = []
        self.num_opened += 1

    def _leave(self, seq_id: int) -> None:
        if self.random.random() < 0.5:
            self.cache.exchange(seq_id, self.random.choice(list(self.tokens)))
        self.cache.close(seq_id)
        del self.tokens[seq_id]

    def grow(self) -> None:
        ids = self.cache.seq_ids
        if self.random.random() < 0.6:
            ids = self.random.sample(ids, self.random.randint(1, len(ids)))
        cut = self.random.randint(0, len(ids) - 1)
        decode = self.random.random() < 0.5
        calls = [self._call(part, decode) for part in (ids[:cut], ids[cut:]) if part]
        for call in calls:
            out = self._pass(call)
            if self.model.groups.is_last_stage:
                self.outputs.append(out)

    def _pass(self, call: Call) -> Tensor:
        inputs = stage_inputs(self.model, torch.tensor(call.tokens))
        rows_R = None if call.rows is None else torch.tensor(call.rows)
        out = step(self.model, self.cache, call.seq_ids, call.lens, inputs, rows_R)
        pass_on(self.model, out)
        return out

    def _call(self, ids: list[int], decode: bool) -> Call:
        call = Call(ids, [1 if decode else self.random.randint(1, 7) for _ in ids])
        chosen: list[int] = []
        for seq_id, new in zip(ids, call.lens, strict=True):
            known = len(self.tokens[seq_id])
            self.tokens[seq_id] += [self.random.randrange(64) for _ in range(new)]
            rows = sorted(self.random.sample(range(new), self.random.randint(0, new)))
            chosen += [len(call.tokens) + r for r in rows]
            call.tokens += self.tokens[seq_id][known:]
            self.visits.append(Whole(list(self.tokens[seq_id]), [known + r for r in rows]))
        if decode or not chosen:
            for seq_id, new, visit in zip(ids, call.lens, self.visits[-len(ids) :], strict=True):
                visit.positions = list(range(len(self.tokens[seq_id]) - new, len(self.tokens[seq_id])))
        else:
            call.rows = chosen
        return call


def _compare(model: RoleModel, seed: int, num_steps: int) -> dict[str, float]:
    walk = Walk(model, model.new_cache(5), random.Random(seed))
    with mock.patch.object(FusedStage, "__call__", autospec=True, side_effect=FusedStage.__call__) as fused_calls:
        for _ in range(num_steps):
            walk.join_leave_roll_back()
            walk.grow()
        report = {"fused_calls": fused_calls.call_count, "opened": walk.num_opened, "rolled_back": walk.num_rolled_back}
    expected = full_outputs(model, walk.visits)
    if expected is None:
        return report
    found = torch.cat([gather_logits(out, model.vocab) if model.head == "lm" else out for out in walk.outputs])
    assert found.shape == expected.shape
    return {**report, "error": float((found - expected).abs().max()), "spread": float(expected.std())}


def cached_against_full(directories: dict[str, str], tp: int, pp: int, num_steps: int) -> dict[str, dict[str, float]]:
    """name/path -> largest difference between cached and full outputs, and how much the walk has met."""
    groups = world_groups(tp, pp)
    reports = {}
    for name, directory in directories.items():
        head = "scalar" if name.endswith("scalar") else "lm"
        for path in PATHS:
            model = load(directory, groups, head, path=path)
            reports[f"{name}/{path}"] = _compare(model, len(reports), num_steps)
    return reports


TOLERANCE = 1e-5
NUM_STEPS = 40
DIFFERENT, ALIKE = ("qwen2", "mistral", "qwen3-scalar"), ("qwen3", "llama")
"""Models; of those that are alike each is tested on parallel groups at length alone."""


@pytest.mark.parametrize(
    ("tp", "pp", "names"),
    [
        pytest.param(1, 1, DIFFERENT + ALIKE, id="tp1-pp1"),
        pytest.param(2, 1, DIFFERENT[:1], id="tp2-pp1"),
        pytest.param(1, 2, DIFFERENT, id="tp1-pp2"),
        pytest.param(2, 1, DIFFERENT[1:] + ALIKE, id="tp2-pp1-others", marks=pytest.mark.long),
        pytest.param(1, 2, ALIKE, id="tp1-pp2-others", marks=pytest.mark.long),
        pytest.param(2, 2, DIFFERENT + ALIKE, id="tp2-pp2", marks=pytest.mark.long),
    ],
)
def test_cached_steps_equal_the_full_forward(models: dict[str, str], tp: int, pp: int, names: tuple[str, ...]) -> None:
    chosen = {name: models[name] for name in names}
    answers = run_ranks(
        tp * pp, "tests.gloo.test_cache:cached_against_full", directories=chosen, tp=tp, pp=pp, num_steps=NUM_STEPS
    )
    speakers = [answer for answer in answers if "error" in answer[f"{names[0]}/fused"]]
    assert len(speakers) == tp  # the last stage
    for answer in speakers:
        for name, report in answer.items():
            assert report["error"] < TOLERANCE, (name, report)
            assert report["spread"] > 0.3 and report["rolled_back"] > 3 and report["opened"] > 8, (name, report)
            assert (report["fused_calls"] > 0) != name.endswith("/module"), (name, report)

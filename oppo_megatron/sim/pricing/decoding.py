"""Seconds of decoding a batch, and cost lines for schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

import numpy as np

from oppo_megatron.columns import Ints
from oppo_megatron.schedule.weaving.costs import Costs, Linear
from oppo_megatron.schedule.weaving.cut import Work, choose_cut, predict_s
from oppo_megatron.sim.laws import WIDTH, all_reduce_s, send_s
from oppo_megatron.sim.pricing.model import LaidModel, Tokens

BLOCKS = 32
"""Intervals of decoding with constant sequences and position."""
SAMPLED_WIDTH = 4
"""Bytes of a sampled logit."""
PASSES = 6
"""Passes over logits per draw: temperature, softmax, cumulative sums."""
DRAWS = 2
"""Messages per draw: shards' masses, and the token (`engine/sampler.py`)."""


@dataclass(frozen=True)
class Decoding:
    prompt_tokens: int
    lengths: Sequence[int]
    captured: bool = True


@dataclass(frozen=True)
class Turns:
    """A replica decodes `slots` sequences at once, admitted at rounds of `chunk` steps. `micro_batches` None: the fastest
    number.
    """

    slots: int
    chunk: int = 1
    micro_batches: int | None = None

    def starts(self, lengths: Ints) -> Ints:
        """Decode step at which each sequence gets a slot, in order."""
        left = lengths[: self.slots].tolist()
        heapify(left)
        starts = np.zeros_like(lengths)
        for number in range(self.slots, len(lengths)):
            starts[number] = -(-left[0] // self.chunk) * self.chunk
            heapreplace(left, int(starts[number] + lengths[number]))
        return starts


def decode_s(actor: LaidModel, decoding: Decoding, turns: Turns) -> float:
    """Seconds until the slowest (first) replica's last response ends, without prompts. Responses are dealt longest first."""
    lengths = np.array(sorted(decoding.lengths, reverse=True)[:: actor.placement.dp])
    lengths = np.random.default_rng(0).permutation(lengths)  # sequences that wait for a slot have any length
    starts = turns.starts(lengths)
    ends = starts + lengths
    edges = np.unique(np.linspace(0, int(ends.max()), BLOCKS + 1).astype(int))
    total = 0.0
    for begin, end in zip(edges.tolist(), edges[1:].tolist(), strict=False):
        first, last = np.maximum(starts, begin), np.minimum(ends, end)
        steps = np.maximum(last - first, 0)
        sequences = max(1, int(np.rint(steps.sum() / (end - begin))))
        position = (steps * ((first + last) / 2 - starts)).sum() / max(1, steps.sum())
        costs = decode_costs(actor, sequences, decoding.prompt_tokens + position, captured=decoding.captured)
        work = Work(sequences, end - begin, actor.placement.pp, {})
        cut = choose_cut(work, costs, sequences, micro_batches=turns.micro_batches, prefill_tokens=sequences)
        total += predict_s(work, cut, costs)
    return total


def decode_costs(actor: LaidModel, sequences: int, position: float, *, captured: bool) -> Costs:
    """Lines through the smallest and the largest micro-batch at a position."""
    pp = actor.placement.pp
    few = max(1, sequences // (2 * pp))

    def step(stage: int, size: int) -> float:
        return actor.step_s(stage, Tokens.step(size, size * position), captured=captured)

    decode = tuple(line_through(few, step(stage, few), sequences, step(stage, sequences)) for stage in range(pp))
    draw = PASSES * SAMPLED_WIDTH * actor.shape["vocab_size"] / actor.placement.tp / actor.cluster.gpu.bytes_per_s
    messages = DRAWS * all_reduce_s(actor.cluster, actor.tensor_groups[pp - 1], SAMPLED_WIDTH)
    return Costs(decode, Linear(messages, draw), message_s=_message_s(actor, sequences / pp))


def predicted_costs(models: Mapping[str, LaidModel], decoding: Decoding, sequences: int, prefill_tokens: int) -> Costs:
    """Cost lines as in `oppo plan schedule --costs`, for a replica's batch halfway through decoding."""
    position = decoding.prompt_tokens + sum(decoding.lengths) / len(decoding.lengths) / 2
    actor = models["actor"]
    decode = decode_costs(actor, sequences, position, captured=decoding.captured)
    prefill = {
        role: tuple(_prefill_line(model, stage, prefill_tokens, position) for stage in range(model.placement.pp))
        for role, model in models.items()
    }
    score = max(_score_s(model) for model in models.values())
    return Costs(decode.decode, decode.sample, prefill, score=Linear(0.0, score), message_s=decode.message_s)


def line_through(few: float, few_s: float, many: float, many_s: float) -> Linear:
    """Line that does not fall; constant for equal sizes."""
    each = max(0.0, (many_s - few_s) / (many - few)) if many > few else 0.0
    return Linear(max(0.0, few_s - few * each), each)


def _prefill_line(model: LaidModel, stage: int, tokens: int, position: float) -> Linear:
    few = max(1, tokens // 8)
    seconds = [model.forward_s(stage, Tokens(size, size * position, 0.0, 0.0)) for size in (few, tokens)]
    return line_through(few, seconds[0], tokens, seconds[1])


def _score_s(model: LaidModel) -> float:
    """Seconds per row, without reading the head's weights."""
    last = model.placement.pp - 1
    return max(0.0, (model.head_s(last, 4096) - model.head_s(last, 2048)) / 2048)


def _message_s(actor: LaidModel, rows: float) -> float:
    if actor.placement.pp == 1:
        return send_s(actor.cluster, WIDTH * actor.shape["hidden_size"] * rows, between=False)
    return max(actor.hop_s(stage, rows) for stage in range(actor.placement.pp - 1)) + actor.cluster.engine.replay_s

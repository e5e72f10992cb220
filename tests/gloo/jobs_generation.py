"""Decoding rollouts in rounds of every size, and what the training forward says of the tokens drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from oppo_megatron.records import Chunk, Prompt, Rollout
from oppo_megatron.runtime.batch import join_rows, pack_responses
from oppo_megatron.runtime.generation import Generator
from oppo_megatron.runtime.mcore.model import RoleModel
from oppo_megatron.runtime.mcore.training import forward_rows
from oppo_megatron.runtime.mcore.vocab_parallel import gather_logits, token_logprobs
from oppo_megatron.runtime.sampler import Sampling
from oppo_megatron.runtime.stopping import Stopping
from tests.gloo.models import CPU, load, world_groups

EOS = 20  # comes up early in some of the sequences that the tests draw, and never in others
MAX_RESPONSE = 20
PROMPTS = [(1, 2, 3), (9,), (4, 4, 8, 30, 61, 2, 7), (11, 12), (13, 60, 1, 2), (40, 41, 42), (3,)]
NEVER = 10**6


@dataclass
class Finishers:
    """A stop signal that is ready after `needed` finished sequences."""

    needed: int = NEVER
    num_finished: int = 0

    @property
    def ready(self) -> bool:
        return self.num_finished >= self.needed

    def finish(self, seq_id: int) -> None:
        self.num_finished += 1


@dataclass
class Variant:
    """One way to run the same decode."""

    max_steps: int = NEVER
    slots: int = len(PROMPTS)
    alone: bool = False
    forget: bool = False
    reverse: bool = False
    prefill_tokens: int = 16


VARIANTS = {
    "plain": Variant(),
    "steps of 1": Variant(max_steps=1),
    "steps of 7": Variant(max_steps=7),
    "steps of 64": Variant(max_steps=64),
    "alone": Variant(alone=True, max_steps=7),
    "one slot": Variant(slots=1),
    "two slots": Variant(slots=2, max_steps=7),
    "other order, small prefills": Variant(reverse=True, prefill_tokens=3, max_steps=7),
    "cache forgotten each round": Variant(max_steps=4, forget=True),
}


def apply(chunk: Chunk, rollouts: dict[int, Rollout]) -> None:
    """Append a chunk's rows to their rollouts."""
    for row in chunk.rows:
        rollout = rollouts[row.seq_id]
        assert row.offset == len(rollout.tokens) and not rollout.finished
        assert len(row.tokens) == len(row.logprobs) == len(row.sampling_logprobs) > 0
        rollout.tokens += row.tokens
        rollout.logprobs += row.logprobs
        rollout.sampling_logprobs += row.sampling_logprobs
        rollout.versions += [row.version] * len(row.tokens)
        rollout.finish_clock, rollout.finish_reason = row.finish_clock, row.finish_reason


def generator(model: RoleModel, sampling: Sampling, slots: int = len(PROMPTS), prefill_tokens: int = 16) -> Generator:
    cache = model.new_cache(slots)
    return Generator(
        model,
        cache,
        sampling=sampling,
        stopping=Stopping(EOS, MAX_RESPONSE),
        prefill_tokens=prefill_tokens,
    )


def new_rollouts() -> dict[int, Rollout]:
    return {50 + i: Rollout(Prompt(50 + i, i, "", tokens), i) for i, tokens in enumerate(PROMPTS)}


def finish(engine: Generator, rollouts: dict[int, Rollout], variant: Variant) -> None:
    """Decode rollouts to their ends."""
    index = clock = 0
    while running := [r for r in rollouts.values() if not r.finished]:
        order = running[::-1] if variant.reverse else running
        chunk = engine.decode_round(
            order, Finishers(), index=index, max_steps=variant.max_steps, clock=clock, version=index
        )
        assert chunk.index == index and clock < chunk.clock <= clock + variant.max_steps
        apply(chunk, rollouts)
        index, clock = index + 1, chunk.clock
        if variant.forget:
            engine.invalidate(list(rollouts))
    assert not engine.cache.seq_ids


def decode(model: RoleModel, sampling: Sampling, variant: Variant) -> dict[int, Rollout]:
    engine = generator(model, sampling, variant.slots, variant.prefill_tokens)
    rollouts = new_rollouts()
    for part in [{k: r} for k, r in rollouts.items()] if variant.alone else [rollouts]:
        finish(engine, part, variant)
    return rollouts


def every_variant(
    directory: str, tp: int, pp: int, samplings: dict[str, Sampling], variants: list[str]
) -> dict[str, dict[int, Any]]:
    """sampling/variant -> sequence id -> (tokens, reason)."""
    groups, answers = world_groups(tp, pp), {}
    for lean in (True, False):
        model = load(directory, groups, lean=lean)
        for name, sampling in samplings.items():
            for label in variants if lean else ["plain"]:
                rollouts = decode(model, sampling, VARIANTS[label])
                answers[f"{name}/{label}/{'lean' if lean else 'module'}"] = {
                    k: (r.tokens, r.finish_reason) for k, r in rollouts.items()
                }
    return answers


def logprob_gaps(directory: str, tp: int, pp: int, samplings: dict[str, Sampling]) -> dict[str, Any]:
    """sampling -> tokens, recorded log-probs and, on the last stage, the training forward's log-probs and logits."""
    model = load(directory, world_groups(tp, pp))
    return {name: _against_training(model, sampling) for name, sampling in samplings.items()}


def _against_training(model: RoleModel, sampling: Sampling) -> dict[str, Any]:
    rollouts = list(decode(model, sampling, Variant(max_steps=7, slots=4)).values())
    lengths = [len(r.tokens) for r in rollouts]
    batches = pack_responses([r.prompt.tokens for r in rollouts], [r.tokens for r in rollouts], 60, CPU)
    group = model.groups.collection.tp
    logprobs = forward_rows(
        model, batches, lambda b, out: token_logprobs(out, b.targets_R, group, sampling.temperature)[0]
    )
    logits = forward_rows(model, batches, lambda _, out: gather_logits(out, group))
    assert all(r.versions == sorted(r.versions) and len(r.versions) == len(r.tokens) for r in rollouts)
    answer = {
        "tokens": [t for r in rollouts for t in r.tokens],
        "logprobs": [x for r in rollouts for x in r.logprobs],
        "sampling_logprobs": [x for r in rollouts for x in r.sampling_logprobs],
    }
    if model.groups.is_last_stage:
        answer["training"] = join_rows(logprobs, lengths, batches).tolist()
        answer["logits"] = join_rows(logits, lengths, batches).tolist()
    return answer


def early_end(directory: str) -> dict[str, Any]:
    """A round that ends as the batch is complete, and the one that goes on from there."""
    model = load(directory, world_groups(1, 1))
    engine, rollouts = generator(model, Sampling(seed=7)), new_rollouts()
    stop = Finishers(needed=2)
    first = engine.decode_round(list(rollouts.values()), stop, index=0, max_steps=NEVER, clock=100, version=0)
    apply(first, rollouts)
    cached = {seq_id: engine.cache.length(seq_id) for seq_id in engine.cache.seq_ids}
    summary = {k: (len(r.tokens), r.finish_clock) for k, r in rollouts.items()}
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.9)
    engine.invalidate(list(rollouts))
    assert all(engine.cache.length(seq_id) == 0 for seq_id in engine.cache.seq_ids)
    left = [r for r in rollouts.values() if not r.finished]
    second = engine.decode_round(left, Finishers(), index=1, max_steps=NEVER, clock=first.clock, version=1)
    apply(second, rollouts)
    done = list(rollouts.values())
    batches = pack_responses([r.prompt.tokens for r in done], [r.tokens for r in done], 60, CPU)
    group = model.groups.collection.tp
    fresh = forward_rows(model, batches, lambda b, out: token_logprobs(out, b.targets_R, group)[0])
    return {
        "clock": first.clock,
        "cached": cached,
        "summary": summary,
        "versions": [v for r in done for v in r.versions],
        "gaps": (join_rows(fresh, [len(r.tokens) for r in done], batches)
                 - torch.tensor([x for r in done for x in r.logprobs])).tolist(),
    }  # fmt: skip

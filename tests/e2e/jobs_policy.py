"""Policies that were trained, asked on the ranks of the pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from oppo_megatron.cluster.world import World
from oppo_megatron.config.model import ParallelConfig, RuntimeConfig
from oppo_megatron.config.run import TrainSettings
from oppo_megatron.engine.sampler import Sampling
from oppo_megatron.engine.stopping import Stopping, StopText
from oppo_megatron.mcore.model import build_model
from oppo_megatron.mcore.weights.hf_source import open_weights
from oppo_megatron.mcore.weights.hf_weights import export_weights, load_weights
from oppo_megatron.policy.answering import build_place, load_policy
from oppo_megatron.policy.finding import Choice, find_policy, policy_tokenizer, read_run, require_layout
from oppo_megatron.records import Prompt

Response = tuple[int, list[int], str | None]


def answers(
    directories: list[Path],
    texts: list[str],
    *,
    parallel: dict[str, int],
    max_tokens: int,
    sampling: dict[str, Any],
    num_slots: int = 4,
    round_steps: int = 7,
    stop: list[str] | None = None,
    choice: dict[str, Any] | None = None,
) -> list[list[Response]]:
    """Responses (sequence, tokens, reason) of each directory to all prompts, in the order in which they ended."""
    layout, runtime = ParallelConfig(**parallel), RuntimeConfig().with_threads(1)
    world = World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    place, found = build_place(world, layout), []
    for directory in directories:
        policy = find_policy(directory, Choice(**choice or {}))
        tokenizer = policy_tokenizer(policy)
        prompts = [Prompt(i, i, text, tuple(tokenizer.encode(text))) for i, text in enumerate(texts)]
        longest = max(len(prompt.tokens) for prompt in prompts) + max_tokens
        require_layout(policy, layout, longest, tokenizer.vocab_size)
        loaded = load_policy(policy, place, runtime, tokenizer, longest)
        decoder = loaded.decoder(
            Sampling(**sampling),
            Stopping(tokenizer.eos_ids, max_tokens, text=StopText(stop, tokenizer.decode) if stop else None),
            num_slots=num_slots,
            round_steps=round_steps,
        )
        once = [(r.seq_id, r.tokens, r.finish_reason) for r in decoder.decode(prompts)]
        again = [(r.seq_id, r.tokens, r.finish_reason) for r in decoder.decode(iter(prompts))]
        assert once == again, "what was decoded before leaves nothing behind"
        found.append(once)
    return found


def write_drawn(run: Path, directory: Path) -> None:
    settings = read_run(run)
    assert isinstance(settings, TrainSettings)
    shape, source = open_weights(settings.actor, "lm")
    model = build_model(
        shape, build_place(World(0, 1, torch.device("cpu")), ParallelConfig()).groups,
        head="lm", max_length=64, dtype="float32", device=torch.device("cpu"),
    )  # fmt: skip
    load_weights(model, shape, source, head="lm")
    export_weights(model, directory)

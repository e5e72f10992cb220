"""The work of a peer as a JSON file: the models, prompts, response lengths and settings of our runs.

algorithm                          ppo or grpo
steps, batch_size, micro_batch     steps; rows of a step; rows of TRL's micro-batch
group_size                         rows of a prompt, next to each other
max_response_tokens, temperature
prompts, lengths                   token ids and forced response tokens of each sequence, in the order of training
eos_id, pad_id                     token ids; the padding token is in no prompt
seed, dtype, device, threads       `dtype`: float32, or bfloat16 as mixed precision
models                             Hugging Face directories by role, float32
ppo, grpo, optimizer               keyword arguments of TRL's PPOConfig or GRPOConfig
length_penalty                     of grpo: keyword arguments of TRL's reward function
output_dir                         for what the peer itself writes
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.settings import algorithm_settings
from oppo_megatron.config.model import HEADS_LEARNED, weight_seed
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.data.prompts import PromptStream
from oppo_megatron.engine.stopping import Stopping
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.hf_layout import Head
from oppo_megatron.layout.placements import named_roles
from oppo_megatron.mcore.weights.hf_source import open_weights
from oppo_megatron.mcore.weights.hf_weights import rewrite_weights
from oppo_megatron.records import Prompt
from oppo_megatron.train.inputs import read_inputs

HEADS: dict[str, Head] = {"actor": "lm", "reference": "lm", "critic": "scalar", "reward": "scalar"}


def build_work(
    config: TrainConfig, out: Path, *, device: str, dtype: str, threads: int, micro_batch: int | None
) -> dict[str, Any]:
    """The work of a configuration that `require_same_work` accepts.  Writes the models below `out`.

    Raises the errors of reading the configuration's data and weights, and ConfigError if there are too few prompts.
    """
    inputs, batch = read_inputs(config), config.rollout.batch_size
    assert config.steps is not None, "checked before"
    stream = PromptStream(
        inputs.prompts, config.seed, epochs=config.epochs, limit=config.steps * batch, shuffle=config.data.shuffle
    )
    prompts = list(stream)
    if len(prompts) < config.steps * batch:
        raise ConfigError(
            f"{config.steps} steps of {batch} rollouts need {config.steps * batch}, but epochs={config.epochs} "
            f"gives {len(prompts)}; lower --steps, or set epochs=null"
        )
    stopping = Stopping.of(
        config.rollout, inputs.tokenizer.eos_ids, config.seed, inputs.lengths, inputs.tokenizer.decode, config.rollout.lengths
    )
    vocab_size = open_weights(config.actor, "lm")[0].vocab_size
    return {
        "algorithm": config.algorithm.preset,
        "steps": config.steps,
        "group_size": config.rollout.group_size,
        "batch_size": batch,
        "micro_batch": micro_batch or batch,
        "max_response_tokens": config.rollout.max_response_tokens,
        "temperature": config.rollout.temperature,
        "prompts": [list(prompt.tokens) for prompt in prompts],
        "lengths": [stopping.limit(prompt.seq_id) for prompt in prompts],
        "eos_id": inputs.tokenizer.eos_id,
        "pad_id": free_token(vocab_size, prompts, inputs.tokenizer.eos_id),
        "seed": config.seed,
        "dtype": dtype,
        "device": device,
        "threads": threads,
        "models": export_models(config, out / "models"),
        **algorithm_settings(config),
        "output_dir": str(out.resolve() / "trainer"),
    }


def free_token(vocab_size: int, prompts: list[Prompt], eos_id: int) -> int:
    """The largest token id that no prompt holds and that is not EOS: TRL takes every padding token for padding."""
    taken = {token for prompt in prompts for token in prompt.tokens} | {eos_id}
    free = next((token for token in reversed(range(vocab_size)) if token not in taken), None)
    if free is None:
        raise ConfigError(f"the prompts hold all {vocab_size} tokens of the vocabulary, and TRL needs one to pad with")
    return free


def export_models(config: TrainConfig, directory: Path) -> dict[str, str]:
    """The weights that our roles start from, as Hugging Face directories by role."""
    roles, paths = named_roles(config), {}
    for role in roles:
        head = HEADS[role]
        shape, source = open_weights(roles[role], head, seed=weight_seed(role), fresh_head=role in HEADS_LEARNED)
        rewrite_weights(shape, source, directory / role, head=head, dtype=torch.float32)
        paths[role] = str((directory / role).resolve())
    return paths

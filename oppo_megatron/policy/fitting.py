"""A policy's tokenizer, and whether its model fits a layout: what is known before ranks are started.  No torch when imported."""

from __future__ import annotations

from oppo_megatron.config.model import ParallelConfig
from oppo_megatron.data.tokenizer import Tokenizer, load_tokenizer
from oppo_megatron.errors import CheckpointError
from oppo_megatron.layout.shape import check_shape
from oppo_megatron.policy.finding import Policy


def policy_tokenizer(policy: Policy) -> Tokenizer:
    """With the ids that end the policy's responses.  Raises ConfigError or CheckpointError."""
    return load_tokenizer(policy.tokenizer, policy.eos_source)


def require_layout(policy: Policy, parallel: ParallelConfig, max_length: int, vocab_size: int) -> None:
    """Raises CheckpointError where the model does not fit the layout, contexts of `max_length` tokens or the tokenizer."""
    if problems := check_shape(str(policy.directory), policy.hf_config, parallel, max_length, vocab_size):
        raise CheckpointError("\n".join(problems))

"""A reward model in this process.  S: sequences of a micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from oppo_megatron.cluster.hosts import show_hosts
from oppo_megatron.cluster.world import choose_device, open_world
from oppo_megatron.config.model import ParallelConfig, RoleConfig, RuntimeConfig
from oppo_megatron.config.serve import ServeConfig
from oppo_megatron.data.tokenizer import Tokenizer, encode_prompt, load_tokenizer
from oppo_megatron.errors import ConfigError, RewardError
from oppo_megatron.layout.shape import check_shape
from oppo_megatron.mcore.batch import join_rows, pack_at
from oppo_megatron.mcore.groups import build_groups
from oppo_megatron.mcore.model import RoleModel
from oppo_megatron.mcore.roles import load_role
from oppo_megatron.mcore.training import forward_rows
from oppo_megatron.modeldir.headers import read_hf_config
from oppo_megatron.rewards.protocol import Item


@contextmanager
def open_reward_model(
    reward: RoleConfig, runtime: RuntimeConfig, *, max_tokens: int, vocab_size: int | None = None
) -> Iterator[tuple[RoleModel, torch.device]]:
    """Yield the model and its device.  `vocab_size`: of the tokenizer, for texts."""
    choose_device(runtime)
    shape = read_hf_config(reward)
    if problems := check_shape("reward", shape, ParallelConfig(), max_tokens, vocab_size or shape["vocab_size"]):
        raise ConfigError(problems)
    with open_world(runtime, {}) as world:
        show_hosts(world.hosts)
        groups = build_groups(range(1), 1, 1, "reward")
        assert groups is not None
        model = load_role(reward, groups, head="scalar", role="reward", max_length=max_tokens, device=world.device)
        model.requires_grad_(False)
        yield model, world.device


@dataclass(frozen=True)
class ModelScorer:
    """The scalar at the last token, as in `oppo train`."""

    model: RoleModel
    tokenizer: Tokenizer
    max_tokens: int
    micro_batch_tokens: int
    device: torch.device

    def scores(self, items: Sequence[Item]) -> list[float]:
        """Return a score per item.  Raises RewardError for too long sequences or unknown ids."""
        sequences = [self._tokens(item) for item in items]
        batches = pack_at(sequences, [[len(s) - 1] for s in sequences], self.micro_batch_tokens, self.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # which device is current is a thread's own
        outputs = forward_rows(self.model, batches, lambda batch, scores_S: scores_S.float())
        return join_rows(outputs, [1] * len(items), batches).tolist()

    def _tokens(self, item: Item) -> list[int]:
        text = item.prompt + item.response
        tokens = item.tokens
        if tokens is None or _letters(self.tokenizer.decode(tokens)) != _letters(text):  # ids of another tokenizer
            tokens = [*encode_prompt(self.tokenizer, text), self.tokenizer.eos_id]
        if not 1 <= len(tokens) <= self.max_tokens:
            raise RewardError(f"sequence {item.id} has {len(tokens)} tokens, but must have 1 to max_tokens {self.max_tokens}")
        if max(tokens) >= self.model.shape.vocab_size:
            raise RewardError(
                f"sequence {item.id} has token id {max(tokens)}, but the reward model knows {self.model.shape.vocab_size}: the "
                "run and the service must have the same tokenizer; or send no ids"
            )
        return list(tokens)


def _letters(text: str) -> str:
    """Return a text without spaces and bytes that are not UTF-8."""
    return "".join(text.replace("\N{REPLACEMENT CHARACTER}", "").split())


@contextmanager
def open_model(config: ServeConfig) -> Iterator[ModelScorer]:
    assert config.reward is not None and config.tokenizer is not None, "rules of ServeConfig"
    tokenizer, runtime, most = load_tokenizer(config.tokenizer), config.runtime, config.max_tokens
    opened = open_reward_model(config.reward, runtime, max_tokens=most, vocab_size=tokenizer.vocab_size)
    with opened as (model, device):
        yield ModelScorer(model, tokenizer, most, runtime.micro_batch_tokens, device)

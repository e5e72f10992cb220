"""Checks of preference training: losses and their settings, micro-batches that hold a pair, the reference."""

from __future__ import annotations

from collections.abc import Iterator

from oppo_megatron.config.paths import irregular_path
from oppo_megatron.config.preference import DPOConfig, KTOConfig, PreferenceConfig
from oppo_megatron.config.preference_losses import DPOLossConfig
from oppo_megatron.config.run import SupervisedConfig


def check_preferences(config: SupervisedConfig) -> Iterator[str]:
    """Every broken rule of `oppo dpo` and `oppo kto`; none of other commands."""
    if isinstance(config, DPOConfig):
        yield from check_smoothing(config.dpo)
        yield from _check_pair(config)
    if isinstance(config, KTOConfig) and config.kto.loss == "kto" and config.batch_size < 2:
        yield (
            "batch_size is 1, but kto.loss kto compares a completion with those of other rows of its batch; raise it (32 is "
            "usual), or choose kto.loss=apo_zero_unpaired"
        )
    if isinstance(config, PreferenceConfig):
        if config.model.fresh_head or (config.reference is not None and config.reference.fresh_head):
            yield "fresh_head is true, but preference training has no scalar head; remove it"
        if config.reference_logprobs is not None and config.reference_logprobs.exists():
            yield from _check_file(config)


def _check_file(config: PreferenceConfig) -> Iterator[str]:
    path = config.reference_logprobs
    assert path is not None, "asked for where it is named"
    if path.is_dir():
        yield f"reference_logprobs is {path}, which is a folder; name a file in it, as in {path / 'reference.safetensors'}"
    elif problem := irregular_path("reference_logprobs", path, "name a regular file, or one that is not there yet"):
        yield problem


def check_smoothing(rule: DPOLossConfig) -> Iterator[str]:
    """A share of wrong pairs where, and only where, the loss has a place for it."""
    if rule.loss == "robust" and not rule.label_smoothing:
        yield (
            "dpo.loss is robust, but dpo.label_smoothing is 0, with which it is sigmoid; set label_smoothing to the share of "
            "pairs that are the wrong way round, or choose sigmoid"
        )
    if rule.loss in ("hinge", "ipo") and rule.label_smoothing:
        yield (
            f"dpo.label_smoothing is {rule.label_smoothing:g}, but dpo.loss {rule.loss} has none; remove it, or choose sigmoid "
            "or robust"
        )


def _check_pair(config: DPOConfig) -> Iterator[str]:
    """Both answers of a pair are in one micro-batch, for the gradient of each depends on the other's log-prob."""
    longest, tokens = 2 * config.max_tokens, config.runtime.micro_batch_tokens
    if tokens < longest:
        yield (
            f"runtime.micro_batch_tokens is {tokens}, but a pair may have {longest} tokens (twice max_tokens "
            f"{config.max_tokens}) and must fit, for it cannot be divided; raise it to {longest}, or lower max_tokens to "
            f"{tokens // 2}"
        )

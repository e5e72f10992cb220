"""Checks of NeMo-Aligner's settings against the block `oppo:`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

from nemo.utils import logging
from nemo_aligner.models.nlp.gpt.megatron_gpt_ppo_actor import MegatronGPTActorModel
from nemo_aligner.utils.batch_iterators import DefaultBatchIterator
from nemo_aligner.utils.train_script_utils import FakeCheckpointCallback
from omegaconf import DictConfig

from oppo_megatron.config.aligner import AlignerConfig, read_aligner_config
from oppo_megatron.errors import ConfigError
from oppo_megatron.integrations.nemo_aligner.decoding import plain


def read_block(cfg: DictConfig) -> AlignerConfig:
    """Read the block of `trainer.ppo`; without it nothing is enabled. Raises ConfigError."""
    block = cfg.get("oppo")
    if not isinstance(block, DictConfig | None):
        raise ConfigError(f"trainer.ppo.oppo is {block!r:.40}, but must be a section of keys (docs/nemo_aligner.md)")
    return read_aligner_config({} if block is None else plain(block))


def uncut(cfg: DictConfig, model: Any) -> list[str]:
    """Reasons why micro-batches are generated without a break."""
    return [
        f"{name}.enable is true, but TensorRT-LLM generates whole micro-batches, so rollouts can neither be deferred nor "
        "streamed; set it to false, or leave delta.max at 0 and scorer out of trainer.ppo.oppo"
        for name, tree in (("trainer.ppo.trt_llm", cfg), ("model.ppo.trt_llm", model.cfg.ppo))
        if (tree.get("trt_llm") or {}).get("enable", False)
    ]


def shared(batch_iterator_cls: Any) -> list[str]:
    """Reasons why a replica does not know its own prompts."""
    made = batch_iterator_cls.func if isinstance(batch_iterator_cls, partial) else batch_iterator_cls
    if made is DefaultBatchIterator:
        return []
    return [
        f"the batch iterator is {getattr(made, '__name__', made)}, but deferral counts what each replica has drawn by "
        "itself; set trainer.ppo.batch_iterator.use_flask to false, or oppo.delta.max to 0"
    ]


def bypassed(model: Any) -> str | None:
    """Note on a model's own `infer`, unused in steps that defer; None for NeMo-Aligner's."""
    if getattr(model.infer, "__func__", None) is MegatronGPTActorModel.infer:
        return None
    return (
        f"{type(model).__name__}.infer is not NeMo-Aligner's: steps that defer rollouts do not call it, but the model's "
        "`generate`; if it uses another back end, or chooses answers, set trainer.ppo.oppo.delta.max to 0"
    )


def folder_of(ckpt_callback: Any) -> str | None:
    """Callback's checkpoint folder, if known."""
    dirpath = getattr(ckpt_callback, "dirpath", None)
    return os.fspath(dirpath) if isinstance(dirpath, str | os.PathLike) else None


def require_fit(settings: AlignerConfig, uncut: Sequence[str], shared: Sequence[str], ckpt_callback: Any) -> None:
    problems: list[str] = []
    dirpath = folder_of(ckpt_callback)
    if settings.delta.max > 0 or settings.scorer is not None:
        problems += uncut
    if settings.delta.max > 0:
        problems += shared
        if dirpath is not None and "://" in dirpath:
            problems.append(
                f"checkpoints go to {dirpath}, but deferred rollouts are kept in a folder beside them; give a path of a file "
                "system as exp_manager.checkpoint_callback_params.dirpath, or set oppo.delta.max to 0"
            )
    if problems:
        raise ConfigError(problems)
    if settings.delta.max > 0 and dirpath is None and not isinstance(ckpt_callback, FakeCheckpointCallback):
        logging.warning(
            f"the checkpoint callback {type(ckpt_callback).__name__} has no dirpath, so deferred rollouts are not kept beside "
            "its checkpoints, and a resumed run loses their prompts; give it the attribute dirpath, the folder of its "
            "checkpoints, with step=<n> in their names, or set trainer.ppo.oppo.delta.max to 0"
        )

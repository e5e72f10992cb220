"""NeMo-Aligner's `PPOTrainer` with a pool of rollouts under its unchanged `fit`.

    generate_rollouts -> PoolBatches draws -> PooledActor.infer decodes waves -> StreamedRewards takes the scores

The wrappers stand for the model, the batch iterator and the reward client that the script passes; no code of NeMo-Aligner is
replaced.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from nemo.utils import logging
from nemo_aligner.algorithms import ppo
from nemo_aligner.utils import parallel_state
from nemo_aligner.utils.batch_iterators import DefaultBatchIterator
from nemo_aligner.utils.distributed import all_reduce_dict
from omegaconf import DictConfig

from oppo_megatron.config.aligner import AlignerConfig, read_aligner_config
from oppo_megatron.control.chunk_tuner import ChunkTuner, StepCost
from oppo_megatron.control.delta_controllers import make_delta_controller
from oppo_megatron.errors import CheckpointError, ConfigError
from oppo_megatron.integrations.nemo_aligner.pool import Pool, room, share_of
from oppo_megatron.integrations.nemo_aligner.pooled_actor import Effort, PoolBatches, PooledActor
from oppo_megatron.integrations.nemo_aligner.rewarding import StreamedRewards
from oppo_megatron.integrations.nemo_aligner.sidecar import Kept, Sidecar
from oppo_megatron.integrations.nemo_aligner.watched_decode import plain
from oppo_megatron.records import StepSignals
from oppo_megatron.rewards.streaming import build_stream


class PPOTrainer(ppo.PPOTrainer):
    """As `nemo_aligner.algorithms.ppo.PPOTrainer`, with a block `oppo:` in `trainer.ppo` (docs/nemo_aligner.md).

    Raises ConfigError for a block that is wrong, and for TensorRT-LLM or the shared prompt queue of `batch_iterator.use_flask`,
    whose generation cannot be cut.
    """

    def __init__(
        self,
        cfg: DictConfig,
        model: Any,
        optimizer: Any,
        scheduler: Any,
        train_dataloader_builder: Callable[..., Any],
        val_dataloader_builder: Callable[..., Any],
        collate_fn: Callable[..., Any],
        rm_critic: Any,
        batch_iterator_cls: Callable[..., Any],
        logger: Any,
        ckpt_callback: Any,
        run_timer: Any,
    ):
        self._settings = _settings(cfg, model, batch_iterator_cls)
        asks = _is_source() and self._settings.scorer is not None
        self._stream = build_stream(self._settings.scorer, os.environ) if asks and self._settings.scorer else None
        self._actor = PooledActor(model, Pool(self._settings.max_deferrals), self._stream)
        self._delta = make_delta_controller(self._settings.delta)
        self._chunk = ChunkTuner(self._settings.chunk, model.cfg.ppo.length_params.max_length)
        self._their_batches = batch_iterator_cls
        self._consumed_after = 0
        self._draw: int | None = None
        super().__init__(
            cfg=cfg,
            model=self._actor,
            optimizer=optimizer,
            scheduler=scheduler,
            train_dataloader_builder=train_dataloader_builder,
            val_dataloader_builder=val_dataloader_builder,
            collate_fn=collate_fn,
            rm_critic=StreamedRewards(rm_critic, self._settings.scorer is not None, self._stream),
            batch_iterator_cls=self._batches,
            logger=logger,
            ckpt_callback=ckpt_callback,
            run_timer=run_timer,
        )
        self._batch = train_dataloader_builder(consumed_samples=0).batch_sampler.global_batch_size
        _require_delta(self._settings.delta.max, self._batch)

    @property
    def pool(self) -> Pool:
        """The rollouts of this replica that are carried."""
        return self._actor.pool

    @torch.no_grad()
    def generate_rollouts(self) -> tuple[Any, dict[str, Any], dict[str, float]]:
        """NeMo-Aligner's, on a step that may overcommit; adds `oppo_*` to its rollout metrics."""
        self._begin_step()
        started = time.monotonic()
        data, metrics, timers = super().generate_rollouts()
        self._consumed_after = self.consumed_samples
        return data, metrics | self._end_step(metrics, time.monotonic() - started), timers

    @torch.no_grad()
    def run_validation(self) -> dict[str, Any]:
        """NeMo-Aligner's, by whole batches: the pool rests."""
        effort, self._actor.effort = self._actor.effort, Effort()
        self._actor.pooled, self._draw = False, None
        metrics: dict[str, Any] = super().run_validation()
        self._actor.effort = effort
        return metrics

    def save(self, extra_candidates: dict[str, Any] | None = None, is_train_end: bool = False) -> None:
        """The sidecar first: no checkpoint is without the rows that it has deferred."""
        state = {"delta": self._delta.state_dict(), "chunk": self._chunk.state_dict()}
        self._sidecar().write(self.step, Kept(self.pool.rows, self.pool.next_key, state))
        super().save(extra_candidates, is_train_end)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """NeMo-Aligner's four numbers, and the rows beside the checkpoint.  Raises CheckpointError."""
        super().load_state_dict(state_dict)
        self._consumed_after = self.consumed_samples
        kept = self._sidecar().read(int(self.step))
        if kept is None:
            logging.info("no rows of oppo_megatron beside the checkpoints: none are carried")
            return
        if kept.state["delta"]["rule"] != self._settings.delta.rule:
            raise CheckpointError(
                f"trainer.ppo.oppo.delta.rule is {self._settings.delta.rule}, but the checkpoint's run has "
                f"{kept.state['delta']['rule']}, whose history means nothing to it; resume with that"
            )
        self.pool.restore(kept.rows, kept.next_key)
        self._delta.load_state_dict(kept.state["delta"])
        self._chunk.load_state_dict(kept.state["chunk"])

    def _begin_step(self) -> None:
        if self.consumed_samples < self._consumed_after:
            # After the critic's warm-up the prompts come again from the start, those of the pool among them.
            given_up = self.pool.flush()
            if self._stream is not None:
                self._stream.forget([row.key for row in given_up])
        replicas, replica = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        batch = self._batch // replicas
        left = room(self.consumed_samples // replicas, self.num_steps_per_epoch * batch, batch)
        left = min(left, max(self.max_steps - self.step, 1) * batch)
        held = min(batch + share_of(self._delta.value, replica, replicas), left)
        self._draw = max(0, held - len(self.pool))
        self._actor.pooled = len(self.pool) > 0 or held > batch
        self._actor.policy, self._actor.chunk, self._actor.effort = self.step, self._chunk.value, Effort()

    def _batches(self, sampler_iter: Any, num_microbatches: int, dataset: Any, collate_fn: Any) -> Any:
        """NeMo-Aligner's batch iterator, or the pool's."""
        if not self._actor.pooled:
            return self._their_batches(sampler_iter, num_microbatches, dataset, collate_fn)
        assert self._draw is not None
        return PoolBatches(self._actor, self._draw, sampler_iter, num_microbatches, dataset, collate_fn)

    def _end_step(self, metrics: dict[str, Any], seconds: float) -> dict[str, float]:
        """Let the controllers see the step; what it has carried and drawn, over all replicas."""
        effort, rows = self._actor.effort, self.pool.rows
        local = {
            "deferred": len(rows), "carried_tokens": sum(len(row.tokens) for row in rows), "places": effort.places,
            "tokens": effort.tokens, "trained_tokens": effort.trained_tokens, "stale_tokens": effort.stale_tokens,
        }  # fmt: skip
        sums = all_reduce_dict(local, dtype=torch.float64, group=parallel_state.get_data_parallel_group())
        stale = sums["stale_tokens"] / max(sums["trained_tokens"], 1)
        trained_mean = sums["trained_tokens"] / self._batch
        submitted = (sums["trained_tokens"] + sums["carried_tokens"]) / (self._batch + sums["deferred"])
        waste = 1 - sums["tokens"] / sums["places"] if sums["places"] else 0.0
        gap = 1 - trained_mean / submitted if submitted else 0.0
        figures = {
            "oppo_delta": self._delta.value, "oppo_chunk": self._chunk.value, "oppo_deferred": sums["deferred"],
            "oppo_stale_tokens": stale, "oppo_max_deferrals": max((row.deferrals for row in rows), default=0),
            "oppo_tail_waste": waste, "oppo_length_gap": gap,
        }  # fmt: skip
        self._delta.observe(self.step, StepSignals(metrics["rewards"], waste, 1 - stale, gap))
        self._chunk.observe(self.step, StepCost(seconds, effort.positions, effort.tokens, effort.law))
        return figures

    def _sidecar(self) -> Sidecar:
        return Sidecar(
            Path(self.ckpt_callback.dirpath),
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_data_parallel_world_size(),
            writes=_is_source(),
            leads=torch.distributed.get_rank() == 0,
            wait=torch.distributed.barrier,
        )


def _require_delta(most: int, batch: int) -> None:
    if most > batch:
        raise ConfigError(
            f"trainer.ppo.oppo.delta.max {most} is more than the batch of {batch} rollouts (num_rollout_samples); lower it"
        )


def _is_source() -> bool:
    """Whether this rank speaks for its replica."""
    return bool(torch.distributed.get_rank() == parallel_state.get_model_parallel_src_rank())


def _settings(cfg: DictConfig, model: Any, batch_iterator_cls: Any) -> AlignerConfig:
    """The block `oppo:`.  Raises ConfigError for it, and for settings of NeMo-Aligner's that it does not go with."""
    block = cfg.get("oppo")
    if not isinstance(block, DictConfig | None):
        raise ConfigError(f"trainer.ppo.oppo is {block!r:.40}, but must be a section of keys (docs/nemo_aligner.md)")
    settings = read_aligner_config({} if block is None else plain(block))
    problems = []
    for name, tree in (("trainer.ppo.trt_llm", cfg), ("model.ppo.trt_llm", model.cfg.ppo)):
        if (tree.get("trt_llm") or {}).get("enable", False):
            problems.append(
                f"{name}.enable is true, but TensorRT-LLM generates whole micro-batches without a break, so rollouts can "
                "neither be deferred nor streamed; set it to false, or use nemo_aligner.algorithms.ppo.PPOTrainer"
            )
    made = batch_iterator_cls.func if isinstance(batch_iterator_cls, partial) else batch_iterator_cls
    if settings.delta.max > 0 and made is not DefaultBatchIterator:
        problems.append(
            f"the batch iterator is {getattr(made, '__name__', made)}, but deferral counts what each replica has drawn by "
            "itself; set trainer.ppo.batch_iterator.use_flask to false, or oppo.delta.max to 0"
        )
    if problems:
        raise ConfigError(problems)
    return settings

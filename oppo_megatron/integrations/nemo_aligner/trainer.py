"""NeMo-Aligner's `PPOTrainer` with a pool of rollouts under its unchanged `fit`; wrappers replace model, batch iterator and
client:

    generate_rollouts -> fill draws for the pool -> PooledActor.infer decodes waves -> StreamedRewards takes the scores
"""

from __future__ import annotations

import inspect
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from nemo.utils import logging
from nemo.utils.model_utils import uninject_model_parallel_rank
from nemo_aligner.algorithms import ppo
from nemo_aligner.models.nlp.gpt.megatron_gpt_ppo_actor import MegatronGPTActorModel
from nemo_aligner.utils import parallel_state
from nemo_aligner.utils.batch_iterators import DefaultBatchIterator
from nemo_aligner.utils.distributed import all_reduce_dict
from nemo_aligner.utils.train_script_utils import FakeCheckpointCallback
from omegaconf import DictConfig

from oppo_megatron.config.aligner import AlignerConfig, StreamConfig, read_aligner_config
from oppo_megatron.control.chunk_tuner import ChunkTuner, StepCost
from oppo_megatron.control.delta_controllers import make_delta_controller
from oppo_megatron.errors import CheckpointError, ConfigError, DataError
from oppo_megatron.integrations.nemo_aligner.decoding import Effort, PooledActor, fill, plain
from oppo_megatron.integrations.nemo_aligner.pool import Pool, room, share_of
from oppo_megatron.integrations.nemo_aligner.rewarding import Feed, StreamedRewards, as_first, raise_together
from oppo_megatron.integrations.nemo_aligner.sidecar import Kept, Sidecar, folder_next_to, name_of, stamps_of
from oppo_megatron.records import StepSignals
from oppo_megatron.rewards.streaming import ScorerStream, build_stream


class PPOTrainer(ppo.PPOTrainer):
    """Reads a block `oppo:` in `trainer.ppo` (docs/nemo_aligner.md).  Raises ConfigError."""

    model: Any
    rm_critic: Any
    batch_iterator_cls: Any

    def __init__(self, *args: Any, **kwargs: Any):
        given = inspect.signature(super().__init__).bind(*args, **kwargs).arguments
        cfg, model = given["cfg"], given["model"]
        block = cfg.get("oppo")  # without it nothing is enabled
        if not isinstance(block, DictConfig | None):
            raise ConfigError(f"trainer.ppo.oppo is {block!r:.40}, but must be a section of keys (docs/nemo_aligner.md)")
        self._settings = read_aligner_config({} if block is None else plain(block))
        self.pool = Pool(self._settings.max_staleness)
        self._active, self._consumed_after, self._draw = False, 0, 0
        self._saved_step, self._others = -1, dict[str, int]()
        asked = self._settings.delta.max > 0 or self._settings.scorer is not None
        if asked:
            _require_fit(self._settings, cfg, model, given["batch_iterator_cls"], given["ckpt_callback"])
        super().__init__(**given)
        if asked:
            self._take_over()

    def _take_over(self) -> None:
        settings, model = self._settings, self.model
        self._batch: int = self.train_dataloader_builder(consumed_samples=0).batch_sampler.global_batch_size
        _require_delta(settings.delta.max, self._batch, model)
        self._feed = None if settings.scorer is None else Feed(_open_stream(settings.scorer))
        self._actor = PooledActor(model, self.pool, self._feed)
        self._delta = make_delta_controller(settings.delta)
        self._chunk = ChunkTuner(settings.chunk_sizes, model.cfg.ppo.length_params.max_length)
        self._their_batches, self._active = self.batch_iterator_cls, True
        self.model, self.rm_critic = self._actor, StreamedRewards(self.rm_critic, self._feed)
        self.batch_iterator_cls = self._batches

    @torch.no_grad()
    def generate_rollouts(self) -> tuple[Any, dict[str, Any], dict[str, float]]:
        """Roll out with overcommit; adds `oppo_*` metrics."""
        if not self._active:
            theirs: tuple[Any, dict[str, Any], dict[str, float]] = super().generate_rollouts()
            return theirs
        if self.consumed_samples < self._consumed_after:
            # After the critic's warm-up the prompts start over, including the prompts of the pool.
            given_up = self.pool.flush()
            if self._feed is not None:
                self._feed.forget([row.key for row in given_up])
        replicas, replica = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        batch = self._batch // replicas
        left = room(self.consumed_samples // replicas, self.num_steps_per_epoch * batch, batch)
        left = min(left, max(self.max_steps - self.step, 1) * batch)
        held = min(batch + share_of(self._delta.value, replica, replicas), left)
        self._draw = max(0, held - len(self.pool))
        self._actor.pooled = len(self.pool) > 0 or held > batch
        self._actor.policy, self._actor.chunk = self.step, self._chunk.value
        self._actor.measured, self._actor.effort = True, Effort()
        started = time.monotonic()
        data, metrics, timers = super().generate_rollouts()
        self._consumed_after = self.consumed_samples
        return data, metrics | self._end_step(metrics, time.monotonic() - started), timers

    @torch.no_grad()
    def run_validation(self) -> dict[str, Any]:
        if not self._active:
            theirs: dict[str, Any] = super().run_validation()
            return theirs
        effort, self._actor.effort = self._actor.effort, Effort()
        self._actor.pooled, self._draw = False, 0
        metrics: dict[str, Any] = super().run_validation()
        self._actor.effort = effort
        return metrics

    def save(self, extra_candidates: dict[str, Any] | None = None, is_train_end: bool = False) -> None:
        """Write the sidecar first: no checkpoint lacks its rows."""
        dirpath = _folder_of(self.ckpt_callback)
        if dirpath is None or not self._active:
            super().save(extra_candidates, is_train_end)
            return
        folder = Path(dirpath)
        sidecar = self._sidecar(folder)
        state = {"delta": self._delta.state_dict(), "chunk": self._chunk.state_dict()}
        if self._saved_step != self.step:  # a second save finds this run's own checkpoints
            self._others, self._saved_step = self._stamps(folder), self.step
        kept = Kept(self.pool.rows, self.pool.next_key, state, frozenset(self._others))
        sidecar.write(self.step, kept)
        super().save(extra_candidates, is_train_end)
        now = self._stamps(folder)
        others = {name: stamp for name, stamp in self._others.items() if now.get(name) == stamp}
        if others != self._others:  # the callback has reused some names
            self._others = others
            sidecar.write(self.step, replace(kept, not_of=frozenset(others)))
        sidecar.prune(folder, self.step)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises CheckpointError if deferred rows do not fit."""
        super().load_state_dict(state_dict)
        self._consumed_after = self.consumed_samples
        try:
            path = getattr(self.model.trainer, "ckpt_path", None)
        except (AttributeError, RuntimeError):  # a model without a Lightning trainer
            path = None
        whole = Path(uninject_model_parallel_rank(path)).resolve() if isinstance(path, str | os.PathLike) else None
        dirpath = _folder_of(self.ckpt_callback)
        if whole is None and dirpath is None:
            return
        sidecar = self._sidecar(Path(str(dirpath)) if whole is None else whole.parent)
        kept = sidecar.read(int(self.step), None if whole is None else name_of(whole))
        if kept is None:
            tell = logging.warning if self._active else logging.info
            tell(
                f"{sidecar.root} does not exist: no deferred rollouts are carried into this run. If the checkpoint's run "
                "deferred rollouts, their prompts are lost: bring that folder next to its checkpoints, and resume again"
            )
            return
        self._restore(kept)

    def _restore(self, kept: Kept) -> None:
        error, delta, before = None, self._settings.delta, kept.state["delta"]["rule"]
        batches = self._their_batches if self._active else self.batch_iterator_cls
        if delta.max > 0 and before != delta.rule:
            error = CheckpointError(
                f"trainer.ppo.oppo.delta.rule is {delta.rule}, but the checkpoint's run has {before}, whose history means "
                "nothing to it; resume with that"
            )
        elif kept.rows and (cannot := [*_uncut(self.cfg, self.model), *_shared(batches)]):
            error = CheckpointError(
                f"the checkpoint's run has deferred {len(kept.rows)} rollouts of this replica, which cannot be decoded on here: "
                + "; ".join(cannot)
            )
        raise_together(error, CheckpointError)
        if not self._active:
            self._take_over()
        self.pool.restore(kept.rows, kept.next_key)
        self._chunk.load_state_dict(kept.state["chunk"])
        if delta.max > 0:
            self._delta.load_state_dict(kept.state["delta"])

    def _batches(self, sampler_iter: Any, num_microbatches: int, dataset: Any, collate_fn: Any) -> Any:
        given = (sampler_iter, num_microbatches, dataset, collate_fn)
        made: Any = None
        error: Exception | None = None
        if self._actor.pooled:
            try:
                made = fill(self.pool, self._draw, *given)
            except Exception as wrong:  # also of the user's dataset or collate function: raised just below
                error = wrong
        raise_together(error, DataError)
        return self._their_batches(*given) if made is None else made

    def _end_step(self, metrics: dict[str, Any], seconds: float) -> dict[str, float]:
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
            "oppo_stale_tokens": stale, "oppo_max_staleness": max((row.deferrals for row in rows), default=0),
            "oppo_tail_waste": waste, "oppo_length_gap": gap,
        }  # fmt: skip
        self._delta.observe(self.step, StepSignals(metrics["rewards"], waste, 1 - stale, gap))
        self._chunk.observe(self.step, StepCost(seconds, effort.positions, effort.tokens, effort.law))
        return figures

    def _stamps(self, checkpoints: Path) -> dict[str, int]:
        """Return the first rank's stamps.  Collective."""
        return as_first(stamps_of(checkpoints, self.step) if torch.distributed.get_rank() == 0 else {})

    def _sidecar(self, checkpoints: Path) -> Sidecar:
        return Sidecar(
            folder_next_to(checkpoints),
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_data_parallel_world_size(),
            writes=bool(torch.distributed.get_rank() == parallel_state.get_model_parallel_src_rank()),
            leads=torch.distributed.get_rank() == 0,
            agree=raise_together,
        )


def _uncut(cfg: DictConfig, model: Any) -> list[str]:
    """Reasons why generation cannot stop early."""
    return [
        f"{name}.enable is true, but TensorRT-LLM generates whole micro-batches, so rollouts can neither be deferred nor "
        "streamed; set it to false, or leave delta.max at 0 and scorer out of trainer.ppo.oppo"
        for name, tree in (("trainer.ppo.trt_llm", cfg), ("model.ppo.trt_llm", model.cfg.ppo))
        if (tree.get("trt_llm") or {}).get("enable", False)
    ]


def _shared(batch_iterator_cls: Any) -> list[str]:
    """Reasons why a replica does not know its own prompts."""
    made = batch_iterator_cls.func if isinstance(batch_iterator_cls, partial) else batch_iterator_cls
    if made is DefaultBatchIterator:
        return []
    return [
        f"the batch iterator is {getattr(made, '__name__', made)}, but deferral counts what each replica has drawn by "
        "itself; set trainer.ppo.batch_iterator.use_flask to false, or oppo.delta.max to 0"
    ]


def _folder_of(ckpt_callback: Any) -> str | None:
    dirpath = getattr(ckpt_callback, "dirpath", None)
    return os.fspath(dirpath) if isinstance(dirpath, str | os.PathLike) else None


def _require_fit(settings: AlignerConfig, cfg: DictConfig, model: Any, batch_iterator_cls: Any, ckpt_callback: Any) -> None:
    """Raise ConfigError for conflicting NeMo-Aligner settings."""
    problems, dirpath = _uncut(cfg, model), _folder_of(ckpt_callback)
    if settings.delta.max > 0:
        problems += _shared(batch_iterator_cls)
        if dirpath is not None and "://" in dirpath:
            problems.append(
                f"checkpoints go to {dirpath}, but deferred rollouts are kept in a folder next to them; give a path of a file "
                "system as exp_manager.checkpoint_callback_params.dirpath, or set oppo.delta.max to 0"
            )
    if problems:
        raise ConfigError(problems)
    if settings.delta.max > 0 and dirpath is None and not isinstance(ckpt_callback, FakeCheckpointCallback):
        logging.warning(
            f"the checkpoint callback {type(ckpt_callback).__name__} has no dirpath, so deferred rollouts are not kept next to "
            "its checkpoints, and a resumed run loses their prompts; give it the attribute dirpath, the folder of its "
            "checkpoints, with step=<n> in their names, or set trainer.ppo.oppo.delta.max to 0"
        )


def _require_delta(most: int, batch: int, model: Any) -> None:
    """Raise ConfigError for too large a delta."""
    if most > batch:
        raise ConfigError(
            f"trainer.ppo.oppo.delta.max {most} is more than the batch of {batch} rollouts (num_rollout_samples); lower it"
        )
    replicas = parallel_state.get_data_parallel_world_size()
    if 0 < most < replicas:
        logging.warning(
            f"trainer.ppo.oppo.delta.max is {most}, over {replicas} data-parallel replicas: those without a part of it make the "
            f"others wait; set it to {replicas} or more"
        )
    if most > 0 and getattr(model.infer, "__func__", None) is not MegatronGPTActorModel.infer:
        logging.warning(
            f"{type(model).__name__}.infer is not NeMo-Aligner's: steps that defer rollouts do not call it, but the model's "
            "`generate`; if it uses another back end, or chooses answers, set trainer.ppo.oppo.delta.max to 0"
        )


def _open_stream(settings: StreamConfig) -> ScorerStream | None:
    """Open the client on the rank that sees tokens; ConfigError on all."""
    stream: ScorerStream | None = None
    error: ConfigError | None = None
    if parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0:
        try:
            stream = build_stream(settings, os.environ)
        except ConfigError as wrong:
            error = wrong
    raise_together(error, ConfigError)
    return stream

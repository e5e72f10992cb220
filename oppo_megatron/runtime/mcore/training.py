"""Training and cache-free forward of a role through megatron-core's own DDP, optimizer, scheduler and pipeline schedules.

Legend: R rows of interest of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as McoreOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor

from oppo_megatron.config.model import OptimizerConfig
from oppo_megatron.errors import NumericsError
from oppo_megatron.runtime.batch import MicroBatch
from oppo_megatron.runtime.mcore import compat
from oppo_megatron.runtime.mcore.attention import PackedPlan
from oppo_megatron.runtime.mcore.model import RoleModel

Loss = Callable[[MicroBatch, Tensor], tuple[Tensor, dict[str, Tensor]]]
"""(micro-batch, output of its rows) -> (its share of the minibatch's loss, summed statistics)."""


@dataclass
class StepReport:
    """One optimizer step.  `stats` are sums over the micro-batches (maxima where the name begins with `max_`).

    They are known on last-stage ranks only; on the others the mapping is empty.
    """

    grad_norm: float
    lr: float
    stats: dict[str, float]


def _run(
    model: torch.nn.Module, role: RoleModel, batches: Sequence[MicroBatch], finish: Loss, forward_only: bool
) -> list[dict[str, Tensor]]:
    """Drive the pipeline over the micro-batches.  Returns what `finish` reported for each, on the last stage."""

    def forward_step(batches_left: Iterator[MicroBatch], module: torch.nn.Module) -> tuple[Tensor, Any]:
        batch = next(batches_left)
        out = module(batch.tokens_T, PackedPlan(batch.lengths, role.rope), batch.rows_R)

        def loss(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            share, stats = finish(batch, output)
            return share * len(batches), stats  # megatron divides by the number of micro-batches

        return out, loss

    groups = role.groups
    longest = max(len(b.tokens_T) for b in batches)
    return get_forward_backward_func(groups.pp, None)(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=model,
        num_microbatches=len(batches),
        seq_length=longest,
        micro_batch_size=1,
        forward_only=forward_only,
        p2p_communicator=P2PCommunicator(groups.collection.pp, role.config),
        pg_collection=groups.collection,
    )


@torch.no_grad()
def forward_rows(
    role: RoleModel, batches: Sequence[MicroBatch], finish: Callable[[MicroBatch, Tensor], Tensor]
) -> list[Tensor]:
    """Full forward of every micro-batch without a cache.  On the last stage: finish(batch, rows' output) of each; else []."""

    def as_loss(batch: MicroBatch, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return output.new_zeros(()), {"out": finish(batch, output)}

    return [report["out"] for report in _run(role, role, batches, as_loss, forward_only=True)]


class TrainedModel:
    """A role with its optimizer.  `model` is the module that decodes and scores: the optimizer updates it in place."""

    def __init__(self, model: RoleModel, config: OptimizerConfig, total_steps: int):
        self.model = model
        settings = model.config
        groups = model.groups.collection
        bf16 = settings.bf16
        ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
        self.ddp = DistributedDataParallel(settings, ddp_config, model, pg_collection=groups)
        optimizer_config = McoreOptimizerConfig(
            optimizer="adam", lr=config.lr, min_lr=config.min_lr, weight_decay=config.weight_decay,
            adam_beta1=config.beta1, adam_beta2=config.beta2, adam_eps=config.eps, clip_grad=config.clip_grad,
            bf16=bf16, params_dtype=settings.params_dtype,
        )  # fmt: skip
        with compat.optimizer_world(model.groups.all):
            self.optimizer = get_megatron_optimizer(
                optimizer_config,
                [self.ddp],
                config_overrides=get_standard_config_overrides(optimizer_config),
                use_gloo_process_groups=False,
                pg_collection=groups,
            )
        self.scheduler = _scheduler(self.optimizer, config, total_steps)
        settings.finalize_model_grads_func = partial(finalize_model_grads, pg_collection=groups)
        settings.no_sync_func = self.ddp.no_sync
        settings.grad_scale_func = self.optimizer.scale_loss if bf16 else None

    def step(self, batches: Sequence[MicroBatch], loss: Loss) -> StepReport:
        """Forward, backward and one optimizer step.  The micro-batches' losses add up to the minibatch's.

        Raises NumericsError, before the weights change, if the gradient norm is not finite.
        """
        self.ddp.train()
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        lr = self.optimizer.param_groups[0]["lr"]
        reports = _run(self.ddp, self.model, batches, loss, forward_only=False)
        norm = self._checked_step()
        self.ddp.eval()
        return StepReport(norm, lr, _reduce(reports))

    def _checked_step(self) -> float:
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if not math.isfinite(norm):
            raise NumericsError(
                f"the gradient norm is {norm}: the update is not applied. Lower the learning rate, or look at the batch's "
                "rewards and log-prob gap in metrics.jsonl."
            )
        _, norm, _ = self.optimizer.step()
        self.scheduler.step(increment=1)
        return norm


def _reduce(reports: Sequence[dict[str, Tensor]]) -> dict[str, float]:
    names = reports[0] if reports else ()
    return {
        name: (max if name.startswith("max_") else sum)([float(report[name]) for report in reports]) for name in names
    }


def _scheduler(optimizer: Any, config: OptimizerConfig, total_steps: int) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer,
        # megatron starts a warm-up at init_lr: the first step is to be one of the ramp, not one that does nothing.
        init_lr=config.lr / config.warmup_steps if config.warmup_steps else config.lr,
        max_lr=config.lr,
        min_lr=config.min_lr if config.decay != "constant" else min(config.min_lr, config.lr),
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=max(total_steps, config.warmup_steps + 1),
        lr_decay_style=config.decay,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=max(total_steps, 1),
        wd_incr_style="constant",
    )

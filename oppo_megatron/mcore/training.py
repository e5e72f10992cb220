"""Training and cache-free forward by megatron-core.  Legend: R rows of interest of a micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as McoreOptimizerConfig
from megatron.core.optimizer import ParamKey, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from oppo_megatron.cluster.process_groups import gather_figures
from oppo_megatron.config.model import OptimizerConfig, TrainingLayoutConfig
from oppo_megatron.errors import NumericsError
from oppo_megatron.mcore import compat
from oppo_megatron.mcore.attention import PackedPlan
from oppo_megatron.mcore.batch import MicroBatch
from oppo_megatron.mcore.context import ContextPlan
from oppo_megatron.mcore.device import memory_for, too_many_tokens
from oppo_megatron.mcore.experts import replay
from oppo_megatron.mcore.groups import RoleGroups
from oppo_megatron.mcore.model import RoleModel

Loss = Callable[[MicroBatch, Any], tuple[Tensor, dict[str, Tensor]]]
"""(micro-batch, its rows as `OutputRows` or scalars) -> (its share of the minibatch's loss, summed statistics)."""

Chunks = RoleModel | Sequence[RoleModel]


@dataclass
class StepReport:
    """`stats`: sums over all replicas' micro-batches (`max_...`: maxima), on last-stage ranks."""

    grad_norm: float
    lr: float
    stats: dict[str, float]


def _run(
    modules: Sequence[torch.nn.Module], chunks: Sequence[RoleModel], batches: Sequence[MicroBatch], finish: Loss,
    *, forward_only: bool, ahead: list[tuple[MicroBatch, Tensor]],
) -> list[dict[str, Tensor]]:  # fmt: skip
    """Run the pipeline; return the reports of `finish`, on the last stage.  `ahead`: at most one batch, taken out when used."""
    first = chunks[0]
    groups, interleaved = first.groups, len(chunks) > 1
    count = _most(len(batches), groups)
    if forward_only and count == 0:
        return []
    missing = _multiple(max(count, 1), groups.pp if interleaved else 1) - len(batches)
    batches = [*batches, *[MicroBatch.dummy(first.rope[0].device)] * missing]
    batches = [batch.shared_by(groups, first.token_multiple) for batch in batches]
    sizes = [_multiple(len(b.tokens_T), first.token_multiple) for b in batches]
    if interleaved:  # its messages do not say how long they are
        sizes = [max(sizes)] * len(sizes)

    def forward_step(left: Iterator[tuple[MicroBatch, int]], module: torch.nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
        batch, size = next(left)
        if ahead and (batch.index, batch.tokens) == (ahead[0][0].index, ahead[0][0].tokens):
            _, out = ahead.pop()
        else:
            out = _forward(first, module, batch, size)

        def loss(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            rows: Any = batch.of_all_rows(output) if first.head == "scalar" else chunks[-1].output_rows(output, batch.share)
            if batch.is_dummy:  # every weight has a gradient
                numbers_R = rows if first.head == "scalar" else rows.figures(batch.targets_R).logp_R
                share, stats = numbers_R.sum() * 0.0, dict[str, Tensor]()
            else:
                share, stats = finish(batch, rows)
            return share, torch.zeros((), dtype=torch.int, device=share.device), stats  # losses are sums: no count

        return out, loss

    work = list(zip(batches, sizes, strict=True))
    with memory_for(lambda: _largest(batches, "a forward pass" if forward_only else "a training micro-batch")):
        reports = get_forward_backward_func(groups.pp, len(chunks) if interleaved else None)(
            forward_step_func=forward_step,
            data_iterator=[iter(work) for _ in modules] if interleaved else iter(work),
            model=list(modules) if interleaved else modules[0],
            num_microbatches=len(batches),
            seq_length=max(sizes),
            micro_batch_size=1,
            forward_only=forward_only,
            p2p_communicator=StageMessages(groups.collection.pp, first.config, sizes),
            pg_collection=groups.collection,
        )
    for chunk in chunks:
        chunk.set_input_tensor(None)  # release the last micro-batch's
    if not groups.is_last_stage:
        return []
    return [report for report, batch in zip(reports, batches, strict=True) if not batch.is_dummy]


def _forward(model: RoleModel, module: torch.nn.Module, batch: MicroBatch, size: int) -> Tensor:
    if batch.share is None:
        lengths, tokens_T = batch.padded(size, model.max_length)
        plan = PackedPlan(lengths, model.rope, batch.prefixes)
    else:
        plan, tokens_T = ContextPlan(batch.share, model.rope, size), F.pad(batch.tokens_T, (0, size - batch.share.size))
    if model.shape.experts is not None and any(batch.routes):
        plan.routing = replay(batch.routes, batch.rows_R[: len(batch.routes)], size, model.shape)
    out: Tensor = module(tokens_T, plan, batch.rows_R)
    return out


def _largest(batches: Sequence[MicroBatch], work: str) -> tuple[str, str]:
    largest = max(batches, key=lambda batch: len(batch.tokens_T))
    together = len(largest.lengths) // max(1, len(largest.index))
    # More sequences than a pair has with its prompt are a group, which a smaller limit cuts.
    return too_many_tokens(work, largest.lengths, together if together <= 3 else 1)


def _most(count: int, groups: RoleGroups) -> int:
    """Largest count of the replicas that divide experts, which run as many micro-batches."""
    if groups.ep == 1:
        return count
    most = torch.tensor([count])
    dist.all_reduce(most, dist.ReduceOp.MAX, groups.collection.ep)
    return int(most)


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of


def as_chunks(model: Chunks) -> list[RoleModel]:
    return [model] if isinstance(model, RoleModel) else list(model)


@torch.no_grad()
def forward_rows(model: Chunks, batches: Sequence[MicroBatch], finish: Callable[[MicroBatch, Any], Tensor]) -> list[Tensor]:
    """Return finish(batch, output) per micro-batch on the last stage, else [].  Raises CapacityError."""
    chunks = as_chunks(model)
    none = torch.zeros((), device=chunks[0].rope[0].device)
    reports = _run(chunks, chunks, batches, lambda b, x: (none, {"out": finish(b, x)}), forward_only=True, ahead=[])
    return [report["out"] for report in reports]


class TrainedModel:
    def __init__(self, model: Chunks, config: OptimizerConfig, total_steps: int, layout: TrainingLayoutConfig | None = None):
        layout = layout or TrainingLayoutConfig()
        self.chunks = as_chunks(model)
        self.model = self.chunks[0]
        settings, groups = self.model.config, self.model.groups
        assert all(chunk.config is settings for chunk in self.chunks), "megatron reads one configuration for all chunks"
        assert len(self.chunks) == layout.vpp, (len(self.chunks), layout.vpp)
        self.sharded = sharded = groups.copies > 1  # each replica keeps the optimizer's state of a share of the weights
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=sharded, overlap_grad_reduce=sharded
        )
        self.ddp = [
            DistributedDataParallel(settings, ddp_config, chunk, disable_bucketing=number > 0, pg_collection=groups.collection)
            for number, chunk in enumerate(self.chunks)
        ]
        self.optimizer = _optimizer(self.ddp, config, groups)
        self.scheduler = _scheduler(self.optimizer, config, total_steps)
        # Gradients are summed over replicas and copies of shared weights, but not divided by tokens.
        settings.finalize_model_grads_func = lambda chunks, _tokens, **how: finalize_model_grads(chunks, None, **how)
        self._ahead: list[tuple[MicroBatch, Tensor]] = []
        settings.no_sync_func = [ddp.no_sync for ddp in self.ddp] if len(self.ddp) > 1 else self.ddp[0].no_sync
        settings.grad_scale_func = self.optimizer.scale_loss if settings.bf16 else None

    @property
    def goes_ahead(self) -> bool:
        """True if forward needs no other stage, replica or micro-batch."""
        return self.model.groups.pp == self.model.groups.ep == 1 and len(self.chunks) == 1

    def ahead(self, batch: MicroBatch) -> None:
        """Run a micro-batch of the next `step` forward."""
        assert self.goes_ahead
        self._ahead.clear()
        model, ddp = self.model, self.ddp[0]
        batch = batch.shared_by(model.groups, model.token_multiple)
        ddp.train()
        try:
            with memory_for(lambda: _largest([batch], "a training micro-batch")):
                output = _forward(model, ddp, batch, _multiple(len(batch.tokens_T), model.token_multiple))
            self._ahead.append((batch, output))
        finally:
            ddp.eval()

    def forget_ahead(self) -> None:
        self._ahead.clear()

    def step(self, batches: Sequence[MicroBatch], loss: Loss) -> StepReport:
        """Step on this replica's share, maybe empty, on all ranks.  Raises CapacityError, NumericsError before weights change."""
        for ddp in self.ddp:
            ddp.train()
            ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        lr = self.optimizer.param_groups[0]["lr"]
        try:
            with compat.no_lone_sums():
                reports = _run(self.ddp, self.chunks, batches, loss, forward_only=False, ahead=self._ahead)
                with memory_for(lambda: ("the optimizer step", "use more ranks")):
                    norm = self._checked_step()
        finally:
            self._ahead.clear()
            for ddp in self.ddp:
                ddp.eval()
        return StepReport(norm, lr, _total(reports, self.model.groups))

    @property
    def updates(self) -> int:
        return int(self.scheduler.num_steps)

    def resume_schedule(self, updates: int) -> None:
        self.scheduler.num_steps = updates
        self.scheduler.step(increment=0)

    def _checked_step(self) -> float:
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())  # the host waits
        if not math.isfinite(norm):
            raise NumericsError(
                f"the gradient norm is {norm}: the update is not applied. Lower the learning rate, or look at the batch's "
                "rewards and log-prob gap in metrics.jsonl."
            )
        with compat.known_norm(self.optimizer, norm):
            self.optimizer.step()
        self.scheduler.step(increment=1)
        return norm


def _total(reports: Iterable[Mapping[str, Tensor]], groups: RoleGroups) -> dict[str, float]:
    own = _added(read_reports(list(reports)))
    if groups.dp == 1 or not groups.is_last_stage:
        return own
    return _added(gather_figures(own, groups.data))  # a replica without rows has no names


def read_reports(reports: Sequence[Mapping[str, Tensor]]) -> list[dict[str, float]]:
    values = [value.detach().double() for report in reports for value in report.values()]
    numbers = iter(torch.stack(values).tolist() if values else ())
    return [{name: next(numbers) for name in report} for report in reports]


def _added(reports: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for report in reports:
        for name, value in report.items():
            both = (total.get(name, value), value)
            total[name] = max(both) if name.startswith("max_") else total.get(name, 0.0) + value
    return total


def _optimizer(ddp: list[DistributedDataParallel], config: OptimizerConfig, groups: RoleGroups) -> Any:
    settings = ddp[0].config
    compat.keep_norms_on_device()
    optimizer_config = McoreOptimizerConfig(
        optimizer="adam", lr=config.rate, min_lr=config.min_lr, weight_decay=config.weight_decay,
        adam_beta1=config.betas[0], adam_beta2=config.betas[1], adam_eps=config.eps, clip_grad=config.clip_grad,
        bf16=settings.bf16, params_dtype=settings.params_dtype, use_distributed_optimizer=groups.copies > 1,
    )  # fmt: skip
    of_experts = {ParamKey(name="*_bias"): {"wd_mult": 0.0}}  # matrices of biases, which do not decay either
    with compat.optimizer_world(groups.all):
        optimizer = get_megatron_optimizer(
            optimizer_config, ddp, config_overrides=get_standard_config_overrides(optimizer_config) | of_experts,
            use_gloo_process_groups=False, pg_collection=groups.collection,
        )  # fmt: skip
    for each in optimizer.chained_optimizers:
        if isinstance(each.optimizer, torch.optim.AdamW):  # megatron found no other
            for group in each.optimizer.param_groups:
                group["fused"] = True  # one pass over weights and moments instead of a dozen
    return optimizer


def _scheduler(optimizer: Any, config: OptimizerConfig, total_steps: int) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer,
        # megatron starts a warm-up at init_lr; without this the first step would have a learning rate of 0.
        init_lr=config.rate / config.warmup_steps if config.warmup_steps else config.rate, max_lr=config.rate,
        min_lr=config.min_lr if config.decay != "constant" else min(config.min_lr, config.rate),
        lr_warmup_steps=config.warmup_steps, lr_decay_steps=max(total_steps, config.warmup_steps + 1),
        lr_decay_style=config.decay, start_wd=config.weight_decay, end_wd=config.weight_decay,
        wd_incr_steps=max(total_steps, 1), wd_incr_style="constant",
    )  # fmt: skip


class StageMessages(P2PCommunicator):
    """Pipeline messages without shapes; the host waits for shapes (`P2PCommunicator._communicate_shapes`)."""

    def __init__(self, group: dist.ProcessGroup, config: TransformerConfig, sizes: Sequence[int]):
        super().__init__(group, config)
        shards = config.tensor_model_parallel_size if config.sequence_parallel else 1
        shapes = [[size // shards, 1, config.hidden_size] for size in sizes]
        self._activations, self._gradients = iter(shapes), iter(shapes)

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        nothing = [0, 0, 0]
        return next(self._activations) if recv_prev else nothing, next(self._gradients) if recv_next else nothing


class Undo:
    def __init__(self, model: TrainedModel):
        self._scheduler, self._num_steps = model.scheduler, model.scheduler.num_steps
        inner = [each.optimizer for each in model.optimizer.chained_optimizers if each.optimizer is not None]
        # The optimizer may hold weights of its own: float32 copies, or a replica's shares.
        held = [p for each in inner for group in each.param_groups for p in group["params"]]
        params = {id(p): p for p in (*(p for c in model.chunks for p in c.parameters() if p.requires_grad), *held)}
        groups = [group for each in inner for group in each.param_groups]
        self._weights = [(p.data, _aside(p.data)) for p in params.values()]
        self._groups = [(group, {k: v for k, v in group.items() if k != "params"}) for group in groups]
        self._states = [
            (each.state, {p: {k: _aside(v) for k, v in state.items()} for p, state in each.state.items()}) for each in inner
        ]

    @torch.no_grad()
    def restore(self) -> None:
        for weight, before in self._weights:
            weight.copy_(before)
        for group, settings in self._groups:
            group.update(settings)
        for states, saved in self._states:
            for param in [p for p in states if p not in saved]:  # made by an update since
                del states[param]
            for param, entries in saved.items():
                for name, value in entries.items():
                    if isinstance(value, Tensor):
                        states[param][name].copy_(value)
                    else:
                        states[param][name] = value
        self._scheduler.num_steps = self._num_steps


def _aside(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value

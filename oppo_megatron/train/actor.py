"""Actor and critic on their ranks: decoding and updates.

Legend: T response tokens of a batch (packed), R rows of a micro-batch (its tokens), V vocabulary shard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from oppo_megatron.algorithms.algorithm import Algorithm
from oppo_megatron.algorithms.experience import Experience
from oppo_megatron.algorithms.losses import ActorTargets
from oppo_megatron.algorithms.packed import GAP_STATS, GapLimit, gap_stats, judged_gap, tokens_of_rows
from oppo_megatron.mcore.batch import MicroBatch, join_rows
from oppo_megatron.mcore.device import on_device
from oppo_megatron.mcore.training import forward_rows, read_reports
from oppo_megatron.mcore.vocab import OutputRows, RowFigures
from oppo_megatron.records import Rollout
from oppo_megatron.train.roles import TrainedRole
from oppo_megatron.train.update import (
    UpdateSettings,
    begin_update,
    divide,
    each_alone,
    micro_batches,
    run_update,
    stats_dict,
    update_packing,
)

STATS = ("ess", "logprob_gap", "logprob_gap_judged", "grad_norm", "lr")
"""Statistics in addition to what the algorithm's loss has."""

WHOLE_EVERY = 10
"""Every tenth update, from the first, compares decoding with training in all minibatches.

After the first minibatch the weights have moved, so the other tokens need an extra forward pass.
"""


@dataclass(frozen=True)
class BegunUpdate:
    """Log-probs [T] under the initial weights (last stage), and decoding's gap to them."""

    proximal_T: Tensor | None = None
    gap: dict[str, float] | None = None


@dataclass
class Actor:
    """The policy and its optimizer."""

    role: TrainedRole
    algorithm: Algorithm
    temperature: float
    gap_limit: GapLimit = GapLimit()
    _begun: BegunUpdate | None = None

    def __post_init__(self) -> None:
        self._groups = self.role.trained.model.groups
        self._compared_at = self.algorithm.choices.temperature(self.temperature)

    def begin(self, batch: Sequence[Rollout], settings: UpdateSettings) -> None:
        """Do the work that needs no scores; `update` completes it."""
        self._begun = self._prepare(batch, settings)
        if self.algorithm.reads_known:
            begin_update(self.role.trained, batch, settings, self.algorithm.units)

    def abandon(self) -> None:
        if self._begun is not None:
            self._begun = None
            self.role.trained.forget_ahead()
            self.role.keep()

    def update(
        self, batch: Sequence[Rollout], experience: Experience, kl_coefficient: float, settings: UpdateSettings
    ) -> dict[str, float]:
        """Train PPO epochs; return statistics.  Raises NumericsError on every rank if a gradient is not finite."""
        begun, self._begun = self._begun or self._prepare(batch, settings), None
        inputs_T, columns_T = self._loss_inputs(batch, experience, begun.proximal_T, settings)
        counts = {"batch_size": len(batch), "group_size": settings.group_size}

        def loss(micro: MicroBatch, output: OutputRows, num_tokens: int, first: bool) -> tuple[Tensor, dict[str, Tensor]]:
            logp, entropy, _ = found = output.figures(micro.targets_R, self._compared_at)
            old_T, advantages_T, stale_T = (micro.extra[name] for name in ("old_logp", "advantages", "stale"))
            reference_T, weight_T, share_T = (micro.extra.get(name) for name in ("reference_logp", "weight", "share"))
            lengths_R = on_device(micro.counts, logp.device) if self.algorithm.needs_lengths else None
            columns = {name: micro.extra[name] for name in columns_T} | ({"tokens": micro.targets_R} if columns_T else {})
            targets = ActorTargets(old_T, advantages_T, reference_T, weight_T, share_T, lengths_R, stale_T, columns, counts)
            value, stats = self.algorithm.actor_loss(logp, entropy, targets, kl_coefficient, num_tokens)
            return value, stats_dict(stats) | (self._first_sums(micro, output, found) if first else {})

        counted = None if experience.counted_B is None else experience.counted_B.tolist()

        def weights(rows: Sequence[int]) -> list[float]:
            lengths = [len(batch[i].tokens) for i in rows]
            return self.algorithm.row_weights(lengths, None if counted is None else [counted[i] for i in rows])

        units = partial(self.algorithm.units, experience=experience)
        reports = run_update(self.role.trained, batch, inputs_T | columns_T, loss, settings, weights, units)
        names = (*self.algorithm.figure_names, *STATS)
        summary = self.role.share(self._summary(reports, begun.gap), names)
        return summary | update_packing(batch, self._groups.dp, settings, units)

    @property
    def _exact(self) -> bool:
        """True if the policy's own tokens need no correction; rounding moves a response's ratio out of its narrow range."""
        return self.algorithm.choices.ratio == "token"

    def _corrects(self, batch: Sequence[Rollout], settings: UpdateSettings) -> bool:
        stale = any(version != settings.version for rollout in batch for version in rollout.versions)
        return self.algorithm.ppo.staleness != "behaviour" and (stale or not self._exact)

    def _prepare(self, batch: Sequence[Rollout], settings: UpdateSettings) -> BegunUpdate:
        whole = settings.minibatches > 1 and settings.version % WHOLE_EVERY == 0 and self.gap_limit.nats is not None
        begun = self._under_start(batch, settings) if whole or self._corrects(batch, settings) else BegunUpdate()
        self.role.retire()
        return begun

    def _loss_inputs(
        self, batch: Sequence[Rollout], experience: Experience, proximal_T: Tensor | None, settings: UpdateSettings
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Tensors [T] for any loss, and for a custom loss; empty except on the last stage."""
        if not self._groups.is_last_stage:
            return {}, {}
        fresh_T = fresh_tokens(batch, settings)
        if not self._corrects(batch, settings):
            proximal_T = None
        elif proximal_T is not None and self._exact:
            proximal_T = experience.old_logp_T.where(fresh_T > 0, proximal_T)
        base_T, weight_T = self.algorithm.ratio_base(
            experience.old_logp_T, proximal_T, experience.advantages_T, experience.lengths_B
        )
        stale = [float(any(v != settings.version for v in r.versions)) for r in batch for _ in r.versions]
        inputs = {
            "old_logp": base_T,
            "behaviour_logp": experience.old_logp_T,
            "advantages": experience.advantages_T,
            "fresh": fresh_T,
            "stale": on_device(stale, settings.device, torch.float32),  # 1 in responses with a token of an older policy
            "reference_logp": experience.reference_logp_T,
            "weight": weight_T,
        }
        found = {name: x_T for name, x_T in inputs.items() if x_T is not None}
        if self.algorithm.loss is None:
            return found, {}
        assert experience.scores_B is not None
        rows_T = on_device([row for row, rollout in enumerate(batch) for _ in rollout.tokens], settings.device)
        cut_B = on_device([rollout.finish_reason == "length" for rollout in batch], settings.device, torch.bool)
        columns = {
            "behaviour_logp": experience.old_logp_T,
            "versions": on_device([v for rollout in batch for v in rollout.versions], settings.device),
            "score": experience.scores_B[rows_T],
            "truncated": cut_B[rows_T],
            "group": rows_T // settings.group_size,
        }
        if experience.old_values_T is not None:
            columns["values"] = experience.old_values_T
        return found, columns

    def _under_start(self, batch: Sequence[Rollout], settings: UpdateSettings) -> BegunUpdate:
        """Log-probs under the initial weights."""

        def logprobs(micro: MicroBatch, output: OutputRows) -> Tensor:
            found = output.figures(micro.targets_R, self.temperature)
            return torch.stack([found.logp_R, found.largest_R], -1)

        found_T2 = forward_batch(self.role, batch, settings.micro_batch_tokens, logprobs, settings.sharing)
        if found_T2 is None:
            return BegunUpdate()
        logp_T, largest_T = found_T2.unbind(-1)
        drawn_T = on_device([x for r in batch for x in r.logprobs], settings.device, torch.float32)
        gap = gap_stats(logp_T - drawn_T, largest_T, fresh_tokens(batch, settings), self.gap_limit)
        return BegunUpdate(logp_T, read_reports([gap])[0])

    @torch.no_grad()
    def _first_sums(self, micro: MicroBatch, output: OutputRows, found: RowFigures) -> dict[str, Tensor]:
        if self._compared_at != self.temperature:
            found = output.figures(micro.targets_R, self.temperature)
        difference_R = found.logp_R - micro.extra["behaviour_logp"]
        ratio_R = difference_R.double().exp()
        return gap_stats(difference_R, found.largest_R, micro.extra["fresh"], self.gap_limit) | {
            "weight_sum": ratio_R.sum(),
            "weight_squares": ratio_R.square().sum(),
        }

    def _summary(self, reports: list[dict[str, float]], gap: dict[str, float] | None) -> dict[str, float]:
        if not reports or "num_tokens" not in reports[0]:
            return {}
        first = reports[0]
        gap = gap or {name: first[name] for name in GAP_STATS}
        return self.algorithm.figures(reports) | {
            "ess": first["weight_sum"] ** 2 / (first["weight_squares"] * first["num_tokens"]),
            "logprob_gap": gap["max_logprob_gap"],
            "logprob_gap_judged": judged_gap(self.gap_limit, **gap),
            "grad_norm": sum(r["grad_norm"] for r in reports) / len(reports),
            "lr": reports[-1]["lr"],
        }


def forward_batch(
    role: TrainedRole, batch: Sequence[Rollout], budget: int, finish: Callable[[MicroBatch, Any], Tensor], sharing: int = 1
) -> Tensor | None:
    """Return finish(micro-batch, output) of all response tokens, [T, ...], on the last stage; replicas divide the rows.

    `budget`: tokens of a micro-batch.  `sharing`: see `UpdateSettings`.
    """
    groups, device = role.trained.model.groups, next(role.trained.model.parameters()).device
    alone = each_alone(range(len(batch)))
    shares = divide(batch, alone, groups.dp, budget, sharing)
    if not all(shares):  # whole groups would leave a replica idle, without the shape of an output
        shares = divide(batch, alone, groups.dp, budget, 1)
    units = shares[groups.dp_rank]
    micros = micro_batches(role.trained, batch, units, budget, sharing, device)
    outputs = forward_rows(role.trained.chunks, micros, finish)
    if not groups.is_last_stage:
        return None
    mine = join_rows(outputs, [sum(len(batch[i].tokens) for i in unit) for unit in units], micros)
    lengths_B = torch.tensor([len(r.tokens) for r in batch])
    found_T = torch.zeros(int(lengths_B.sum()), *mine.shape[1:], device=device)
    found_T[on_device(tokens_of_rows(lengths_B, [i for unit in units for i in unit]), device)] = mine
    if groups.dp > 1:
        dist.all_reduce(found_T, group=groups.data)  # each is 0 on all replicas but one
    return found_T


def fresh_tokens(batch: Sequence[Rollout], settings: UpdateSettings) -> Tensor:
    """[T]: 1 for tokens decoded with the update's initial weights, cache included."""
    flags = [float(version == settings.version) for rollout in batch for version in rollout.versions]
    return on_device(flags, settings.device, torch.float32)


CRITIC_STATS = ("critic_loss", "critic_clip_fraction", "critic_error", "critic_grad_norm", "critic_update_s")


@dataclass
class Critic:
    """The value model and its optimizer.  `stats`: of its last update."""

    role: TrainedRole
    algorithm: Algorithm
    micro_batch_tokens: int
    stats: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CRITIC_STATS, 0.0))

    def values(self, batch: Sequence[Rollout]) -> Tensor | None:
        """Return values [T] of whole responses, on the last stage, for a critic whose ranks only train."""
        return forward_batch(self.role, batch, self.micro_batch_tokens, lambda _, output: output.float())

    def update(self, batch: Sequence[Rollout], experience: Experience, settings: UpdateSettings) -> dict[str, float]:
        """Train value epochs.  After a NumericsError `stats` are NaN."""
        self.stats = no_stats()

        def loss(micro: MicroBatch, output: Tensor, num_tokens: int, first: bool) -> tuple[Tensor, dict[str, Tensor]]:
            value, stats = self.algorithm.critic_loss(output, micro.extra["old_values"], micro.extra["returns"], num_tokens)
            return value, stats_dict(stats)

        assert experience.old_values_T is not None, "a critic has given values"
        extra = {"old_values": experience.old_values_T, "returns": experience.returns_T}
        self.role.retire()
        reports = run_update(self.role.trained, batch, extra, loss, settings)
        stats = {}
        if "num_tokens" in reports[0]:
            tokens = sum(r["num_tokens"] for r in reports)
            stats = {
                "critic_loss": sum(r["loss"] for r in reports) / tokens,
                "critic_clip_fraction": sum(r["clipped"] for r in reports) / tokens,
                "critic_error": sum(r["squared_error"] for r in reports) / tokens,
                "critic_grad_norm": sum(r["grad_norm"] for r in reports) / len(reports),
            }
        self.stats = self.role.share(stats, CRITIC_STATS)
        return self.stats


def no_stats() -> dict[str, float]:
    return dict.fromkeys(CRITIC_STATS, math.nan) | {"critic_update_s": 0.0}

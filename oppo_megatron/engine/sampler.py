"""Drawing tokens by a hash of (seed, sequence id, position), whatever the batch and placement.

Legend: R rows, V vocabulary shard, S tensor ranks, K top-k candidates or blocks of W tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from oppo_megatron.config.ppo import RolloutConfig
from oppo_megatron.errors import NumericsError
from oppo_megatron.mcore.device import on_device
from oppo_megatron.mcore.vocab import VocabShards
from oppo_megatron.records import ALONE, Members
from oppo_megatron.uniforms import uniforms

BELOW_ONE = 1 - 2.0**-24  # times this number, a float32 becomes the next smaller one

BLOCK = 64  # tokens per block: cumulative sums over blocks, then one block, are faster than over the vocabulary


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 is greedy, as are `members`; top_k 0 and top_p 1 keep all tokens."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    members: Members = ALONE

    @classmethod
    def of(cls, rollout: RolloutConfig, seed: int, members: Members = ALONE) -> Sampling:
        return cls(rollout.temperature, rollout.top_k, rollout.top_p, seed, members)


@dataclass
class Draw:
    """[R] each; a mass is finite if and only if its distribution is valid.

    `logprobs`: over the vocabulary at the temperature (1 if greedy); `sampling_logprobs`: after top-k and top-p.
    """

    tokens: Tensor
    logprobs: Tensor
    sampling_logprobs: Tensor
    masses: Tensor

    def table(self) -> Tensor:
        return torch.stack([x.double() for x in (self.tokens, self.logprobs, self.sampling_logprobs, self.masses)])


def no_distribution(sampling: Sampling, seq_id: int, position: int) -> NumericsError:
    return NumericsError(
        f"sequence {seq_id}, response token {position}: the logits at temperature {sampling.temperature:g} are not finite, "
        "but must give a distribution; check the actor's weights, lower the learning rate if training has diverged, or "
        "raise the temperature (0 is greedy)"
    )


def uniforms_at(states_R: Tensor, positions_R: Tensor) -> Tensor:
    """Float64 [R] in [0, 1) from int64, bit-equal to `uniforms`."""
    x = (states_R ^ positions_R) + (0x9E3779B97F4A7C15 - 2**64)
    x = (x ^ _shifted(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _shifted(x, 27)) * (0x94D049BB133111EB - 2**64)
    return _shifted(x ^ _shifted(x, 31), 11).double() * 2.0**-53


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & (2 ** (64 - bits) - 1)


def draw(
    logits_RV: Tensor, sampling: Sampling, seq_ids: Sequence[int], positions: Sequence[int], shards: VocabShards | None = None
) -> Draw:
    """Draw a token per row from float32 logits, equal on every rank."""
    u_R, *greedy = draw_numbers(sampling, seq_ids, positions, logits_RV.device)
    return draw_at(logits_RV, sampling, u_R, shards, *greedy)


def draw_numbers(sampling: Sampling, seq_ids: Sequence[int], positions: Sequence[int], device: torch.device) -> list[Tensor]:
    """Return each row's number in [0, 1), and, if there are greedy rows, which they are."""
    numbers = [on_device(uniforms(sampling.seed, seq_ids, positions), device, torch.float64)]
    if sampling.members.greedy:
        numbers.append(on_device([sampling.members.is_greedy(i) for i in seq_ids], device, torch.bool))
    return numbers


def draw_at(
    logits_RV: Tensor, sampling: Sampling, u_R: Tensor, shards: VocabShards | None = None, greedy_R: Tensor | None = None
) -> Draw:
    """Draw at numbers in [0, 1); `greedy_R` rows (bool) take the likeliest token."""
    shards = shards or VocabShards()
    logits_RV = shards.filled_up(logits_RV)
    if sampling.temperature == 0:
        return _greedy(logits_RV, shards)
    scaled_RV = logits_RV if sampling.temperature == 1 else logits_RV / sampling.temperature
    u_R1 = u_R.float()[:, None]
    if sampling.top_k == 0 and sampling.top_p == 1:
        drawn = _whole(scaled_RV, u_R1, shards)
    else:
        drawn = _truncated(scaled_RV, u_R1, sampling, shards)
    if greedy_R is None:
        return drawn
    likeliest = _greedy(logits_RV, shards)
    return Draw(*(torch.where(greedy_R, getattr(likeliest, f.name), getattr(drawn, f.name)) for f in fields(Draw)))


def _greedy(logits_RV: Tensor, shards: VocabShards) -> Draw:
    best_R, token_R = logits_RV.max(-1)
    mass_R = torch.logsumexp(logits_RV, -1)
    if shards.size > 1:
        best_SR, token_SR, mass_SR = shards.gather(torch.stack([best_R, shards.globally(token_R).to(best_R), mass_R])).unbind(1)
        best_R, shard_R = best_SR.max(0)
        token_R = token_SR.gather(0, shard_R[None])[0].long()
        mass_R = torch.logsumexp(mass_SR, 0)
    return Draw(token_R, best_R - mass_R, torch.zeros_like(best_R), mass_R)


def _whole(scaled_RV: Tensor, u_R1: Tensor, shards: VocabShards) -> Draw:
    """Draw a block, then a token in it; ranks exchange block masses."""
    probs_RV = torch.softmax(scaled_RV, -1)  # of this shard
    missing = -probs_RV.shape[-1] % BLOCK
    blocks_RKW = (F.pad(probs_RV, (0, missing)) if missing else probs_RV).view(len(probs_RV), -1, BLOCK)
    num_blocks, mass_RS = blocks_RKW.shape[1], blocks_RKW.sum(-1)
    log_share_R1: Tensor | None = None
    if shards.size > 1:
        local_R1 = torch.logsumexp(scaled_RV, -1, keepdim=True)
        all_SRK = shards.gather(torch.cat([local_R1, mass_RS], -1))
        log_share_SR1 = all_SRK[:, :, :1] - torch.logsumexp(all_SRK[:, :, :1], 0)
        mass_RS = (all_SRK[:, :, 1:] * log_share_SR1.exp()).transpose(0, 1).flatten(1)
        log_share_R1 = log_share_SR1[shards.rank]
    cumulative_RS = mass_RS.cumsum(-1)
    target_R1 = u_R1 * cumulative_RS[:, -1:]
    block_R1 = _invert(cumulative_RS, target_R1)
    rest_R1 = target_R1 - (cumulative_RS.gather(-1, block_R1) - mass_RS.gather(-1, block_R1))
    local_R1 = block_R1 % num_blocks
    inner_RW = blocks_RKW.gather(1, local_R1[:, :, None].expand(-1, -1, blocks_RKW.shape[2]))[:, 0]
    if log_share_R1 is not None:
        inner_RW = inner_RW * log_share_R1.exp()
    place_R1 = _invert(inner_RW.cumsum(-1), rest_R1.clamp_min(0))
    token_R1 = (local_R1 * blocks_RKW.shape[2] + place_R1).clamp_max(probs_RV.shape[-1] - 1)  # of no distribution: any
    logprob_R1 = probs_RV.gather(-1, token_R1).log()
    if log_share_R1 is not None:
        mine_R1 = block_R1 // num_blocks == shards.rank
        found_2R1 = torch.stack([shards.globally(token_R1).double(), (logprob_R1 + log_share_R1).double()])
        token_R1, logprob_R1 = shards.add(found_2R1.where(mine_R1, 0.0)).unbind(0)
    logprob_R = logprob_R1[:, 0].float()
    return Draw(token_R1[:, 0].long(), logprob_R, logprob_R, cumulative_RS[:, -1])


def _truncated(scaled_RV: Tensor, u_R1: Tensor, sampling: Sampling, shards: VocabShards) -> Draw:
    """Draw from candidates: each rank's best k, without top-k all logits."""
    vocab = scaled_RV.shape[-1] * shards.size
    mass_R1 = torch.logsumexp(scaled_RV, -1, keepdim=True)
    if shards.size > 1:
        mass_R1 = torch.logsumexp(shards.gather(mass_R1), 0)
    num_kept = min(sampling.top_k or vocab, vocab)
    kept_RK, ids_RK = scaled_RV.topk(min(num_kept, scaled_RV.shape[-1]), dim=-1)
    if shards.size > 1:
        kept_RK, ids_RK = shards.gather(kept_RK), shards.gather(shards.globally(ids_RK))
        kept_RK, ids_RK = (x.transpose(0, 1).flatten(1) for x in (kept_RK, ids_RK))
        kept_RK, places_RK = kept_RK.topk(num_kept, dim=-1)
        ids_RK = ids_RK.gather(-1, places_RK)
    probs_RK = torch.softmax(kept_RK, -1)
    if sampling.top_p < 1:
        # The smallest set that reaches top_p: a candidate stays if those before it have not reached it yet.
        before_RK = probs_RK.cumsum(-1) - probs_RK
        probs_RK = probs_RK.masked_fill(before_RK >= sampling.top_p, 0.0)
    cumulative_RK = probs_RK.cumsum(-1)
    place_R1 = _invert(cumulative_RK, u_R1 * cumulative_RK[:, -1:])
    sampled_R = (probs_RK.gather(-1, place_R1) / probs_RK.sum(-1, keepdim=True)).log()[:, 0]
    logprob_R = (kept_RK.gather(-1, place_R1) - mass_R1)[:, 0]
    return Draw(ids_RK.gather(-1, place_R1)[:, 0], logprob_R, sampled_R, mass_R1[:, 0])


def _invert(cumulative_RK: Tensor, target_R1: Tensor) -> Tensor:
    """First index [R, 1] whose cumulative sum exceeds the target; never of probability 0."""
    # The target may have been rounded up to the total, which no element exceeds: take the first that reaches it.
    below_R1 = torch.minimum(target_R1, cumulative_RK[:, -1:] * BELOW_ONE)
    # A row that is not a distribution has no such element, but needs a valid index.
    return torch.searchsorted(cumulative_RK, below_R1, right=True).clamp_max_(cumulative_RK.shape[-1] - 1)

"""Drawing tokens with counter-based randomness.

Legend: R rows (one a sequence), V whole vocabulary, K candidates kept by top-k.

The random number of a token is a hash of (seed, sequence id, response position), so a sequence's draws do not depend on
the chunk size, on what else is in the batch, on the placement, or on a restart.  A token is found by inverting the
cumulative distribution at that number: a single pass over the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from oppo_megatron.config.ppo import RolloutConfig
from oppo_megatron.errors import NumericsError


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.  Temperature 0 is greedy; top_k 0 and top_p 1 keep the whole vocabulary."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    @classmethod
    def of(cls, rollout: RolloutConfig, seed: int) -> Sampling:
        return cls(rollout.temperature, rollout.top_k, rollout.top_p, seed)


@dataclass
class Draw:
    """Tokens [R] and two log-probs [R] of each.

    `logprobs` is under the whole vocabulary at the configured temperature (1 when greedy): the quantity that the
    training forward recomputes, so PPO's ratio compares like with like and is 1 before the first update.
    `sampling_logprobs` is under the distribution after top-k and top-p, whose support changes with the weights: no
    ratio of it is defined.
    """

    tokens: Tensor
    logprobs: Tensor
    sampling_logprobs: Tensor


def uniforms(seed: int, seq_ids: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """One number in [0, 1) per (seed, sequence id, position): 53 bits of a splitmix64 chain (Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        state = _mix(np.full(len(seq_ids), seed, dtype=np.uint64))
        for counter in (seq_ids, positions):
            state = _mix(state ^ np.asarray(counter, dtype=np.uint64))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def draw(logits_RV: Tensor, sampling: Sampling, seq_ids: Sequence[int], positions: Sequence[int]) -> Draw:
    """Draw one token a row from float32 logits.  Raises NumericsError for a row that gives no distribution."""
    if sampling.temperature == 0:
        return _greedy(logits_RV, sampling, seq_ids, positions)
    scaled_RV = logits_RV if sampling.temperature == 1 else logits_RV / sampling.temperature
    mass_R = torch.logsumexp(scaled_RV, -1, keepdim=True)
    _require_finite(mass_R, sampling, seq_ids, positions)
    u_R1 = torch.from_numpy(uniforms(sampling.seed, seq_ids, positions)).to(scaled_RV.device, torch.float32)[:, None]
    if sampling.top_k == 0 and sampling.top_p == 1:
        token_R1 = _invert((scaled_RV - mass_R).exp_(), u_R1)
        logprob_R = (scaled_RV.gather(-1, token_R1) - mass_R)[:, 0]
        return Draw(token_R1[:, 0], logprob_R, logprob_R)
    num_kept = min(sampling.top_k or scaled_RV.shape[-1], scaled_RV.shape[-1])
    kept_RK, ids_RK = scaled_RV.topk(num_kept, dim=-1)
    probs_RK = torch.softmax(kept_RK, -1)
    if sampling.top_p < 1:
        # The smallest set that reaches top_p: a candidate stays if those before it have not reached it yet.
        before_RK = probs_RK.cumsum(-1) - probs_RK
        probs_RK = probs_RK.masked_fill(before_RK >= sampling.top_p, 0.0)
    place_R1 = _invert(probs_RK, u_R1)
    token_R1 = ids_RK.gather(-1, place_R1)
    sampled_R = (probs_RK.gather(-1, place_R1) / probs_RK.sum(-1, keepdim=True)).log()[:, 0]
    return Draw(token_R1[:, 0], (scaled_RV.gather(-1, token_R1) - mass_R)[:, 0], sampled_R)


def _greedy(logits_RV: Tensor, sampling: Sampling, seq_ids: Sequence[int], positions: Sequence[int]) -> Draw:
    best_R, token_R = logits_RV.max(-1)
    mass_R = torch.logsumexp(logits_RV, -1)
    _require_finite(mass_R, sampling, seq_ids, positions)
    return Draw(token_R, best_R - mass_R, torch.zeros_like(best_R))


def _require_finite(mass_R: Tensor, sampling: Sampling, seq_ids: Sequence[int], positions: Sequence[int]) -> None:
    """`mass_R` are the log-sum-exps of the rows: finite exactly where a row is a distribution."""
    if bool(mass_R.isfinite().all()):
        return
    row = int((~mass_R.flatten().isfinite()).nonzero()[0])
    raise NumericsError(
        f"sequence {seq_ids[row]}, response token {positions[row]}: the logits at temperature {sampling.temperature:g} "
        "are not finite, but must give a distribution; check the actor's weights, lower the learning rate if training "
        "has diverged, or raise the temperature (0 is greedy)"
    )


def _invert(probs_RK: Tensor, u_R1: Tensor) -> Tensor:
    """Index [R, 1] at which the cumulative sum first exceeds u times its total; never one of probability 0."""
    cumulative_RK = probs_RK.cumsum(-1)
    total_R1 = cumulative_RK[:, -1:].contiguous()
    index_R1 = torch.searchsorted(cumulative_RK, u_R1 * total_R1, right=True)
    # u * total may round up to the total, which no element exceeds: then it is the first to reach it.
    return torch.minimum(index_R1, torch.searchsorted(cumulative_RK, total_R1))

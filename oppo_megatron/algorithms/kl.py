"""Estimators of KL(actor || reference) from one sampled token each (J. Schulman, "Approximating KL divergence", 2020).

Legend: T response tokens (packed).  Tokens are drawn from the actor; d = log actor - log reference.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]


def kl_per_token(logp_T: Tensor, reference_logp_T: Tensor, estimator: Estimator) -> Tensor:
    """Return the KL estimate of each token in nats, [T], differentiable in `logp_T`.

    k1 = d: unbiased, of either sign, noisy.
    k2 = d^2 / 2: never negative, biased.
    k3 = exp(-d) - 1 + d: never negative, unbiased if the reference has no mass outside the actor's support.

    As a loss only k2's gradient has the KL's gradient for its expectation under the actor; k1's has expectation zero
    (no pull to the reference at all) and k3's that of the reversed KL(reference || actor).
    """
    d_T = logp_T - reference_logp_T
    if estimator == "k1":
        return d_T
    if estimator == "k2":
        return 0.5 * d_T.square()
    if estimator == "k3":
        return torch.expm1(-d_T) + d_T
    raise ValueError(f"KL estimator {estimator!r} is unknown; choose k1, k2 or k3")


def with_reverse_gradient(kl_T: Tensor, logp_T: Tensor, old_logp_T: Tensor, estimator: Estimator) -> Tensor:
    """Return the estimate whose expected gradient is the gradient of KL(actor || reference), for tokens that `old` drew, [T].

    k1 and k3 times actor / old: the expectation under old is then the KL itself, and so is its gradient (arXiv 2506.09477,
    2512.21852; TRL's `use_bias_correction_kl`).  k2 has this gradient already, if the actor is old.
    """
    return kl_T if estimator == "k2" else kl_T * (logp_T - old_logp_T).exp()

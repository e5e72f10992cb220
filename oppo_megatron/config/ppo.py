"""Sections of the rollout and of the PPO update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, Field, StrictInt, StrictStr

from oppo_megatron.config.base import Section, Unit
from oppo_megatron.uniforms import uniforms_at

MOST_MEDIAN, MOST_SIGMA = 1e9, 10.0
"""Limits of forced log-normal lengths: the longest that can be drawn stays in the range of floats."""
Quantile = Callable[[float], float]
"""From a share in [0, 1) to a length in tokens."""


@dataclass(frozen=True)
class ForcedLengths:
    """Log-normal lengths (`median`, `sigma`), or lengths of a file (`trace`, `column`).

    `scale` multiplies a file's lengths; auto: their 99th percentile is `rollout.max_response_tokens`.
    """

    median: float | None = None
    sigma: float = 1.0
    trace: Path | None = None
    column: str | None = None
    scale: float | Literal["auto"] = "auto"


def log_normal(forced: ForcedLengths) -> Quantile:
    assert forced.median is not None, "checked with the configuration"
    median, sigma = forced.median, forced.sigma
    return lambda u: median * math.exp(sigma * NormalDist().inv_cdf(max(u, 2.0**-53)))


def _check_log_normal(value: Any) -> Any:
    if isinstance(value, list) and not (len(value) == 2 and 0 < value[0] <= MOST_MEDIAN and 0 <= value[1] <= MOST_SIGMA):
        raise ValueError(
            f"[median, sigma] with a median above 0 and up to {MOST_MEDIAN:g} and a sigma from 0 to {MOST_SIGMA:g}, "
            "a CSV file, or [file, column]"
        )
    return value


Given = Annotated[list[float] | Path | tuple[Path, str], AfterValidator(_check_log_normal)]
"""[median, sigma] of log-normal lengths, a trace, or [trace, column]."""


LENGTH_DRAW = 2**63  # takes the place of a token's position in its draw; no token has this position
KEPT_LENGTHS = 65536  # a length is asked for in every round
DRAWN_AT_ONCE = 256


@dataclass(frozen=True)
class ForcedLimits:
    """The forced length of each sequence, a function of (seed, sequence id), up to `most` tokens."""

    quantile: Quantile
    most: int
    seed: int
    _drawn: dict[int, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, forced: ForcedLengths, most: int, seed: int, trace: Quantile | None = None) -> ForcedLimits:
        """`trace`: lengths of a named file."""
        return cls(trace or log_normal(forced), most, seed)

    def __call__(self, seq_id: int) -> int:
        if seq_id not in self._drawn:
            if len(self._drawn) >= KEPT_LENGTHS:
                self._drawn.clear()
            first = seq_id - seq_id % DRAWN_AT_ONCE
            seq_ids = range(first, first + DRAWN_AT_ONCE)
            shares = uniforms_at(self.seed, np.arange(first, seq_ids.stop), LENGTH_DRAW)
            lengths = [round(self.quantile(share)) for share in shares]
            self._drawn.update(zip(seq_ids, [min(max(length, 1), self.most) for length in lengths], strict=True))
        return self._drawn[seq_id]


class RolloutConfig(Section):
    """The responses of a step, and how their tokens are drawn."""

    batch_size: Annotated[int, Unit("rollouts")] = Field(..., ge=1, description="trained rollouts per step (paper's B)")
    group_size: Annotated[int, Unit("rollouts")] = Field(
        1,
        ge=1,
        description="responses to each prompt; must divide the batch size; `algorithm.baseline: greedy` adds "
        "one, which does not count; default: the preset's",
    )
    max_response_tokens: int = Field(..., ge=1, description="longest response; a longer one is cut")
    temperature: Annotated[float, Unit("factor")] = Field(1.0, ge=0, description="0 means greedy")
    top_k: Annotated[int, Unit("tokens")] = Field(0, ge=0, description="0 turns it off")
    top_p: Annotated[float, Unit("share")] = Field(1.0, gt=0, le=1, description="smallest set with this mass; 1: off")
    stop: Annotated[list[StrictStr | StrictInt], Unit("token ids")] = Field(
        default=[],
        description="texts and token ids that end a response, in addition to the EOS of the tokenizer and "
        "of the actor's `generation_config.json`; the stop text stays in the response",
    )

    router_replay: bool = Field(
        True,
        description="of a policy with experts: train each token with the experts that it was drawn with "
        "([R3](https://arxiv.org/abs/2510.11370)), so that rounding cannot choose others",
    )
    forced_lengths: Annotated[Given | None, Unit("tokens, nats")] = Field(
        None,
        description="for benchmarks: lengths at which responses end, in place of EOS, drawn by (seed, sequence id): [median, "
        "sigma] of log-normal lengths, in tokens, and of their logarithm (0: all equal); a CSV file with a row per request "
        "and a column of tokens, or a histogram with the columns `kind`, `tokens`, `requests`; or [file, column], with its "
        "column of tokens (else `GeneratedTokens`), or the kind of a histogram (else `output`). A file's lengths are scaled so "
        "that their 99th percentile is `max_response_tokens`",
    )

    @property
    def lengths(self) -> ForcedLengths | None:
        given = self.forced_lengths
        if given is None:
            return None
        if isinstance(given, Path):
            return ForcedLengths(trace=given)
        if isinstance(given, tuple):
            return ForcedLengths(trace=given[0], column=given[1])
        return ForcedLengths(median=given[0], sigma=given[1])

    def rules(self) -> Iterator[str]:
        for each in self.stop_token_ids:
            if each < 0:
                yield f"rollout.stop has {each}, but ids are numbers from 0 on; correct or remove it"
        if "" in self.stop:
            yield "rollout.stop has an empty text, which would end every response at once; remove it"
        if self.stop and self.forced_lengths is not None:
            yield "rollout.stop is set, but with rollout.forced_lengths a response ends at its length only; remove one of them"

    @property
    def stop_texts(self) -> list[str]:
        return [each for each in self.stop if isinstance(each, str)]

    @property
    def stop_token_ids(self) -> list[int]:
        return [each for each in self.stop if isinstance(each, int)]


class KLConfig(Section):
    """Distance kept from the reference policy."""

    estimator: Literal["k1", "k2", "k3", "k1+", "k3+"] = Field(
        "k1",
        description="KL of one sampled token (docs/algorithm.md); k1+, k3+: with `mode: loss`, those values with a gradient "
        "whose expectation is the gradient of KL(actor || reference)",
    )
    mode: Literal["none", "penalty", "score", "loss", "margin"] = Field(
        "penalty",
        description="penalty: subtracted from the reward of each token; score: a response's sum is "
        "subtracted from its score, before a baseline is; loss: a term of the actor's loss (estimator k1+, k2, k3 or k3+); "
        "margin: the margins of pairs are measured against the reference (preset online_dpo); none: without a "
        "reference; default: the preset's",
    )
    coefficient: Annotated[float, Unit("reward per nat")] = Field(0.05, ge=0, description="weight of the KL, or its start")
    target: Annotated[float | None, Unit("nats per response")] = Field(
        None,
        gt=0,
        description="KL per response that the coefficient follows: by a tenth of the relative error, at "
        "most 2 % per step (Ziegler et al. 2019); null: the coefficient stays",
    )

    @property
    def formula(self) -> Literal["k1", "k2", "k3"]:
        """The value's estimator, whatever its gradient."""
        return {"k1+": "k1", "k3+": "k3"}.get(self.estimator, self.estimator)  # type: ignore[return-value]

    @property
    def corrected(self) -> bool:
        """True if the loss has the gradient of KL(actor || reference)."""
        return self.estimator.endswith("+")


STALENESS_BOUNDS: dict[str, tuple[float, ...]] = {
    "behaviour": (), "decoupled": (0.0, 2.0), "icepop": (0.5, 5.0), "seq_mask": (0.999, 1.002), "opsm": (1e-4,),
}  # fmt: skip


class PPOConfig(Section):
    """The PPO update (paper eq. 1-2 and the usual companions)."""

    epochs: Annotated[int, Unit("passes")] = Field(1, ge=1, description="passes over a batch")
    minibatches: Annotated[int, Unit("optimizer steps")] = Field(1, ge=1, description="must divide the batch size")
    gamma: Annotated[float, Unit("factor")] = Field(1.0, ge=0, le=1, description="discount of later rewards")
    gae_lambda: Annotated[float, Unit("factor")] = Field(0.95, ge=0, le=1, description="0 trusts the critic, 1 rewards")
    clip: Annotated[float, Unit("factor")] = Field(0.2, gt=0, description="ratio within 1 - clip .. 1 + clip")
    clip_high: Annotated[float | None, Unit("factor")] = Field(
        None,
        gt=0,
        description="the ratio counts up to 1 + clip_high, and with objective cispo, which needs it, this "
        "is the largest weight; null: 1 + clip; default: the preset's",
    )
    dual_clip: Annotated[float | None, Unit("factor")] = Field(
        None, gt=1, description="bound of the loss of a token of negative advantage, in advantages (arXiv 1912.09729); null: none"
    )
    value_clip: Annotated[float, Unit("reward")] = Field(0.2, ge=0, description="0 turns value clipping off")
    entropy_coefficient: Annotated[float, Unit("reward per nat")] = Field(0.0, ge=0, description="weight of the entropy bonus")
    reward_clip: Annotated[float | None, Unit("reward")] = Field(None, gt=0, description="bound of the absolute score")
    truncated: Annotated[float | Literal["mask"] | None, Unit("reward")] = Field(
        None,
        description="responses cut at the limit: a number is their score; mask: they are left out of the actor's loss, but still "
        "count in baselines and scales; null: as others",
    )
    reward_normalization: Literal["none", "batch", "running"] = Field(
        "none",
        description="scale scores to mean 0 and variance 1, after `reward_clip`: over the batch, or over all batches so far",
    )
    critic_warmup_steps: int = Field(0, ge=0, description="first steps, which train only the critic")
    kl: KLConfig = KLConfig()
    staleness: Literal["behaviour", "decoupled", "icepop", "seq_mask", "opsm"] = Field(
        "behaviour",
        description="treatment of tokens that an older policy sampled (docs/algorithm.md). behaviour: ratio against their "
        "log-probs at sampling; decoupled: against those at the step's start, with a clamped importance weight; icepop: with "
        "weight 0 outside of the bounds; seq_mask: with weight 0 for responses outside; opsm: behaviour, without bad responses "
        "that the policy has left; default: decoupled if `algorithm.ratio` is a response's, and responses are carried or the "
        "actor is in bfloat16",
    )
    staleness_bounds: Annotated[list[float] | None, Unit("factor; opsm: nats")] = Field(
        None,
        description="bounds of the importance weight: [0, 2] (decoupled), [0.5, 5] (icepop), of its mean over a response "
        "[0.999, 1.002] (seq_mask); opsm: [0.0001], most mean log-ratio of a response with a negative advantage; null: these",
    )

    @property
    def bounds(self) -> tuple[float, ...]:
        """Bounds of the correction; none for `behaviour`."""
        return STALENESS_BOUNDS[self.staleness] if self.staleness_bounds is None else tuple(self.staleness_bounds)

    @property
    def truncated_score(self) -> float | None:
        return None if self.truncated == "mask" else self.truncated

    @property
    def mask_truncated(self) -> bool:
        return self.truncated == "mask"


class PairLossConfig(Section):
    """The loss of a pair of responses (preset online_dpo; docs/preferences.md has the formulas)."""

    loss: Literal["sigmoid", "hinge", "ipo"] = Field("sigmoid", description="DPO, SLiC's hinge or IPO")
    beta: Annotated[float, Unit("")] = Field(0.1, gt=0, description="larger: nearer to the reference")

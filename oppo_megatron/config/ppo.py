"""Sections of the rollout and of the PPO update."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from oppo_megatron.config.base import Section, Unit


class ForcedLengthsConfig(Section):
    """For benchmarks: response lengths that do not depend on what the policy says, so that runs do the same work.

    Log-normal (`median`), or as in a file of recorded requests (`trace`). Drawn by (seed, sequence id), at least 1 and at
    most `rollout.max_response_tokens`; EOS is ignored. A trace is a CSV file with one row a request and a column of
    tokens, or a histogram with the columns `kind`, `tokens`, `requests`.
    """

    median: Annotated[float | None, Unit("tokens")] = Field(
        None, gt=0, description="log-normal: median length in tokens"
    )
    sigma: Annotated[float | None, Unit("nats")] = Field(
        None, ge=0, description="log-normal: standard deviation of the length's logarithm; 0: all equal; null: 1"
    )
    trace: Path | None = Field(None, description="CSV file of recorded lengths")
    column: str | None = Field(
        None,
        description="trace: the column of tokens (null: `GeneratedTokens`); of a histogram, the kind (null: `output`)",
    )
    scale: Annotated[PositiveFloat | Literal["auto"], Unit("factor")] = Field(
        "auto",
        description="trace: factor of every length; auto: what makes the trace's 99th percentile "
        "`rollout.max_response_tokens`",
    )


class RolloutConfig(Section):
    """What is decoded in a step and how tokens are drawn."""

    batch_size: Annotated[int, Unit("rollouts")] = Field(
        ..., ge=1, description="trained rollouts a step (the paper's B)"
    )
    max_response_tokens: int = Field(..., ge=1, description="a response is cut at so many tokens")
    temperature: Annotated[float, Unit("factor")] = Field(1.0, ge=0, description="0 means greedy")
    top_k: Annotated[int, Unit("tokens")] = Field(0, ge=0, description="0 turns it off")
    top_p: Annotated[float, Unit("share")] = Field(
        1.0, gt=0, le=1, description="smallest set of tokens with this mass; 1 turns it off"
    )
    stop_token_ids: Annotated[list[int], Unit("token ids")] = Field(
        default=[],
        description="ids that end a response beside the EOS of the tokenizer and those that the actor's `generation_config.json` "
        "names",
    )
    stop: list[str] = Field(
        default=[],
        description="texts that end a response: the first token behind which its text contains one of them is its last; the "
        "text stays in it as it was drawn, for rewards too",
    )
    forced_lengths: ForcedLengthsConfig | None = Field(
        None, description="for benchmarks: where responses end, in place of EOS"
    )


class AdaptiveKLConfig(Section):
    """Ziegler et al. 2019: the coefficient follows the measured KL."""

    target: Annotated[float, Unit("nats a response")] = Field(6.0, gt=0, description="KL per response, in nats")
    horizon: Annotated[float, Unit("rollouts")] = Field(
        10000.0, gt=0, description="rollouts over which the coefficient adapts"
    )


class KLConfig(Section):
    """Distance kept from the reference policy."""

    estimator: Literal["k1", "k2", "k3"] = Field("k1", description="KL of one sampled token; see docs/algorithm.md")
    mode: Literal["penalty", "loss"] = Field(
        "penalty", description="per-token reward penalty, or a term of the actor's loss"
    )
    coefficient: Annotated[float, Unit("reward a nat")] = Field(
        0.05, ge=0, description="weight of the KL (the first one, where it is adaptive)"
    )
    adaptive: AdaptiveKLConfig | None = None


class AlgorithmConfig(Section):
    """What is made of a batch's scores: which roles it takes, and how rewards become advantages."""

    preset: Literal["ppo", "reinforce_pp"] = Field(
        "ppo",
        description="ppo: a critic's values and GAE; reinforce_pp: REINFORCE++ (arXiv 2501.03262), discounted returns without "
        "a critic, which then has no section, no ranks and no messages",
    )

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained."""
        return self.preset == "ppo"


class StalenessConfig(Section):
    """How tokens sampled under an older policy enter the loss."""

    correction: Literal["behaviour", "decoupled"] = Field(
        "behaviour", description="ratio against the log-probs of sampling, or of the step's start with a weight"
    )
    weight_cap: Annotated[float, Unit("factor")] = Field(
        2.0, ge=1, description="cap of the truncated importance weight (decoupled)"
    )


class PPOConfig(Section):
    """The PPO update (paper eq. 1-2 and the usual companions)."""

    epochs: Annotated[int, Unit("passes")] = Field(1, ge=1, description="passes over a batch")
    minibatches: Annotated[int, Unit("optimizer steps")] = Field(
        1, ge=1, description="optimizer steps per epoch; must divide the batch size"
    )
    gamma: Annotated[float, Unit("factor")] = Field(1.0, ge=0, le=1, description="discount of later rewards")
    gae_lambda: Annotated[float, Unit("factor")] = Field(
        0.95, ge=0, le=1, description="GAE's lambda: 0 trusts the critic, 1 the rewards"
    )
    clip: Annotated[float, Unit("factor")] = Field(
        0.2, gt=0, description="the ratio counts within 1 - clip .. 1 + clip"
    )
    value_clip: Annotated[float, Unit("reward")] = Field(0.2, ge=0, description="0 turns value clipping off")
    entropy_coefficient: Annotated[float, Unit("reward a nat")] = Field(
        0.0, ge=0, description="weight of the entropy bonus"
    )
    whiten_advantages: bool = Field(True, description="mean 0 and variance 1 over the whole batch")
    reward_clip: Annotated[float | None, Unit("reward")] = Field(
        None, gt=0, description="bound of the absolute score of a rollout"
    )
    truncated_score: Annotated[float | None, Unit("reward")] = Field(
        None, description="score of a response cut at the limit, in place of its reward; null: its reward"
    )
    kl: KLConfig = KLConfig()
    staleness: StalenessConfig = StalenessConfig()
    logprob_gap_limit: Annotated[PositiveFloat | Literal["auto"] | None, Unit("nats")] = Field(
        "auto",
        description="largest |logprob at decode - at training|; beyond it the run stops. auto: 1e-4 for a float32 actor; "
        "0.25 for bfloat16, where 0.06 was measured on trained actors of 4 layers and one rounding of a logit between 16 "
        "and 32 makes 0.125; both divided by a temperature below 1, which scales rounding up. null: no limit",
    )

    def gap_limit(self, dtype: str, temperature: float) -> float | None:
        """`logprob_gap_limit` in numbers, for an actor of `dtype` that samples at `temperature`."""
        if self.logprob_gap_limit != "auto":
            return self.logprob_gap_limit
        return (0.25 if dtype == "bfloat16" else 1e-4) / (min(temperature, 1.0) or 1.0)

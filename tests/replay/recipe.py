"""The parts of an algorithm, in numbers: the six choices, and what stands beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Baseline = Literal["critic", "group_mean", "others", "greedy", "best_worst", "none"]
Scale = Literal["none", "group_std", "batch_std", "advantage_std", "whiten"]
Ratio = Literal["token", "sequence", "sequence_token", "sequence_product"]
Objective = Literal["clip", "cispo", "plain", "dpo"]
Reduction = Literal["token_mean", "sequence_mean", "constant", "group_token_mean", "sequence_sum", "pair_mean"]
KL = Literal["none", "penalty", "score", "loss", "margin"]
Gradient = Literal["estimator", "reverse", "ratio"]


@dataclass(frozen=True)
class Recipe:
    """One algorithm.

    `std_eps`: added to standard deviations.  `cap`: largest ratio of cispo.  `dual_clip`: limit on the factor of negative
    advantages. `beta`: factor of a pair's margin.  `longest`: divisor of the reduction `constant`, in tokens.  `kl_gradient`: of
    the estimator itself, of the reverse KL (d times the log-prob's gradient), or of the estimator times the ratio.
    """

    baseline: Baseline = "critic"
    scale: Scale = "whiten"
    ratio: Ratio = "token"
    objective: Objective = "clip"
    reduction: Reduction = "token_mean"
    kl: KL = "penalty"

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    cap: float = 5.0
    beta: float = 0.1
    longest: int = 1
    std_eps: float = 1e-6
    estimator: Literal["k1", "k2", "k3"] = "k1"
    kl_gradient: Gradient = "estimator"
    kl_coefficient: float = 0.05
    kl_target: float | None = None
    gamma: float = 1.0
    gae_lambda: float = 0.95
    value_clip: float = 0.2
    entropy_coefficient: float = 0.0
    staleness: Literal["behaviour", "decoupled"] = "behaviour"
    weight_cap: float = 2.0
    reward_clip: float | None = None
    reward_normalization: Literal["none", "batch", "running"] = "none"
    truncated_score: float | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any], **choices: Any) -> Recipe:
        """The numbers of a run's `config.yaml`; `choices` go before them."""
        ppo, kl = config["ppo"], config["ppo"]["kl"]
        found = cls(
            kl=kl["mode"], kl_gradient="ratio" if kl["estimator"].endswith("+") else "estimator", clip_low=ppo["clip"],
            clip_high=ppo["clip"] if ppo["clip_high"] is None else ppo["clip_high"], dual_clip=ppo["dual_clip"],
            cap=1 + (ppo["clip_high"] or 4.0), beta=(config["dpo"] or {"beta": 0.1})["beta"], std_eps=1e-4,
            longest=config["rollout"]["max_response_tokens"], estimator=kl["estimator"].removesuffix("+"),
            kl_coefficient=kl["coefficient"], kl_target=kl["target"], truncated_score=ppo["truncated"],
            **{name: ppo[name] for name in ("gamma", "gae_lambda", "value_clip", "entropy_coefficient", "staleness",
                "reward_clip", "reward_normalization")},
        )  # fmt: skip
        return replace(found, **choices)


PRESETS: dict[str, dict[str, Any]] = {
    "ppo": {}, "reinforce_pp": {"baseline": "none"},
    "reinforce_pp_baseline": {"baseline": "group_mean", "kl": "loss", "estimator": "k2"},
    "grpo": {"baseline": "group_mean", "scale": "group_std", "reduction": "sequence_mean", "kl": "loss", "estimator": "k3"},
    "dr_grpo": {"baseline": "group_mean", "scale": "none", "reduction": "constant", "kl": "none"},
    "dapo": {"baseline": "group_mean", "scale": "group_std", "kl": "none", "clip_high": 0.28},
    "gspo": {"baseline": "group_mean", "scale": "group_std", "ratio": "sequence", "reduction": "sequence_mean", "kl": "none",
        "clip_low": 3e-4, "clip_high": 4e-4},
    "gspo_token": {"baseline": "group_mean", "scale": "group_std", "ratio": "sequence_token", "reduction": "sequence_mean",
        "kl": "none", "clip_low": 3e-4, "clip_high": 4e-4},
    "rloo": {"baseline": "others", "scale": "none", "ratio": "sequence_product", "reduction": "sequence_sum", "kl": "score"},
    "magistral": {"baseline": "group_mean", "scale": "advantage_std", "reduction": "group_token_mean", "kl": "none",
        "clip_high": 0.28},
    "cispo": {"baseline": "group_mean", "scale": "batch_std", "objective": "cispo", "kl": "none"},
    "online_dpo": {"baseline": "best_worst", "scale": "none", "objective": "dpo", "reduction": "pair_mean", "kl": "margin"},
    "remax": {"baseline": "greedy", "scale": "none", "reduction": "sequence_sum"},
}  # fmt: skip
"""What each preset chooses; what it leaves out comes from the settings, or is plain PPO's."""

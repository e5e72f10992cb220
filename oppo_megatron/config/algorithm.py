"""The algorithm: a preset, and the choices that it is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, model_validator

from oppo_megatron.config.base import Choices, FunctionPath, Section
from oppo_megatron.config.paths import missing_path
from oppo_megatron.nesting import read_yaml

Baseline = Literal["critic", "group_mean", "others", "greedy", "best_worst", "none"]
Scale = Literal["none", "group_std", "batch_std", "advantage_std", "whiten"]
Ratio = Literal["token", "sequence", "sequence_token", "sequence_product"]
Objective = Literal["clip", "cispo", "plain"]
Reduction = Literal["token_mean", "sequence_mean", "constant", "group_token_mean", "sequence_sum"]
AnyObjective = Literal[Objective, "dpo"]
AnyReduction = Literal[Reduction, "pair_mean"]
"""The objectives and reductions of tokens and of pairs."""


@dataclass(frozen=True)
class Preset:
    """An algorithm: its choices, and its other settings by section."""

    about: str
    source: str
    baseline: Baseline
    scale: Scale
    ratio: Ratio
    objective: AnyObjective
    reduction: AnyReduction
    kl: Mapping[str, Any]
    ppo: Mapping[str, Any] = field(default_factory=dict)
    group_size: int = 1
    filter: str | None = None  # the metric; a filter needs `overlap.backfill`

    @property
    def choices(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in CHOICES}


OF_PAIRS = {"baseline": "best_worst", "objective": "dpo", "reduction": "pair_mean"}
"""Choices that only presets of pairs make."""
COMPARED = ("group_mean", "others", "best_worst")
CHOICES = ("baseline", "scale", "ratio", "objective", "reduction")
NO_KL = {"mode": "none"}

PRESETS = {
    "ppo": Preset(
        "a critic's values and GAE", "arXiv 1707.06347",
        "critic", "whiten", "token", "clip", "token_mean", {"mode": "penalty", "estimator": "k1", "coefficient": 0.05},
    ),
    "grpo": Preset(
        "a group's mean and deviation, each response has the same weight", "arXiv 2402.03300",
        "group_mean", "group_std", "token", "clip", "sequence_mean", {"mode": "loss", "estimator": "k3", "coefficient": 0.04},
        group_size=8,
    ),
    "dr_grpo": Preset(
        "GRPO without its division by length and by deviation", "arXiv 2503.20783",
        "group_mean", "none", "token", "clip", "constant", NO_KL, group_size=8,
    ),
    "dapo": Preset(
        "GRPO over tokens, with more room for a ratio to grow", "arXiv 2503.14476",
        "group_mean", "group_std", "token", "clip", "token_mean", NO_KL, {"clip_high": 0.28}, group_size=16, filter="reward",
    ),
    "gspo": Preset(
        "GRPO with one ratio for a response: the geometric mean of its tokens'", "arXiv 2507.18071",
        "group_mean", "group_std", "sequence", "clip", "sequence_mean", NO_KL, {"clip": 3e-4, "clip_high": 4e-4}, group_size=8,
    ),
    "cispo": Preset(
        "every token keeps its gradient, weighted by its capped ratio", "arXiv 2506.13585",
        "group_mean", "batch_std", "token", "cispo", "token_mean", NO_KL, {"clip_high": 4.0}, group_size=8,
    ),
    "rloo": Preset(
        "the mean of the group's other responses, a response as one action", "arXiv 2402.14740",
        "others", "none", "sequence_product", "clip", "sequence_sum",
        {"mode": "score", "estimator": "k1", "coefficient": 0.03}, group_size=4,
    ),
    "reinforce_pp": Preset(
        "REINFORCE++: no baseline, whitened over the batch's tokens", "arXiv 2501.03262",
        "none", "whiten", "token", "clip", "token_mean", {"mode": "penalty", "estimator": "k1", "coefficient": 0.01},
    ),
    "reinforce_pp_baseline": Preset(
        "REINFORCE++ with a group's mean as baseline", "arXiv 2501.03262",
        "group_mean", "whiten", "token", "clip", "token_mean", {"mode": "loss", "estimator": "k2", "coefficient": 0.01},
        group_size=8,
    ),
    "magistral": Preset(
        "a group's mean, then the batch's deviation; each group has the same weight", "arXiv 2506.10910",
        "group_mean", "advantage_std", "token", "clip", "group_token_mean", NO_KL, {"clip_high": 0.28}, group_size=8,
    ),
    "online_dpo": Preset(
        "DPO on the best response of a group against its worst", "arXiv 2402.04792",
        "best_worst", "none", "token", "dpo", "pair_mean", {"mode": "margin", "coefficient": 0.0}, group_size=2,
    ),
    "remax": Preset(
        "the score of one more response, decoded greedily and not trained", "arXiv 2310.10505",
        "greedy", "none", "token", "clip", "sequence_sum", {"mode": "penalty", "estimator": "k1", "coefficient": 0.05},
    ),
}  # fmt: skip

Name = Literal[
    "ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "magistral",
    "online_dpo", "remax",
]  # fmt: skip


def _table() -> tuple[tuple[str, ...], ...]:
    rows: list[tuple[str, ...]] = [("preset", *CHOICES, "KL", "group_size", "ppo", "source")]
    for name, preset in PRESETS.items():
        kl = " ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in preset.kl.values())
        bounds = ", ".join(f"{key} {value:g}" for key, value in preset.ppo.items())
        rows.append((name, *preset.choices.values(), kl, str(preset.group_size), bounds or "-", preset.source))
    return tuple(rows)


class AlgorithmConfig(Section):
    """The algorithm: a preset, or a preset with some of its choices changed."""

    preset: Annotated[Name, Choices(_table())] = Field(
        "ppo",
        description="built-in preset, whose choices are the defaults here, of `ppo.kl`, of bounds in `ppo` and "
        "of `rollout.group_size` (`oppo config --explain algorithm.preset`); or a YAML file of your own "
        "(docs/extending.md)",
    )
    baseline: Baseline = Field(
        "critic",
        description="baseline of a score: a critic's values (GAE); the group's mean; the mean of the others "
        "in the group; the score of a greedy response, which is decoded too and not trained; a group's best response "
        "against its worst; default: the preset's",
    )
    scale: Scale = Field(
        "whiten",
        description="divisor of advantages: standard deviation of the scores of the group, or of the batch; "
        "advantage_std: of the batch's advantages less their mean; whiten: mean 0 and variance 1 over the batch's "
        "tokens; default: the preset's",
    )
    ratio: Ratio = Field(
        "token",
        description="bounded ratio of new to old policy: each token's; sequence: the geometric mean over the "
        "response; sequence_token: that value with each token's gradient; sequence_product: the product over the "
        "response; default: the preset's",
    )
    objective: AnyObjective = Field(
        "clip",
        description="clip: the clipped surrogate; cispo: log-probs weighted by capped ratios without "
        "gradient; plain: log-probs, without a ratio; dpo: the loss of a pair, by section `dpo`; default: the "
        "preset's",
    )
    reduction: AnyReduction = Field(
        "token_mean",
        description="weight of a token in the loss of a minibatch with N responses, G groups and T "
        "tokens: token_mean: 1/T; sequence_mean: 1/(N x tokens of its response); constant: 1/(N x "
        "rollout.max_response_tokens); group_token_mean: 1/(G x tokens of its group); sequence_sum: 1/N; pair_mean: "
        "1/pairs; default: the preset's",
    )

    advantage: FunctionPath | None = Field(None, description="your own advantages, in place of baseline and scale")
    loss: FunctionPath | None = Field(None, description="your own loss of a response, in place of ratio and objective")

    @model_validator(mode="before")
    @classmethod
    def _choices(cls, data: Any) -> Any:
        preset = PRESETS.get(str(data.get("preset", "ppo"))) if isinstance(data, dict) else None
        return data if preset is None else preset.choices | data

    @property
    def critic(self) -> bool:
        return self.baseline == "critic"

    @property
    def contradiction(self) -> str | None:
        preset, critic = self.preset, PRESETS[self.preset].baseline == "critic"
        for name, value in OF_PAIRS.items():
            found = getattr(self, name)
            if preset == "online_dpo" and found != value:
                return f"algorithm.{name} is {found}, but algorithm.preset online_dpo is made of {value}; remove it"
            if preset != "online_dpo" and found == value:
                return f"algorithm.{name} is {found}, but algorithm.preset {preset} has no pairs; remove it, or use online_dpo"
        if self.critic and not critic:
            return f"algorithm.baseline is critic, but algorithm.preset {preset} has none; remove it, or choose preset ppo"
        if critic and not self.critic:
            return (
                f"algorithm.baseline is {self.baseline}, but algorithm.preset {preset} is what trains a critic; remove it, or "
                "choose reinforce_pp (no baseline), grpo (a group's) or remax (a greedy response)"
            )
        return None

    @property
    def pairs(self) -> bool:
        return self.objective == "dpo"

    def temperature(self, drawn: float) -> float:
        """Temperature of log-probs in loss and reference; 1 for pairs."""
        return 1.0 if self.pairs else drawn

    @property
    def greedy(self) -> bool:
        return self.baseline == "greedy"

    @property
    def compares(self) -> bool:
        """True if other responses change a response's score."""
        by_response = self.scale in ("group_std", "batch_std", "advantage_std")
        return by_response or self.baseline in (*COMPARED, "greedy")

    @property
    def needs_group(self) -> bool:
        """True if responses to one prompt are compared."""
        return self.baseline in COMPARED or self.scale == "group_std"


def with_preset(settings: Any) -> Any:
    """Add the preset's KL, ratio bounds, group size, pair loss, and (with `overlap.inter`) filter."""
    if not isinstance(settings, dict):
        return settings
    algorithm = settings.get("algorithm", {})
    name = algorithm.get("preset", "ppo") if isinstance(algorithm, dict) else getattr(algorithm, "preset", "ppo")
    preset = PRESETS.get(str(name))
    if preset is None:
        return settings
    if preset.objective == "dpo":
        settings = {"dpo": {}} | settings
    ppo, rollout = settings.get("ppo", {}), settings.get("rollout")
    if isinstance(ppo, dict) and isinstance(ppo.get("kl", {}), dict):
        kl = ppo.get("kl", {})
        usual = {} if kl.get("mode") == "none" else preset.kl  # without a KL nothing reads the rest
        settings = settings | {"ppo": dict(preset.ppo) | ppo | {"kl": {**usual, **kl}}}
    if isinstance(rollout, dict):
        settings = settings | {"rollout": {"group_size": preset.group_size} | rollout}
    overlap = settings.get("overlap", {})
    if None in (preset.filter, settings.get("filter", preset.filter)) or not isinstance(overlap, dict):
        return settings
    if overlap.get("inter", True) is True:
        overlap = {"backfill": True} | overlap
    return {"filter": preset.filter} | settings | {"overlap": overlap} if overlap.get("backfill") else settings


SECTIONS = ("algorithm", "ppo", "dpo", "rollout", "overlap", "filter")
SUFFIXES = (".yaml", ".yml")


def with_preset_file(settings: Any) -> Any:
    """Lay the settings over the file of `algorithm.preset`.  Raises ValueError."""
    algorithm = settings.get("algorithm") if isinstance(settings, dict) else None
    name = algorithm.get("preset") if isinstance(algorithm, dict) else None
    if not isinstance(name, str | Path) or Path(name).suffix not in SUFFIXES:
        return settings
    assert isinstance(algorithm, dict), "it has the name"
    path = Path(name)
    if not path.is_file():
        raise ValueError(missing_path("algorithm.preset", path))
    try:
        brought = read_yaml(path.read_bytes())
    except (yaml.YAMLError, ValueError, OSError) as error:
        raise ValueError(f"algorithm.preset `{path}` cannot be read ({str(error).partition(chr(10))[0]}); correct it") from error
    if not isinstance(brought, dict) or not all(isinstance(key, str) for key in brought):
        raise ValueError(f"algorithm.preset `{path}` is not a YAML mapping; write sections such as `ppo: {{clip: 0.1}}`")
    if others := [key for key in brought if key not in SECTIONS]:
        raise ValueError(
            f"algorithm.preset `{path}` has {', '.join(others)}, but a preset has the sections {', '.join(SECTIONS)} only; move "
            "the others into the configuration"
        )
    start = brought.get("algorithm", {}).get("preset", "ppo") if isinstance(brought.get("algorithm"), dict) else "ppo"
    if Path(str(start)).suffix in SUFFIXES:
        raise ValueError(f"algorithm.preset of `{name}` is `{start}`, but must be a built-in preset; name one of these")
    return _laid_over(brought, {**settings, "algorithm": {**algorithm, "preset": start}})


def _laid_over(under: Any, over: Any) -> Any:
    """Return `under` with the keys of `over` replaced, by section."""
    if not (isinstance(under, dict) and isinstance(over, dict)):
        return over
    return {**under, **{key: _laid_over(under[key], value) if key in under else value for key, value in over.items()}}

"""The `oppo:` block of a NeMo-Aligner training configuration (`trainer.ppo.oppo`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationError

from oppo_megatron.config.base import Section, Unit
from oppo_megatron.config.explain import explain
from oppo_megatron.config.overlap import CarryConfig, DeltaConfig
from oppo_megatron.errors import ConfigError


class StreamConfig(Section):
    """The service of `oppo serve`."""

    url: str = Field(..., pattern="^https?://", description="address of the service, as `oppo serve` prints it")
    token_env: str | None = Field(None, description="environment variable with the service's bearer token; null: none")


class AlignerDeltaConfig(DeltaConfig):
    """Prompts drawn beyond `num_rollout_samples`, over all replicas; by default none."""

    initial: Annotated[int, Unit("prompts")] = Field(0, ge=0, description="delta of the first step")
    max: Annotated[int, Unit("prompts")] = Field(0, ge=0, description="largest delta, up to `num_rollout_samples`")


class AlignerConfig(CarryConfig):
    """The settings that `oppo_megatron.integrations.nemo_aligner` adds to NeMo-Aligner's `trainer.ppo`."""

    delta: AlignerDeltaConfig = AlignerDeltaConfig()
    scorer: StreamConfig | None = Field(None, description="service that scores while the actor decodes; null: its own")


def read_aligner_config(tree: Mapping[str, Any]) -> AlignerConfig:
    """Raises ConfigError with every problem."""
    try:
        config = AlignerConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError([f"trainer.ppo.oppo: {problem}" for problem in explain(AlignerConfig, error)]) from error
    delta = config.delta
    if delta.initial > delta.max:
        raise ConfigError(f"trainer.ppo.oppo.delta: initial {delta.initial} is above max {delta.max}; lower it, or raise max")
    return config

"""The `oppo:` block of a NeMo-Aligner training configuration (`trainer.ppo.oppo`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationError

from oppo_megatron.config.base import Section, Unit
from oppo_megatron.config.explain import explain
from oppo_megatron.config.overlap import ChunkConfig, DeltaConfig
from oppo_megatron.errors import ConfigError


class StreamConfig(Section):
    """How a service of `oppo serve-scorer` is asked."""

    url: str = Field(..., pattern="^https?://", description="address of the service, as `oppo serve-scorer` prints it")
    token_env: str | None = Field(
        None, description="environment variable with the bearer token that the service wants; null: none"
    )
    timeout_s: float = Field(60.0, gt=0, description="one request, from connecting to the last byte of its answer")
    give_up_s: float = Field(600.0, gt=0, description="requests that fail for so long end the run")


class AlignerConfig(Section):
    """What `oppo_megatron.integrations.nemo_aligner` adds to NeMo-Aligner's `trainer.ppo`."""

    delta: DeltaConfig = DeltaConfig()
    chunk: ChunkConfig = ChunkConfig()
    max_deferrals: Annotated[int, Unit("steps")] = Field(
        4, ge=1, description="a rollout carried this often is waited for"
    )
    scorer: StreamConfig | None = Field(
        None, description="service that rewards come from, fed while the actor decodes; null: NeMo-Aligner's own server"
    )


def read_aligner_config(tree: Mapping[str, Any]) -> AlignerConfig:
    """The block as a typed configuration.  Raises ConfigError with every problem in it."""
    try:
        config = AlignerConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError([f"trainer.ppo.oppo: {problem}" for problem in explain(AlignerConfig, error)]) from error
    delta = config.delta
    if not delta.min <= delta.initial <= delta.max:
        raise ConfigError(
            f"trainer.ppo.oppo.delta: initial {delta.initial} is not within min {delta.min} and max {delta.max}; change one "
            "of them"
        )
    return config

"""The file of constants that benchmarks/machine.py fits, and that `measured` of cluster.yaml names."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, Strict, ValidationError

from oppo_megatron.config.base import Section
from oppo_megatron.config.explain import explain
from oppo_megatron.config.paths import missing_path
from oppo_megatron.errors import ConfigError
from oppo_megatron.nesting import read_json
from oppo_megatron.sim.clusters.gpus import MOST_POWER

Share = Annotated[float, Field(ge=1e-6, le=2)]
Seconds = Annotated[float, Field(ge=0, le=60)]
Factor = Annotated[float, Field(ge=0, le=1000)]


class EfficienciesSection(Section):
    """`Efficiencies` of a processor."""

    compute: Share
    memory: Share
    fixed_s: Seconds
    power: Annotated[float, Field(ge=1, le=MOST_POWER)]
    elementwise: Share
    elementwise_fixed_s: Seconds
    plain: Share


class LineSection(Section):
    """A line of messages."""

    alpha_s: Seconds
    bytes_per_s: Annotated[float, Field(ge=1e3, le=1e18)]


class EngineSection(Section):
    """`Engine`."""

    launch_s: Seconds
    replay_s: Seconds
    decode: Factor
    read: Factor
    update: Factor


class MeasuredConfig(Section):
    """Fitted constants; what is null was not measured, and stays as published.

    `efficiencies` are relative to the peaks of the processor that they were fitted with.  `threads`: how many times as fast a
    rank with so many cores is as one with a single core.
    """

    source: Annotated[str, Field(min_length=1)]
    efficiencies: EfficienciesSection | None = None
    collective: dict[Annotated[int, Field(ge=2)], LineSection] = Field(default_factory=dict)
    send: LineSection | None = None
    engine: EngineSection | None = None
    threads: dict[Annotated[int, Field(ge=1)], Annotated[float, Strict(), Field(ge=1e-3, le=1e6)]] = Field(
        default_factory=dict
    )


def read_measured(path: Path) -> MeasuredConfig:
    """Raises ConfigError with every problem."""
    if not path.is_file():
        raise ConfigError(missing_path("`measured` of cluster.yaml", path))
    try:
        tree = read_json(path.read_text(encoding="utf-8"))
        if not isinstance(tree, dict):
            raise ValueError(f"it holds {type(tree).__name__}, not a JSON object")
        return MeasuredConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError([f"{path}: {problem}" for problem in explain(MeasuredConfig, error)]) from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}; name the measured.json that benchmarks/machine.py has written") from error

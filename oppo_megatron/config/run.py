"""Top-level configurations, one per command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, PrivateAttr, field_validator, model_validator
from typing_extensions import Self

from oppo_megatron.config.algorithm import AlgorithmConfig, with_preset, with_preset_file
from oppo_megatron.config.base import Section, Unit
from oppo_megatron.config.data import PromptDataConfig, RowsConfig, TokenizerConfig
from oppo_megatron.config.evaluation import REWARD, EarlyStopConfig, EvaluationConfig, MeasuringConfig
from oppo_megatron.config.model import (
    ActorConfig,
    Dtype,
    ModelConfig,
    PlacementConfig,
    PlacementSettings,
    RoleConfig,
    RuntimeConfig,
    TrainedRoleConfig,
    usual_dtype,
)
from oppo_megatron.config.overlap import DeltaConfig, OverlapConfig
from oppo_megatron.config.ppo import PairLossConfig, PPOConfig, RolloutConfig
from oppo_megatron.config.reliability import CheckpointConfig, GuardsConfig
from oppo_megatron.config.rewards import RewardPart


def with_common_dtype(data: Any, roles: Sequence[str]) -> Any:
    """Set `runtime.dtype` in roles without a type."""
    runtime = data.get("runtime", {}) if isinstance(data, dict) else None
    if isinstance(runtime, dict) and runtime.get("dtype") is None:
        runtime = runtime | {"dtype": usual_dtype(runtime.get("device", "auto"))}
        data = data | {"runtime": runtime}
    dtype = runtime.get("dtype") if isinstance(runtime, dict) else getattr(runtime, "dtype", None)
    if dtype not in get_args(Dtype):
        return data
    return data | {name: _of_dtype(data[name], dtype) for name in roles if name in data}


def _of_dtype(role: Any, dtype: Any) -> Any:
    if isinstance(role, ModelConfig) and "dtype" not in role.model_fields_set:
        return role.model_copy(update={"dtype": dtype})
    return {"dtype": dtype} | role if isinstance(role, dict) else role


class LoggingConfig(Section):
    """Outputs of progress and metrics.  `metrics.jsonl` is always written."""

    console: Literal["auto", "live", "plain", "off"] = Field("auto", description="auto: live in a terminal")
    trackers: list[Annotated[str, Field(pattern="^(tensorboard|wandb:.+)$")]] = Field(
        default=[],
        description="also write the metrics to `tensorboard/` in the run directory (`tensorboard`), or to a Weights & Biases "
        "project (`wandb:PROJECT`; mode: WANDB_MODE)",
    )
    trace: bool | Literal["actions"] = Field(
        True,
        description="write trace.json: each rank's work over time; actions: every action of every round in it, and schedules.txt",
    )
    rollouts: bool = Field(False, description="write trained and greedy rollouts to rollouts.jsonl")

    @field_validator("console", mode="before")
    @classmethod
    def _off(cls, value: object) -> object:
        """YAML reads a bare `off` as false."""
        return "off" if value is False else value


class RunConfig(Section):
    """Settings that every run has, whatever it trains."""

    run_dir: Path = Field(..., description="folder for everything that the run writes; it must hold no finished run")
    seed: Annotated[int, Unit("")] = Field(1, ge=0, lt=2**63, description="seed of the data's order and of all draws")
    steps: int | None = Field(None, ge=1, description="end after this many steps; null: when `epochs` are over")
    epochs: Annotated[float | None, Unit("passes")] = Field(None, gt=0, description="null: as `steps` needs, or one")
    tokenizer: TokenizerConfig
    data: RowsConfig
    evaluation: MeasuringConfig | None = None
    early_stop: EarlyStopConfig | None = None
    runtime: RuntimeConfig = RuntimeConfig()
    logging: LoggingConfig = LoggingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    preempt_deadline_s: float = Field(
        120.0,
        ge=0,
        description="on SIGTERM, SIGUSR1, SIGHUP or SIGINT (Ctrl-C) the run saves after the current "
        "chunk and ends with exit code 75, or unsaved after this time; 0: SIGTERM and Ctrl-C end the run at once",
    )
    stall_deadline_s: float = Field(
        900.0,
        ge=0,
        description="a run without progress for this long is ended, and every rank writes the stacks of "
        "its threads to `stacks/`; must exceed the longest single piece of work (reading weights, a checkpoint, a "
        "micro-batch of an update, a call of a reward function); 0: no limit",
    )

    ALWAYS_MEASURED: ClassVar[str | None] = None

    _resume: bool = PrivateAttr(default=False)

    @property
    def resume(self) -> bool:
        """True if the run continues from its last checkpoint (`--resume`)."""
        return self._resume

    def resumed(self) -> Self:
        copy = self.model_copy()
        copy._resume = True
        return copy


class TrainSettings(RunConfig):
    """`oppo train` as written in a configuration file: the placement may be `auto`."""

    epochs: Annotated[int | None, Unit("passes")] = Field(None, ge=1, description="null: as `steps` needs, or one")
    data: PromptDataConfig
    placement: PlacementSettings = PlacementSettings()
    actor: ActorConfig
    critic: TrainedRoleConfig | None = Field(None, description="needed if `algorithm.preset` trains a critic")
    reference: RoleConfig | None = Field(
        None, description="null: the actor's starting weights, `lora.adapter` included; there is none with `ppo.kl.mode: none`"
    )
    reward: RoleConfig | None = Field(None, description="the (process) reward model, if `rewards` names one")
    rewards: list[RewardPart] = Field(..., min_length=1, description="the reward is the sum of these parts")
    rollout: RolloutConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    ppo: PPOConfig = PPOConfig()
    dpo: PairLossConfig | None = Field(None, description="the loss of pairs, for preset online_dpo only")
    overlap: OverlapConfig = OverlapConfig()
    filter: str | None = Field(
        None,
        description="dynamic sampling: drop groups whose responses all have the same score, and sample other "
        "prompts instead; the score is `reward`, the whole sum, or the label of one part of `rewards`, before its "
        "weight; needs `overlap.backfill`; default: the preset's (`dapo` has one, and backfill for it, "
        "with `overlap.inter`)",
    )
    evaluation: EvaluationConfig | None = None
    guards: GuardsConfig = GuardsConfig()

    @model_validator(mode="before")
    @classmethod
    def _common_dtype(cls, data: Any) -> Any:
        return with_preset(with_preset_file(with_common_dtype(data, ("actor", "critic", "reference", "reward"))))

    @model_validator(mode="after")
    def _roles_of_algorithm(self) -> Self:
        preset, mode = self.algorithm.preset, self.ppo.kl.mode
        if problem := self.algorithm.contradiction:
            raise ValueError(problem)
        if self.algorithm.critic and self.critic is None:
            raise ValueError(f"critic is missing, but algorithm.preset {preset} trains one; add it, with checkpoint or init")
        if not self.algorithm.critic and self.critic is not None:
            raise ValueError(f"critic is given, but algorithm.preset {preset} has none; remove the section")
        if self.algorithm.pairs != (self.dpo is not None):
            raise ValueError(
                "dpo is null, but algorithm.preset online_dpo has a loss of pairs; remove it, or set dpo={}"
                if self.dpo is None
                else f"dpo is given, but algorithm.preset {preset} has no pairs; remove the section, or choose online_dpo"
            )
        if mode == "none" and self.reference is not None:
            raise ValueError(
                f"reference is given, but ppo.kl.mode is none (the mode of algorithm.preset {preset}, unless it is set), and "
                "nothing reads it; remove the section, or set ppo.kl.mode"
            )
        return self

    @model_validator(mode="after")
    def _staleness_of_ratio(self) -> Self:
        """Stale tokens and bfloat16's rounding move ratios out of the clip range."""
        apart = self.overlap.carries(filtered=self.filter is not None) or self.actor.dtype == "bfloat16"
        whole = self.algorithm.ratio != "token" and not self.algorithm.pairs
        if apart and whole and "staleness" not in self.ppo.model_fields_set:
            self.ppo = self.ppo.model_copy(update={"staleness": "decoupled"})
        return self

    @model_validator(mode="after")
    def _run_ahead(self) -> Self:
        """Continuous generation may be as far ahead as the bound on staleness allows."""
        overlap, groups = self.overlap, self.rollout.batch_size // self.rollout.group_size
        if overlap.continuous is not None and "delta" not in overlap.model_fields_set:
            most = overlap.max_staleness * groups
            self.overlap = overlap.model_copy(update={"delta": DeltaConfig(rule="fixed", initial=most, max=most)})
        return self

    ALWAYS_MEASURED: ClassVar[str | None] = REWARD

    @property
    def trained(self) -> dict[str, TrainedRoleConfig]:
        return {"actor": self.actor} | ({} if self.critic is None else {"critic": self.critic})

    @property
    def scores_steps(self) -> bool:
        return any(part.kind == "process" for part in self.rewards)

    @property
    def measured(self) -> list[str]:
        """Held-out metrics measured during the run."""
        return self.evaluation.names if self.evaluation is not None and self.evaluation.every_steps else []

    @property
    def passes(self) -> int | None:
        """Passes over the prompts that end the run; None: no limit."""
        return self.epochs or (1 if self.steps is None else None)

    def resolved(self) -> TrainConfig | None:
        """None if the placement is not yet measured."""
        if self.placement.mode == "auto":
            return None
        return self.with_placement(PlacementConfig(**self.placement.model_dump()))

    def with_placement(self, placement: PlacementConfig) -> TrainConfig:
        placed = TrainConfig.model_validate(self.model_dump() | {"placement": placement.model_dump()})
        return placed.resumed() if self.resume else placed


class TrainConfig(TrainSettings):
    """`oppo train`: PPO with a chosen placement."""

    placement: PlacementConfig = PlacementConfig()

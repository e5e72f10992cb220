"""Sections for models, optimizers, placement and the machine."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from annotated_types import Ge, Lt
from pydantic import Field, PositiveInt, PrivateAttr, field_validator, model_validator
from typing_extensions import Self

from oppo_megatron.config.base import Section, Unit
from oppo_megatron.cores import has_cuda

LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS: tuple[LoraTarget, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoraConfig(Section):
    """Low-rank adapters (Hu et al. 2021): only they are trained; the model's own weights stay as they are.

    y = W x + alpha / rank * B A x for each target, in every layer.  Without dropout, so that training and decoding have the same
    log-probs.
    """

    rank: Annotated[int, Unit("rows")] = Field(16, ge=1, description="rows of A and columns of B")
    alpha: Annotated[float, Unit("")] = Field(32.0, gt=0, description="the adapters' weight, divided by the rank")
    targets: Annotated[list[LoraTarget], Field(min_length=1)] | None = Field(
        None, description="projections that have adapters, by their Hugging Face names; null: all seven"
    )
    adapter: Path | None = Field(
        None, description="peft directory to start from, of this rank, alpha and targets; null: A drawn at random, B zero"
    )

    @field_validator("targets")
    @classmethod
    def _in_order(cls, value: list[LoraTarget] | None) -> list[LoraTarget] | None:
        if value is None:
            return None
        if len(set(value)) < len(value):
            raise ValueError("each target once")
        return [target for target in TARGETS if target in value]

    @property
    def projections(self) -> list[LoraTarget]:
        return list(TARGETS) if self.targets is None else self.targets

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


_RANKS = re.compile("{0}(-{0})?(,{0}(-{0})?)*".format("[0-9]{1,18}"))
Dtype = Literal["float32", "bfloat16"]
KVLayout = Literal["auto", "dense", "paged"]
PlacementMode = Literal["disaggregated", "colocated", "single"]


class SizesConfig(Section):
    """Sizes of a layout; null: as in the role's own."""

    tp: Annotated[PositiveInt | None, Unit("ranks")] = Field(None, description="tensor-parallel; null: the role's")
    pp: Annotated[PositiveInt | None, Unit("ranks")] = Field(None, description="pipeline-parallel; null: the role's")
    dp: Annotated[PositiveInt | None, Unit("ranks")] = Field(None, description="data-parallel; null: the role's")


class UpdateSizesConfig(Section):
    """Sizes of an update only: decoding and scoring read whole sequences, and their replicas do not wait for each other."""

    cp: Annotated[int, Unit("ranks")] = Field(
        1, ge=1, description="context-parallel size of the update: ranks that share each sequence; 1: none"
    )
    ep: Annotated[int, Unit("replicas")] = Field(
        1, ge=1, description="expert-parallel size of the update: replicas that divide the experts of each layer; 1: none"
    )


class ParallelConfig(SizesConfig):
    """Tensor-, pipeline- and data-parallel size of one role."""

    tp: Annotated[int, Unit("ranks")] = Field(1, ge=1, description="tensor-parallel size: ranks that share each layer")
    pp: Annotated[int, Unit("ranks")] = Field(1, ge=1, description="pipeline-parallel size: stages of the layers")
    dp: Annotated[int, Unit("ranks")] = Field(1, ge=1, description="data-parallel size: replicas")

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp * self.dp


class TrainedParallelConfig(ParallelConfig, UpdateSizesConfig):
    """Sizes of a model that is only trained."""

    @property
    def num_ranks(self) -> int:
        return super().num_ranks * self.cp


class TrainingLayoutConfig(SizesConfig, UpdateSizesConfig):
    """The layout of a trained role during its update.

    A null size is taken from the role's `parallel` layout, with cp above 1 dp from the number of ranks.  If the layouts differ,
    the weights move after each update.
    """

    vpp: Annotated[int, Unit("stages per rank")] = Field(1, ge=1, description="virtual stages; above 1: interleaved 1F1B")
    sequence_parallel: bool = Field(False, description="shard activations between layers over the tensor ranks")
    recompute: Literal["none", "selective", "full"] = Field(
        "none", description="activations computed again in the backward pass: none, attention only, or whole layers"
    )


class ModelConfig(Section):
    """A Hugging Face or Megatron directory (`checkpoint`), or a shape to initialise at random (`init`)."""

    checkpoint: Path | None = Field(
        None, description="Hugging Face directory (config.json + safetensors), or a Megatron torch_dist one with a config.json"
    )
    init: dict[str, Any] | Path | None = Field(None, description="config.json, or its path: random weights of that shape")
    dtype: Dtype = Field("float32", description="type of the weights and of the computation; default: `runtime.dtype`")

    def rules(self, name: str) -> Iterator[str]:
        if (self.checkpoint is None) == (self.init is None):
            given = "neither" if self.checkpoint is None else "both"
            yield f"{name} has {given} of checkpoint and init, but needs exactly one; give the folder of weights or a shape"


HEADS_LEARNED = ("critic", "model")
"""Roles whose training may start with a new scalar head."""


def weight_seed(role: str) -> int:
    """Return a seed for random weights, heads and adapters."""
    return {"critic": 5, "reward": 6}.get(role, 1234)


class LearningModelConfig(ModelConfig):
    """A model that is trained."""

    lora: LoraConfig | None = Field(None, description="train low-rank adapters only; null: all weights")


class UsualRate(NamedTuple):
    """The default learning rate: of all weights, and of adapters."""

    weights: float
    adapters: float


class OptimizerConfig(Section):
    """Adam and its schedule, through megatron-core's optimizer."""

    lr: Annotated[float | None, Unit("")] = Field(
        None,
        gt=0,
        description="largest learning rate; null: 1e-6 for an actor and `oppo dpo`, 5e-6 for "
        "a critic, 1e-5 for `oppo sft` and `oppo rm`; ten times that for adapters (`lora`)",
    )
    min_lr: Annotated[float, Unit("")] = Field(0.0, ge=0, description="learning rate at the end of the decay")
    warmup_steps: Annotated[int, Unit("optimizer steps")] = Field(0, ge=0, description="linear warm-up")
    decay: Literal["constant", "linear", "cosine"] = Field("constant", description="learning rate after the warm-up")
    weight_decay: Annotated[float, Unit("")] = Field(0.0, ge=0, description="decoupled weight decay (AdamW)")
    betas: Annotated[list[Annotated[float, Ge(0), Lt(1)]], Unit("")] = Field(
        default=[0.9, 0.95],
        min_length=2,
        max_length=2,
        description="decay of the mean gradient, and of the mean squared gradient",
    )
    eps: Annotated[float, Unit("")] = Field(1e-8, gt=0, description="added to the root of the mean squared gradient")
    clip_grad: Annotated[float, Unit("")] = Field(1.0, ge=0, description="largest global gradient norm; 0: none")

    @property
    def rate(self) -> float:
        assert self.lr is not None, "no section has set the learning rate"
        return self.lr

    def rules(self, name: str) -> Iterator[str]:
        if self.min_lr > self.rate:
            yield f"{name}.min_lr is {self.min_lr}, but must not exceed lr {self.rate}; lower it"
        elif self.min_lr and self.decay == "constant":
            yield (
                f"{name}.min_lr is {self.min_lr}, but {name}.decay is constant, and nothing reads it; set it to 0, or decay to "
                "linear or cosine"
            )

    def with_usual_rate(self, usual: UsualRate, lora: LoraConfig | None) -> OptimizerConfig:
        """Copy with the usual learning rate if none is given."""
        if self.lr is not None:
            return self
        return self.model_copy(update={"lr": usual.weights if lora is None else usual.adapters})


def as_ranks(value: object) -> object:
    """YAML reads a single rank as a number."""
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if text is not None and not (isinstance(text, str) and _RANKS.fullmatch(text)):
        raise ValueError("ranks and spans of ranks with commas between them, as in 0-3,6")
    return text


class RoleConfig(ModelConfig):
    """A frozen role (reference, reward)."""

    parallel: ParallelConfig | None = Field(None, description="layout over this role's ranks; default: placement's")
    ranks: str | None = Field(None, description="ranks of the role, as in 0-3,6; default: placement's")

    _as_ranks = field_validator("ranks", mode="before")(as_ranks)


def format_ranks(ranks: Iterable[int]) -> str:
    """Format as in `RoleConfig.ranks`: `0-3,6`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


class AdaptedRoleConfig(RoleConfig, LearningModelConfig):
    """A role that may have adapters."""


class TrainedRoleConfig(AdaptedRoleConfig):
    """A trained role (critic)."""

    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainingLayoutConfig = TrainingLayoutConfig()

    USUAL_RATE: ClassVar[UsualRate] = UsualRate(5e-6, 5e-5)

    @model_validator(mode="after")
    def _learning_rate(self) -> Self:
        if self.optimizer.lr is None:
            self.optimizer = self.optimizer.with_usual_rate(self.USUAL_RATE, self.lora)
        return self


class ActorTrainingConfig(TrainingLayoutConfig):
    """The actor's layout, and its ranks, during its update."""

    ranks: str | None = Field(
        None, description="ranks that train the actor and hold its optimizer, as in 4-7; null: those that decode"
    )

    _as_ranks = field_validator("ranks", mode="before")(as_ranks)


class ActorConfig(TrainedRoleConfig):
    """The policy."""

    train: ActorTrainingConfig = ActorTrainingConfig()

    USUAL_RATE: ClassVar[UsualRate] = UsualRate(1e-6, 1e-5)


class PlacementSettings(Section):
    """The ranks of the roles that name no ranks of their own."""

    mode: Literal["disaggregated", "colocated", "single", "auto"] = Field(
        "disaggregated",
        description="disaggregated: actor on the first ranks, scorers on the next; colocated: all on "
        "the same ranks; single: one process; auto: measure before the run which is fastest on this machine",
    )
    actor: ParallelConfig = ParallelConfig()
    scorer: ParallelConfig | None = Field(None, description="default: one rank, or the actor's layout if colocated")
    reference: Literal["scorer", "actor"] = Field(
        "scorer",
        description="ranks and layout of the reference: the scorers', or the actor's, if a large reward "
        "model keeps the scorers busy",
    )


class PlacementConfig(PlacementSettings):
    """A placement other than `auto`, as a run needs it."""

    mode: PlacementMode = Field("disaggregated", description="as written, or as measured")


LEAST_MEETING_S = 60.0


def usual_dtype(device: object) -> Dtype:
    return "bfloat16" if device == "cuda" or (device == "auto" and has_cuda()) else "float32"


class RuntimeConfig(Section):
    """Use of the machine: device, threads, memory, kernels."""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda if there is a device, else cpu")
    dtype: Dtype | None = Field(
        None,
        description="type of every role that gives none of its own; with bfloat16 the optimizer also keeps "
        "float32 weights; null: bfloat16 on CUDA devices, float32 on a CPU",
    )
    timeout_s: float = Field(
        1800.0,
        gt=0,
        description="time limit of a message or collective; at the start, all ranks must meet within a "
        "sixth of it, or within a minute if that is longer",
    )
    micro_batch_tokens: int = Field(4096, ge=1, description="most tokens of a packed micro-batch")
    kv_cache_mb: float | None = Field(None, gt=0, description="budget per role and rank; null: the whole buffer")

    _kv_layout: KVLayout = PrivateAttr(default="auto")
    _threads: int = PrivateAttr(default=0)

    @property
    def kv_layout(self) -> KVLayout:
        """A full-length slot per sequence (dense) or 256-token blocks (paged); auto: paged if a GPU has a kernel for it."""
        return self._kv_layout

    def with_kv_layout(self, layout: KVLayout) -> Self:
        copy = self.model_copy()
        copy._kv_layout = layout
        return copy

    @property
    def threads_per_rank(self) -> int:
        """CPU threads; 0: OMP_NUM_THREADS or MKL_NUM_THREADS, else usable cores divided by local ranks."""
        return self._threads

    def with_threads(self, threads_per_rank: int) -> Self:
        copy = self.model_copy()
        copy._threads = threads_per_rank
        return copy

    @property
    def kv_budget_bytes(self) -> int | None:
        return None if self.kv_cache_mb is None else int(self.kv_cache_mb * 2**20)

    @property
    def meeting_s(self) -> float:
        """Seconds to wait at the start for others, which may first read data."""
        return max(self.timeout_s / 6, LEAST_MEETING_S)

    @model_validator(mode="after")
    def _resolved_dtype(self) -> Self:
        if self.dtype is None:
            self.dtype = usual_dtype(self.device)
        return self

"""A run of the contract test; light, so that the test itself needs no nemo."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf


@dataclass(frozen=True)
class Job:
    """A run of `batch` with block `oppo` (None: NeMo-Aligner's trainer); `resume`: a step of its own or `resume_from`'s."""

    prompts: int = 32
    batch: int = 8
    micro: int = 2
    max_length: int = 12
    epochs: int = 1
    max_steps: int = -1
    warmup: int = 0
    val_every: int = 0
    save_every: int = 0
    stop_after: int | None = None
    greedy: bool = False
    random_sampler: bool = True
    seed: int = 3
    oppo: Mapping[str, Any] | None = None
    folder: Path = Path("unused")
    checkpoints: bool = True
    resume: int | None = None
    resume_from: Path | None = None
    tp: int = 1
    pp: int = 1
    trt_llm: bool = False
    model: str = "TinyActor"

    def trainer_config(self) -> DictConfig:
        return OmegaConf.create({
            "max_epochs": self.epochs, "max_steps": self.max_steps, "val_check_interval": self.val_every,
            "save_interval": self.save_every, "gradient_clip_val": None, "initial_policy_kl_penalty": 0.02,
            "use_absolute_kl": True, "discount_factor": 1.0, "gae_lambda": 0.95, "normalize_advantages": True,
            "critic_warmup_steps": self.warmup, "model_gbs": self.batch, "model_mbs": self.micro,
            "rollout_batch_seq_length": None, "trt_llm": {"enable": self.trt_llm, "reshard": False},
            "num_rollout_samples": self.batch, "batch_iterator": {"use_flask": False},
        } | ({} if self.oppo is None else {"oppo": dict(self.oppo)}))  # fmt: skip

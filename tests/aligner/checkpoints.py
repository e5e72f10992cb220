"""NeMo's own checkpoint callback over a stand-in for Lightning's trainer, which saves folders, as distributed checkpoints are."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from nemo.utils.callbacks import NeMoModelCheckpoint
from nemo.utils.model_utils import ckpt_to_dir
from nemo_aligner.utils.train_script_utils import add_custom_checkpoint_callback
from nemo_aligner.utils.utils import extract_value_from_ckpt

from tests.aligner.job import Job

KEYS = ("step", "consumed_samples", "epoch", "ppo_optimization_step")


class Lightning:
    """The parts of Lightning's trainer, and of its strategy, that the callback uses."""

    fast_dev_run, val_check_interval, global_step = False, 0, 0

    def __init__(self, actor: Any, callbacks: list[Any], ckpt_path: str | None):
        self.actor, self.callbacks, self.ckpt_path, self.loggers = actor, callbacks, ckpt_path, []
        self.strategy, self.is_global_zero = self, dist.get_rank() == 0

    def save_checkpoint(self, path: str, weights_only: bool = False, storage_options: Any = None) -> None:
        folder = Path(ckpt_to_dir(path))
        folder.mkdir(parents=True, exist_ok=True)
        if parallel_state.get_data_parallel_rank() == 0:
            torch.save(self.actor.model.state_dict(), folder / weights_name())
        dist.barrier()

    def remove_checkpoint(self, path: str) -> None:
        if self.is_global_zero:
            shutil.rmtree(ckpt_to_dir(path))

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision

    def broadcast(self, value: Any, src: int = 0) -> Any:
        values = [value]
        dist.broadcast_object_list(values, src=src)
        return values[0]

    def barrier(self, name: str | None = None) -> None:
        dist.barrier()


def weights_name() -> str:
    return f"stage-{parallel_state.get_pipeline_model_parallel_rank()}-{parallel_state.get_tensor_model_parallel_rank()}.pt"


def callback_of(folder: Path, n_resume: bool = False) -> NeMoModelCheckpoint:
    """Make NeMo's callback as `exp_manager` does; it keeps the first two checkpoints and the last."""
    name = "tiny-" + "-".join(f"{{{key}}}" for key in KEYS)
    callback = NeMoModelCheckpoint(
        n_resume=n_resume, dirpath=str(folder / "checkpoints"), filename=name, monitor="step", mode="min", save_top_k=2,
        save_last=True, save_nemo_on_train_end=False,
    )  # fmt: skip
    callback.CHECKPOINT_NAME_LAST = f"{name}-last"
    return callback


def attach(job: Job, actor: Any) -> Any:
    """Give the script's `ckpt_callback`; the actor gets the trainer that it is restored by."""
    callbacks = [callback_of(job.folder)] if job.checkpoints else []
    path = None if job.resume is None else checkpoint_of(job.resume_from or job.folder, job.resume)
    actor._trainer = Lightning(actor, callbacks, path)
    return add_custom_checkpoint_callback(actor._trainer, actor)


def checkpoint_of(folder: Path, step: int) -> str:
    return str(min((folder / "checkpoints").glob(f"*-step={step}-*")))


def restore(actor: Any) -> dict[str, int]:
    path = actor.trainer.ckpt_path
    actor.model.load_state_dict(torch.load(Path(path) / weights_name(), weights_only=True))
    return {key: extract_value_from_ckpt(key, path) for key in KEYS}

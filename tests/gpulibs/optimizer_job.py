"""Updates with megatron-core's optimizer over stand-in kernels: `python -m tests.gpulibs.optimizer_job LIBRARY FOLDER`.
LIBRARY is torch, transformer_engine or apex; results go to FOLDER/LIBRARY.pt."""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from tests.gpulibs.stubs import COMPILED, cuda_means_cpu, import_transformer_engine, stand_in

LIBRARY = sys.argv[1]
if LIBRARY != "torch":
    stand_in([name for name in COMPILED if LIBRARY == "apex" or name != "amp_C"])
if LIBRARY == "transformer_engine":
    import_transformer_engine()

import torch  # noqa: E402  (behind the stand-ins)
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

from oppo_megatron.cluster.world import open_world  # noqa: E402
from oppo_megatron.config.model import Dtype, LearningModelConfig, OptimizerConfig, RuntimeConfig, TrainingLayoutConfig  # noqa: E402
from oppo_megatron.mcore.batch import MicroBatch, pack_responses  # noqa: E402
from oppo_megatron.mcore.groups import RoleGroups, build_groups  # noqa: E402
from oppo_megatron.mcore.roles import load_training  # noqa: E402
from oppo_megatron.mcore.training import TrainedModel, Undo  # noqa: E402
from oppo_megatron.mcore.vocab import OutputRows  # noqa: E402
from oppo_megatron.mcore.weights.checkpoint import gather_models, load_models, write_models  # noqa: E402
from tests.support.ppo import SHAPE  # noqa: E402

CPU = torch.device("cpu")
OPTIMIZER = OptimizerConfig(lr=0.01, min_lr=0.001, weight_decay=0.1, clip_grad=0.5, warmup_steps=1, decay="linear")


def trained_model(groups: RoleGroups, dtype: Dtype) -> TrainedModel:
    config = LearningModelConfig(init=SHAPE, dtype=dtype)
    chunks = load_training(config, TrainingLayoutConfig(), groups, head="lm", max_length=64, device=CPU)
    return TrainedModel(chunks, OPTIMIZER, total_steps=4)


def update(trained: TrainedModel) -> float:
    batches = pack_responses([[5, 6, 7]] * 3, [list(range(10, 10 + n)) for n in (4, 9, 15)], 24, CPU)

    def loss(batch: MicroBatch, output: OutputRows) -> tuple[Tensor, dict[str, Tensor]]:
        return -output.figures(batch.targets_R).logp_R.sum() / 28, {}

    return trained.step(batches, loss).grad_norm


def weights(trained: TrainedModel) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in trained.model.named_parameters()}


def updates(groups: RoleGroups, dtype: Dtype, folder: Path) -> dict[str, Any]:
    """Weights and norms after three updates, the third also of a model that took the first two from a checkpoint."""
    trained = trained_model(groups, dtype)
    norms = [update(trained), update(trained)]
    folder.mkdir(parents=True)
    write_models(folder, gather_models({"actor": trained}, copied=False), dist.group.WORLD)
    undo = Undo(trained)
    norms.append(update(trained))
    found = {"norms": norms, "weights": weights(trained), "optimizer": _kind(trained)}
    undo.restore()
    update(trained)
    resumed = trained_model(groups, dtype)
    load_models(folder, {"actor": resumed}, {"actor": 2})
    resumed.resume_schedule(2)
    update(resumed)
    return {**found, "undone": weights(trained), "resumed": weights(resumed)}


def _kind(trained: TrainedModel) -> str:
    (each,) = trained.optimizer.chained_optimizers
    return f"{type(each.optimizer).__module__.partition('.')[0]}.{type(each.optimizer).__name__}"


@contextmanager
def noted_constructions() -> Iterator[list[dict[str, Any]]]:
    from megatron.core import optimizer as megatron_optimizer

    noted: list[dict[str, Any]] = []
    kind = megatron_optimizer.Adam
    signature = inspect.signature(kind)

    def construct(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs).arguments
        noted.append({name: value for name, value in bound.items() if name != "params"})
        return kind(*args, **kwargs)

    with mock.patch.object(megatron_optimizer, "Adam", construct):
        yield noted


def main(folder: Path) -> None:
    found: dict[str, Any] = {}
    with open_world(RuntimeConfig(device="cpu").with_threads(1), {}), cuda_means_cpu():
        groups = build_groups([0], 1, 1, "actor")
        assert groups is not None
        with noted_constructions() as noted:
            dtypes: tuple[Dtype, ...] = ("float32", "bfloat16")
            for dtype in dtypes:
                found[dtype] = updates(groups, dtype, folder / LIBRARY / dtype)
    torch.save({**found, "constructed": noted}, folder / f"{LIBRARY}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[2]))

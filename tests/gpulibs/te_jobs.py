"""Models of transformer-engine's layers beside torch's: `python -m tests.gpulibs.te_jobs JOB FILE` leaves findings in FILE."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

from tests.gpulibs.stubs import COMPILED, import_transformer_engine, stand_in

stand_in(COMPILED)
TE = import_transformer_engine()

import torch  # noqa: E402  (behind the stand-ins)
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from oppo_megatron.cluster.world import open_world  # noqa: E402
from oppo_megatron.config.model import ModelConfig, RuntimeConfig, TrainingLayoutConfig  # noqa: E402
from oppo_megatron.layout.kernels import Available, LayerKind  # noqa: E402
from oppo_megatron.layout.shape import ModelShape  # noqa: E402
from oppo_megatron.mcore import roles  # noqa: E402
from oppo_megatron.mcore.attention import PackedPlan  # noqa: E402
from oppo_megatron.mcore.groups import RoleGroups, build_groups  # noqa: E402
from oppo_megatron.mcore.model import RoleModel, build_chunks, step  # noqa: E402
from oppo_megatron.mcore.roles import load_role  # noqa: E402
from tests.support.ppo import SHAPE  # noqa: E402

CPU = torch.device("cpu")
KINDS = ("qwen2", "llama", "qwen3")  # a bias, none, and norms of queries and keys
MARKS = ("tensor_model_parallel", "partition_dim", "partition_stride", "sequence_parallel", "allreduce")
LAYERS: tuple[LayerKind, LayerKind] = ("torch", "transformer_engine")


def shards() -> dict[str, Any]:
    """The parameters of rank 0 of two tensor ranks, by library: (shape, dtype, device, marks)."""
    found: dict[str, Any] = {}
    with mock.patch("oppo_megatron.cluster.process_groups.world_timeout", lambda: timedelta(seconds=60)):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        groups = build_groups(range(2), 2, 1, "actor")
    assert groups is not None
    for kind in KINDS:
        for shared in (False, True):
            for layers in LAYERS:
                (model,) = build_chunks(
                    ModelShape.from_hf(SHAPE | {"model_type": kind}), groups, TrainingLayoutConfig(sequence_parallel=shared),
                    head="lm", max_length=64, dtype="bfloat16", device=CPU, layers=layers,
                )  # fmt: skip
                found[f"{kind}, sequence parallel {shared}, {layers}"] = {
                    name: (tuple(p.shape), str(p.dtype), str(p.device), *(getattr(p, mark, None) for mark in MARKS))
                    for name, p in model.named_parameters()
                }
    return found


@contextmanager
def bound_calls() -> Iterator[list[str]]:
    calls: list[str] = []

    def replaced(kind: type, compute: Callable[..., Any]) -> Any:
        signature = inspect.signature(kind.forward)

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(self, *args, **kwargs)
            calls.append(f"{kind.__name__}({', '.join(list(bound.arguments)[1:])})")
            return compute(self, args[0])

        return mock.patch.object(kind, "forward", forward)

    with replaced(TE.Linear, _linear), replaced(TE.RMSNorm, _norm):
        yield calls


def _linear(self: Any, x: Tensor) -> Any:
    bias = self.bias if self.use_bias else None
    out = F.linear(x, self.weight, None if self.return_bias else bias)
    return (out, bias) if self.return_bias else out


def _norm(self: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def outputs() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with open_world(RuntimeConfig(device="cpu").with_threads(1), {}), bound_calls() as calls:
        groups = build_groups([0], 1, 1, "actor")
        assert groups is not None
        for kind in KINDS:
            for layers in LAYERS:
                model = _loaded(kind, layers, groups)
                names = {type(m).__name__ for m in model.modules()}
                found[f"{kind}, {layers}, modules"] = sorted(n for n in names if "Linear" in n or "Norm" in n)
                found[f"{kind}, {layers}"] = _outputs(model)
        found["calls"] = sorted(set(calls))
    return found


def _loaded(kind: str, layers: LayerKind, groups: RoleGroups) -> RoleModel:
    """Load by the product's own loading, which is told that the layers can be transformer-engine's."""
    config, available = ModelConfig(init=SHAPE | {"model_type": kind}), Available(transformer_engine="2", cuda=True)
    with mock.patch.object(roles, "find_available", lambda cuda: available):
        model = load_role(config, groups, head="lm", max_length=64, device=CPU, layers=layers)
    return model.requires_grad_(False)


def _outputs(model: RoleModel) -> dict[str, Tensor]:
    tokens_T = torch.arange(5, 45)
    found = {"whole": model.logits(model(tokens_T, PackedPlan([40], model.rope)))}
    for path in ("module", "fused"):
        model.decode_by(path)
        cache = model.new_cache(2)
        cache.open(0)
        found[path] = model.logits(
            torch.cat([step(model, cache, [0], [len(part)], part) for part in tokens_T.split([20, 1, 1, 18])])
        )
    return found


if __name__ == "__main__":
    job, file = sys.argv[1:]
    torch.save({"shards": shards, "outputs": outputs}[job](), file)

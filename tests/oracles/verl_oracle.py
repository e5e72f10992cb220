"""verl 0.9.1, `trainer/ppo/core_algos.py`: advantages, aggregation and policy losses on padded matrices.
The file is imported without what its package imports: no ray, no deepspeed, no tensordict."""

import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.oracles.comparing import Sample, mask_of, padded, rows_of
from tests.replay.formulas import Rows, kl_of


@dataclass
class AlgoConfig:
    gamma: float = 1.0


@dataclass
class ActorConfig:
    clip_ratio: float = 0.2
    clip_ratio_low: float | None = 0.2
    clip_ratio_high: float | None = 0.2
    clip_ratio_c: float = 3.0
    global_batch_info: dict[str, Any] = field(default_factory=dict)

    def get(self, name: str, default: Any) -> Any:
        return getattr(self, name, default)


def bare_package(name: str, **names: Any) -> None:
    """A package whose modules can be imported, of whose `__init__` nothing is run; `names` are what it has instead."""
    top, *rest = name.split(".")
    spec = importlib.util.find_spec(top) if top not in sys.modules else sys.modules[top].__spec__
    assert spec is not None and spec.submodule_search_locations
    module = types.ModuleType(name)
    module.__path__ = [str(Path(spec.submodule_search_locations[0]).joinpath(*rest))]
    module.__spec__ = importlib.util.spec_from_loader(name, None, is_package=True)
    module.__spec__.submodule_search_locations = module.__path__
    _enter(module, names)


def stand_in(name: str, **names: Any) -> None:
    """A module that has these names and no more, within a package that is bare."""
    _enter(types.ModuleType(name), names)


@contextmanager
def absent(**packages: dict[str, Any]) -> Iterator[None]:
    for name, names in packages.items():
        assert name not in sys.modules, name
        _enter(types.ModuleType(name), names)
    try:
        yield
    finally:
        for name in packages:
            del sys.modules[name]


def _enter(module: types.ModuleType, names: dict[str, Any]) -> None:
    vars(module).update(names)
    sys.modules[module.__name__] = module
    parent, _, own = module.__name__.rpartition(".")
    if parent:
        setattr(sys.modules[parent], own, module)


def _core() -> Any:
    for name in ("verl", "verl.utils", "verl.workers", "verl.trainer", "verl.trainer.ppo"):
        bare_package(name)
    stand_in("verl.utils.device", get_device_name=lambda: "cpu", get_torch_device=lambda: torch.cpu)
    stand_in("verl.trainer.config", AlgoConfig=AlgoConfig)
    stand_in("verl.workers.config", ActorConfig=ActorConfig)
    import verl.utils
    from verl.utils.groupwise import as_torch_index, group_mean_std

    verl.utils.as_torch_index, verl.utils.group_mean_std = as_torch_index, group_mean_std
    with absent(tensordict={"TensorDict": dict}):
        from verl.trainer.ppo import core_algos
    return core_algos


core = _core()


def advantages(sample: Sample, name: str, *, kl: str | None = None, coefficient: float = 0.0, **options: Any) -> Rows:
    """Advantages by estimator `name`; `kl`: an estimator of what each token's reward is less by, times the coefficient."""
    batch = sample.batch
    rewards = [torch.zeros_like(row) for row in batch.old]
    for row, score in zip(rewards, batch.scores_B, strict=True):
        row[-1] = score
    rewards_BL, mask_BL = padded(rewards), mask_of(rewards)
    if kl is not None:
        found = [kl_of(old, reference, kl) for old, reference in zip(batch.old, batch.reference, strict=True)]
        rewards_BL = rewards_BL - coefficient * padded(found)
    given: dict[str, Any] = {"token_level_rewards": rewards_BL, "response_mask": mask_BL, **options}
    if name in ("grpo", "rloo", "reinforce_plus_plus_baseline"):
        given["index"] = np.array(batch.groups)
    if name == "remax":
        given["reward_baselines"] = torch.tensor([batch.greedy[prompt][0] for prompt in batch.groups])
    if name == "gae":
        assert batch.values is not None
        given["values"] = padded(batch.values)
    return rows_of(core.get_adv_estimator_fn(name)(**given)[0], batch.old)


def loss(
    name: str, new: Rows, old: Rows, advantages: Rows, aggregation: str, importance: Rows | None, config: ActorConfig
) -> Tensor:
    found, _ = core.get_policy_loss_fn(name)(
        old_log_prob=padded(old), log_prob=padded(new), advantages=padded(advantages), response_mask=mask_of(new),
        loss_agg_mode=aggregation, config=config, rollout_is_weights=None if importance is None else padded(importance),
    )  # fmt: skip
    return found


def aggregated(rows: Rows, mode: str, **options: Any) -> Tensor:
    return core.agg_loss(padded(rows), mask_of(rows), mode, **options)


def kl_loss(new: Rows, reference: Rows, kind: str, aggregation: str, **options: Any) -> Tensor:
    return core.agg_loss(core.kl_penalty(padded(new), padded(reference), kind), mask_of(new), aggregation, **options)


def value_loss(new: Rows, old: Rows, returns: Rows, clip: float) -> Tensor:
    return core.compute_value_loss(padded(new), padded(returns), padded(old), mask_of(new), clip)[0]

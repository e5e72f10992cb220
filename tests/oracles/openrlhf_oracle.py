"""OpenRLHF 0.11.2: `models/loss.py`, the KL of `models/utils.py`, and how `ppo_utils/experience_maker.py` makes advantages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.oracles.bare import absent, bare_package, stand_in
from tests.oracles.batches import Sample, mask_of, padded, rows_of
from tests.replay.formulas import Rows, kl_of


def _modules() -> tuple[Any, Any, Any]:
    packages = ("openrlhf", "openrlhf.models", "openrlhf.utils", "openrlhf.trainer", "openrlhf.trainer.ppo_utils")
    for name in (*packages, "openrlhf.trainer.ray"):
        bare_package(name)
    stand_in("openrlhf.trainer.ray.launcher", RayActorGroup=object)
    stand_in("openrlhf.trainer.ppo_utils.experience", Experience=SimpleNamespace)
    stand_in("openrlhf.trainer.ppo_utils.length_penalty", apply_length_penalties=lambda experiences, args: None)
    stand_in("openrlhf.utils.logging_utils", init_logger=lambda name: SimpleNamespace(warning=print))
    stand_in(
        "openrlhf.utils.seqlen_balancing",
        get_minimum_num_micro_batch_size=None,
        get_seqlen_balanced_partitions=None,
    )
    with absent(deepspeed={}, ray={}):
        from openrlhf.models import loss, utils
        from openrlhf.trainer.ppo_utils import experience_maker
    return loss, utils, experience_maker


losses, utils, maker = _modules()


def loss(
    new: Rows, old: Rows, advantages: Rows, behaviour: Rows | None = None, cap: float | None = None, **options: Any
) -> Tensor:
    """`PolicyLoss`; with `behaviour`, tokens weigh as much as old / behaviour, at most `cap`."""
    if behaviour is not None:
        options |= {
            "is_correction_level": "token",
            "is_correction_mode": "clip",
            "is_correction_threshold": (0.0, cap),
        }
    mask = mask_of(new)
    given = None if behaviour is None else padded(behaviour)
    return losses.PolicyLoss(**options)(padded(new), padded(old), padded(advantages), mask, given)[0]


def value_loss(new: Rows, old: Rows, returns: Rows, clip: float) -> Tensor:
    return losses.ValueLoss(clip)(padded(new), padded(old), padded(returns), mask_of(new))


def kl_loss(new: Rows, old: Rows, reference: Rows, estimator: str, unbiased: bool) -> Tensor:
    """Mean over tokens, as the actor's trainer adds it to the loss."""
    mask = mask_of(new)
    found = utils.compute_approx_kl(
        padded(new), padded(reference), padded(old), kl_estimator=estimator, unbiased_gradient=unbiased
    )
    return losses.aggregate_loss(found, mask)


def advantages(sample: Sample, estimator: str, *, kl: str, coefficient: float, **options: float) -> Rows:
    """`compute_advantages_and_returns` of all rows in one experience."""
    batch = sample.batch
    mask = mask_of(batch.old)
    settings = {"gamma": 1.0, "lambd": 0.95, **options}
    args = SimpleNamespace(
        rollout=SimpleNamespace(n_samples_per_prompt=sample.group_size),
        algo=SimpleNamespace(
            advantage=SimpleNamespace(estimator=estimator, no_std_norm=False, **settings),
        ),
        reward=SimpleNamespace(clip_range=None),
    )
    found = [kl_of(old, reference, kl) for old, reference in zip(batch.old, batch.reference, strict=True)]
    experience = SimpleNamespace(
        rewards=batch.scores_B.clone(),
        index=list(range(len(batch.scores_B))),
        kl=padded(found),
        action_mask=mask.bool(),
        values=None if batch.values is None else padded(batch.values),
        info={},
    )
    own = maker.RemoteExperienceMaker
    self = SimpleNamespace(
        strategy=SimpleNamespace(args=args),
        advantage_estimator=estimator,
        kl_ctl=SimpleNamespace(value=coefficient),
        get_advantages_and_returns=lambda *given: own.get_advantages_and_returns(None, *given),
        get_cumulative_returns=lambda *given: own.get_cumulative_returns(None, *given),
    )
    own.compute_advantages_and_returns(self, [experience])
    return rows_of(torch.as_tensor(experience.advantages), batch.old)

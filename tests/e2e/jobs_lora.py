"""Runs with adapters whose reference must be the actor's own weights."""

from __future__ import annotations

from typing import Any
from unittest import mock

from oppo_megatron.errors import CheckpointError
from oppo_megatron.train.loop import TrainingLoop
from tests.e2e.jobs import train


def refusal(config: dict[str, Any]) -> str:
    """Why `train` does not go on from the run's checkpoint; nothing where it does."""
    try:
        train(config)
    except CheckpointError as error:
        return str(error)
    return ""


def train_with_a_shared_reference(config: dict[str, Any]) -> int:
    """`train`; the number of weights that the actor and the reference of this rank have in common, which are all it has."""
    run, shared = TrainingLoop.run, 0

    def looked_at(loop: TrainingLoop) -> bool:
        nonlocal shared
        actor, worker = loop.actor, loop.rounds.scoring.get("reference")
        assert (actor is None) == (worker is None), "they are on the same ranks"
        if actor is None or worker is None:
            return run(loop)
        for name, param in worker.model.named_parameters():
            assert param is actor.role.serving.get_parameter(name), name
            shared += param.numel()
        fused, ours = worker.model.fused, actor.role.serving.fused
        assert fused is not None and ours is not None
        reference = worker.model
        bare = ours.of(reference.decoder.layers, reference.groups.collection.tp)
        assert fused.layers[0].down is bare.layers[0].down is not ours.layers[0].down, "laid-out weights are shared, too"
        return run(loop)

    with mock.patch.object(TrainingLoop, "run", looked_at):
        train(config)
    return shared

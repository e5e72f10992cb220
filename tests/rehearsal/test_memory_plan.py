"""The plan of memory against what the product takes on fake CUDA tensors, by kind; and terms that are left out are found."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout import activations, role_memory
from oppo_megatron.layout.activations import Model
from oppo_megatron.layout.role_memory import train_holdings
from tests.rehearsal.asking import Server
from tests.rehearsal.cuda_stub import compiler
from tests.rehearsal.memory_cases import LAYOUTS, QUICK, Layout
from tests.support.configs import run_of

Bytes = dict[str, float]
LASTING = ("weights", "gradients", "optimizer", "kv_cache", "buffers")
MARGIN = 0.1
SMALL = 2**20
"""Bytes that no kind need be right by."""

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs g++, for torch's hooks of a CUDA device (Debian: g++)")


@pytest.fixture(scope="module")
def measurements() -> Iterator[Server]:
    with closing(Server("holding", "Alone")) as found:
        yield found


def measured(measurements: Server, layout: Layout) -> Bytes:
    return taken_by(measurements, layout.settings(), layout.role, layout.rank(run_of(layout.settings())))


def taken_by(measurements: Server, settings: dict[str, Any], role: str, rank: int) -> Bytes:
    told: dict[str, Any] = measurements.answer({"settings": settings, "role": role, "rank": rank})
    assert "error" not in told, told["error"]
    return told


def planned(layout: Layout) -> Bytes:
    config = run_of(layout.settings())
    return planned_for(config, layout.role, layout.rank(config))


def planned_for(config: TrainConfig, role: str, rank: int) -> Bytes:
    """Bytes of the role on the rank, by kind, as `oppo train --dry-run` counts them on a GPU."""
    found = Bytes()
    for held in train_holdings(config, on_cpu=False):
        if held.rank == rank and held.role.partition(".")[0] == role:
            of_kind = {kind: getattr(held.memory, kind) for kind in LASTING} | held.phases
            of_kind["weights"] += held.memory.copy
            assert held.memory.activations == max(held.phases.values())
            found = {kind: found.get(kind, 0.0) + of_kind.get(kind, 0.0) for kind in {**found, **of_kind}}
    return {kind: size for kind, size in found.items() if size}


def wrong(plan: Bytes, taken: Bytes) -> dict[str, tuple[float, float]]:
    """Kinds, in GiB planned and taken, in which they differ by more than the margin."""
    kinds = {kind for kind in {**plan, **taken} if kind != "left behind"}
    pairs = {kind: (plan.get(kind, 0.0), taken.get(kind, 0.0)) for kind in kinds}
    return {
        kind: (of_plan / 2**30, of_run / 2**30)
        for kind, (of_plan, of_run) in pairs.items()
        if abs(of_plan - of_run) > max(MARGIN * of_run, SMALL)
    }


@pytest.mark.parametrize("name", [*QUICK, *[pytest.param(name, marks=pytest.mark.long) for name in LAYOUTS]])
def test_the_plan_is_what_a_rank_takes(measurements: Server, name: str) -> None:
    layout = {**QUICK, **LAYOUTS}[name]
    plan, taken = planned(layout), measured(measurements, layout)
    assert wrong(plan, taken) == {}
    kinds = {"weights", "kv_cache", "buffers", "reading"}
    trained = {"gradients", "optimizer", "update"} if layout.role in ("actor", "critic") else set()
    assert plan.keys() == kinds | trained | ({"decoding"} if layout.role == "actor" else set())
    assert taken.get("left behind", 0) < SMALL, "an update leaves nothing behind"


def _without(owner: Any, name: str, part: Callable[..., Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """A plan in which `part(what the function gives, its arguments)` stands for what the function of that name gives."""
    real = getattr(owner, name)

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(owner, name, lambda *a, **k: part(real(*a, **k), *a, **k))

    return plant


DEFECTS: dict[str, tuple[str, str, Callable[[pytest.MonkeyPatch], None]]] = {
    "embeddings": ("1.5B, one rank", "weights",
        _without(role_memory, "stage_parameters", lambda n, shape, *_, **__: n - shape["vocab_size"] * shape["hidden_size"])),
    "gradients in bfloat16": ("1.5B, one rank", "gradients",
        _without(role_memory, "training_state", lambda m, *_: replace(m, gradients=m.gradients / 2))),
    "float32 weights": ("1.5B, one rank", "optimizer",
        _without(role_memory, "training_state", lambda m, n, *_: replace(m, optimizer=m.optimizer - 4 * n))),
    "an optimizer that is not sharded": ("70B, first of 8 stages", "optimizer",
        _without(role_memory, "training_state", lambda m, _, __, dp: replace(m, optimizer=m.optimizer * dp))),
    "values": ("8B reference, paged", "kv_cache", _without(role_memory, "kv_bytes_per_token", lambda n, *_: n / 2)),
    "whole blocks": ("8B reference, paged", "kv_cache", _without(role_memory, "kv_bytes_per_token", lambda n, *_: n * 7 / 8)),
    "what is gathered": ("70B, first of 8 stages", "buffers", _without(role_memory, "gather_bytes", lambda *_, **__: 0)),
    "rotary tables": ("1.5B, one rank", "buffers", _without(role_memory, "table_bytes", lambda *_: 0)),
    "micro-batches in flight": ("70B, first of 8 stages", "update",
        _without(activations, "kept_activations", lambda n, *_: n / 8)),
    "norms": ("70B, first of 8 stages", "update",
        _without(Model, "kept_of_layer", lambda both, model, train: (both[0], both[1] - 4 * model.shard(train)))),
    "a layer's backward pass": ("70B, first of 8 stages", "update", _without(Model, "backward_of_layer", lambda *_: 0)),
    "the loss": ("1.5B, one rank", "update", _without(Model, "loss", lambda *_: 0)),
    "a layer that is computed again": ("405B, first of 16 stages", "update",
        _without(Model, "kept_of_layer", lambda both, *_: (both[1], both[1]))),
    "logits of scorers": ("8B reference, paged", "reading", _without(activations, "_of_logits", lambda *_: 0)),
    "layers of a call": ("70B, first of 8 stages", "reading", _without(activations, "_in_layers", lambda n, *_: n / 2)),
    "drawing": ("1.5B, one rank", "decoding", _without(activations, "_of_logits", lambda n, *_: n / 2)),
}  # fmt: skip


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_term_that_is_missing_is_found(measurements: Server, defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, kind, plant = DEFECTS[defect]
    taken = measured(measurements, QUICK[name])
    plant(monkeypatch)
    assert kind in wrong(planned(QUICK[name]), taken)


def test_a_kind_that_only_the_run_has_is_found() -> None:
    assert wrong({"weights": 2.0**30}, {"weights": 2.0**30, "buffers": 2.0**21}).keys() == {"buffers"}

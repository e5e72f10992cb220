"""Every supervised command in every layout trains as one rank does, and goes on after a stop as if there had been none."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from oppo_megatron.rundir.checkpoints import CheckpointStore
from oppo_megatron.rundir.trace import read_trace
from tests.e2e.supervised import Settings, metrics, run, settings
from tests.support.hf import tensors_of
from tests.support.ranks import run_ranks

LORA = {"lora": {"rank": 4, "alpha": 12.0, "targets": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]}}
KINDS: dict[str, tuple[str, Settings]] = {
    "sft": ("sft", {}),
    "rm": ("rm", {}),
    "prm": ("prm", {}),
    "dpo": ("dpo", {}),
    "kto": ("kto", {}),
    "sft, adapters": ("sft", LORA),
    "rm, adapters": ("rm", LORA),
    "prm, adapters": ("prm", LORA),
    "dpo, adapters": ("dpo", LORA),
}
"""Commands and changes of the model, which has fresh heads and adapters that must be the same in every layout."""
LAYOUTS = {"TP2": (2, 1, 1), "PP2": (1, 2, 1), "DP2": (1, 1, 2), "PP2 x DP2": (1, 2, 2)}
SOON = {
    ("sft", "TP2"), ("sft", "PP2 x DP2"), ("rm", "PP2"), ("dpo", "TP2"), ("kto", "PP2"), ("kto", "DP2"),
    ("sft, adapters", "TP2"), ("rm, adapters", "PP2"),
}  # fmt: skip
LOSSES = {"loss", "margin", "heldout"}


def figures(run_dir: Path) -> list[dict[str, Any]]:
    told = ("step", "loss", "accuracy", "margin", "lr", "grad_norm", "tokens", "heldout")
    return [{name: line[name] for name in told if name in line} for line in metrics(run_dir)]


def require_equal(run_dir: Path, whole: Path) -> None:
    assert figures(run_dir) == figures(whole)
    ours, theirs = tensors_of(run_dir / "weights"), tensors_of(whole / "weights")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def require_close(run_dir: Path, whole: Path) -> None:
    for ours, theirs in zip(figures(run_dir), figures(whole), strict=True):
        assert all(ours[name] == theirs[name] for name in ("step", "tokens", "lr"))
        for name in LOSSES & theirs.keys():
            assert ours[name] == pytest.approx(theirs[name], rel=2e-4, abs=2e-5), (name, ours["step"])
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-3), ours["step"]
    found, expected = tensors_of(run_dir / "weights"), tensors_of(whole / "weights")
    assert max(float((found[name] - expected[name]).abs().max()) for name in expected) < 1e-3


def chosen(inputs: Path, kind: str, run_dir: Path, **changes: Any) -> Settings:
    command, model = KINDS[kind]
    schedule = {"lr": 3e-3, "eps": 1e-4, "decay": "linear", "warmup_steps": 2}
    evaluation = {"fraction": 0.25, "every_steps": 1}
    usual = {"batch_size": 5, "epochs": 2, "steps": 6, "optimizer": schedule, "evaluation": evaluation}
    return settings(inputs, command, run_dir, model={"checkpoint": inputs / "qwen2", **model}, **usual | changes)


@pytest.fixture(scope="module")
def alone(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("alone")

    @cache
    def trained(kind: str) -> Path:
        run(KINDS[kind][0], chosen(inputs, kind, root / kind))
        return root / kind

    return trained


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, layout, marks=[] if (kind, layout) in SOON else [pytest.mark.long])
        for kind in KINDS
        for layout in LAYOUTS
    ],
)
def test_a_layout_trains_as_one_rank_and_goes_on_after_a_stop(
    inputs: Path, tmp_path: Path, alone: Callable[[str], Path], kind: str, layout: str
) -> None:
    def train(name: str, layout: str = layout, stop_after: int | None = None, **changes: Any) -> Path:
        tp, pp, dp = LAYOUTS[layout]
        own = chosen(inputs, kind, tmp_path / name, parallel={"tp": tp, "pp": pp, "dp": dp}, **changes)
        job = "tests.e2e.supervised_jobs:train"
        run_ranks(tp * pp * dp, job, kind=KINDS[kind][0], settings=own, stop_after=stop_after)
        return tmp_path / name

    whole = train("whole")
    require_close(whole, alone(kind))
    assert {span.rank for span in read_trace(whole / "trace.json")} == set(range(prod(LAYOUTS[layout])))
    assert not list(whole.glob("trace.rank*")), "traces of ranks are merged"
    parts = train("parts", stop_after=3)
    assert len(metrics(parts)) == 3 and not (parts / "summary.json").exists()
    assert [position.step for position in CheckpointStore(parts / "checkpoints").positions()] == [3]
    shutil.copytree(parts, tmp_path / "elsewhere")
    require_equal(train("parts", checkpoint={"resume": True}), whole)
    other = list(LAYOUTS)[list(LAYOUTS).index(layout) - 1]
    require_close(train("elsewhere", other, checkpoint={"resume": True}), whole)

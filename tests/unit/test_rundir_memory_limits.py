"""`memory_limits.json`: it holds for the layout in which memory ran out, and a damaged one is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.layout.placements import layout_tree
from oppo_megatron.rundir.directory import RunDirectory
from oppo_megatron.rundir.memory_limits import lower_memory_limit, read_memory_limits
from tests.support.configs import least_config

TP2, PP2 = {"model": [[0, 1], 2, 1, 1]}, {"model": [[0, 1], 1, 2, 1]}


def test_limits_fall_and_are_those_of_their_layout(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert read_memory_limits(run, TP2) == {}
    for name, most in ("train", 300), ("score", 90), ("train", 400), ("train", 150):
        lower_memory_limit(run, TP2, name, most)
    assert read_memory_limits(run, TP2) == {"train": 150, "score": 90}
    assert read_memory_limits(run, PP2) == {}
    lower_memory_limit(run, PP2, "train", 200)
    assert read_memory_limits(run, PP2) == {"train": 200} and read_memory_limits(run, TP2) == {}


def test_every_change_of_a_layout_is_one(tmp_path: Path) -> None:
    def tree(**sections: Any) -> Any:
        return layout_tree(least_config(tmp_path, **sections))

    two = {"mode": "colocated", "actor": {"tp": 2}}
    trees = [tree(), *(tree(placement=two | {"actor": {part: 2}}) for part in ("tp", "pp", "dp"))]
    trees.append(tree(placement=two, actor={"checkpoint": "a", "train": {"tp": 1, "pp": 2}}))
    trees.append(tree(placement=two, critic={"checkpoint": "a", "parallel": {"dp": 2}}))
    trees.append(tree(placement={"mode": "single"}))
    assert all(a != b for i, a in enumerate(trees) for b in trees[:i])
    assert json.loads(json.dumps(trees)) == trees and tree() == tree(
        rollout={"batch_size": 9, "max_response_tokens": 100}
    )


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"train": 3}', '{"layout": {"model": [[0, 1], 2, 1, 1]}, "limits": 3}']
)
def test_a_damaged_file_is_none(tmp_path: Path, text: str) -> None:
    run = RunDirectory(tmp_path)
    run.memory_limits.write_text(text)
    assert read_memory_limits(run, TP2) == {}

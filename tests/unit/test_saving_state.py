"""A continued run takes its state from its checkpoint, and tells the differences."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.config.load import plain_settings
from oppo_megatron.errors import CheckpointError
from oppo_megatron.overcommit.ahead import Ahead
from oppo_megatron.train.saving.state import Found, adapter_state, describe_changes, frozen_models, require_same_run, source_state
from tests.support.configs import least_config


def test_a_null_reference_is_another_with_other_adapters(tmp_path: Path) -> None:
    def models(adapter: str | None, **sections: Any) -> Any:
        actor = {"checkpoint": "a", "lora": {"rank": 4, "adapter": adapter}}
        return frozen_models(plain_settings(least_config(tmp_path, actor=actor, **sections)))

    assert models("one") == models("one") != models("another") != models(None)
    named = {"reference": {"checkpoint": "r"}}
    assert models("one", **named) == models("another", **named), "a reference that is named has no adapters"


def test_rollouts_of_prompts_that_are_left_out_are_not_taken_up() -> None:
    lines = [{"seq_id": seq_id} for seq_id in (3, 5, 8)]
    found = Found(Path("step-000002"), {"done": 2, "scheduler": {"position": 9}}, lines)
    assert found.held(frozenset()) == lines and found.held({5}) == [lines[0], lines[2]]
    assert found.ahead({5, 20}) == Ahead(2, 9, 2, frozenset({5, 20}))


@pytest.mark.parametrize("named_by", ["file", "module"])
def test_changes_are_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named_by: str) -> None:
    file = tmp_path / "changing_reward.py"
    file.write_text("def score(prompt, response, fields):\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    entry_point = f"{file if named_by == 'file' else 'changing_reward'}:score"
    config = least_config(tmp_path / "run", rewards=[{"kind": "python", "entry_point": entry_point}])
    state = {"saved_at": time.time() - 185, "done": 2, "config": {"seed": 1}, "sources": source_state(config)}
    found = Found(tmp_path / "step-000002", state, [])
    start = f"{tmp_path}: continued from checkpoint step-000002, saved 3m05s ago, after 2 steps"
    assert describe_changes(tmp_path, found, {"seed": 1}, source_state(config)) == [start]
    file.write_text("def score(prompt, response, fields):\n    return 2.0\n")
    told = describe_changes(tmp_path, found, {"seed": 2}, source_state(config))
    assert told == [start, "changed: seed: 1 -> 2", f"changed: the file of {entry_point}"]


@pytest.mark.parametrize(
    ("entries", "adapters", "says"),
    [
        ({"seed": 5}, {}, "seed is 5, but the checkpoint's run has 11"),
        ({"shuffle": False}, {}, "data.shuffle is False, but"),
        ({"rows": 7}, {}, "the number of usable prompts is 7, but"),
        ({"group_size": 2}, {}, "rollout.group_size is 2, but the checkpoint's run has 1"),
        ({"greedy": True}, {}, r"whether a prompt has a greedy response \(algorithm.baseline\) is True, but"),
        ({"fingerprint": "b" * 64}, {}, "resume with the same data, tokenizer and template"),
        ({}, {"alpha": 8.0}, r"actor.lora is rank 4, alpha 8.0, .* but the checkpoint's run has rank 4, alpha 16.0"),
        ({}, {"targets": ["q_proj"]}, r"actor.lora is .*targets \['q_proj'\], but the checkpoint's run has rank 4"),
        ({}, None, "actor.lora is null, but the checkpoint's run has rank 4"),
    ],
)
def test_another_order_or_other_adapters_are_refused(
    tmp_path: Path, entries: dict[str, Any], adapters: dict[str, Any] | None, says: str
) -> None:
    lora = {"rank": 4, "alpha": 16.0}
    then = least_config(tmp_path, actor={"checkpoint": "a", "lora": lora})
    data = {"seed": 11, "shuffle": True, "rows": 8, "fingerprint": "a" * 64, "group_size": 1, "greedy": False}
    found = Found(tmp_path, {"data": data, "adapters": adapter_state(then)}, [])
    require_same_run(found, data, then)
    now = least_config(tmp_path, actor={"checkpoint": "a", "lora": None if adapters is None else lora | adapters})
    with pytest.raises(CheckpointError, match=says):
        require_same_run(found, data | entries, now)

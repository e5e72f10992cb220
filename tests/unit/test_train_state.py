"""Which settings make the caches of a checkpoint those of other models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oppo_megatron.config.load import plain_settings
from oppo_megatron.overcommit.ahead import Ahead
from oppo_megatron.train.saving.resuming import Found
from oppo_megatron.train.saving.state import frozen_models
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

"""Which settings make the caches of a checkpoint those of other models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oppo_megatron.config.load import plain_settings
from oppo_megatron.train.saving.state import frozen_models
from tests.support.configs import least_config


def test_a_null_reference_is_another_with_other_adapters(tmp_path: Path) -> None:
    def models(adapter: str | None, **sections: Any) -> Any:
        actor = {"checkpoint": "a", "lora": {"rank": 4, "adapter": adapter}}
        return frozen_models(plain_settings(least_config(tmp_path, actor=actor, **sections)))

    assert models("one") == models("one") != models("another") != models(None)
    named = {"reference": {"checkpoint": "r"}}
    assert models("one", **named) == models("another", **named), "a reference that is named has no adapters"

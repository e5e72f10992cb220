"""A continued run says whose file has changed since its checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from oppo_megatron.train.saving.state import changes, source_state
from tests.support.configs import least_config


@pytest.mark.parametrize("named_by", ["file", "module"])
def test_a_reward_function_whose_file_has_changed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named_by: str) -> None:
    file = tmp_path / "told_reward.py"
    file.write_text("def score(prompt, response, fields):\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    entry_point = f"{file if named_by == 'file' else 'told_reward'}:score"
    config = least_config(tmp_path / "run", rewards=[{"kind": "python", "entry_point": entry_point}])
    then = source_state(config)
    assert changes({}, {}, then, source_state(config)) == []
    file.write_text("def score(prompt, response, fields):\n    return 2.0\n")
    assert changes({}, {}, then, source_state(config)) == [f"changed: the file of {entry_point}"]

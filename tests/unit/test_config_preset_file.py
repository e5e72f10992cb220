"""Presets of a user's own: a file of sections under the configuration, checked as the built-in ones are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from oppo_megatron.config.load import dump_config, load_config
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.config.run_rules import train_rules
from oppo_megatron.errors import ConfigError

MINE = {
    "algorithm": {"preset": "grpo", "scale": "none"},
    "ppo": {"clip_high": 0.28, "kl": {"mode": "none"}},
    "rollout": {"group_size": 4},
}
TREE: dict[str, Any] = {
    "run_dir": "run", "tokenizer": {"path": "t"}, "data": {"path": "d", "max_prompt_tokens": 8}, "actor": {"init": {}},
    "rewards": [{"kind": "verifier", "name": "gsm8k"}], "rollout": {"batch_size": 16, "max_response_tokens": 8},
    "overlap": {"inter": False},
}  # fmt: skip


def loaded(tmp_path: Path, preset: Any, *overrides: str) -> TrainConfig:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(preset))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(TREE | {"algorithm": {"preset": str(tmp_path / "mine.yaml")}}))
    return load_config(TrainConfig, tmp_path / "run.yaml", overrides, check=lambda config: list(train_rules(config)))


def test_a_file_gives_defaults_that_the_configuration_overrides(tmp_path: Path) -> None:
    config = loaded(tmp_path, MINE)
    choices = config.algorithm
    assert (choices.preset, choices.scale, choices.reduction) == ("grpo", "none", "sequence_mean")
    assert (config.ppo.clip_high, config.ppo.kl.mode, config.rollout.group_size) == (0.28, "none", 4)
    changed = loaded(tmp_path, MINE, "ppo.clip_high=0.3", "algorithm.scale=group_std")
    assert (changed.ppo.clip_high, changed.algorithm.scale, changed.rollout.group_size) == (0.3, "group_std", 4)
    dump_config(config, tmp_path / "resolved.yaml")
    (tmp_path / "mine.yaml").unlink()
    assert load_config(TrainConfig, tmp_path / "resolved.yaml") == config, "a resolved file needs the preset no more"


@pytest.mark.parametrize(
    ("preset", "says"),
    [
        ({"algorithm": {"preset": "grpo"}, "ppo": {"gae_lambda": 0.9}}, "has no critic, and nothing reads it; remove it"),
        ({"algorithm": {"preset": "cispo"}, "ppo": {"clip": 0.1}}, "algorithm.objective is cispo, which does not clip by it"),
        ({"algorithm": {"preset": "grppo"}}, "did you mean `grpo`?"),
        ({"algorithm": {"preset": "grpo"}, "ppo": {"clp": 0.1}}, "`ppo.clp` is not a setting; did you mean `ppo.clip`?"),
        ({"algorithm": {"preset": "other.yaml"}}, "is `other.yaml`, but must be a built-in preset"),
        ({"actor": {}}, "has actor, but a preset has the sections algorithm, ppo"),
        ([1], "is not a YAML mapping"),
    ],
)
def test_a_file_is_checked_as_a_built_in_preset_is(tmp_path: Path, preset: Any, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        loaded(tmp_path, preset)
    assert says in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(TREE | {"algorithm": {"preset": str(tmp_path / "none.yaml")}}))
    with pytest.raises(ConfigError, match="algorithm.preset `.*none.yaml` does not exist"):
        load_config(TrainConfig, tmp_path / "run.yaml")

"""No secret of the environment gets into a configuration, and so into the file that a run writes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from oppo_megatron.config.load import config_yaml, load_config
from oppo_megatron.config.run import TrainSettings
from oppo_megatron.errors import ConfigError

CONFIG = """
run_dir: ${oc.env:RUN_FOLDER,run}
tokenizer: {path: t.model}
data: {path: rows.jsonl}
actor: {init: {model_type: llama}}
critic: {init: {model_type: llama}}
rewards: [{kind: verifier, name: gsm8k}]
rollout: {batch_size: 8, max_response_tokens: 20}
"""
VALUE = "k9-very-secret-value"
NAMES = ("WANDB_API_KEY", "HF_TOKEN", "reward_service_token", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "OPENAI_API_KEY")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in NAMES:
        monkeypatch.setenv(name, VALUE)
    (tmp_path / "c.yaml").write_text(CONFIG)
    return tmp_path / "c.yaml"


def test_the_dump_of_a_configuration_shows_no_secret(config: Path) -> None:
    assert VALUE not in config_yaml(load_config(TrainSettings, config))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "override", ["run_dir=${oc.env:%s}", "data.path=[a, 'x-${oc.env:%s}']", "actor.init={a: {b: ['${oc.env:%s}']}}"]
)
def test_a_secret_in_a_setting_is_refused_without_being_shown(config: Path, name: str, override: str) -> None:
    with pytest.raises(ConfigError, match="by its name a secret") as caught:
        load_config(TrainSettings, config, [override % name, "steps=no"])
    assert override.partition("=")[0] in str(caught.value) and VALUE not in str(caught.value)


def test_other_variables_may_be_used(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RUN_FOLDER", "TOKENIZER_PATH", "MONKEY_KEYS_X"):
        monkeypatch.setenv(name, "a-long-folder-name")
    monkeypatch.setenv("HF_TOKEN", "-folder")  # 7 characters may occur in any text
    overrides = ["tokenizer.path=${oc.env:TOKENIZER_PATH}"]
    settings = load_config(TrainSettings, config, overrides)
    assert str(settings.tokenizer.path) == str(settings.run_dir) == "a-long-folder-name"
    monkeypatch.setenv("HF_TOKEN", "-folder-")
    with pytest.raises(ConfigError, match=r"`run_dir` holds the value of the environment variable HF_TOKEN"):
        load_config(TrainSettings, config, overrides)

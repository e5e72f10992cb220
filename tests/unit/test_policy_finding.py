"""The configuration that a run of any command recorded is read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.config.load import dump_config
from oppo_megatron.config.run import RunConfig
from oppo_megatron.config.supervised import DPOConfig, RewardModelConfig, SFTConfig
from oppo_megatron.policy.finding import RUN_CONFIG, read_run

SHAPE = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
SETTINGS: dict[str, Any] = {
    "data": {"path": "rows.jsonl"},
    "tokenizer": {"path": "tokenizer"},
    "model": {"init": {"model_type": "llama", "vocab_size": 8} | SHAPE},
    "batch_size": 2,
    "max_tokens": 16,
}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (SFTConfig, {}),
        (RewardModelConfig, {}),
        (RewardModelConfig, {"separator": "\n"}),
        (DPOConfig, {}),
        (DPOConfig, {"dpo": {"loss": "kto"}}),
    ],
)
def test_a_recorded_configuration_is_read_again(kind: type[RunConfig], changes: dict[str, Any], tmp_path: Path) -> None:
    written = kind.model_validate({"run_dir": str(tmp_path)} | SETTINGS | changes)
    dump_config(written, tmp_path / RUN_CONFIG)
    assert read_run(tmp_path) == written

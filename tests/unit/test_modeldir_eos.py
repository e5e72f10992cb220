"""The ids that end a response: the tokenizer's own, and those that the directories of tokenizer and policy name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oppo_megatron.errors import CheckpointError
from oppo_megatron.modeldir.eos import model_eos_ids


def write(directory: Path, **files: object) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({}, ()),
        ({"config": {"eos_token_id": 5}}, (5,)),
        ({"config": {"eos_token_id": [5, 7, 5]}}, (5, 7)),
        ({"config": {"eos_token_id": 5}, "generation_config": {"eos_token_id": [9, 8]}}, (9, 8)),
        ({"config": {"eos_token_id": 5}, "generation_config": {"eos_token_id": None}}, (5,)),
        ({"config": {}, "generation_config": {"temperature": 0.6}}, ()),
    ],
)
def test_the_generation_settings_count_before_the_model_s(
    tmp_path: Path, files: dict[str, object], ids: object
) -> None:
    assert model_eos_ids(write(tmp_path, **files)) == ids


@pytest.mark.parametrize("value", ["</s>", [1, "x"], -1, 1.5, True, {"id": 1}])
def test_what_is_no_id_is_told(tmp_path: Path, value: object) -> None:
    with pytest.raises(CheckpointError, match="eos_token_id is .* but must be a token id"):
        model_eos_ids(write(tmp_path, generation_config={"eos_token_id": value}))

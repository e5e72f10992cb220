"""The token ids that end a response, read from a model's directory."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from oppo_megatron.errors import CheckpointError
from oppo_megatron.modeldir.megatron import read_mapping

GENERATION_CONFIG, MODEL_CONFIG = "generation_config.json", "config.json"
FIELD = "eos_token_id"


def model_eos_ids(directory: Path) -> tuple[int, ...]:
    """The `eos_token_id` of `generation_config.json`, or if it has none, of `config.json`.  Raises CheckpointError for one that
    is not an id or a list of them.
    """
    for name in (GENERATION_CONFIG, MODEL_CONFIG):
        path = directory / name
        value = read_mapping(path, "the model's settings").get(FIELD) if path.is_file() else None
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(i) is int and i >= 0 for i in ids):
            raise CheckpointError(
                f"`{path}`: {FIELD} is {value!r:.80}, but must be a token id (a number from 0 on) or a list of them; correct it"
            )
        if ids:
            return distinct(ids)
    return ()


def distinct(ids: Iterable[int]) -> tuple[int, ...]:
    """Each id once, in order of first appearance."""
    return tuple(dict.fromkeys(ids))

"""Files next to weights, so that transformers reads the policy as it was trained: tokenizer, special ids, ends."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oppo_megatron.data.tokenizer import Tokenizer
from oppo_megatron.modeldir.eos import GENERATION_CONFIG, distinct
from oppo_megatron.modeldir.megatron import read_mapping
from oppo_megatron.nesting import read_json


def special_ids(tokenizer: Tokenizer, stop_token_ids: Sequence[int] = (), *, scored: bool = False) -> dict[str, Any]:
    """The ids that `config.json` and `generation_config.json` name; several EOS are a list.

    `scored`: the model is a reward model or critic, which scores the last token that is not padding, so no token that may
    end an answer can be the padding.
    """
    ends = distinct([*tokenizer.eos_ids, *stop_token_ids])
    pad = scoring_pad(tokenizer) if scored else tokenizer.pad_id if tokenizer.pad_id is not None else ends[0]
    return {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": ends[0] if len(ends) == 1 else list(ends),
        "pad_token_id": pad,
    }


def scoring_pad(tokenizer: Tokenizer) -> int:
    """A padding id for a reward model: the pad token, another special token, or the last id that does not end answers."""
    candidates = (tokenizer.pad_id, *tokenizer.other_ids, tokenizer.bos_id, *range(tokenizer.vocab_size - 1, -1, -1))
    return next(i for i in candidates if i is not None and i not in tokenizer.eos_ids)


def write_beside(
    directory: Path,
    tokenizer: Tokenizer,
    ids: Mapping[str, Any],
    family: str,
    *,
    scored: bool,
    source: Path | None = None,
) -> str | None:
    """Write the tokenizer and, for a policy, `generation_config.json`: the file of `source`, if it has one, with `ids`.

    `family` is the `model_type` of the weights.  Returns a warning if transformers will tokenize differently, else None.
    """
    directory.mkdir(parents=True, exist_ok=True)
    told = tokenizer.save(directory, pad_id=ids["pad_token_id"] if scored else None)
    _keep_class(directory / "tokenizer_config.json", family)
    if not scored:
        settings = {} if source is None else _generation_config(source / GENERATION_CONFIG)
        settings |= {name: value for name, value in ids.items() if value is not None}
        (directory / GENERATION_CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return told


def _keep_class(path: Path, family: str) -> None:
    """Make transformers 5 load the tokenizer as written: for a Qwen2 model it uses Qwen2's pre-tokenizer, whatever class
    is named, unless `auto_map` names one."""
    if family != "qwen2" or not path.is_file():
        return
    settings = read_json(path.read_text(encoding="utf-8"))
    if not str(settings.get("tokenizer_class", "")).startswith("Qwen2") and "auto_map" not in settings:
        settings["auto_map"] = {"AutoTokenizer": ["", None]}
        path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _generation_config(path: Path) -> dict[str, Any]:
    """The file's settings; empty if it is missing."""
    return read_mapping(path, "the generation settings") if path.is_file() else {}

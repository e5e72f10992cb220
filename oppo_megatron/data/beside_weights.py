"""Files next to weights, so that transformers reads the policy as it was trained."""

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

    `scored`: a reward model or critic scores the last token that is not padding, so no token that may end an answer can be the
    padding.
    """
    ends = distinct([*tokenizer.eos_ids, *stop_token_ids])
    pad = ends[0] if tokenizer.pad_id is None else tokenizer.pad_id
    if scored:
        candidates = (tokenizer.pad_id, *tokenizer.other_ids, tokenizer.bos_id, *range(tokenizer.vocab_size - 1, -1, -1))
        pad = next(i for i in candidates if i is not None and i not in tokenizer.eos_ids)
    eos = ends[0] if len(ends) == 1 else list(ends)
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": eos, "pad_token_id": pad}


def write_beside(
    directory: Path, tokenizer: Tokenizer, ids: Mapping[str, Any], family: str, *, scored: bool, source: Path | None = None
) -> str | None:
    """Write the tokenizer and, for a policy, `generation_config.json`: the one of `source` with `ids`.

    `family`: the `model_type` of the weights.  Returns a warning if transformers will tokenize differently, else None.
    """
    directory.mkdir(parents=True, exist_ok=True)
    warning = tokenizer.save(directory, pad_id=ids["pad_token_id"] if scored else None)
    _keep_class(directory / "tokenizer_config.json", family)
    if not scored:
        settings: dict[str, Any] = {}
        if source is not None and (source / GENERATION_CONFIG).is_file():
            settings = read_mapping(source / GENERATION_CONFIG, "the generation settings")
        settings |= {name: value for name, value in ids.items() if value is not None}
        (directory / GENERATION_CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return warning


def _keep_class(path: Path, family: str) -> None:
    """Make transformers 5 load the tokenizer as written: for a Qwen2 model it uses Qwen2's, unless `auto_map` names one."""
    if family != "qwen2" or not path.is_file():
        return
    settings = read_json(path.read_text(encoding="utf-8"))
    if not str(settings.get("tokenizer_class", "")).startswith("Qwen2") and "auto_map" not in settings:
        settings["auto_map"] = {"AutoTokenizer": ["", None]}
        path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


"""Tokens of prompts and answers, and checks of stop texts."""

from __future__ import annotations

import os
from collections.abc import Sequence

from oppo_megatron.data.tokenizer import Tokenizer
from oppo_megatron.errors import ConfigError


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids that begin a sequence, with BOS unless a template wrote it."""
    ids = tokenizer.encode(text)
    if not (tokenizer.adds_bos and ids) or ids[0] == tokenizer.bos_id:
        return ids
    assert tokenizer.bos_id is not None, "`load_tokenizer` has asked for it"
    return [tokenizer.bos_id, *ids]


def encode_answers(tokenizer: Tokenizer, prompt: str, answers: Sequence[str]) -> list[list[int]]:
    """Token ids of a prompt and of each answer: prompt + answer are the tokens of the whole text.

    Prompt tokens that an answer changes belong to the answers, unless none would be left.
    """
    alone = encode_prompt(tokenizer, prompt)
    wholes = [encode_prompt(tokenizer, prompt + answer) for answer in answers]
    shared = len(os.path.commonprefix([alone, *wholes]))
    if not shared:
        return [alone, *(tokenizer.encode(answer) for answer in answers)]
    return [alone[:shared], *(whole[shared:] for whole in wholes)]


def end_of_prompt(tokenizer: Tokenizer, ids: Sequence[int], most: int) -> list[int]:
    if ids[0] != tokenizer.bos_id or most < 2:
        return list(ids[-most:])
    return [ids[0], *ids[-(most - 1) :]]


def hidden_ids(text: str, tokenizer: Tokenizer) -> list[int] | None:
    """Special tokens of a text that no response can contain, or None."""
    ids = tokenizer.encode(f"a{text}a")
    return None if text in tokenizer.decode(ids) else [i for i in ids if not tokenizer.decode([i])]


def require_stop_texts(texts: Sequence[str], tokenizer: Tokenizer, setting: str, ids_setting: str | None = None) -> None:
    """Raise ConfigError for a text that no response can contain; `ids_setting` would take its token id."""
    problems = []
    for text in texts:
        if (special := hidden_ids(text, tokenizer)) is None:
            continue
        remedy = "; name another" if ids_setting is None else "; remove it"
        if special and ids_setting is not None:
            remedy = f"; give its id in {ids_setting}: {special}"
        problems.append(
            f"{setting} has {text!r:.60}, which no response contains: the tokenizer has a special token for it, or drops it"
            f"{remedy}"
        )
    if problems:
        raise ConfigError(problems)

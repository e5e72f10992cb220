"""The tokens of prompts and answers: those that their whole text has, which begins with BOS if its tokenizer says so."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from oppo_megatron.errors import ConfigError


class Beginning(Protocol):
    """What of a tokenizer says how a prompt begins."""

    bos_id: int | None
    adds_bos: bool

    def encode(self, text: str) -> list[int]: ...


def encode_prompt(tokenizer: Beginning, text: str) -> list[int]:
    """Token ids of a text that a model reads first.  One that begins with BOS, as some templates have it, gets no second."""
    ids = tokenizer.encode(text)
    if not (tokenizer.adds_bos and ids) or ids[0] == tokenizer.bos_id:
        return ids
    assert tokenizer.bos_id is not None, "`settle_bos` has asked for it"
    return [tokenizer.bos_id, *ids]


def encode_answers(tokenizer: Beginning, prompt: str, answers: Sequence[str]) -> list[list[int]]:
    """Token ids of a prompt and of each answer to it: prompt + answer are the tokens of the whole text.

    Encoded alone, an answer may get a space in front (sentencepiece), or other tokens where the texts meet.  Tokens of the
    prompt's end that an answer changes belong to the answers.  Only a prompt that would lose all tokens so is encoded apart.
    """
    alone = encode_prompt(tokenizer, prompt)
    wholes = [encode_prompt(tokenizer, prompt + answer) for answer in answers]
    shared = len(os.path.commonprefix([alone, *wholes]))
    if not shared:
        return [alone, *(tokenizer.encode(answer) for answer in answers)]
    return [alone[:shared], *(whole[shared:] for whole in wholes)]


def end_of_prompt(tokenizer: Beginning, ids: Sequence[int], most: int) -> list[int]:
    """The last `most` tokens of a longer prompt; BOS stays in front where it was, whoever put it there."""
    if ids[0] != tokenizer.bos_id or most < 2:
        return list(ids[-most:])
    return [ids[0], *ids[-(most - 1) :]]


def settle_bos(tokenizer: Beginning, wanted: bool | None, path: Path) -> None:
    """Whether prompts begin with BOS: as `wanted`, or null, as the tokenizer at `path` has it itself.

    Raises ConfigError where it has none.
    """
    if wanted and tokenizer.bos_id is None:
        raise ConfigError(
            f"tokenizer.add_bos is true, but the tokenizer at {path} has no BOS token; set it to null, or name a tokenizer "
            "that has one"
        )
    if wanted is not None:
        tokenizer.adds_bos = wanted

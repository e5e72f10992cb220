"""Checks stop texts against the tokenizer of the responses."""

from __future__ import annotations

from collections.abc import Sequence

from oppo_megatron.data.tokenizer import Tokenizer
from oppo_megatron.errors import ConfigError

EITHER_SIDE = "a"


def hidden_ids(text: str, tokenizer: Tokenizer) -> list[int] | None:
    """The special tokens in a text that no response's text can have; None if one can."""
    ids = tokenizer.encode(f"{EITHER_SIDE}{text}{EITHER_SIDE}")
    return None if text in tokenizer.decode(ids) else [i for i in ids if not tokenizer.decode([i])]


def require_stop_texts(texts: Sequence[str], tokenizer: Tokenizer, setting: str, ids_setting: str | None = None) -> None:
    """Raises ConfigError for a text that no response can contain: a special token has an id and no text.

    `ids_setting`: where its id may be given instead.
    """
    problems = []
    for text in texts:
        if (special := hidden_ids(text, tokenizer)) is None:
            continue
        remedy = "; name another" if ids_setting is None else "; remove it"
        if special and ids_setting is not None:
            remedy = f"; give its id in {ids_setting}: {special}"
        problems.append(
            f"{setting} has {text!r:.60}, which is in no response's text: the tokenizer has a special token for it, or drops it"
            f"{remedy}"
        )
    if problems:
        raise ConfigError(problems)

"""Checks that the run's tokenizer is the one of each role's model, from files.

Two tokenizers are the same if each id maps to the same piece, and sample texts become the same ids.  One may have added tokens
that the other lacks, or has under a reserved name; one may be a fast tokenizer and the other its sentencepiece model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oppo_megatron.errors import CheckpointError
from oppo_megatron.modeldir.eos import model_eos_ids
from oppo_megatron.modeldir.megatron import read_mapping

FAST, SENTENCEPIECE, SLOW, SETTINGS = "tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json"
SPACE_MARK = "\u2581"
SAMPLE = (
    "The quick brown fox jumps over the lazy dog.",
    "Hello, world! How are you today?",
    "What is 12 + 34 - 5 * 678?",
    "def add(first, second):\n    return first + second",
    "Question: why is the sky blue?\nAnswer: because of scattering.",
    "caf\u00e9 na\u00efve \u4f60\u597d \u043f\u0440\u0438\u0432\u0435\u0442 \U0001f600",
)


@dataclass(frozen=True)
class Vocabulary:
    """`added`: ids of tokens besides the trained pieces.  `eos`: all ids that end a response; empty if unspecified."""

    pieces: Mapping[int, str]
    added: frozenset[int]
    eos: frozenset[int]
    bos: int | None
    encode: Callable[[str], list[int]] | None


def compare_tokenizers(path: Path, directories: Mapping[str, Path]) -> tuple[list[str], list[str]]:
    """Problems of the directories (by the setting that names each) whose tokenizer is not that at `path`; and what was compared.
    """
    problems: list[str] = []
    lines: list[str] = []
    own: Vocabulary | None = None
    file = _tokenizer_file(path)
    for name, directory in directories.items():
        try:
            other = _tokenizer_file(directory)
            if other is None or file is None:
                lines.append(_without(name, directory, path if other is not None else directory))
            elif _identity(path, file) == _identity(directory, other):
                lines.append(f"tokenizer: that of {name} is the same, byte for byte")
            else:
                own = own or _read(path, file)
                there = _read(directory, other)
                if (fault := _difference(own, there)) is not None:
                    problems.append(_wrong(path, name, directory, fault))
                else:
                    shared = len(own.pieces.keys() & there.pieces.keys())
                    lines.append(
                        f"tokenizer: that of {name} has the same {shared} pieces, special ids and sample texts"
                    )
        except CheckpointError as error:
            problems.append(f"{name}: {error}")
    return problems, lines


def _wrong(path: Path, name: str, directory: Path, fault: str) -> str:
    return (
        f"tokenizer.path={path} is another tokenizer than that of {name}={directory}: {fault}; "
        f"set tokenizer.path={directory}, or name a model that was trained with this tokenizer"
    )


def _without(name: str, directory: Path, lacking: Path) -> str:
    ends = ", ".join(map(str, model_eos_ids(directory))) or "none"
    return (
        f"tokenizer: not compared with {name}, whose EOS is {ends}: {lacking} has no {FAST}, {SENTENCEPIECE} or {SLOW}"
    )


def _difference(own: Vocabulary, there: Vocabulary) -> str | None:
    own_ids, their_ids = _ids(own), _ids(there)
    for i in sorted(own.pieces.keys() | there.pieces.keys()):
        ours, theirs = own.pieces.get(i), there.pieces.get(i)
        if ours == theirs:
            continue
        if ours is None or theirs is None:
            added = i in (there.added if ours is None else own.added)
            renamed = False
        else:
            added = i in own.added and i in there.added
            renamed = ours in their_ids or theirs in own_ids
        if not added or renamed:
            return f"id {i} is {_shown(theirs)} there and {_shown(ours)} here"
    if own.eos and there.eos and not own.eos & there.eos:
        return f"its EOS is {_listed(there.eos)} there and {_listed(own.eos)} here"
    if own.bos is not None and there.bos is not None and own.bos != there.bos:
        return f"its BOS is {there.bos} there and {own.bos} here"
    if own.encode is not None and there.encode is not None:
        for text in SAMPLE:
            if own.encode(text) != there.encode(text):
                return f"{text!r} becomes {there.encode(text)[:12]} there and {own.encode(text)[:12]} here"
    return None


def _ids(vocabulary: Vocabulary) -> dict[str, int]:
    return {piece: i for i, piece in vocabulary.pieces.items()}


def _shown(piece: str | None) -> str:
    return "no piece" if piece is None else repr(piece)


def _listed(ids: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ids)))


def _tokenizer_file(path: Path) -> Path | None:
    """The file that holds the pieces."""
    if path.is_file():
        return path
    return next((path / name for name in (FAST, SENTENCEPIECE, SLOW) if (path / name).is_file()), None)


def _identity(path: Path, file: Path) -> tuple[str, str]:
    """Equal for tokenizers that need no further look: digest of the pieces, and the special ids as they are written."""
    with file.open("rb") as stream:
        digest = hashlib.sha256()
        while block := stream.read(1 << 20):
            digest.update(block)
    ends = set(model_eos_ids(path)) if path.is_dir() else set()
    return digest.hexdigest(), json.dumps([_special(path, "eos_token"), _special(path, "bos_token"), sorted(ends)])


def _special(path: Path, name: str) -> str | None:
    if not (path / SETTINGS).is_file():
        return None
    value = read_mapping(path / SETTINGS, "the tokenizer's settings").get(name)
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _read(path: Path, file: Path) -> Vocabulary:
    if file.name not in (FAST, SLOW):
        return _sentencepiece(path, file)
    pieces, added = _fast_pieces(file) if file.name == FAST else _slow_pieces(path, file)
    ids = {piece: i for i, piece in pieces.items()}
    eos = set(model_eos_ids(path)) | {ids[text] for text in [_special(path, "eos_token")] if text in ids}
    bos = ids.get(_special(path, "bos_token") or "")
    encode = _fast_encode(file) if file.name == FAST else None
    return Vocabulary(_plain(pieces), added, frozenset(eos), bos, encode)


def _plain(pieces: Mapping[int, str]) -> dict[int, str]:
    """A space is written as itself by some and as U+2581 by others."""
    return {i: piece.replace(SPACE_MARK, " ") for i, piece in pieces.items()}


def _fast_pieces(file: Path) -> tuple[dict[int, str], frozenset[int]]:
    content = read_mapping(file, "the tokenizer")
    try:
        vocab = content["model"]["vocab"]
        trained = vocab.items() if isinstance(vocab, dict) else ((entry[0], i) for i, entry in enumerate(vocab))
        pieces = {int(i): str(text) for text, i in trained}
        added = {int(token["id"]): str(token["content"]) for token in content.get("added_tokens") or []}
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise CheckpointError(f"`{file}` is not a tokenizer ({error!r:.80}); fetch or save it again") from error
    return pieces | added, frozenset(added)


def _slow_pieces(path: Path, file: Path) -> tuple[dict[int, str], frozenset[int]]:
    settings = read_mapping(path / SETTINGS, "the tokenizer's settings") if (path / SETTINGS).is_file() else {}
    extra = path / "added_tokens.json"
    try:
        pieces = {int(i): str(text) for text, i in read_mapping(file, "the tokenizer").items()}
        decoder: dict[str, Any] = settings.get("added_tokens_decoder") or {}
        added = {int(i): str(token["content"]) for i, token in decoder.items()}
        if extra.is_file():
            added |= {int(i): str(text) for text, i in read_mapping(extra, "the added tokens").items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"`{file}` is not a tokenizer ({error!r:.80}); fetch or save it again") from error
    return pieces | added, frozenset(added)


def _fast_encode(file: Path) -> Callable[[str], list[int]]:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"`{file}` is not a tokenizer ({error}); fetch or save it again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def _sentencepiece(path: Path, file: Path) -> Vocabulary:
    from sentencepiece import SentencePieceProcessor

    try:
        model = SentencePieceProcessor(model_file=str(file))
    except (RuntimeError, OSError) as error:
        raise CheckpointError(f"`{file}` is not a sentencepiece model; fetch or save it again") from error
    size = int(model.vocab_size())
    added = frozenset(i for i in range(size) if model.is_control(i) or model.is_unused(i) or model.is_unknown(i))
    eos = {i for i in (int(model.eos_id()),) if i >= 0} | (set(model_eos_ids(path)) if path.is_dir() else set())
    bos = int(model.bos_id())
    pieces = {i: str(model.id_to_piece(i)) for i in range(size)}
    return Vocabulary(
        _plain(pieces), added, frozenset(eos), bos if bos >= 0 else None, lambda text: list(model.encode(text))
    )

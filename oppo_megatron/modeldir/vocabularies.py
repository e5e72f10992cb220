"""Reads token ids that end responses, and checks that each role's model has the run's tokenizer.

Tokenizers match if each id maps to the same piece and samples get the same ids.  One may have additional added tokens, or be a
fast version of the other's sentencepiece model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from oppo_megatron.errors import CheckpointError
from oppo_megatron.modeldir.megatron import read_mapping

FAST, SENTENCEPIECE, SETTINGS = "tokenizer.json", "tokenizer.model", "tokenizer_config.json"
GENERATION_CONFIG, MODEL_CONFIG = "generation_config.json", "config.json"
SPACE_MARK = "\u2581"
SAMPLE = (
    "The quick brown fox jumps over the lazy dog.",
    "Hello, world! How are you today?",
    "What is 12 + 34 - 5 * 678?",
    "def add(first, second):\n    return first + second",
    "Question: why is the sky blue?\nAnswer: because of scattering.",
    "caf\u00e9 na\u00efve \u4f60\u597d \u043f\u0440\u0438\u0432\u0435\u0442 \U0001f600",
)


def model_eos_ids(directory: Path) -> tuple[int, ...]:
    """Read `eos_token_id` of `generation_config.json`, else `config.json`.  Raises CheckpointError."""
    for name in (GENERATION_CONFIG, MODEL_CONFIG):
        path = directory / name
        value = read_mapping(path, "the model's settings").get("eos_token_id") if path.is_file() else None
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(i) is int and i >= 0 for i in ids):
            raise CheckpointError(
                f"`{path}`: eos_token_id is {value!r:.80}, but must be a token id (a number from 0 on) or a list of them; "
                "correct it"
            )
        if ids:
            return distinct(ids)
    return ()


def distinct(ids: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(ids))


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer's `pieces` (U+2581: a space), `added` tokens besides, special ids.

    `eos`: all ids that end a response; empty if unspecified.
    """

    pieces: Mapping[int, str]
    added: frozenset[int]
    eos: frozenset[int]
    bos: int | None
    encode: Callable[[str], list[int]]


def compare_tokenizers(path: Path, directories: Mapping[str, Path]) -> tuple[list[str], list[str]]:
    """Return problems of directories with other tokenizers, and what was compared."""
    problems: list[str] = []
    lines: list[str] = []
    own: Vocabulary | None = None
    file = _tokenizer_file(path)
    for name, directory in directories.items():
        try:
            other = _tokenizer_file(directory)
            if other is None or file is None:
                ends = ", ".join(map(str, model_eos_ids(directory))) or "none"
                lacking = path if other is not None else directory
                lines.append(f"tokenizer: not compared with {name} (EOS {ends}): {lacking} has no {FAST} or {SENTENCEPIECE}")
            elif _identity(path, file) == _identity(directory, other):
                lines.append(f"tokenizer: {name} has the same, byte for byte")
            else:
                own = own or _read(path, file)
                there = _read(directory, other)
                if (fault := _difference(own, there)) is not None:
                    problems.append(
                        f"tokenizer.path={path} is not the tokenizer of {name}={directory}: {fault}; set "
                        f"tokenizer.path={directory}, or name a model that was trained with this tokenizer"
                    )
                else:
                    shared = len(own.pieces.keys() & there.pieces.keys())
                    lines.append(f"tokenizer: {name} has the same {shared} pieces, special ids and sample texts")
        except CheckpointError as error:
            problems.append(f"{name}: {error}")
    return problems, lines


def _difference(own: Vocabulary, there: Vocabulary) -> str | None:
    own_ids, their_ids = ({piece: i for i, piece in each.pieces.items()} for each in (own, there))
    for i in sorted(own.pieces.keys() | there.pieces.keys()):
        ours, theirs = own.pieces.get(i), there.pieces.get(i)
        if ours == theirs:
            continue
        if ours is None or theirs is None:
            allowed = i in (there.added if ours is None else own.added)
        else:
            renamed = ours in their_ids or theirs in own_ids
            allowed = i in own.added and i in there.added and not renamed
        if not allowed:
            shown = ["no piece" if piece is None else repr(piece) for piece in (theirs, ours)]
            return f"id {i} is {shown[0]} there and {shown[1]} here"
    if own.eos and there.eos and not own.eos & there.eos:
        ends = [", ".join(map(str, sorted(each.eos))) for each in (there, own)]
        return f"its EOS is {ends[0]} there and {ends[1]} here"
    if own.bos is not None and there.bos is not None and own.bos != there.bos:
        return f"its BOS is {there.bos} there and {own.bos} here"
    for text in SAMPLE:
        if own.encode(text) != there.encode(text):
            return f"{text!r} becomes {there.encode(text)[:12]} there and {own.encode(text)[:12]} here"
    return None


def _tokenizer_file(path: Path) -> Path | None:
    if path.is_file():
        return path
    return next((path / name for name in (FAST, SENTENCEPIECE) if (path / name).is_file()), None)


def _identity(path: Path, file: Path) -> tuple[str, str]:
    """Return digest of pieces and special ids; equal ones need no further check."""
    ends = set(model_eos_ids(path)) if path.is_dir() else set()
    special = json.dumps([_special(path, "eos_token"), _special(path, "bos_token"), sorted(ends)])
    return hashlib.sha256(file.read_bytes()).hexdigest(), special


def _special(path: Path, name: str) -> str | None:
    if not (path / SETTINGS).is_file():
        return None
    value = read_mapping(path / SETTINGS, "the tokenizer's settings").get(name)
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _read(path: Path, file: Path) -> Vocabulary:
    if file.name != FAST:
        return _sentencepiece(path, file)
    content = read_mapping(file, "the tokenizer")
    try:
        from tokenizers import Tokenizer

        vocab = content["model"]["vocab"]
        trained = vocab.items() if isinstance(vocab, dict) else ((entry[0], i) for i, entry in enumerate(vocab))
        pieces = {int(i): str(text) for text, i in trained}
        added = {int(token["id"]): str(token["content"]) for token in content.get("added_tokens") or []}
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"`{file}` is not a tokenizer ({error!r:.80}); fetch or save it again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    pieces |= added
    ids = {piece: i for i, piece in pieces.items()}
    eos = {*model_eos_ids(path), *(ids[text] for text in [_special(path, "eos_token")] if text in ids)}
    bos = ids.get(_special(path, "bos_token") or "")
    plain = {i: piece.replace(SPACE_MARK, " ") for i, piece in pieces.items()}
    return Vocabulary(
        plain, frozenset(added), frozenset(eos), bos, lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)
    )


def _sentencepiece(path: Path, file: Path) -> Vocabulary:
    from sentencepiece import SentencePieceProcessor

    try:
        model = SentencePieceProcessor(model_file=str(file))
    except (RuntimeError, OSError) as error:
        raise CheckpointError(f"`{file}` is not a sentencepiece model; fetch or save it again") from error
    ids = range(int(model.vocab_size()))
    added = frozenset(i for i in ids if model.is_control(i) or model.is_unused(i) or model.is_unknown(i))
    eos = {i for i in (int(model.eos_id()),) if i >= 0} | (set(model_eos_ids(path)) if path.is_dir() else set())
    bos = int(model.bos_id())
    pieces = {i: str(model.id_to_piece(i)).replace(SPACE_MARK, " ") for i in ids}
    return Vocabulary(pieces, added, frozenset(eos), bos if bos >= 0 else None, lambda text: list(model.encode(text)))

"""Converts a sentencepiece model to files for `transformers.AutoTokenizer`; spaces stay spaces, so U+2581 in a text is kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from oppo_megatron.nesting import read_json

SPACE_MARK = "\u2581"
"""Sentencepiece's character for a space; a text may contain it too."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Piece types (sentencepiece_model.proto)."""

UNIGRAM, BPE, CHAR = 1, 2, 4
"""Model types."""

UNBOUNDED = int(1e30)
"""`model_max_length` of a tokenizer without a limit."""

TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"
MADE_FROM = "made_from_sentencepiece"
"""Configuration key for digests of the model and of the files made from it."""

WITHOUT_CONTROLS = "{% set bos_token = '' %}{% set eos_token = '' %}"
"""Prefix of the chat template: its control symbols would be read as text."""

CHECKED = (
    "", " ", "a", " a", "a ", "  a  b   ", "a\nb", "\n\n", "\t", "a\tb", "Hello, world!", "1+1=2 100 3.14", "x\r\ny",
    "Caf\u00e9 na\u00efve", "\u4f60\u597d", "\u0645\u0631\u062d\u0628\u0627", "\U0001f600\U0001f9d1\u200d\U0001f680",
    "\u2581", "a\u2581b \u2581 c", "\u00a0x\u3000y", "<s>x</s><unk><pad>", "<0x41>", "e\u0301", "\ufb01 \u2460 \u212b",
    "aaaa aaaaa aaaaaaa", "\u200b", "A\u0000B", "Q: 12+3-4=?\nA: 11\n", "The quick brown fox jumps over the lazy dog.",
    "def f(x):\n    return x ** 2\n",
)  # fmt: skip
"""Texts that must encode as in sentencepiece."""


def fast_files(
    model: bytes, encode: Callable[[str], list[int]], chat_template: str | None, pad_id: int | None = None
) -> dict[str, str] | None:
    """Texts of `tokenizer.json` and `tokenizer_config.json`, or None if `model` cannot be converted exactly."""
    from sentencepiece import sentencepiece_model_pb2
    from tokenizers import Tokenizer

    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(model)
    normalizer, trainer = proto.normalizer_spec, proto.trainer_spec
    changes = (
        normalizer.precompiled_charsmap, normalizer.add_dummy_prefix, normalizer.remove_extra_whitespaces,
        not normalizer.escape_whitespaces, trainer.treat_whitespace_as_suffix, not trainer.byte_fallback,
    )  # fmt: skip
    if trainer.model_type not in (UNIGRAM, BPE, CHAR) or any(changes):
        return None
    text = _tokenizer(proto).to_str(pretty=True)
    made = Tokenizer.from_str(text)
    made.encode_special_tokens = True
    for checked in CHECKED:
        ids = encode(checked)
        if made.encode(checked, add_special_tokens=False).ids != ids or made.decode(ids) != checked:
            return None
    config = _config(proto, chat_template, pad_id) | {MADE_FROM: _digests(model, text.encode())}
    return {TOKENIZER: text, CONFIG: json.dumps(config, indent=2, ensure_ascii=False) + "\n"}


def made_config(directory: Path, model: Path) -> dict[str, Any] | None:
    """`tokenizer_config.json` if `fast_files` of `model` are here unchanged, else None."""
    try:
        config = read_json((directory / CONFIG).read_text(encoding="utf-8"))
        if config[MADE_FROM] != _digests(model.read_bytes(), (directory / TOKENIZER).read_bytes()):
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if config.get("chat_template") is not None:
        config["chat_template"] = str(config["chat_template"]).removeprefix(WITHOUT_CONTROLS)
    return dict(config)


def _digests(model: bytes, tokenizer: bytes) -> dict[str, str]:
    return {"model": hashlib.sha256(model).hexdigest(), "tokenizer": hashlib.sha256(tokenizer).hexdigest()}


def _tokenizer(proto: Any) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models

    pieces = [(_text(piece), piece.score) for piece in proto.pieces]
    unknown = next((_text(piece) for piece in proto.pieces if piece.type == UNKNOWN), None)
    if proto.trainer_spec.model_type == UNIGRAM:
        unknown_id = next(i for i, piece in enumerate(proto.pieces) if piece.type == UNKNOWN)
        made = Tokenizer(models.Unigram(pieces, unknown_id, byte_fallback=True))
    else:
        vocabulary = {text: i for i, (text, _) in enumerate(pieces)}
        made = Tokenizer(models.BPE(vocabulary, _merges(proto), unk_token=unknown, byte_fallback=True))
    shown = [decoders.Replace(unknown, proto.trainer_spec.unk_surface)] if unknown else []
    made.decoder = decoders.Sequence([*shown, decoders.ByteFallback(), decoders.Fuse()])
    controls = [_text(piece) for piece in proto.pieces if piece.type == CONTROL]
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in controls])
    made.add_tokens([AddedToken(_text(p), normalized=False) for p in proto.pieces if p.type == USER_DEFINED])
    return made


def _text(piece: Any) -> str:
    return str(piece.piece).replace(SPACE_MARK, " ") if piece.type in (NORMAL, USER_DEFINED) else str(piece.piece)


def _merges(proto: Any) -> list[tuple[str, str]]:
    if proto.trainer_spec.model_type == CHAR:
        return []
    joined = {_text(piece): (-piece.score, i) for i, piece in enumerate(proto.pieces) if piece.type == NORMAL}
    pairs = [
        (order, cut, (text[:cut], text[cut:]))
        for text, order in joined.items()
        for cut in range(1, len(text))
        if text[:cut] in joined and text[cut:] in joined
    ]
    return [pair for _, _, pair in sorted(pairs, key=lambda each: (each[0], -each[1]))]


def _config(proto: Any, chat_template: str | None, pad_id: int | None) -> dict[str, Any]:
    trainer, ids = proto.trainer_spec, {}
    for name in ("bos", "eos", "pad"):
        number = getattr(trainer, f"{name}_id") if name != "pad" or pad_id is None else pad_id
        if 0 <= number < len(proto.pieces) and proto.pieces[number].type in (CONTROL, UNKNOWN):
            ids[f"{name}_token"] = _text(proto.pieces[number])
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **ids,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # a control symbol in a text is text
        "model_max_length": UNBOUNDED,
    }
    if chat_template is not None:
        config["chat_template"] = WITHOUT_CONTROLS + chat_template
    return config

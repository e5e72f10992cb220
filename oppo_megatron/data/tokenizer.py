"""Tokenizers (Hugging Face, sentencepiece or trained here), tokens of prompts and answers, checks of stop texts."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal, Protocol

from oppo_megatron.config.data import TokenizerConfig
from oppo_megatron.config.paths import folders_with, irregular_path
from oppo_megatron.data.chat_template import ChatTemplate
from oppo_megatron.data.fast_tokenizer import SPACE_MARK, fast_files, made_config
from oppo_megatron.errors import ConfigError, DataError
from oppo_megatron.modeldir.megatron import read_mapping
from oppo_megatron.modeldir.vocabularies import GENERATION_CONFIG, distinct, model_eos_ids
from oppo_megatron.nesting import check_json, read_json
from oppo_megatron.processes import signals_held

SENTENCEPIECE_NAME = "tokenizer.model"
TOKENIZER_PATTERNS = ("*token*", "*vocab*", "*.model")
"""Every transformers tokenizer directory has such a file."""
JSON_PATTERNS = ("*config.json", "*token*.json", "*vocab*.json", "*template*.json")
"""Files that transformers reads."""
UNKNOWN_ID_TEXT = "\ufffd"
# Options for decode(encode(text)) == text for any text, and the special tokens.
LOSSLESS: dict[str, Any] = {
    "byte_fallback": True,
    "split_digits": True,
    "user_defined_symbols": ["\n"],
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "add_dummy_prefix": False,
    "unk_id": 0,
    "bos_id": 1,
    "eos_id": 2,
    "pad_id": 3,
}


class Tokenizer(Protocol):
    """`vocab_size`: largest id + 1. `eos_ids`: they end a response, `eos_id` first. `adds_bos`: prompts begin with `bos_id`."""

    eos_id: int
    eos_ids: tuple[int, ...]
    bos_id: int | None
    adds_bos: bool
    pad_id: int | None
    other_ids: tuple[int, ...]  # further special tokens, the unknown one first
    vocab_size: int
    chat: ChatTemplate

    def encode(self, text: str) -> list[int]:
        """Token ids, without special tokens around them."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` as a continuation (a leading space is kept), without special tokens; unknown ids are U+FFFD."""

    def piece(self, token: int) -> str:
        """Name of a token in the vocabulary."""

    def save(self, directory: Path, *, pad_id: int | None = None) -> str | None:
        """Write files for `load_tokenizer` and transformers; returns a warning if these will differ. `pad_id`: if it has none."""


def load_tokenizer(config: TokenizerConfig, model: Path | None = None) -> Tokenizer:
    """Load a directory or `.model` file; `eos_ids` also come from the settings of `model`, the policy. Raises ConfigError."""
    path = config.path
    if not path.exists():
        raise ConfigError(
            f"tokenizer.path={path} does not exist (looked from {Path.cwd()}); name a Hugging Face tokenizer "
            "directory or a sentencepiece .model file, or train one with `oppo data tokenizer`"
        )
    for file in (path, *path.glob("*.json")):  # what reads them would wait for a pipe
        if irregular := irregular_path("tokenizer.path:", file):
            raise ConfigError(irregular)
    tokenizer = _open_tokenizer(path, config)
    directories = [directory for directory in (path, model) if directory is not None and directory.is_dir()]
    named = [i for directory in directories for i in model_eos_ids(directory)]
    tokenizer.eos_ids = distinct([tokenizer.eos_id, *named])
    if config.add_bos and tokenizer.bos_id is None:
        raise ConfigError(
            f"tokenizer.add_bos is true, but the tokenizer at {path} has no BOS token; set it to null, or name a tokenizer "
            "that has one"
        )
    if config.add_bos is not None:
        tokenizer.adds_bos = config.add_bos
    if config.chat_template is not None:
        tokenizer.chat.reads()  # raises for a syntax error
    tokenizer.chat.require_arguments()
    return tokenizer


def _open_tokenizer(path: Path, config: TokenizerConfig) -> Tokenizer:
    if path.is_file():
        return SentencePieceTokenizer(path, config)
    if (made := made_config(path, model := path / SENTENCEPIECE_NAME)) is not None:
        template = config.chat_template or made.get("chat_template")
        return SentencePieceTokenizer(model, config.model_copy(update={"chat_template": template}))
    is_hugging_face = any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    if not is_hugging_face and (path / SENTENCEPIECE_NAME).is_file():
        return SentencePieceTokenizer(path / SENTENCEPIECE_NAME, config)
    if path.is_dir() and not any(file.is_file() for pattern in TOKENIZER_PATTERNS for file in path.glob(pattern)):
        inner = folders_with(("tokenizer.json", "tokenizer_config.json", SENTENCEPIECE_NAME), path)
        named = " or ".join(f"`{folder}`" for folder in inner[:3]) or "the folder or the .model file that does"
        raise ConfigError(
            f"tokenizer.path={path} holds no tokenizer (tokenizer.json, tokenizer_config.json or {SENTENCEPIECE_NAME}); name "
            f"{named}"
        )
    return HuggingFaceTokenizer(path, config)


class _Decoder:
    """Decodes continuations: many tokenizers drop a leading space."""

    def __init__(self, encode: Callable[[str], list[int]], decode: Callable[[list[int]], str], vocab_size: int):
        whole = encode("a b")
        begun = list(os.path.commonprefix([encode("a"), whole]))
        if not begun or decode(begun) + decode(whole[len(begun) :]) == decode(whole):
            begun = []
        self._begun, self._skipped = begun, len(decode(begun)) if begun else 0
        self._decode, self._vocab_size = decode, vocab_size

    def __call__(self, ids: Sequence[int]) -> str:
        pieces: list[list[int]] = [[]]
        for i in ids:
            if i < self._vocab_size:
                pieces[-1].append(i)
            else:
                pieces.append([])
        return UNKNOWN_ID_TEXT.join(self._decode([*self._begun, *piece])[self._skipped :] for piece in pieces)


class HuggingFaceTokenizer:
    """A local `transformers` tokenizer; code in the directory is never run."""

    def __init__(self, directory: Path, config: TokenizerConfig):
        with signals_held():  # an import that is interrupted may end in another exception
            from transformers import AutoTokenizer

        try:
            for file in {file for pattern in JSON_PATTERNS for file in directory.glob(pattern)}:
                check_json(file.read_text(encoding="utf-8"))
            loaded: Any = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
        except Exception as error:
            raise ConfigError(
                f"tokenizer.path={directory} is not a tokenizer that transformers can load ({error}); a directory with "
                "tokenizer.json (or the model's own tokenizer files) and tokenizer_config.json is needed"
            ) from error
        if loaded.eos_token_id is None:
            raise ConfigError(
                f"tokenizer.path={directory} has no eos_token, and a response needs an end; set eos_token in its "
                "tokenizer_config.json"
            )
        self._loaded, self._directory, self._chat_template = loaded, directory, config.chat_template
        self.chat = ChatTemplate(config, self._choose_template, loaded.special_tokens_map)
        self.eos_id: int = loaded.eos_token_id
        self.eos_ids: tuple[int, ...] = (self.eos_id,)
        self.bos_id: int | None = loaded.bos_token_id
        self.adds_bos = self.bos_id is not None and loaded.encode("a")[:1] == [self.bos_id]
        self.pad_id: int | None = loaded.pad_token_id
        unknown = [] if loaded.unk_token_id is None else [loaded.unk_token_id]
        self.other_ids: tuple[int, ...] = distinct([*unknown, *loaded.all_special_ids])
        self.vocab_size: int = max(loaded.get_vocab().values()) + 1

        def decode(ids: list[int]) -> str:
            return str(loaded.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

        self.decode = _Decoder(self.encode, decode, self.vocab_size)

    def encode(self, text: str) -> list[int]:
        return list(self._loaded.encode(text, add_special_tokens=False, verbose=False))

    def piece(self, token: int) -> str:
        return str(self._loaded.convert_ids_to_tokens(token))

    def _choose_template(self, with_tools: bool) -> str | None:
        if self._chat_template is None and not self._loaded.chat_template:
            return None
        try:
            return str(self._loaded.get_chat_template(self._chat_template, [{}] if with_tools else None))
        except ValueError as error:
            names = ", ".join(sorted(self._loaded.chat_template))
            raise ConfigError(
                f"tokenizer.path={self._directory} has several chat templates ({names}) and no default one; set "
                "tokenizer.chat_template to one of these names"
            ) from error

    def save(self, directory: Path, *, pad_id: int | None = None) -> str | None:
        copy = deepcopy(self._loaded)
        if self._chat_template is not None:
            copy.chat_template = self._choose_template(False)
        if pad_id is not None and pad_id != self.pad_id:
            copy.pad_token = copy.convert_ids_to_tokens(pad_id)
        copy.save_pretrained(str(directory))
        model = self._directory / SENTENCEPIECE_NAME  # for programs that read sentencepiece's own files
        if model.is_file() and not (directory / SENTENCEPIECE_NAME).exists():
            shutil.copyfile(model, directory / SENTENCEPIECE_NAME)
        return None


class SentencePieceTokenizer:
    """Control symbols are never read, so text cannot forge an EOS."""

    def __init__(self, path: Path, config: TokenizerConfig):
        import sentencepiece

        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise ConfigError(
                f"tokenizer.path={path} is not a sentencepiece model ({error}); train one with `oppo data tokenizer`"
            ) from error
        if self._processor.eos_id() < 0:
            raise ConfigError(f"tokenizer.path={path} has no EOS, and a response needs an end; train it with eos_id >= 0")
        self._path, self._chat_template = path, config.chat_template
        # Control symbols are never read from text, so the template's are empty.
        self.chat = ChatTemplate(config, lambda with_tools: config.chat_template, {"bos_token": "", "eos_token": ""})
        self.eos_id: int = self._processor.eos_id()
        self.eos_ids: tuple[int, ...] = (self.eos_id,)
        self.bos_id, self.pad_id = (i if i >= 0 else None for i in (self._processor.bos_id(), self._processor.pad_id()))
        self.adds_bos = False  # the library's own way
        self.other_ids: tuple[int, ...] = (self._processor.unk_id(),)
        self.vocab_size: int = self._processor.get_piece_size()
        # Byte pieces of SPACE_MARK; empty if the model lacks them or puts a space before each text.
        ids = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()]
        has_prefix = self._processor.id_to_piece(self._processor.encode("a")[0]).startswith(SPACE_MARK)
        self._space_mark_ids = ids if all(map(self._processor.is_byte, ids)) and not has_prefix else []
        self.decode = _Decoder(self.encode, lambda ids: str(self._processor.decode(ids)), self.vocab_size)

    def encode(self, text: str) -> list[int]:
        if SPACE_MARK not in text or not self._space_mark_ids:
            return list(self._processor.encode(text))
        first, *others = text.split(SPACE_MARK)
        ids = list(self._processor.encode(first))
        for other in others:
            ids += [*self._space_mark_ids, *self._processor.encode(other)]
        return ids

    def piece(self, token: int) -> str:
        return str(self._processor.id_to_piece(token))

    def save(self, directory: Path, *, pad_id: int | None = None) -> str | None:
        directory.mkdir(parents=True, exist_ok=True)
        target = directory / SENTENCEPIECE_NAME
        if not (target.exists() and target.samefile(self._path)):
            shutil.copyfile(self._path, target)
        files = fast_files(self._path.read_bytes(), self.encode, self._chat_template, pad_id)
        if files is None:
            return (
                f"{self._path}: transformers cannot cut up texts exactly as this sentencepiece model does, so it gets no "
                f"tokenizer.json; load {SENTENCEPIECE_NAME} with the sentencepiece package"
            )
        for name, text in files.items():
            (directory / name).write_text(text, encoding="utf-8")
        return None


def train_sentencepiece(
    texts: Iterable[str], path: Path, vocab_size: int, *, model_type: Literal["bpe", "unigram", "char"] = "bpe",
    character_coverage: float = 0.9995,
) -> None:  # fmt: skip
    """Train losslessly; ids 0-3 are unk, bos, eos, pad. Raises DataError without text, or ConfigError."""
    import sentencepiece

    # Keep newlines and the space character out of all other pieces.
    separated = (text.replace(SPACE_MARK, "\n").replace("\0", "\n") for text in texts)
    lines = [line for text in separated for line in text.split("\n") if line.strip()]
    if not lines:
        raise DataError("a tokenizer cannot be trained on nothing; give at least one text that is not blank.")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            vocab_size=vocab_size,
            model_type=model_type,
            character_coverage=character_coverage,
            max_sentence_length=max(10, 1 + max(len(line.encode()) for line in lines)),
            num_threads=1,
            minloglevel=2,
            **LOSSLESS,
        )
    except RuntimeError as error:
        raise _misfit(vocab_size, str(error)) from error
    trained_size = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()).get_piece_size()
    if trained_size != vocab_size:
        raise _misfit(vocab_size, f"<= {trained_size}")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(model.getvalue())
    os.replace(partial, path)


def _misfit(vocab_size: int, reason: str) -> ConfigError:
    largest = re.search(r"<= (\d+)\.?$", reason.strip())
    smallest = re.search(r"\d+ vs (\d+)", reason)
    if largest:
        return ConfigError(f"vocab_size={vocab_size} is too large for these texts; the largest is {largest[1]}")
    if smallest:
        return ConfigError(f"vocab_size={vocab_size} is too small: bytes, specials and characters need {smallest[1]}")
    return ConfigError(f"vocab_size={vocab_size}: sentencepiece cannot train on these texts ({reason})")


def special_ids(tokenizer: Tokenizer, stop_token_ids: Sequence[int] = (), *, scored: bool = False) -> dict[str, Any]:
    """Ids for `config.json` and `generation_config.json`; several EOS are a list.

    `scored`: a reward model or critic scores the last non-padding token, so padding must not end answers.
    """
    ends = distinct([*tokenizer.eos_ids, *stop_token_ids])
    pad = ends[0] if tokenizer.pad_id is None else tokenizer.pad_id
    if scored:
        candidates = (tokenizer.pad_id, *tokenizer.other_ids, tokenizer.bos_id, *range(tokenizer.vocab_size - 1, -1, -1))
        pad = next(i for i in candidates if i is not None and i not in tokenizer.eos_ids)
    eos = ends[0] if len(ends) == 1 else list(ends)
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": eos, "pad_token_id": pad}


def write_tokenizer(
    directory: Path, tokenizer: Tokenizer, ids: Mapping[str, Any], family: str, *, scored: bool, source: Path | None = None
) -> str | None:
    """Write the tokenizer and, for a policy, `generation_config.json` (`source`'s, with `ids`). Returns a warning as `save`."""
    directory.mkdir(parents=True, exist_ok=True)
    warning = tokenizer.save(directory, pad_id=ids["pad_token_id"] if scored else None)
    path = directory / "tokenizer_config.json"
    if family == "qwen2" and path.is_file():
        # Without a class in `auto_map`, transformers 5 loads Qwen2's tokenizer for a Qwen2 model.
        config = read_json(path.read_text(encoding="utf-8"))
        if not str(config.get("tokenizer_class", "")).startswith("Qwen2") and "auto_map" not in config:
            config["auto_map"] = {"AutoTokenizer": ["", None]}
            path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if not scored:
        settings: dict[str, Any] = {}
        if source is not None and (source / GENERATION_CONFIG).is_file():
            settings = read_mapping(source / GENERATION_CONFIG, "the generation settings")
        settings |= {name: value for name, value in ids.items() if value is not None}
        (directory / GENERATION_CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return warning


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids with BOS, unless a template wrote it."""
    ids = tokenizer.encode(text)
    if not (tokenizer.adds_bos and ids) or ids[0] == tokenizer.bos_id:
        return ids
    assert tokenizer.bos_id is not None, "`load_tokenizer` has asked for it"
    return [tokenizer.bos_id, *ids]


def encode_answers(tokenizer: Tokenizer, prompt: str, answers: Sequence[str]) -> list[list[int]]:
    """Token ids of a prompt and of each answer: joined, those of the whole text. Changed prompt tokens go to the answers."""
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
    """Special tokens that no response can contain, or None."""
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

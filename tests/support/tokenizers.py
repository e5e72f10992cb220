"""A tokenizer plain enough to check by eye: one token a character, its code point the id; EOS is 3."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oppo_megatron.errors import DataError


class MarkedTurns:
    """A chat template of code: `<role>` before each turn, EOS and a line break after it."""

    def reads(self, with_tools: bool = False) -> frozenset[str]:
        return frozenset()

    def render(
        self, messages: Sequence[dict[str, Any]], *, generation_prompt: bool = True, variables: Mapping[str, Any] | None = None
    ) -> str:
        if any(message["role"] == "tool" for message in messages):
            raise DataError("no tools here")
        turns = "".join(f"<{message['role']}>{message['content']}\3\n" for message in messages)
        return turns + ("<assistant>" if generation_prompt else "")


class CharacterTokenizer:
    chat: Any = MarkedTurns()
    eos_id = 3
    eos_ids = (3,)
    bos_id = None
    adds_bos = False
    pad_id = None
    other_ids = ()
    vocab_size = 0x110000

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(i) for i in ids if i != self.eos_id)

    def piece(self, token: int) -> str:
        return chr(token)

    def save(self, directory: Path, *, pad_id: int | None = None) -> str | None:
        raise NotImplementedError("tests do not save it")


def save_byte_level(
    directory: Path, texts: Sequence[str], vocab_size: int = 320, *, over_words: bool = False, **settings: Any
) -> Path:
    """Train a byte-level BPE with EOS `<|end|>`; `over_words`: a token may span words and a line break."""
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer
    from transformers import PreTrainedTokenizerFast

    fast = FastTokenizer(BPE())
    fast.pre_tokenizer, fast.decoder = ByteLevel(add_prefix_space=False, use_regex=not over_words), ByteLevelDecoder()
    specials = ["<|end|>", "<|turn|>"]
    alphabet = ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=vocab_size, special_tokens=specials, initial_alphabet=alphabet, show_progress=False)
    fast.train_from_iterator(texts, trainer)
    settings = {"eos_token": "<|end|>", "additional_special_tokens": ["<|turn|>"]} | settings
    PreTrainedTokenizerFast(tokenizer_object=fast, **settings).save_pretrained(str(directory))
    return directory

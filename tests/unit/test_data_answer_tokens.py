"""The tokens that are trained are those of the whole text, by tokenizers of every kind."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.config.data import DataConfig, TokenizerConfig
from oppo_megatron.data.rows import Quarantine
from oppo_megatron.data.supervised_rows import RowLoader
from oppo_megatron.data.tokenizer import Tokenizer, encode_answers, encode_prompt, load_tokenizer
from oppo_megatron.token_text import StepEnds
from tests.support.chat_templates import CHATML, LLAMA2, LLAMA3, MISTRAL
from tests.support.rows import write_rows
from tests.support.tokenizers import save_byte_level

TEXTS = ["Question: two plus two? Answer: four", "[INST] hello there [/INST] Hello friend", "Sum: 4 and 17.\nThen: 21"] * 20


def sentencepiece(folder: Path, kind: str) -> Path:
    """A model that puts a space before each text, as Llama 2's does."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=model, vocab_size=310, model_type=kind, byte_fallback=True, minloglevel=2,
        remove_extra_whitespaces=False, user_defined_symbols=["\n"], pad_id=3, hard_vocab_limit=False,
    )  # fmt: skip
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    return folder / "tokenizer.model"


def fast(folder: Path, kind: str) -> Path:
    """`llama`: pieces with a space put before the first; `words`: BERT's; both put their own tokens around each text."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    specials = ["<unk>", "<s>", "</s>"]
    if kind == "llama":
        made = Fast(models.BPE(unk_token="<unk>", byte_fallback=True))
        made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        made.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        made.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=90, special_tokens=specials, show_progress=False))
    else:
        made = Fast(models.WordPiece(unk_token="<unk>"))
        made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(cleanup=False)
        made.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=specials, show_progress=False))
    made.post_processor = processors.TemplateProcessing("<s> $A </s>", None, [("<s>", 1), ("</s>", 2)])
    PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(str(folder))  # fmt: skip
    return folder


def make(folder: Path, kind: str, template: str | None = None) -> Tokenizer:
    if kind in ("bpe", "unigram"):
        path = sentencepiece(folder, kind)
    elif kind == "bytes":  # whose tokens hold ends of words, spaces and beginnings
        path = save_byte_level(folder, TEXTS, 290, over_words=True, bos_token="<|turn|>")
    else:
        path = fast(folder, kind)
    return load_tokenizer(TokenizerConfig(path=path, chat_template=template))


KINDS = ("bpe", "unigram", "llama", "words", "bytes")


def load(tmp_path: Path, loader: Any, tokenizer: Tokenizer, row: dict[str, Any], *more: Any) -> Any:
    quarantine = Quarantine()
    return loader(RowLoader(DataConfig(path=write_rows(tmp_path, row)), tokenizer, 900, quarantine), *more)[0], quarantine


@pytest.mark.parametrize("template", [LLAMA2, MISTRAL, LLAMA3, CHATML], ids=["llama2", "mistral", "llama3", "chatml"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_has_the_tokens_of_its_text(tmp_path: Path, kind: str, template: str) -> None:
    tokenizer = make(tmp_path, kind, template)
    turns = [{"role": "user", "content": "two plus two?"}, {"role": "assistant", "content": "four"}]
    whole = encode_prompt(tokenizer, tokenizer.chat.render(turns, generation_prompt=False))
    row, quarantine = load(tmp_path, RowLoader.completions, tokenizer, {"messages": turns})
    trained = [*row.prompt, *row.completion]
    assert trained[: len(whole)] == whole[: len(trained)] and len(trained) >= len(whole) - 1  # a line break after EOS may go
    assert trained[len(whole) :] in ([], [tokenizer.eos_id])
    assert trained[-1] == tokenizer.eos_id and trained.count(tokenizer.eos_id) == 1
    meets = row.prompt != encode_prompt(tokenizer, tokenizer.chat.render(turns[:1]))
    assert any("one token joins the end of the prompt" in note for note in quarantine.notes) == meets
    assert "four" in quarantine.first["completion"]


@pytest.mark.parametrize(
    "prompt, answer", [("Answer:", " four"), ("Sum: ", "4 and 17."), ("two Ques", "tion: two"), ("hello", "there")]
)
@pytest.mark.parametrize("kind", KINDS)
def test_texts_that_meet_anywhere_have_the_tokens_of_the_whole(tmp_path: Path, kind: str, prompt: str, answer: str) -> None:
    tokenizer = make(tmp_path, kind)
    eos, other = tokenizer.eos_id, answer + " and Then"
    wholes = [[*encode_prompt(tokenizer, prompt + text), eos] for text in (answer, other)]
    row, quarantine = load(tmp_path, RowLoader.completions, tokenizer, {"prompt": prompt, "completion": answer})
    assert [*row.prompt, *row.completion] == wholes[0]
    meets = row.prompt != encode_prompt(tokenizer, prompt)
    assert any("one token joins the end of the prompt" in note for note in quarantine.notes) == meets
    for loader in (RowLoader.pairs, RowLoader.unequal_pairs):
        pair, _ = load(tmp_path, loader, tokenizer, {"prompt": prompt, "chosen": answer, "rejected": other})
        assert [[*pair.prompt, *each] for each in (pair.chosen, pair.rejected)] == wholes
    marked = [{"prompt": prompt, "completion": text, "label": text == answer} for text in (answer, other)]
    rows = RowLoader(DataConfig(path=write_rows(tmp_path, *marked)), tokenizer, 900, Quarantine()).marked()
    assert [[*each.prompt, *each.completion] for each in rows] == wholes


@pytest.mark.parametrize("kind", KINDS)
def test_steps_end_where_a_policy_writes_their_ends(tmp_path: Path, kind: str) -> None:
    tokenizer, separator = make(tmp_path, kind), "\n" if kind in ("bpe", "unigram", "bytes") else "."
    steps = ["Sum: 4 and 17", "Then: 21"]
    given = {"prompt": "Question:", "completions": [" two plus two", *steps], "labels": [1, 0, 1]}
    row, _ = load(tmp_path, RowLoader.steps, tokenizer, given, separator)
    whole = encode_prompt(tokenizer, "Question:" + separator.join(given["completions"]))
    assert [*row.prompt, *row.completion] == [*whole, tokenizer.eos_id]
    assert row.ends == StepEnds(separator, tokenizer.decode).of(row.completion) and len(row.ends) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_an_answers_text_is_what_follows_the_prompts(tmp_path: Path, kind: str) -> None:
    """A space in front belongs to it: sentencepiece drops it from a text that stands alone."""
    tokenizer = make(tmp_path, kind)
    prompt, tokens = encode_answers(tokenizer, "Answer:", [" four"])
    text = tokenizer.decode(tokens)
    assert text.endswith("four") and (kind not in ("bpe", "unigram") or text == " four")
    assert encode_prompt(tokenizer, tokenizer.decode(prompt).strip() + text) == [*prompt, *tokens]

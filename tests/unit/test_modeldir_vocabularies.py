"""Another tokenizer than a role's own is refused, the same one in another form is not; and the ids that end a response."""

import json
import shutil
from pathlib import Path

import pytest

from oppo_megatron.data.tokenizer import train_sentencepiece
from oppo_megatron.errors import CheckpointError
from oppo_megatron.modeldir.vocabularies import compare_tokenizers, model_eos_ids
from tests.support.tokenizers import save_byte_level

FIRST = [f"{i} apples and {i * 7} pears make {i * 8} pieces of fruit" for i in range(40)]
SECOND = [f"the {i}th sailor of the harbour whistles near boat {i * 3}" for i in range(40)]


def problems(path: Path, directory: Path) -> list[str]:
    return compare_tokenizers(path, {"actor.checkpoint": directory})[0]


def change(file: Path, **settings: object) -> None:
    file.write_text(json.dumps({**(json.loads(file.read_text()) if file.exists() else {}), **settings}))


def copy_with_added(source: Path, target: Path, *tokens: str) -> Path:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>", *tokens]})
    tokenizer.save_pretrained(target)
    return target


@pytest.fixture
def bpe(tmp_path: Path) -> Path:
    return save_byte_level(tmp_path / "bpe", FIRST)


@pytest.mark.parametrize("kind", ["sentencepiece", "byte-level"])
def test_another_corpus_of_the_same_size_is_refused(tmp_path: Path, kind: str) -> None:
    if kind == "byte-level":
        own, there = save_byte_level(tmp_path / "a", FIRST), save_byte_level(tmp_path / "b", SECOND)
    else:
        own, there = tmp_path / "a.model", tmp_path / "b"
        train_sentencepiece(FIRST, own, 300)
        train_sentencepiece(SECOND, there / "tokenizer.model", 300)
    (problem,) = problems(own, there)
    assert f"tokenizer.path={own}" in problem and f"actor.checkpoint={there}" in problem
    assert "there and" in problem and f"set tokenizer.path={there}" in problem


def test_the_same_tokenizer_passes_with_more_tokens_or_settings_of_its_own(tmp_path: Path, bpe: Path) -> None:
    other = shutil.copytree(bpe, tmp_path / "copy")
    assert problems(bpe, other) == []
    assert problems(bpe, copy_with_added(bpe, tmp_path / "chat", "<|user|>")) == []
    assert problems(copy_with_added(bpe, tmp_path / "chat2", "<|system|>", "<|user|>"), bpe) == []
    change(other / "tokenizer_config.json", chat_template="{{ messages }}", pad_token="<|turn|>", padding_side="left")
    (other / "tokenizer.json").write_text(json.dumps(json.loads((other / "tokenizer.json").read_text()), indent=1))
    assert problems(bpe, other) == []


def test_a_fast_file_of_the_same_sentencepiece_model_passes(tmp_path: Path) -> None:
    from sentencepiece import SentencePieceProcessor
    from tokenizers import Tokenizer, decoders, models, normalizers

    path = tmp_path / "tokenizer.model"
    train_sentencepiece([text.replace("\n", " ") for text in FIRST], path, 290, model_type="unigram")
    model = SentencePieceProcessor(model_file=str(path))
    fast = Tokenizer(models.Unigram([(model.id_to_piece(i), model.get_score(i)) for i in range(290)], 0, byte_fallback=True))
    fast.normalizer = normalizers.Replace(" ", "\u2581")
    fast.decoder = decoders.ByteFallback()
    (tmp_path / "fast").mkdir()
    fast.save(str(tmp_path / "fast/tokenizer.json"))
    assert problems(path, tmp_path / "fast") == [] and problems(tmp_path / "fast", tmp_path) == []


def test_special_ids_and_merges_are_compared(tmp_path: Path, bpe: Path) -> None:
    other = shutil.copytree(bpe, tmp_path / "copy")
    change(other / "tokenizer_config.json", eos_token="<|turn|>")
    (problem,) = problems(bpe, other)
    assert "its EOS is 1 there and 0 here" in problem
    change(other / "generation_config.json", eos_token_id=[1, 0])  # a chat model that ends at both
    assert problems(bpe, other) == []
    content = json.loads((other / "tokenizer.json").read_text())["model"]
    change(other / "tokenizer.json", model=content | {"merges": content["merges"][-1:]})
    (problem,) = problems(bpe, other)
    assert "becomes" in problem, "other merges of the same pieces are found by the sample"


def test_absent_and_broken_tokenizers_are_told(tmp_path: Path, bpe: Path) -> None:
    (tmp_path / "bare").mkdir()
    change(tmp_path / "bare/config.json", eos_token_id=[5, 6])
    found, lines = compare_tokenizers(bpe, {"critic.checkpoint": tmp_path / "bare"})
    assert found == [] and "not compared with critic.checkpoint" in lines[0] and "5, 6" in lines[0]
    (tmp_path / "bad").mkdir()
    for content in ("{", "[]", "{}", '{"model": {"vocab": 3}}', '{"model": {"vocab": {"a": 0}, "type": "X"}}'):
        (tmp_path / "bad/tokenizer.json").write_text(content)
        assert len(problems(bpe, tmp_path / "bad")) == 1, content


@pytest.mark.parametrize(("files", "ids"), [
    ({}, ()), ({"config": {"eos_token_id": 5}}, (5,)), ({"config": {"eos_token_id": [5, 7, 5]}}, (5, 7)),
    ({"config": {"eos_token_id": 5}, "generation_config": {"eos_token_id": [9, 8]}}, (9, 8)),
    ({"config": {"eos_token_id": 5}, "generation_config": {"eos_token_id": None}}, (5,)),
    ({"config": {}, "generation_config": {"temperature": 0.6}}, ()),
])  # fmt: skip
def test_the_generation_settings_count_before_the_model_s(tmp_path: Path, files: dict[str, object], ids: object) -> None:
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert model_eos_ids(tmp_path) == ids


def test_what_is_no_id_is_told(tmp_path: Path) -> None:
    for value in ("</s>", [1, "x"], -1, 1.5, True, {"id": 1}):
        change(tmp_path / "generation_config.json", eos_token_id=value)
        with pytest.raises(CheckpointError, match="eos_token_id is .* but must be a token id"):
            model_eos_ids(tmp_path)

"""A run's export is the trained policy in transformers: tokenizer, ends and greedy answers, from the export alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_megatron.config.data import TokenizerConfig
from oppo_megatron.data.tokenizer import Tokenizer, load_tokenizer, train_sentencepiece
from tests.support.hf import convert, save_tiny
from tests.support.ppo import Workspace, deep
from tests.support.ranks import run_ranks
from tests.support.tokenizers import save_byte_level

MAX_TOKENS = 16
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[me]{% endif %}"
TEXTS = [f"{a} + {b}  =\n" + "\u2581caf\u00e9 <s>" * (a % 3 == 0) for a in range(20) for b in range(10)]
ASKED = TEXTS[::2]
COVERED = [pytest.param(kind, marks=pytest.mark.long) for kind in ("byte-level BPE", "sentencepiece, chat")]
"""A chat's template and each kind of tokenizer are in the others."""


def trained(workspace: Workspace, kind: str) -> dict[str, Any]:
    name = "".join(c for c in kind if c.isalnum())
    config = deep(workspace, name, steps=1, **{"rollout.stop": [40]})
    directory = workspace.root / f"tokenizer-{name}"
    if "BPE" in kind:
        config["tokenizer"] = {"path": str(directory)}
    if "chat" in kind:
        config["tokenizer"]["chat_template"] = TEMPLATE
        rows = workspace.root / f"{name}.jsonl"
        asked = [{"messages": [{"role": "user", "content": text}], "answer": "1"} for text in TEXTS[:24]]
        rows.write_text("".join(json.dumps(row) + "\n" for row in asked))
        config["data"]["path"] = str(rows)
    if (Path(config["run_dir"]) / "summary.json").exists():
        return config
    if "BPE" in kind:
        save_byte_level(directory, TEXTS, 280)
    run_ranks(1, "tests.e2e.jobs:train", config=config)
    return config


@pytest.mark.parametrize("kind", ["sentencepiece", "byte-level BPE, chat", *COVERED])
def test_greedy_answers_are_the_engines_own(workspace: Workspace, kind: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = trained(workspace, kind)
    export = Path(config["run_dir"]) / "weights" / "actor"
    own = load_tokenizer(TokenizerConfig(**config["tokenizer"]))
    chats = [[{"role": "user", "content": text}] for text in ASKED]
    prompts = [own.chat.render(chat) for chat in chats] if "chat" in kind else ASKED
    (answers,) = run_ranks(
        1, "tests.e2e.test_policy:answers", directories=[export], texts=prompts, parallel={"tp": 1, "pp": 1, "dp": 1},
        max_tokens=MAX_TOKENS, sampling={"temperature": 0.0}, num_slots=32,
    )[0]  # fmt: skip
    engine = {number: tokens for number, tokens, _ in answers}
    tokenizer = AutoTokenizer.from_pretrained(export)
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
    ended = ties = 0
    for number, (chat, prompt) in enumerate(zip(chats, prompts, strict=True)):
        ids = tokenizer(prompt).input_ids
        if "chat" in kind:
            ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert ids == own.encode(prompt)
        with torch.no_grad():
            out = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=MAX_TOKENS)[0, len(ids) :].tolist()
        if out != engine[number]:
            ties += 1
            assert is_tie(model, ids, out, engine[number]), f"{prompt!r}: transformers {out}, engine {engine[number]}"
        assert tokenizer.decode(out, skip_special_tokens=True) == own.decode(out) or "\ufffd" in own.decode(out)
        ended += len(out) < MAX_TOKENS
    assert 0 < ended, "some answers must end by themselves"
    assert ties <= len(prompts) // 100


def is_tie(model: Any, ids: list[int], one: list[int], other: list[int]) -> bool:
    """Whether two answers part at a token for which rounding decides."""
    place = next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    with torch.no_grad():
        logits = model(torch.tensor([[*ids, *one[:place]]])).logits[0, -1]
    return bool((logits[one[place]] - logits[other[place]]).abs() < 1e-5)


def test_ids_of_ends_and_padding_are_written(workspace: Workspace) -> None:
    """A policy ends where it ended in training, stop ids included; a critic pads with what ends no answer."""
    config = trained(workspace, "sentencepiece")
    weights = Path(config["run_dir"]) / "weights"
    own = load_tokenizer(TokenizerConfig(**config["tokenizer"]))
    for name in ("config.json", "generation_config.json"):
        found = json.loads((weights / "actor" / name).read_text())
        assert found["eos_token_id"] == [own.eos_id, 40] and found["bos_token_id"] == own.bos_id
        assert found["pad_token_id"] == own.pad_id == 3
    critic = json.loads((weights / "critic" / "config.json").read_text())
    assert critic["pad_token_id"] not in (None, own.eos_id) and not (weights / "critic" / "generation_config.json").exists()


def test_scores_of_a_padded_batch_are_those_of_each_answer(workspace: Workspace, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    config = trained(workspace, "byte-level BPE")
    critic = Path(config["run_dir"]) / "weights" / "critic"
    tokenizer = AutoTokenizer.from_pretrained(critic)
    model = AutoModelForSequenceClassification.from_pretrained(critic, dtype=torch.float32).eval()
    texts = [text + tokenizer.eos_token for text in ("1", "2 + 3 =", "a longer one")]
    with torch.no_grad():
        together = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits[:, 0]
        alone = torch.cat([model(**tokenizer(text, return_tensors="pt")).logits[:, 0] for text in texts])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    assert convert(critic.parent / "actor", tmp_path / "reward", "--as", "reward", "--fresh-head-seed", "3") == 0
    found = json.loads((tmp_path / "reward" / "config.json").read_text())
    own = load_tokenizer(TokenizerConfig(**config["tokenizer"]))
    assert found["pad_token_id"] not in (None, *own.eos_ids), "a policy turned into a reward model pads, too"


@pytest.mark.parametrize("to", ["hf", "megatron", "nemo"])
def test_convert_takes_the_tokenizer_of_the_run_along(workspace: Workspace, tmp_path: Path, to: str) -> None:
    from transformers import AutoTokenizer

    run = Path(trained(workspace, "sentencepiece, chat")["run_dir"])
    source, converted = run / "checkpoints" / "step-000001" / "models" / "actor", tmp_path / "converted"
    assert convert(source, converted, "--to", to) == 0
    ours, theirs = (AutoTokenizer.from_pretrained(place) for place in (converted, run / "weights" / "actor"))
    asked = [{"role": "user", "content": TEXTS[0]}]
    assert ours(TEXTS[0]).input_ids == theirs(TEXTS[0]).input_ids
    assert ours.apply_chat_template(asked, tokenize=False) == theirs.apply_chat_template(asked, tokenize=False)
    found = json.loads((converted / "config.json").read_text())
    assert (found["eos_token_id"], found["pad_token_id"]) == (ours.eos_token_id, ours.pad_token_id)


def test_a_whole_tokenizer_gives_its_end_to_weights_that_name_none(tmp_path: Path) -> None:
    source, converted = tmp_path / "source", tmp_path / "converted"
    save_tiny(source, "llama", vocab_size=320)
    save_byte_level(source, TEXTS, 320)
    for name in ("config.json", "generation_config.json"):
        if (file := source / name).is_file():
            named = {key: value for key, value in json.loads(file.read_text()).items() if not key.endswith("_token_id")}
            file.write_text(json.dumps(named))
    assert convert(source, converted) == 0
    end = load_tokenizer(TokenizerConfig(path=source)).eos_id
    for name in ("config.json", "generation_config.json"):
        assert json.loads((converted / name).read_text())["eos_token_id"] == end
    (source / "tokenizer_config.json").write_text("{}")  # a tokenizer that has no end is taken as it is
    assert convert(source, tmp_path / "again") == 0
    assert "eos_token_id" not in json.loads((tmp_path / "again" / "config.json").read_text())


def test_a_model_of_words_or_unigrams_keeps_its_own_file_and_says_so(tmp_path: Path) -> None:
    train_sentencepiece(TEXTS, tmp_path / "t.model", 279, model_type="unigram")
    assert "no tokenizer.json" in load_tokenizer(TokenizerConfig(path=tmp_path / "t.model")).save(tmp_path / "saved")
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["tokenizer.model"]


texts = st.text(st.characters(codec="utf-8") | st.sampled_from(" \n\t\u2581<s>/019ab"), max_size=30)


@given(text=texts)
@settings(max_examples=150)
def test_any_text_is_cut_up_and_put_together_alike(bpe: tuple[Tokenizer, Any], text: str) -> None:
    ours, theirs = bpe
    ids = ours.encode(text)
    assert theirs(text).input_ids == ids and theirs.decode(ids) == ours.decode(ids) == text


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("bpe")
    train_sentencepiece(TEXTS, folder / "t.model", 283)
    ours = load_tokenizer(TokenizerConfig(path=folder / "t.model"))
    assert ours.save(folder / "saved") is None
    return ours, AutoTokenizer.from_pretrained(folder / "saved")


def test_merged_adapters_keep_the_tokenizer_that_they_were_trained_with(workspace: Workspace, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: it is of the test extra")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base, adapter, merged = tmp_path / "base", tmp_path / "adapter", tmp_path / "merged"
    model = save_tiny(base, "llama", vocab_size=300)
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings).save_pretrained(adapter)
    path = Path(trained(workspace, "sentencepiece")["tokenizer"]["path"])
    tokenizer = load_tokenizer(TokenizerConfig(path=path, chat_template=TEMPLATE))
    assert tokenizer.save(adapter) is None
    (adapter / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7], "temperature": 0.7}))
    assert convert(base, merged, "--adapter", adapter, "--check") == 0
    ours = AutoTokenizer.from_pretrained(merged)
    assert [ours(text).input_ids for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]
    assert ours.chat_template == AutoTokenizer.from_pretrained(adapter).chat_template
    written = json.loads((merged / "generation_config.json").read_text())
    assert set(written["eos_token_id"]) == {2, 7} and written["temperature"] == 0.7
    assert AutoModelForCausalLM.from_pretrained(merged).config.vocab_size == model.config.vocab_size

"""Malformed configurations, rows, chunk messages and checkpoints: a clear error of our own, or a result that is right.
Whatever is accepted is held against another reader: PyYAML, the standard library's JSON, what was sent, safetensors."""

import json
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from oppo_megatron.chunks import Chunk, ChunkRow
from oppo_megatron.config.data import PromptDataConfig
from oppo_megatron.config.load import dump_config, load_config
from oppo_megatron.config.model import ModelConfig
from oppo_megatron.config.run import TrainSettings
from oppo_megatron.data.prompts import load_prompts
from oppo_megatron.data.rows import Quarantine
from oppo_megatron.engine.stream import HEADER_SIZE, MAGIC, ChunkDecoder, ChunkEncoder
from oppo_megatron.errors import CheckpointError, ConfigError, DataError, StreamError
from oppo_megatron.layout.shape import check_head, check_model, check_use
from oppo_megatron.modeldir.headers import check_weights, read_hf_config, tokenizer_vocab_size
from oppo_megatron.nesting import check_json
from oppo_megatron.preflight.validate import train_problems
from tests.support.checkpoint_mutations import mutants, time_limit
from tests.support.tokenizers import CharacterTokenizer

SECONDS = 2.0
CONFIG = b"""\
run_dir: run
seed: 7
steps: 3
tokenizer: {path: t.model}
data: {path: rows.jsonl, max_prompt_tokens: 20, bad_rows: quarantine}
actor: {init: {model_type: llama, vocab_size: 512, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2,
               num_attention_heads: 4}, optimizer: {lr: 1e-4}}
critic: {init: "${actor.init}"}
rewards: [{kind: verifier, name: gsm8k}]
rollout: {batch_size: 8, max_response_tokens: 20, temperature: 0.7}
ppo: {kl: {coefficient: 0.05}, minibatches: 2}
overlap: {delta: {rule: fixed, initial: 2, max: 4}}
guards: {kl_mean: 10, action: skip}
placement: {mode: single}
"""
YAML_BITS = (
    b"${seed}", b"${nope}", b"${actor}", b"${oc.env:HOME}", b"${", b"}", b"&a [*a]", b"*b", b"!!python/name:os.system ",
    b"!!binary x", b"!!int x", b"!!float x", b"!!timestamp 2001-13-01", b"- ", b"? ", b"\t", b"null", b"~", b"true", b".nan",
    b"-.inf", b"1e999", b"-1", b"0", b"9" * 400, b"5", b"0.5", b"run", b"false", b"0x", b"1_0", b"08", b"{}", b"[]", b"[1, 2]",
    b"'", b'"', b"\x00", b"\xff", b"\xef\xbb\xbf", b"\xe2\x80\xa8", b"%TAG", b"---\n", b"...\n", b"<<: ", b"[[" * 40, b"a.b: 1\n",
    b"2001-01-01", b"12:30:45", b"1: 2\n", b"seed: 8\n", b"\n  x: 1", b"? [a]\n: b\n", b"null: 1\n", b"\xf0\x9f\x98\x80",
)  # fmt: skip
ROWS = (
    rb'{"prompt": "what is 1+1?", "answer": "2", "id": 7}',
    rb'{"prompt": "caf\u00e9 \ud83d\ude00", "answer": "x", "meta": {"k": [1, 2.5, null, true]}}',
    rb'{"prompt": [{"role": "user", "content": "hi"}], "answer": "2"}', rb'{"prompt": "a", "answer": ""}',
)  # fmt: skip
JSON_BITS = (
    b"\\ud83d", b"\\udc00", b"\\u0000", b"\\u00", b"\\x", b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\xc3", b"\xed\xa0\x80",
    b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b"[" * 3000, b"{", b"}", b"]", b'"', b",", b":", b"null", b"true", b"[]",
    b"{}", b'""', b'" "', b'"prompt": 1,', b'"prompt": "b",', b"-0", b"01", b"'", b"\r", b"\n", b"\x0b", b"\xe2\x80\xa8",
    b"//", b'[{"role": 1}]', b'[{"role": "user"}]', b"[[]]", b'"\\u0041"',
)  # fmt: skip
HF = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256, "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu",
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128},
    "id2label": {"0": "a"}, "torch_dtype": "bfloat16",
}  # fmt: skip


def outcome(action: Callable[[], Any], *errors: type[Exception]) -> Any:
    """The result of `action`, or its error among `errors`; another error, or none in time, is a failure."""
    with time_limit(SECONDS):
        try:
            return action()
        except errors as error:
            assert len(str(error)) > 20, f"{error!r} says too little"
            return error


def check_config(path: Path, text: bytes) -> bool:
    path.write_bytes(text)
    found = outcome(lambda: load_config(TrainSettings, path), ConfigError)
    if isinstance(found, ConfigError):
        assert outcome(lambda: load_config(TrainSettings, path, check=train_problems), ConfigError).problems
        return False
    dump_config(found, path.with_suffix(".again"))
    assert load_config(TrainSettings, path.with_suffix(".again")) == found
    plain = yaml.safe_load(text)
    assert set(plain) <= set(TrainSettings.model_fields) and len(plain) >= 7
    if isinstance(plain["seed"] if "seed" in plain else 1, int):
        assert found.seed == plain.get("seed", 1)
    outcome(lambda: load_config(TrainSettings, path, check=train_problems), ConfigError)
    return True


def test_configurations(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    assert check_config(path, CONFIG)
    accepted = [check_config(path, text) for text in mutants([CONFIG], YAML_BITS, 240, seed=1)]
    assert 10 < sum(accepted) < 200, "the fuzzer is to give some of both"


BOMB = b"a: &a [x, x, x, x, x, x, x, x, x]\n" + b"".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]\n".encode() for i in range(9)
)


@pytest.mark.parametrize(("text", "says"), [
    (BOMB, "more than 100000; write them out"), (b"a: &a [*a]\n", "the alias of line 1 holds itself"),
    (b"a: " + b"[" * 5000, "line 1 is nested too deeply: .* at most 20"), (b"? [a]\n: b\n", "."),
    (b"\xff\xfea", "UTF-8|not valid"), (b"seed: !!python/object/apply:os.system ['true']\n", "could not determine a constructor"),
])  # fmt: skip
def test_hostile_configurations(tmp_path: Path, text: bytes, says: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(text)
    with time_limit(SECONDS), pytest.raises(ConfigError, match=says):
        load_config(TrainSettings, path)


@settings(max_examples=60, deadline=None)
@given(key=st.text(max_size=12), value=st.text(max_size=20))
@example(key="steps", value="0x10")
def test_overrides(key: str, value: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.yaml"
        path.write_bytes(CONFIG)
        found = outcome(lambda: load_config(TrainSettings, path, [f"{key}={value}", f"seed={value}"]), ConfigError)
        if not isinstance(found, ConfigError):
            assert found.seed == yaml.safe_load(value)
        only = outcome(lambda: load_config(TrainSettings, path, [f"seed={value}"]), ConfigError)
        assert isinstance(only, ConfigError) or only.seed == yaml.safe_load(value)


def refusable(raw: bytes) -> bool:
    doubled: list[bool] = []

    def object_of(items: list[tuple[str, Any]]) -> dict[str, Any]:
        doubled.append(len(dict(items)) < len(items))
        return dict(items)

    try:
        check_json(raw.decode("utf-8"))
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=object_of)
        texts = json.dumps(value, ensure_ascii=False, allow_nan=False)
        texts.encode("utf-8")
    except ValueError:
        return True
    if not isinstance(value, dict) or any(doubled) or "\\u0000" in texts.replace("\\\\", ""):
        return True
    prompt = value.get("prompt")
    if isinstance(prompt, list):  # messages: their form is tested elsewhere
        return True
    return not isinstance(prompt, str) or not prompt.strip()


def check_rows(path: Path, data: bytes) -> int:
    path.write_bytes(data)
    quarantine = Quarantine()
    config = PromptDataConfig(path=path, bad_rows="quarantine", max_prompt_tokens=10_000_000)
    found = outcome(lambda: load_prompts(config, CharacterTokenizer(), quarantine=quarantine), DataError)
    lines = data.split(b"\n")
    refused = {entry["line"] for entry in quarantine.entries}
    for number in refused:
        raw = lines[number - 1]
        assert not raw.strip() or refusable(raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw), raw
    if isinstance(found, DataError):
        return 0
    for row in found.rows:
        number = int(row.place.rpartition(":")[2])
        raw = lines[number - 1].removeprefix(b"\xef\xbb\xbf") if number == 1 else lines[number - 1]
        value = json.loads(raw)
        turn = f"<user>{value['prompt']}\x03\n<assistant>"  # text among messages is a user's turn
        assert number not in refused and row.text in (value["prompt"], turn) or isinstance(value["prompt"], list)
        assert row.fields == {name: item for name, item in value.items() if name != "prompt"}
        row.text.encode("utf-8")
    assert len(found.rows) + len(refused) >= len([line for line in lines if line.strip()])
    return len(found.rows)


def test_rows(tmp_path: Path) -> None:
    data = b"\n".join(ROWS) + b"\n"
    assert check_rows(tmp_path / "rows.jsonl", data) == len(ROWS)
    accepted = [check_rows(tmp_path / "rows.jsonl", mutant) for mutant in mutants([data, *ROWS], JSON_BITS, 400, seed=2)]
    assert 100 < sum(accepted) and 50 < accepted.count(0), "the fuzzer is to give some of both"


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=60) | st.text(max_size=60).map(lambda text: json.dumps({"prompt": text}).encode()))
def test_any_bytes_as_rows(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    check_rows(tmp_path_factory.getbasetemp() / "any.jsonl", data)


def message() -> tuple[list[ChunkRow], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rows = [
        ChunkRow(4, 0, [5, 6, 7], [-0.5, -1.0, -2.0], [-0.4, -0.9, -1.9], 2),
        ChunkRow(9, 0, [8], [-0.25], [-0.25], 2, 3, "eos"),
    ]
    encoder = ChunkEncoder()
    encoder.open(4, [1, 2])
    encoder.open(9, [3])
    return rows, *encoder.encode(Chunk(0, 3, rows))


def check_message(header: np.ndarray[Any, Any], payload: np.ndarray[Any, Any]) -> bool:
    decoder = ChunkDecoder()
    decoder.open(4, [1, 2])
    decoder.open(9, [3])
    found = outcome(lambda: decoder.decode(header, payload), StreamError)
    if isinstance(found, StreamError):
        return False
    assert found.rows == message()[0] and (found.index, found.clock) == (0, 3)
    return True


def test_chunk_messages() -> None:
    """A header whose checksum was made anew, too, as only a hostile peer would send: sizes must be checked on their own."""
    _, header, payload = message()
    assert check_message(header, payload)
    whole = np.concatenate([header, payload])
    rng = np.random.default_rng(3)
    numbers = [0, 1, -1, 2, 3, 7, 2**31, 2**62, -(2**63), 2**63 - 1, MAGIC]
    for number in range(400):
        words = whole.copy()
        for _ in range(rng.integers(1, 4)):
            place = rng.integers(len(words))
            words[place] = rng.choice(numbers) if rng.random() < 0.5 else words[place] ^ (1 << int(rng.integers(63)))
        head, body = words[:HEADER_SIZE], words[HEADER_SIZE:]
        if number % 2:
            head[0], head[1], head[2] = MAGIC, 0, 3
            head[5] = zlib.crc32(head[:5].tobytes())
        if number % 5 == 0:
            body = body[: rng.integers(len(body) + 1)]
        same = np.array_equal(head, header) and np.array_equal(body, payload)
        assert check_message(head, body) == same


@settings(max_examples=60, deadline=None)
@given(words=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=HEADER_SIZE, max_size=40))
def test_any_words_as_a_message(words: list[int]) -> None:
    data = np.array(words, dtype=np.int64)
    assert not check_message(data[:HEADER_SIZE], data[HEADER_SIZE:])


def test_safetensors_headers(tmp_path: Path) -> None:
    whole = save({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}, {"format": "pt"})
    length = int.from_bytes(whole[:8], "little")
    header, data = whole[8 : 8 + length], whole[8 + length :]
    bits = (
        b"F32", b"BF16", b"X", b"-1", b"0", b"[]", b"[2,3]", b"null", b'"a"', b"1e3", b"9" * 30, b"{}", b" ", b"\xff",
    )  # fmt: skip
    path, accepted = tmp_path / "model.safetensors", 0
    variants = [whole[:cut] for cut in range(0, len(whole), 7)]
    variants += [len(h).to_bytes(8, "little") + h + data for h in mutants([header], bits, 200, seed=4)]
    variants += [*mutants([whole], bits, 100, seed=5), whole + b"x", b"\xff" * 8 + whole[8:], whole]
    for variant in variants:
        path.write_bytes(variant)
        problems = outcome(lambda: check_weights("actor", tmp_path))
        try:
            with safe_open(path, "pt") as file:
                names = set(file.keys())
        except SafetensorError:
            names = None
        assert bool(problems) == (names is None), (variant[:200], problems, names)
        accepted += not problems
    assert 5 < accepted < len(variants) - 50


def test_an_index_names_files_of_its_folder_only(tmp_path: Path) -> None:
    for file in ("../x.safetensors", "/x.safetensors", "a/../../x", 5, None, ["a"], "a\0b", {"a": 1}):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file, "b": "c"}}))
        (problem,) = outcome(lambda: check_weights("actor", tmp_path))
        assert "not a file of its folder" in problem


def check_hf(folder: Path, text: bytes) -> bool:
    (folder / "config.json").write_bytes(text)
    found = outcome(lambda: read_hf_config(ModelConfig(checkpoint=folder)), CheckpointError)
    if isinstance(found, CheckpointError):
        return False
    headed = outcome(lambda: [x for scalar in (False, True) for x in check_head("a", found, scalar=scalar)])
    assert all(isinstance(problem, str) for problem in headed)
    problems = outcome(lambda: check_use("actor", found, 200, 500))
    assert all(isinstance(problem, str) and problem.startswith("actor: ") for problem in problems)
    if problems or outcome(lambda: check_model("actor", found)):
        return False
    sizes = [found[name] for name in ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")]
    assert all(type(size) is int and size > 0 for size in sizes) and found["vocab_size"] >= 500
    assert found["num_attention_heads"] % (found.get("num_key_value_heads") or found["num_attention_heads"]) == 0
    return True


def test_model_configurations(tmp_path: Path) -> None:
    text = json.dumps(HF).encode()
    assert check_hf(tmp_path, text)
    bits = (*JSON_BITS, b"0", b"-1", b"3", b"1.5", b"1e308", b'"64"', b'{"type": []}', b'{"rope_type": {}}', b"[1]")
    accepted = [check_hf(tmp_path, mutant) for mutant in mutants([text], bits, 250, seed=6)]
    accepted += [
        check_hf(tmp_path, json.dumps(HF | {key: value}).encode())
        for key in HF
        for value in (None, 0, -1, 1.5, True, "x", "64", [], [None], [[]], {}, {"a": 1}, 1e308, 10**400 // 7)
    ]
    assert 20 < sum(accepted) < len(accepted) - 150


def test_tokenizers(tmp_path: Path) -> None:
    text = json.dumps({"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "c"}]}).encode()
    for mutant in mutants([text], JSON_BITS, 80, seed=7):
        (tmp_path / "tokenizer.json").write_bytes(mutant)
        found = outcome(lambda: tokenizer_vocab_size(tmp_path), CheckpointError)
        assert found is None or isinstance(found, (int, CheckpointError))

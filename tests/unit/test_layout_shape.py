"""Shapes against layouts, contexts, vocabularies and KV budgets; checkpoints and tokenizers by their headers."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from transformers import AutoConfig

from oppo_megatron.config.model import ParallelConfig
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.config.supervised import RewardModelConfig, SFTConfig
from oppo_megatron.errors import CheckpointError
from oppo_megatron.layout.hf_layout import hf_tensors
from oppo_megatron.layout.shape import ModelShape, check_head, check_shape, max_positions, num_kv_heads, windows
from oppo_megatron.modeldir.headers import check_file, check_weights, tokenizer_vocab_size
from oppo_megatron.preflight.validate import check_shared_vocabulary, supervised_problems, train_problems

QWEN: dict[str, Any] = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 100,
    "max_position_embeddings": 256,
}  # fmt: skip
MISTRAL = {"model_type": "mistral", "architectures": None}
MISFITS: list[tuple[dict[str, Any], str]] = [
    ({"num_attention_heads": 6}, "hidden_size 64 does not divide by its 6 attention heads"),
    ({"num_key_value_heads": 3}, "8 attention heads do not divide by 3 key/value heads"),
    ({"max_position_embeddings": 255}, "up to 256 tokens are asked for, but the model's longest is 255"),
    ({"vocab_size": 99}, "vocabulary has 99 entries, but the tokenizer gives ids up to 99"),
    ({"model_type": "mixtral"}, "model_type 'mixtral' is not supported"),
    ({"architectures": ["Qwen2VL"]}, "architecture Qwen2VL is not supported"),
    ({"use_sliding_window": True, "sliding_window": 0}, "`sliding_window` of its config.json is 0"),
    ({**MISTRAL, "sliding_window": "4k"}, "`sliding_window` of its config.json is '4k'"),
    ({"use_sliding_window": True, "max_window_layers": -1}, "`max_window_layers` of its config.json is -1"),
    ({"layer_types": ["full_attention"]}, "for each of its 4 layers"),
    ({"layer_types": ["sliding_attention"] * 4}, "use_sliding_window is not true"),
    ({"hidden_size": None}, "`hidden_size` of its config.json is None"),
    ({"num_hidden_layers": 0}, "`num_hidden_layers` of its config.json is 0"),
    ({"num_key_value_heads": "x"}, "`num_key_value_heads` of its config.json is 'x'"),
    ({"max_position_embeddings": -5}, "`max_position_embeddings` of its config.json is -5"),
    ({"head_dim": 7}, "head_dim is 7"),
    ({"rms_norm_eps": "tiny"}, "`rms_norm_eps` of its config.json is 'tiny'"),
    ({"architectures": "Qwen2ForCausalLM"}, "architecture 'Qwen2ForCausalLM' is not supported"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu', but only silu is computed"),
    ({"attention_bias": True}, "attention_bias is true"),
    ({"rope_scaling": "yarn"}, "RoPE parameters are 'yarn', but must be a mapping"),
    ({"rope_scaling": {"type": "dynamic"}}, "rope type 'dynamic' is not supported"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": "x"}}, "`factor` of its RoPE parameters"),
    ({"rope_theta": None}, "`rope_theta` of its RoPE parameters is None"),
]


@pytest.mark.parametrize(("change", "expected"), MISFITS)
def test_each_misfit(change: dict[str, Any], expected: str) -> None:
    problems = check_shape("critic", {**QWEN, **change}, ParallelConfig(), 256, 100)
    assert len(problems) == 1 and expected in problems[0] and problems[0].startswith("critic: ")


@pytest.mark.parametrize(
    ("change", "parallel", "expected"),
    [
        ({}, {"tp": 4}, "2 key/value heads do not divide by tp 4; choose tp from 1, 2"),
        ({}, {"pp": 3}, "4 layers do not divide by pp 3; choose pp from 1, 2, 4"),
        ({"intermediate_size": 129}, {"tp": 2}, "intermediate_size 129 does not divide by tp 2"),
    ],
)
def test_sizes_divide_over_a_layout(change: dict[str, Any], parallel: dict[str, int], expected: str) -> None:
    (problem,) = check_shape("critic", {**QWEN, **change}, ParallelConfig(**parallel), 256, 100)
    assert expected in problem
    assert check_shape("actor", QWEN, ParallelConfig(tp=2, pp=4), 256, 100) == []
    heads = check_shape("actor", {**QWEN, "num_key_value_heads": 8}, ParallelConfig(tp=3), 1, None)
    assert any(p.startswith("actor: 8 attention heads do not divide by tp 3; choose tp from 1, 2, 4, 8;") for p in heads)


def test_windows_are_those_of_transformers() -> None:
    mistral = {**QWEN, "model_type": "mistral"}
    assert windows(mistral) == [4096] * 4 and windows({**mistral, "sliding_window": None}) == [None] * 4
    assert windows({**QWEN, "sliding_window": 8}) == windows({**QWEN, "model_type": "llama"}) == [None] * 4
    sliding = {**QWEN, "use_sliding_window": True, "sliding_window": 8}
    assert windows(sliding) == [None] * 4 and windows({**sliding, "max_window_layers": 3}) == [None, None, None, 8]
    kinds = ["sliding_attention", "full_attention"] * 2
    assert windows({**sliding, "layer_types": kinds}) == [8, None, 8, None]
    for config in (mistral, sliding | {"max_window_layers": 1}, sliding | {"layer_types": kinds}):
        theirs = AutoConfig.for_model(**config)
        kinds_of = getattr(theirs, "layer_types", ["sliding_attention"] * 4)
        assert windows(config) == [theirs.sliding_window if "sliding" in kind else None for kind in kinds_of]
    assert num_kv_heads({k: v for k, v in mistral.items() if k != "num_key_value_heads"}) == 8


def test_every_tensor_rank_needs_a_token() -> None:
    wide = {**QWEN, "num_key_value_heads": 8}
    assert check_shape("actor", {**wide, "vocab_size": 101}, ParallelConfig(tp=8), 256, 100) == []
    assert check_shape("actor", {**wide, "vocab_size": 9}, ParallelConfig(tp=8), 256, 9) == [
        "actor: vocab_size 9 leaves a rank of tp 8 without a token (2 a rank); lower tp; nearest that fit 8 ranks: "
        "tp 2 x pp 1 x dp 4, tp 2 x pp 2 x dp 2, tp 2 x pp 4 x dp 1"
    ]


YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("extra", "positions"),
    [
        ({}, 256), ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 256), ({"rope_scaling": YARN}, 1024),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 256}}, 1024),
    ],
)  # fmt: skip
def test_the_runtime_reads_the_context_that_was_checked(extra: dict[str, Any], positions: int) -> None:
    config = {**QWEN, **extra}
    assert ModelShape.from_hf(config).max_positions == max_positions(config) == positions
    with pytest.raises(CheckpointError, match="hidden_act is 'gelu'"):
        ModelShape.from_hf({**config, "hidden_act": "gelu"})


@pytest.mark.parametrize(
    ("name", "architecture", "scalar", "expected"),
    [
        ("actor", "Qwen2ForCausalLM", False, ""),
        ("reward", "Qwen2ForSequenceClassification", True, ""),
        ("critic", "Qwen2ForCausalLM", True, ""),
        ("reward", "Qwen2ForCausalLM", True, "a frozen model's new head would score at random"),
        ("actor", "Qwen2ForSequenceClassification", False, "without a language-model head"),
    ],
)
def test_heads_of_checkpoints(name: str, architecture: str, scalar: bool, expected: str) -> None:
    config = {**QWEN, "architectures": [architecture]}
    problems = check_head(name, config, scalar=scalar)
    assert expected in problems[0] if expected else problems == []
    if name == "reward" and not expected:
        assert "2 labels" in check_head("x", config | {"id2label": {"0": "a", "1": "b"}}, scalar=True)[0]


def test_vocabularies_between_roles() -> None:
    actor = {"vocab_size": 100}
    assert check_shared_vocabulary({"actor": actor, "reference": actor, "critic": {"vocab_size": 128}}) == []
    assert "must equal the actor's 100" in check_shared_vocabulary({"actor": actor, "reference": {"vocab_size": 128}})[0]
    assert "the actor can draw any of 100" in check_shared_vocabulary({"actor": actor, "reward": {"vocab_size": 99}})[0]


def write_safetensors(path: Path, payload: int, declared: int | None = None) -> None:
    end = payload if declared is None else declared
    header = json.dumps({"w": {"dtype": "F32", "shape": [end // 4], "data_offsets": [0, end]}, "__metadata__": {}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(payload))


def checkpoint(directory: Path, **change: Any) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({**QWEN, **change}))
    head = "scalar" if "ForSequence" in change.get("architectures", [""])[0] else "lm"
    tensors = hf_tensors(ModelShape.from_hf({**QWEN, **change}), head)
    save_file({name: np.zeros(size, np.float16) for name, size in tensors.items()}, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "F8_E5M2", "I64"])
def test_dtypes_that_numpy_has_not_are_no_damage(tmp_path: Path, dtype: str) -> None:
    size = {"I64": 8, "BF16": 2}.get(dtype, 1)
    header = json.dumps({"w": {"dtype": dtype, "shape": [3], "data_offsets": [0, 3 * size]}}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(3 * size))
    check_file(file)
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(CheckpointError, match="is truncated or damaged: its .* bytes are not a whole safetensors"):
        check_file(file)


def test_weights_are_checked_without_torch(tmp_path: Path) -> None:
    checkpoint(tmp_path / "m")
    code = """if True:
        import pathlib, sys
        from oppo_megatron.modeldir.headers import check_file
        check_file(pathlib.Path(sys.argv[1]))
        assert "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "m" / "model.safetensors")], check=True)


@pytest.mark.parametrize("keep", [0, 4, 8, 20, -1])
def test_truncated_weights_are_named(tmp_path: Path, keep: int) -> None:
    file = checkpoint(tmp_path / "m") / "model.safetensors"
    assert check_weights("actor", file.parent) == []
    file.write_bytes(file.read_bytes()[:keep])
    assert f"actor: `{file}` is truncated" in check_weights("actor", file.parent)[0]


def test_absent_weights_and_such_as_are_no_safetensors(tmp_path: Path) -> None:
    assert "has neither model.safetensors nor" in check_weights("actor", tmp_path)[0]
    (tmp_path / "pytorch_model.bin").touch()
    assert "safe_serialization" in check_weights("actor", tmp_path)[0]
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 4) + b"oops" + bytes(8))
    assert "invalid JSON in header" in check_weights("actor", tmp_path)[0]


def test_index_names_a_missing_shard(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model-1.safetensors", 8)
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    problems = check_weights("actor", tmp_path)
    assert len(problems) == 1 and "model-2.safetensors` does not exist" in problems[0]


def test_vocabulary_of_tokenizers(tmp_path: Path) -> None:
    assert tokenizer_vocab_size(tmp_path) is None
    tokenizer = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 5, "content": "<eos>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert tokenizer_vocab_size(tmp_path) == 6
    (tmp_path / "x.model").write_bytes(b"no sentencepiece")
    with pytest.raises(CheckpointError, match="not a sentencepiece model"):
        tokenizer_vocab_size(tmp_path / "x.model")


@pytest.fixture
def train_settings(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "tok").mkdir()
    (tmp_path / "tok" / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 99}}}))
    (tmp_path / "rows.jsonl").touch()
    classifier = checkpoint(tmp_path / "rm", architectures=["Qwen2ForSequenceClassification"])
    return {
        "run_dir": tmp_path / "run", "tokenizer": {"path": tmp_path / "tok"},
        "data": {"path": tmp_path / "rows.jsonl", "max_prompt_tokens": 128},
        "actor": {"checkpoint": checkpoint(tmp_path / "actor")}, "reward": {"checkpoint": classifier},
        "critic": {"checkpoint": tmp_path / "actor"}, "rewards": [{"kind": "model"}],
        "rollout": {"batch_size": 8, "max_response_tokens": 128},
    }  # fmt: skip


def problems_of(settings: dict[str, Any]) -> list[str]:
    return train_problems(TrainConfig.model_validate(settings))


def test_misfits_of_layout_use_and_vocabulary_come_at_once(train_settings: dict[str, Any]) -> None:
    assert problems_of(train_settings) == []
    train_settings["rollout"]["max_response_tokens"] = 200
    problems = problems_of({**train_settings, "placement": {"actor": {"tp": 4}}, "runtime": {"kv_cache_mb": 0.01}})
    text = "\n".join(problems)
    for expected in ("actor: 2 key/value heads", "actor: contexts of up to 328", "critic: contexts", "critic: runtime.kv"):
        assert expected in text


def test_reference_is_checked_in_the_scorers_layout(train_settings: dict[str, Any]) -> None:
    problems = problems_of({**train_settings, "placement": {"scorer": {"pp": 3}}})
    assert [problem.split(":")[0] for problem in problems] == ["reference", "critic", "reward"]


def test_kv_budget_must_hold_one_sequence(train_settings: dict[str, Any]) -> None:
    # 256 tokens x 2 x 4 layers x 2 kv heads x 8 x 4 bytes = 128 KiB
    assert problems_of({**train_settings, "runtime": {"kv_cache_mb": 0.125}}) == []
    problems = problems_of({**train_settings, "runtime": {"kv_cache_mb": 0.124}})
    assert len(problems) == 4 and "one sequence of 256 tokens needs 0.125 MiB" in problems[0]


def test_settings_files_and_shapes_are_reported_together(train_settings: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "rm" / "config.json").unlink()
    train_settings["ppo"] = {"minibatches": 3}
    train_settings["rollout"]["max_response_tokens"] = 129
    (tmp_path / "tok" / "tokenizer.json").write_text("{")
    text = "\n".join(problems_of(train_settings))
    for expected in ("ppo.minibatches 3", "config.json` does not exist", "up to 257 tokens", "is not valid JSON"):
        assert expected in text


def test_a_causal_lm_is_a_start_for_both_heads(train_settings: dict[str, Any]) -> None:
    common = {key: train_settings[key] for key in ("run_dir", "tokenizer")} | {"data": {"path": train_settings["data"]["path"]}}
    settings = {**common, "model": train_settings["actor"], "max_tokens": 256}
    assert supervised_problems(SFTConfig.model_validate(settings)) == []
    assert supervised_problems(RewardModelConfig.model_validate(settings)) == []

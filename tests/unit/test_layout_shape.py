"""Shapes against layouts, contexts, vocabularies and KV budgets; checkpoints' headers; operations against torch's counter."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.limit import forward_flops, training_flops
from oppo_megatron.cluster.world import open_world
from oppo_megatron.config.model import ModelConfig, ParallelConfig, RuntimeConfig
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.config.supervised import RewardModelConfig, SFTConfig
from oppo_megatron.errors import CheckpointError
from oppo_megatron.layout import shape as shape_module
from oppo_megatron.layout.families import FAMILIES, windows
from oppo_megatron.layout.hf_layout import Head, hf_tensors, size_of_rows, stored_names
from oppo_megatron.layout.memory import stage_parameters
from oppo_megatron.layout.shape import ModelShape, causal_pairs, check_head, check_shape, max_positions
from oppo_megatron.mcore.attention import PackedPlan
from oppo_megatron.mcore.groups import RoleGroups, build_groups
from oppo_megatron.mcore.model import RoleModel, step
from oppo_megatron.mcore.roles import load_role
from oppo_megatron.modeldir.headers import check_file, check_weights, tokenizer_vocab_size
from oppo_megatron.preflight.validate import check_shared_vocabulary, supervised_problems, train_problems

QWEN: dict[str, Any] = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 256,
}  # fmt: skip
MISTRAL, PHI = ({"model_type": family, "architectures": None} for family in ("mistral", "phi3"))
MIXTRAL, QWEN_MOE, OSS = ({"model_type": family, "architectures": None} for family in ("mixtral", "qwen3_moe", "gpt_oss"))
MISFITS: list[tuple[dict[str, Any], str]] = [
    ({"num_attention_heads": 6}, "hidden_size 64 does not divide by its 6 attention heads"),
    ({"num_key_value_heads": 3}, "8 attention heads do not divide by 3 key/value heads"),
    ({"max_position_embeddings": 255}, "up to 256 tokens are asked for, but the model's longest is 255"),
    ({"vocab_size": 99}, "vocabulary has 99 entries, but the tokenizer gives ids up to 99"),
    ({"model_type": "falcon"}, f"'falcon' is not supported; use one of {', '.join(FAMILIES)} (Qwen2.5"),
    ({"partial_rotary_factor": 0.5}, "`partial_rotary_factor` of its RoPE parameters is 0.5, but must be 1"),
    ({**PHI, "partial_rotary_factor": 2}, "is 2, but must be positive and at most 1"),
    ({**PHI, "rope_scaling": {
        "type": "longrope", "short_factor": [1.0], "long_factor": [2, 2, 2, 2]}},
        "`short_factor` of its RoPE parameters is [1.0], but must be a list of 4 positive numbers"),
    ({**PHI, "partial_rotary_factor": 0.1}, "head_dim is 8, and 0 numbers of it are rotated, in pairs"),
    ({**PHI, "rope_scaling": {"type": "yarn"}}, "'yarn' is not supported; use a model with one of default, longrope"),
    ({**PHI, "original_max_position_embeddings": 0}, "`original_max_position_embeddings` of its RoPE parameters is 0"),
    ({"model_type": "gemma2", "architectures": None, "final_logit_softcapping": -1}, "-1, but must be a positive number or null"),
    ({"model_type": "gemma2", "architectures": None, "hidden_activation": "silu"}, "but must be gelu_pytorch_tanh"),
    ({"model_type": "bloom", "n_layer": 2}, "'bloom' is not supported; use one of llama, mistral"),
    ({**MIXTRAL, "num_local_experts": 0}, "`num_local_experts` of its config.json is 0, but must be a positive integer"),
    ({**MIXTRAL, "num_local_experts": 1, "num_experts_per_tok": 1}, "is 1, but must be at least 2, because a single expert is"),
    ({**MIXTRAL, "num_experts_per_tok": 9}, "is 9, but must be at most 8, the number of experts"),
    ({**QWEN_MOE, "mlp_only_layers": [0]}, "`mlp_only_layers` of its config.json is [0], but must be []"),
    ({**QWEN_MOE, "decoder_sparse_step": 2}, "`decoder_sparse_step` of its config.json is 2, but must be 1"),
    ({**QWEN_MOE, "moe_intermediate_size": "x"}, "`moe_intermediate_size` of its config.json is 'x'"),
    ({"architectures": ["Qwen2VL"]}, "architecture Qwen2VL is not supported"),
    ({"use_sliding_window": True, "sliding_window": 0}, "`sliding_window` of its config.json is 0"),
    ({**MISTRAL, "sliding_window": "4k"}, "`sliding_window` of its config.json is '4k'"),
    ({"use_sliding_window": True, "max_window_layers": -1}, "`max_window_layers` of its config.json is -1"),
    ({"layer_types": ["full_attention"]}, "for each of its 4 layers"),
    ({"layer_types": ["sliding_attention"] * 4}, "must name it only if use_sliding_window is true"),
    ({"hidden_size": None}, "`hidden_size` of its config.json is None"),
    ({"num_hidden_layers": 0}, "`num_hidden_layers` of its config.json is 0"),
    ({"num_key_value_heads": "x"}, "`num_key_value_heads` of its config.json is 'x'"),
    ({"max_position_embeddings": -5}, "`max_position_embeddings` of its config.json is -5"), ({"head_dim": 7}, "head_dim is 7"),
    ({"rms_norm_eps": "tiny"}, "`rms_norm_eps` of its config.json is 'tiny'"),
    ({"architectures": "Qwen2ForCausalLM"}, "architecture 'Qwen2ForCausalLM' is not supported"),
    ({"hidden_act": "gelu"}, "`hidden_act` of its config.json is 'gelu', but must be silu"),
    ({"attention_bias": True}, "attention_bias is true"), ({**OSS, "attention_bias": False}, "attention_bias is false"),
    ({**OSS, "swiglu_limit": "7"}, "`swiglu_limit` of its config.json is '7', but must be a positive number"),
    ({**OSS, "sliding_window": 0}, "`sliding_window` of its config.json is 0"),
    ({"rope_scaling": "yarn"}, "RoPE parameters are 'yarn', but must be a mapping"),
    ({"rope_scaling": "yarn", "rope_parameters": {"rope_type": "default"}}, "RoPE parameters are 'yarn'"),
    ({"rope_scaling": {"type": "dynamic"}}, "rope type 'dynamic' is not supported"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": "x"}}, "`factor` of its RoPE parameters"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": "x"}}, "`beta_fast` of its RoPE parameters is 'x'"),
    ({"rope_theta": None}, "`rope_theta` of its RoPE parameters is None"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "expected"), MISFITS)
def test_each_misfit(change: dict[str, Any], expected: str) -> None:
    problems = check_shape("critic", {**QWEN, **change}, ParallelConfig(), 256, 100)
    assert len(problems) == 1 and expected in problems[0] and problems[0].startswith("critic: ")


@pytest.mark.parametrize(("change", "parallel", "expected"), [
    ({}, {"tp": 4}, "2 key/value heads do not divide by tp 4; choose tp from 1, 2"),
    ({}, {"pp": 3}, "4 layers do not divide by pp 3; choose pp from 1, 2, 4"),
    ({"intermediate_size": 129}, {"tp": 2}, "intermediate_size 129 does not divide by tp 2"),
    *(({**family, "num_experts": 9}, {"tp": 2}, "number of experts 9 does not divide by tp 2; choose tp from 1")
      for family in (QWEN_MOE, OSS)),
])  # fmt: skip
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
    for family in ("mixtral", "qwen3_moe"):
        assert windows({**QWEN, "model_type": family, "sliding_window": 8}) == [8 if family == "mixtral" else None] * 4
        assert windows({**sliding, "model_type": family}) == [8] * 4
    for config in (mistral, sliding | {"max_window_layers": 1}, sliding | {"layer_types": kinds}):
        theirs = AutoConfig.for_model(**config)
        kinds_of = getattr(theirs, "layer_types", ["sliding_attention"] * 4)
        assert windows(config) == [theirs.sliding_window if "sliding" in kind else None for kind in kinds_of]
    assert shape_module.num_kv_heads({k: v for k, v in mistral.items() if k != "num_key_value_heads"}) == 8


def test_every_tensor_rank_needs_a_token() -> None:
    wide = {**QWEN, "num_key_value_heads": 8}
    assert check_shape("actor", {**wide, "vocab_size": 101}, ParallelConfig(tp=8), 256, 100) == []
    assert check_shape("actor", {**wide, "vocab_size": 9}, ParallelConfig(tp=8), 256, 9) == [
        "actor: vocab_size 9 leaves a rank of tp 8 without a token (2 per rank); lower tp; nearest that fit 8 ranks: "
        "tp 2 x pp 1 x dp 4, tp 2 x pp 2 x dp 2, tp 2 x pp 4 x dp 1"
    ]


YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(("extra", "positions"), [
    ({}, 256), ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 256), ({"rope_scaling": YARN}, 1024),
    ({"rope_scaling": {**YARN, "original_max_position_embeddings": 256}}, 1024),
])  # fmt: skip
def test_the_runtime_reads_the_context_that_was_checked(extra: dict[str, Any], positions: int) -> None:
    config = {**QWEN, **extra}
    assert ModelShape.from_hf(config).max_positions == max_positions(config) == positions
    with pytest.raises(CheckpointError, match="hidden_act` of its config.json is 'gelu'"):
        ModelShape.from_hf({**config, "hidden_act": "gelu"})


@pytest.mark.parametrize(("name", "architecture", "scalar", "expected"), [
    ("actor", "Qwen2ForCausalLM", False, ""), ("reward", "Qwen2ForSequenceClassification", True, ""),
    ("critic", "Qwen2ForCausalLM", True, ""),
    ("reward", "Qwen2ForCausalLM", True, "a frozen model's new head would score at random"),
    ("actor", "Qwen2ForSequenceClassification", False, "without a language-model head"),
])  # fmt: skip
def test_heads_of_checkpoints(name: str, architecture: str, scalar: bool, expected: str) -> None:
    config = {**QWEN, "architectures": [architecture]}
    problems = check_head(name, config, scalar=scalar)
    assert expected in problems[0] if expected else problems == []
    if name == "reward" and not expected:
        assert "2 labels" in check_head("x", config | {"id2label": {"0": "a", "1": "b"}}, scalar=True)[0]


def _published(family: str, sizes: str, **more: Any) -> dict[str, Any]:
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
    return {"model_type": family} | dict(zip(keys, map(int, sizes.split()), strict=True)) | more


FACTORS = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [float(n) for n in range(1, 49)]}
PUBLISHED = {
    "Phi-3-mini-4k": _published("phi3", "3072 8192 32 32 32 32064", max_position_embeddings=4096, sliding_window=2047),
    "Phi-4": _published("phi3", "5120 17920 40 40 10 100352", max_position_embeddings=16384, rope_theta=250000.0),
    "Phi-4-mini": _published(
        "phi3", "3072 8192 32 24 8 200064", max_position_embeddings=131072, original_max_position_embeddings=4096,
        partial_rotary_factor=0.75, rope_scaling=FACTORS, tie_word_embeddings=True),
    "OLMo-2-7B": _published("olmo2", "4096 11008 32 32 32 100352", max_position_embeddings=4096, rope_theta=500000.0),
    "gemma-2-2b": _published("gemma2", "2304 9216 26 8 4 256000", head_dim=256),
    "gemma-2-9b": _published("gemma2", "3584 14336 42 16 8 256000", head_dim=256),
    "gemma-3-1b": _published(
        "gemma3_text", "1152 6912 26 4 1 262144", head_dim=256, sliding_window=512, rope_theta=1e6, rope_local_base_freq=1e4,
        max_position_embeddings=32768),
    "gpt-oss-20b": _published(
        "gpt_oss", "2880 2880 24 64 8 201088", num_local_experts=32, head_dim=64, max_position_embeddings=131072,
        attention_bias=True, rope_theta=150000, rope_scaling={
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096}),
    "gpt-oss by its defaults": _published("gpt_oss", "2880 2880 36 64 8 201088"),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_are_those_of_transformers(name: str) -> None:
    hf = PUBLISHED[name]
    config = AutoConfig.for_model(**hf)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert check_shape(name, hf, ParallelConfig(), 4096, hf["vocab_size"]) == []
    assert stage_parameters(hf, 1, 1, 0, scalar=False) == sum(p.numel() for p in model.parameters())
    shape = ModelShape.from_hf(hf)
    sizes = hf_tensors(shape, "lm")
    stored = {name: size_of_rows([sizes[part] for part in parts]) for name, parts in stored_names(shape, sizes).items()}
    tied = {"lm_head.weight"} if shape.tied_embeddings else set()
    assert stored == {name: tuple(p.shape) for name, p in model.state_dict().items() if name not in tied}
    reading = [layer.self_attn for layer in model.model.layers]
    assert [each.scaling for each in reading] == pytest.approx([shape.attention_scale] * shape.num_layers)
    own = [config.sliding_window] * shape.num_layers if shape.family == "phi3" else [
        getattr(each, "sliding_window", None) for each in reading]  # fmt: skip
    assert list(shape.windows) == own and shape.max_positions == config.max_position_embeddings


def write_safetensors(path: Path, dtype: str, size: int) -> None:
    header = json.dumps({"w": {"dtype": dtype, "shape": [3], "data_offsets": [0, 3 * size]}, "__metadata__": {}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(3 * size))


def checkpoint(directory: Path, **change: Any) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({**QWEN, **change}))
    head = "scalar" if "ForSequence" in change.get("architectures", [""])[0] else "lm"
    tensors = hf_tensors(ModelShape.from_hf({**QWEN, **change}), head)
    save_file({name: np.zeros(size, np.float16) for name, size in tensors.items()}, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "F8_E5M2", "I64"])
def test_dtypes_that_numpy_has_not_are_no_damage(tmp_path: Path, dtype: str) -> None:
    file = tmp_path / "model.safetensors"
    write_safetensors(file, dtype, {"I64": 8, "BF16": 2}.get(dtype, 1))
    check_file(file)
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(CheckpointError, match="is truncated or damaged: its .* bytes are not a whole safetensors"):
        check_file(file)


@pytest.mark.parametrize("keep", [0, 4, 8, 20, -1])
def test_truncated_weights_are_named(tmp_path: Path, keep: int) -> None:
    file = checkpoint(tmp_path / "m") / "model.safetensors"
    assert check_weights("actor", file.parent) == []
    file.write_bytes(file.read_bytes()[:keep])
    assert f"actor: `{file}` is truncated" in check_weights("actor", file.parent)[0]


def test_absent_weights_such_as_are_no_safetensors_and_an_index_that_names_a_missing_shard(tmp_path: Path) -> None:
    assert "has neither model.safetensors nor" in check_weights("actor", tmp_path)[0]
    (tmp_path / "pytorch_model.bin").touch()
    assert "safe_serialization" in check_weights("actor", tmp_path)[0]
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 4) + b"oops" + bytes(8))
    assert "invalid JSON in header" in check_weights("actor", tmp_path)[0]
    (tmp_path / "model.safetensors").unlink()
    write_safetensors(tmp_path / "model-1.safetensors", "F32", 4)
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    (problem,) = check_weights("actor", tmp_path)
    assert "model-2.safetensors` does not exist" in problem


def test_vocabularies_of_tokenizers_and_between_roles(tmp_path: Path) -> None:
    assert tokenizer_vocab_size(tmp_path) is None
    tokenizer = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 5, "content": "<eos>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert tokenizer_vocab_size(tmp_path) == 6
    (tmp_path / "x.model").write_bytes(b"no sentencepiece")
    with pytest.raises(CheckpointError, match="not a sentencepiece model"):
        tokenizer_vocab_size(tmp_path / "x.model")
    actor = {"vocab_size": 100}
    assert check_shared_vocabulary({"actor": actor, "reference": actor, "critic": {"vocab_size": 128}}) == []
    assert "must equal the actor's 100" in check_shared_vocabulary({"actor": actor, "reference": {"vocab_size": 128}})[0]
    assert "the actor can draw any of 100" in check_shared_vocabulary({"actor": actor, "reward": {"vocab_size": 99}})[0]


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
    common = {key: train_settings[key] for key in ("run_dir", "tokenizer")} | {"data": {"path": train_settings["data"]["path"]}}
    settings = {**common, "model": train_settings["actor"], "max_tokens": 256}
    for kind in (SFTConfig, RewardModelConfig):  # a causal language model is a start for both heads
        assert supervised_problems(kind.model_validate(settings)) == []
    assert problems_of(train_settings) == []
    train_settings["rollout"]["max_response_tokens"] = 200
    problems = problems_of({**train_settings, "placement": {"actor": {"tp": 4}}, "runtime": {"kv_cache_mb": 0.01}})
    text = "\n".join(problems)
    for expected in ("actor: 2 key/value heads", "actor: contexts of up to 328", "critic: contexts", "critic: runtime.kv"):
        assert expected in text


def test_experts_take_no_adapters(train_settings: dict[str, Any]) -> None:
    experts = {"init": {**QWEN, **QWEN_MOE}}
    del train_settings["actor"]["checkpoint"]
    for lora, expected in (({"targets": ["q_proj", "v_proj"]}, 0), ({}, 1), ({"targets": ["o_proj", "up_proj"]}, 1)):
        train_settings["actor"] |= experts | {"lora": {"rank": 2} | lora}
        found = [problem for problem in problems_of(train_settings) if problem.startswith("actor.lora.targets: ")]
        assert len(found) == expected
        assert not found or found[0].endswith("set it to some of q_proj, k_proj, v_proj, o_proj")


def test_settings_files_and_shapes_are_reported_together(train_settings: dict[str, Any], tmp_path: Path) -> None:
    problems = problems_of({**train_settings, "placement": {"scorer": {"pp": 3}}})
    assert [problem.split(":")[0] for problem in problems] == ["reference", "critic", "reward"], "in the scorers' layout"
    (tmp_path / "rm" / "config.json").unlink()
    train_settings["ppo"] = {"minibatches": 3}
    train_settings["rollout"]["max_response_tokens"] = 129
    (tmp_path / "tok" / "tokenizer.json").write_text("{")
    text = "\n".join(problems_of(train_settings))
    for expected in ("ppo.minibatches 3", "config.json` does not exist", "up to 257 tokens", "is not valid JSON"):
        assert expected in text


LLAMA = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 80, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 16, "num_key_value_heads": 1, "tie_word_embeddings": True}
SHAPES = {"llama": LLAMA, "qwen2": {**LLAMA, "model_type": "qwen2", "tie_word_embeddings": True}, "qwen3": QWEN3}
LENGTHS = [9, 5]


@pytest.fixture(scope="module")
def groups() -> Iterator[RoleGroups]:
    with open_world(RuntimeConfig(device="cpu").with_threads(1), environment={}):
        built = build_groups([0], 1, 1, "flops")
        assert built is not None
        yield built


def load(shape: dict[str, Any], groups: RoleGroups, head: Head) -> RoleModel:
    """Call megatron's modules: torch's counter does not know the products of weights laid out for the CPU."""
    return load_role(ModelConfig(init=shape), groups, head=head, max_length=64, device=torch.device("cpu"), path="module")


def counted(call: Any) -> int:
    """Count by torch's counter, which knows attention only as plain products and computes masked pairs too."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        call()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_forward_and_training_are_what_torch_counts(family: str, head: Head, groups: RoleGroups) -> None:
    shape, model = SHAPES[family], load(SHAPES[family], groups, head)
    tokens_T, rows_R = torch.arange(sum(LENGTHS)), torch.tensor([3, 4, 13])
    expected = (shape, sum(LENGTHS), sum(length**2 for length in LENGTHS), len(rows_R))

    def forward() -> torch.Tensor:
        out_R = model(tokens_T, PackedPlan(LENGTHS, model.rope), rows_R)
        return out_R if head == "scalar" else model.output_rows(out_R).figures(rows_R).logp_R

    with torch.no_grad():
        assert counted(forward) == forward_flops(*expected, scalar=head == "scalar")
    model.requires_grad_(True)
    assert counted(lambda: forward().sum().backward()) == training_flops(*expected, scalar=head == "scalar")


def test_a_decode_step_is_what_torch_counts(groups: RoleGroups) -> None:
    model = load(LLAMA, groups, "lm").requires_grad_(False)
    cache = model.new_cache(3)
    for seq_id in range(3):
        cache.open(seq_id)
    step(model, cache, [0, 1, 2], [7, 7, 7], torch.arange(21))
    # All sequences are as long, so that nothing is masked: each token attends to 8 positions.
    plan = cache.begin([0, 1, 2], [1, 1, 1])
    with torch.no_grad():  # torch counts nothing in inference mode, in which `step` runs
        found = counted(lambda: model.logits(model(torch.arange(3), plan)))
    assert found == forward_flops(LLAMA, 3, 3 * causal_pairs(7, 1), 3, scalar=False)
    for past, new in (0, 1), (0, 6), (5, 1), (4, 3):
        assert causal_pairs(past, new) == int(torch.ones(new, past + new).tril(diagonal=past).sum())


@pytest.mark.parametrize("experts", [{"model_type": "mixtral"}, {"model_type": "qwen3_moe", "moe_intermediate_size": 24}])
@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_experts_and_their_router_are_counted(experts: dict[str, Any], head: Head, groups: RoleGroups) -> None:
    shape = LLAMA | experts
    model = load(shape, groups, head)
    assert stage_parameters(shape, 1, 1, 0, scalar=head == "scalar") == sum(p.numel() for p in model.parameters())
    in_layers = 3 * shape_module.layer_weights(shape)
    small = sum(p.numel() for name, p in model.decoder.named_parameters() if p.dim() == 1 or "router" in name)
    assert in_layers == sum(p.numel() for p in model.decoder.parameters()) - small


@pytest.mark.parametrize("family", SHAPES)
def test_matrices_are_the_models_parameters_but_for_the_small_ones(family: str, groups: RoleGroups) -> None:
    shape, model = SHAPES[family], load(SHAPES[family], groups, "lm")
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "word_embeddings" not in name]
    head = shape_module.head_linear(shape, scalar=False).size if shape["tie_word_embeddings"] else 0
    assert shape_module.weight_bytes(shape, "float32", scalar=False) == 4 * (sum(p.numel() for p in matrices) + head)
    in_layers = 3 * sum(linear.size for linear in shape_module.layer_linears(shape))
    assert in_layers < stage_parameters(shape, 1, 1, 0, scalar=False)
    assert shape_module.weight_bytes(shape, "bfloat16", scalar=True) == 2 * (in_layers + 32)

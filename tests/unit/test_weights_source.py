"""Checkpoints that cannot be used are refused with the value met, the rule and the remedy, before a tensor is read."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from oppo_megatron.config.model import LoraConfig, ModelConfig
from oppo_megatron.config.serve import ServeConfig
from oppo_megatron.config.supervised import SFTConfig
from oppo_megatron.errors import CheckpointError, ConfigError
from oppo_megatron.layout.hf_layout import Head, hf_tensors
from oppo_megatron.layout.lora_layout import adapter_parts
from oppo_megatron.mcore.weights.hf_source import (
    RandomSource,
    SafetensorsSource,
    check_source,
    open_weights,
    read_shape,
)
from oppo_megatron.mcore.weights.lora_weights import open_adapters, peft_config
from oppo_megatron.preflight.validate import service_problems, supervised_problems
from tests.support.hf import save_tiny, tiny_config

NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """lm (one file), sharded, scalar and tied checkpoints."""
    root = tmp_path_factory.mktemp("hf")
    save_tiny(root / "lm", "qwen2")
    save_tiny(root / "sharded", "qwen2", max_shard_size="20KB")
    save_tiny(root / "scalar", "qwen2", "scalar")
    save_tiny(root / "tied", "qwen2", tie_word_embeddings=True)
    return root


@pytest.fixture
def checkpoints(originals: Path, tmp_path: Path) -> Path:
    """Copies that a test may damage."""
    return Path(shutil.copytree(originals, tmp_path / "hf"))


def refusal(directory: Path, head: Head = "lm", **config: object) -> str:
    with pytest.raises(CheckpointError) as error:
        open_weights(ModelConfig(checkpoint=directory, **config), head)
    return str(error.value)


def rewrite(directory: Path, change) -> None:
    """Apply `change` to the tensors of a single-file checkpoint."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_sharded_and_single_files_hold_the_same(checkpoints: Path) -> None:
    assert len(list((checkpoints / "sharded").glob("*.safetensors"))) > 3
    one, many = SafetensorsSource(checkpoints / "lm"), SafetensorsSource(checkpoints / "sharded")
    assert set(one.names()) == set(many.names())
    for name in one.names():
        whole = tuple(slice(0, n) for n in one.shape(name))
        assert torch.equal(one.read(name, whole), many.read(name, whole))


def test_a_region_is_that_part_of_the_tensor(checkpoints: Path) -> None:
    source, tensors = SafetensorsSource(checkpoints / "lm"), load_file(checkpoints / "lm" / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(source.read(name, (slice(0, 32), slice(12, 24))), tensors[name][:, 12:24])


def test_no_such_directory(tmp_path: Path) -> None:
    message = refusal(tmp_path / "nowhere")
    assert "nowhere does not exist" in message and "Correct the path" in message


def test_a_file_is_not_a_directory(checkpoints: Path) -> None:
    assert "is a file" in refusal(checkpoints / "lm" / "config.json")


def test_no_config(checkpoints: Path) -> None:
    (checkpoints / "lm" / "config.json").unlink()
    assert "config.json" in refusal(checkpoints / "lm")


@pytest.mark.parametrize("text", ["{broken", "[1, 2]"])
def test_config_that_is_no_mapping(checkpoints: Path, text: str) -> None:
    (checkpoints / "lm" / "config.json").write_text(text)
    assert "fetch or save it again" in refusal(checkpoints / "lm")


def test_pickled_weights_are_not_loaded(checkpoints: Path) -> None:
    (checkpoints / "lm" / "model.safetensors").rename(checkpoints / "lm" / "pytorch_model.bin")
    message = refusal(checkpoints / "lm")
    assert "pytorch_model.bin" in message and "save_pretrained" in message


def test_no_weights_at_all(checkpoints: Path) -> None:
    (checkpoints / "lm" / "model.safetensors").unlink()
    message = refusal(checkpoints / "lm")
    assert "neither model.safetensors nor" in message and "config.json" in message


def test_missing_shard_is_named(checkpoints: Path) -> None:
    shard = sorted((checkpoints / "sharded").glob("*.safetensors"))[1]
    shard.unlink()
    assert shard.name in refusal(checkpoints / "sharded")


def test_index_that_names_a_tensor_which_its_shard_lacks(checkpoints: Path) -> None:
    path = checkpoints / "sharded" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"][NORM] = next(file for file in files if file != index["weight_map"][NORM])
    path.write_text(json.dumps(index))
    message = refusal(checkpoints / "sharded")
    assert NORM in message and index["weight_map"][NORM] in message


@pytest.mark.parametrize(
    "text", ["{}", '{"weight_map": {}}', '{"weight_map": [1]}', '{"weight_map": {"a": 3}}', "nonsense"]
)
def test_damaged_index(checkpoints: Path, text: str) -> None:
    (checkpoints / "sharded" / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json" in refusal(checkpoints / "sharded")


@pytest.mark.parametrize("keep", [0, 5, 40, -1])
@pytest.mark.parametrize("which", ["lm", "sharded"])
def test_truncated_file(checkpoints: Path, which: str, keep: int) -> None:
    path = sorted((checkpoints / which).glob("*.safetensors"))[-1]
    path.write_bytes(path.read_bytes()[:keep])
    message = refusal(checkpoints / which)
    assert path.name in message and "truncated" in message and "fetch or save it again" in message


def test_git_lfs_pointer(checkpoints: Path) -> None:
    path = checkpoints / "lm" / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123456789\n")
    assert "git-lfs" in refusal(checkpoints / "lm")


def test_missing_tensor_is_named_with_its_neighbours(checkpoints: Path) -> None:
    rewrite(checkpoints / "lm", lambda tensors: tensors.pop(NORM))
    message = refusal(checkpoints / "lm")
    assert f"{NORM} is missing" in message and "Nearest names: model.layers." in message


def test_wrong_shape_gives_both_shapes(checkpoints: Path) -> None:
    rewrite(checkpoints / "lm", lambda tensors: tensors.update({NORM: torch.ones(31)}))
    message = refusal(checkpoints / "lm")
    assert f"{NORM} has shape [31], config.json asks for [32]" in message


def test_config_of_another_model_lists_problems_but_not_all(checkpoints: Path) -> None:
    path = checkpoints / "lm" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 64}))
    message = refusal(checkpoints / "lm")
    assert "[48, 32], config.json asks for [64, 32]" in message and "and 4 more" in message


def test_layers_beyond_the_config_are_not_dropped(checkpoints: Path) -> None:
    path = checkpoints / "lm" / "config.json"
    content = json.loads(path.read_text()) | {"num_hidden_layers": 3}
    path.write_text(json.dumps(content | {"layer_types": content["layer_types"][:3]}))
    assert "model.layers.3.input_layernorm.weight has no place" in refusal(checkpoints / "lm")


def test_quantised_weights_are_refused(checkpoints: Path) -> None:
    rewrite(checkpoints / "lm", lambda tensors: tensors.update({NORM: torch.ones(32, dtype=torch.int8)}))
    assert "quantised" in refusal(checkpoints / "lm")


def test_rotary_frequencies_of_older_checkpoints_are_ignored(checkpoints: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    rewrite(checkpoints / "lm", lambda tensors: tensors.update(extra))
    shape, source = open_weights(ModelConfig(checkpoint=checkpoints / "lm"), "lm")
    assert check_source(shape, source, "lm") == []


def test_an_actor_needs_a_language_model_head(checkpoints: Path) -> None:
    assert "*ForCausalLM" in refusal(checkpoints / "scalar")
    rewrite(checkpoints / "lm", lambda tensors: tensors.pop("lm_head.weight"))
    assert "lm_head.weight is missing" in refusal(checkpoints / "lm")


def test_tied_checkpoints_lack_the_head(checkpoints: Path) -> None:
    shape, source = open_weights(ModelConfig(checkpoint=checkpoints / "tied"), "lm")
    assert "lm_head.weight" not in source.names() and shape.tied_embeddings


def test_a_causal_lm_becomes_a_reward_model_only_on_request(checkpoints: Path) -> None:
    message = refusal(checkpoints / "lm", "scalar")
    assert "fresh_head: true" in message and "score.weight" in message

    def head(seed: int) -> torch.Tensor:
        config = ModelConfig(checkpoint=checkpoints / "lm", fresh_head=True, init_seed=seed)
        shape, source = open_weights(config, "scalar")
        assert check_source(shape, source, "scalar") == [] and "lm_head.weight" not in source.names()
        return source.read("score.weight", (slice(0, 1), slice(0, 32)))

    assert torch.equal(head(1), head(1)) and not torch.equal(head(1), head(2))


def test_fresh_head_keeps_the_body_and_a_head_that_is_there(checkpoints: Path) -> None:
    stored = load_file(checkpoints / "lm" / "model.safetensors")
    _, source = open_weights(ModelConfig(checkpoint=checkpoints / "lm", fresh_head=True), "scalar")
    assert torch.equal(source.read(NORM, (slice(0, 32),)), stored[NORM])
    stored = load_file(checkpoints / "scalar" / "model.safetensors")
    _, source = open_weights(ModelConfig(checkpoint=checkpoints / "scalar", fresh_head=True), "scalar")
    assert torch.equal(source.read("score.weight", (slice(0, 1), slice(0, 32))), stored["score.weight"])


def test_a_classifier_of_several_labels_is_no_reward_model(checkpoints: Path) -> None:
    rewrite(checkpoints / "scalar", lambda tensors: tensors.update({"score.weight": torch.ones(2, 32)}))
    message = refusal(checkpoints / "scalar", "scalar")
    assert "[2, 32]" in message and "num_labels 1" in message


def both_refuse(directory: Path, head: Head, **config: object) -> str:
    """What the loading says; `oppo validate` and what starts a run must have said it before, from the headers."""
    model = {"checkpoint": directory, **config}
    early = "\n".join(
        service_problems(ServeConfig.model_validate({"reward": model}))
        if head == "scalar"
        else supervised_problems(
            SFTConfig.model_validate(
                {"run_dir": "run", "model": model, "max_tokens": 8, "data": {"path": "."}, "tokenizer": {"path": "."}}
            )
        )
    )
    late = refusal(directory, head, **config)
    assert "do not fit" in early
    for sentence in re.findall(r"  - (.*)", late)[:3]:
        assert sentence in early
    return late


def tensor(name: str, size: int = 32, dtype: torch.dtype = torch.float32) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({name: torch.ones(size).to(dtype)})


DROPPED = {
    "an extra layer": (tensor("model.layers.9.input_layernorm.weight"), "config.json that belongs"),
    "a bias of the MLP": (tensor("model.layers.0.mlp.up_proj.bias"), "no bias is computed"),
    "a bias of the output": (tensor("model.layers.0.self_attn.o_proj.bias"), "no bias is computed"),
    "a bias of the head": (tensor("lm_head.bias"), "no bias is computed"),
    "norms of queries": (tensor("model.layers.0.self_attn.q_norm.weight"), "config.json that belongs"),
    "a value head": (tensor("v_head.summary.weight"), "value head"),
    "adapters": (tensor("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"), "merge_and_unload"),
    "adapters beside": (tensor("model.layers.0.self_attn.q_proj.lora_B.default.weight"), "merge_and_unload"),
    "scales of FP8": (tensor("model.layers.0.mlp.up_proj.weight_scale_inv"), "quantised"),
    "scales of GPTQ": (tensor("model.layers.0.mlp.up_proj.scales"), "quantised"),
    "scales of bitsandbytes": (tensor("model.layers.0.mlp.up_proj.weight.absmax"), "quantised"),
    "layers of prediction": (tensor("mtp.layers.0.weight"), "has no place"),
    "another vocabulary": (lambda tensors: tensors.update({"lm_head.weight": torch.ones(63, 32)}), "asks for [64, 32]"),
    "another type": (tensor(NORM, dtype=torch.float8_e4m3fn), "not stored as one of"),
    "a tensor less": (lambda tensors: tensors.pop(NORM), "is missing"),
}


@pytest.mark.parametrize("name", DROPPED)
def test_no_tensor_is_dropped_unnoticed(checkpoints: Path, name: str) -> None:
    change, says = DROPPED[name]
    rewrite(checkpoints / "lm", change)
    assert says in both_refuse(checkpoints / "lm", "lm")


@pytest.mark.parametrize(
    "change", [{"hidden_size": 64}, {"num_hidden_layers": 3}, {"num_hidden_layers": 5}, {"vocab_size": 65}]
)
def test_another_config_is_found_from_the_headers(checkpoints: Path, change: dict[str, int]) -> None:
    for folder, head in (("lm", "lm"), ("sharded", "lm"), ("scalar", "scalar")):
        path = checkpoints / folder / "config.json"
        content = json.loads(path.read_text()) | change
        content["layer_types"] = ["full_attention"] * content["num_hidden_layers"]
        path.write_text(json.dumps(content))
        both_refuse(checkpoints / folder, head)


def test_a_score_bias_is_not_dropped(checkpoints: Path) -> None:
    rewrite(checkpoints / "scalar", tensor("score.bias", 1))
    assert "no bias is computed" in both_refuse(checkpoints / "scalar", "scalar")


@pytest.mark.parametrize("extra", ["rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached"])
def test_tensors_that_follow_from_others_are_ignored(checkpoints: Path, extra: str) -> None:
    rewrite(checkpoints / "lm", tensor(f"model.layers.0.self_attn.{extra}", 2))
    open_weights(ModelConfig(checkpoint=checkpoints / "lm"), "lm")
    rewrite(checkpoints / "scalar", lambda tensors: tensors.update({"lm_head.weight": torch.ones(64, 32)}))
    open_weights(ModelConfig(checkpoint=checkpoints / "scalar"), "scalar")


def test_a_head_beside_tied_embeddings(checkpoints: Path) -> None:
    """As transformers: one that equals them is the same; another one is used by it, and so must not be dropped."""
    folder, tokens = checkpoints / "tied", torch.arange(6)[None]
    logits = AutoModelForCausalLM.from_pretrained(folder)(tokens).logits
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    shape, _ = open_weights(ModelConfig(checkpoint=folder), "lm")
    assert shape.tied_embeddings and torch.equal(AutoModelForCausalLM.from_pretrained(folder)(tokens).logits, logits)
    rewrite(folder, lambda tensors: tensors["lm_head.weight"][-1].add_(1.0))
    assert not torch.equal(AutoModelForCausalLM.from_pretrained(folder)(tokens).logits, logits)
    assert "set tie_word_embeddings to false" in both_refuse(folder, "lm")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": False}))
    shape, source = open_weights(ModelConfig(checkpoint=folder), "lm")
    assert not shape.tied_embeddings and "lm_head.weight" in source.names()


def test_adapters_are_found_unfit_from_the_headers(checkpoints: Path, tmp_path: Path) -> None:
    shape, _ = open_weights(ModelConfig(checkpoint=checkpoints / "lm"), "lm")
    lora = LoraConfig(rank=2, adapter=tmp_path)
    parts = adapter_parts(shape, lora, "lm")
    tensors = {part.hf_name: torch.ones(part.hf_shape) for part in parts}
    (tmp_path / "adapter_config.json").write_text(json.dumps(peft_config(lora, "lm", None)))
    for change in ({parts[0].hf_name: torch.ones(3, 32)}, {parts[0].hf_name + ".more": torch.ones(1)}):
        save_file(tensors | change, tmp_path / "adapter_model.safetensors")
        with pytest.raises(CheckpointError, match="the adapters do not fit"):
            open_adapters(tmp_path, shape, lora, "lm")
        config = {"run_dir": "run", "max_tokens": 8, "data": {"path": "."}, "tokenizer": {"path": "."}}
        config["model"] = {"checkpoint": checkpoints / "lm", "lora": {"rank": 2, "adapter": tmp_path}}
        assert any("do not fit" in each for each in supervised_problems(SFTConfig.model_validate(config)))


def test_random_start_from_a_mapping_and_from_a_file(tmp_path: Path) -> None:
    hf = tiny_config("qwen3").to_dict()
    path = tmp_path / "config.json"
    path.write_text(json.dumps(hf))
    for init in (hf, path):
        shape, source = open_weights(ModelConfig(init=init), "scalar")
        assert isinstance(source, RandomSource) and set(source.names()) == set(hf_tensors(shape, "scalar"))
    with pytest.raises(ConfigError, match="neither checkpoint nor init"):
        open_weights(ModelConfig(), "lm")


def test_shape_is_read_from_the_directory(checkpoints: Path) -> None:
    shape = read_shape(checkpoints / "lm")
    assert (shape.family, shape.num_layers, shape.num_kv_heads, shape.qkv_bias) == ("qwen2", 4, 4, True)

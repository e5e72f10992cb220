"""Checkpoints that cannot be used are refused with the value met, the rule and the remedy, before a tensor is read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from oppo_megatron.config.model import ModelConfig
from oppo_megatron.errors import CheckpointError, ConfigError
from oppo_megatron.mcore.naming.hf_layout import Head, hf_tensors
from oppo_megatron.mcore.weights.hf_source import (
    RandomSource,
    SafetensorsSource,
    check_source,
    open_weights,
    read_shape,
)
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
    assert path.name in message and "truncated" in message and "download it again" in message


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

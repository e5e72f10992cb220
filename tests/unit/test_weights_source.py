"""Checkpoints that cannot be used are refused with the value met, the rule and the remedy, before a tensor is read."""

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
from oppo_megatron.layout.hf_layout import Head, adapter_parts, hf_tensors
from oppo_megatron.mcore.weights.hf_source import RandomSource, SafetensorsSource, open_weights, read_shape
from oppo_megatron.mcore.weights.hf_weights import open_adapters
from oppo_megatron.mcore.weights.hf_writer import peft_config
from oppo_megatron.preflight.validate import service_problems, supervised_problems
from tests.support.hf import save_tiny, tiny_config

NORM = "model.layers.1.input_layernorm.weight"
JOINED = "model.layers.1.self_attn.qkv_proj.weight"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """lm (one file), sharded, scalar and tied checkpoints, and one with joined projections."""
    root = tmp_path_factory.mktemp("hf")
    save_tiny(root / "lm", "qwen2")
    save_tiny(root / "sharded", "qwen2", max_shard_size="20KB")
    save_tiny(root / "scalar", "qwen2", "scalar")
    save_tiny(root / "tied", "qwen2", tie_word_embeddings=True)
    save_tiny(root / "joined", "phi3")
    return root


@pytest.fixture
def checkpoints(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals, tmp_path / "hf"))


def refusal(directory: Path, head: Head = "lm") -> str:
    with pytest.raises(CheckpointError) as error:
        open_weights(ModelConfig(checkpoint=directory), head)
    return str(error.value)


def rewrite(directory: Path, change) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_sharded_and_single_files_hold_the_same(checkpoints: Path) -> None:
    assert len(list((checkpoints / "sharded").glob("*.safetensors"))) > 3
    one, many = SafetensorsSource(checkpoints / "lm"), SafetensorsSource(checkpoints / "sharded")
    assert set(one.tensors) == set(many.tensors)
    for name in one.tensors:
        whole = tuple(slice(0, n) for n in one.tensors[name].shape)
        assert torch.equal(one.read(name, whole), many.read(name, whole))
    name, tensors = "model.layers.0.mlp.down_proj.weight", load_file(checkpoints / "lm" / "model.safetensors")
    assert torch.equal(one.read(name, (slice(0, 32), slice(12, 24))), tensors[name][:, 12:24]), "a region"


def tensor(name: str, size: int = 32, dtype: torch.dtype = torch.float32) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({name: torch.ones(size).to(dtype)})


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def shard(folder: Path, number: int = 1) -> Path:
    return sorted(folder.glob("*.safetensors"))[number]


def moved_in_the_index(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    places = json.loads(path.read_text())["weight_map"]
    edit(path, weight_map=places | {NORM: min({*places.values()} - {places[NORM]})})


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123456789\n"
REFUSED: dict[str, tuple[str, Head, Callable[[Path], object], list[str]]] = {
    "no config": ("lm", "lm", lambda d: (d / "config.json").unlink(), ["config.json"]),
    "a broken config": ("lm", "lm", lambda d: (d / "config.json").write_text("{broken"), ["fetch or save it again"]),
    "a list as config": ("lm", "lm", lambda d: (d / "config.json").write_text("[1, 2]"), ["fetch or save it again"]),
    "pickled weights": ("lm", "lm", lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"),
        ["pytorch_model.bin", "save_pretrained"]),
    "no weights": ("lm", "lm", lambda d: (d / "model.safetensors").unlink(), ["neither model.safetensors nor", "config.json"]),
    "a missing shard": ("sharded", "lm", lambda d: shard(d).unlink(), ["model-00002-of-"]),
    "an index of another shard": ("sharded", "lm", moved_in_the_index, [NORM, "model-00001-of-"]),
    "a pointer of git-lfs": ("lm", "lm", lambda d: (d / "model.safetensors").write_text(LFS), ["git-lfs"]),
    "a missing tensor": ("lm", "lm", lambda d: rewrite(d, lambda tensors: tensors.pop(NORM)),
        [f"{NORM} is missing", "Nearest names: model.layers."]),
    "another shape": ("lm", "lm", lambda d: rewrite(d, tensor(NORM, 31)), [f"{NORM} has shape [31], config.json asks for [32]"]),
    "a joined projection of another shape": ("joined", "lm",
        lambda d: rewrite(d, lambda tensors: tensors.update({JOINED: torch.ones(3, 32)})),
        [f"{JOINED} has shape [3, 32], config.json asks for [64, 32]"]),
    "no joined projection": ("joined", "lm", lambda d: rewrite(d, lambda tensors: tensors.pop(JOINED)), [f"{JOINED} is missing"]),
    "another config": ("lm", "lm", lambda d: edit(d / "config.json", intermediate_size=64),
        ["[48, 32], config.json asks for [64, 32]", "and 4 more"]),
    "a layer too many": ("lm", "lm", lambda d: edit(d / "config.json", num_hidden_layers=3, layer_types=["full_attention"] * 3),
        ["model.layers.3.input_layernorm.weight has no place"]),
    "quantised weights": ("lm", "lm", lambda d: rewrite(d, tensor(NORM, dtype=torch.int8)), ["quantised"]),
    "a scalar head for an actor": ("scalar", "lm", lambda d: None, ["*ForCausalLM"]),
    "no head": ("lm", "lm", lambda d: rewrite(d, lambda tensors: tensors.pop("lm_head.weight")), ["lm_head.weight is missing"]),
    "no scalar head": ("lm", "scalar", lambda d: None, ["--fresh-head-seed", "score.weight"]),
    "several labels": ("scalar", "scalar",
        lambda d: rewrite(d, lambda tensors: tensors.update({"score.weight": torch.ones(2, 32)})), ["[2, 32]", "num_labels 1"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_damaged_or_other_checkpoint_is_refused(checkpoints: Path, name: str) -> None:
    folder, head, damage, says = REFUSED[name]
    damage(checkpoints / folder)
    message = refusal(checkpoints / folder, head)
    assert all(words in message for words in says), message


def test_a_path_without_a_directory_and_a_damaged_index_are_refused(checkpoints: Path) -> None:
    message = refusal(checkpoints / "nowhere")
    assert "nowhere does not exist" in message and "correct the path" in message
    assert "is a file" in refusal(checkpoints / "lm" / "config.json")
    for text in ("{}", '{"weight_map": {}}', '{"weight_map": [1]}', '{"weight_map": {"a": 3}}', "nonsense"):
        (checkpoints / "sharded" / "model.safetensors.index.json").write_text(text)
        assert "model.safetensors.index.json" in refusal(checkpoints / "sharded")


@pytest.mark.parametrize("keep", [0, 5, 40, -1])
@pytest.mark.parametrize("which", ["lm", "sharded"])
def test_truncated_file(checkpoints: Path, which: str, keep: int) -> None:
    path = shard(checkpoints / which, -1)
    path.write_bytes(path.read_bytes()[:keep])
    message = refusal(checkpoints / which)
    assert path.name in message and "truncated" in message and "fetch or save it again" in message


def test_the_shape_is_the_directory_s_and_tied_checkpoints_lack_the_head(checkpoints: Path) -> None:
    shape, source = open_weights(ModelConfig(checkpoint=checkpoints / "tied"), "lm")
    assert "lm_head.weight" not in source.tensors and shape.tied_embeddings
    shape = read_shape(checkpoints / "lm")
    assert (shape.family, shape.num_layers, shape.num_kv_heads, shape.traits.qkv_bias) == ("qwen2", 4, 4, True)


def test_a_fresh_head_keeps_the_body_and_a_head_that_is_there(checkpoints: Path) -> None:
    def opened(folder: str, seed: int = 0) -> SafetensorsSource:
        return open_weights(ModelConfig(checkpoint=checkpoints / folder), "scalar", seed=seed, fresh_head=True)[1]

    def head(source: SafetensorsSource) -> torch.Tensor:
        assert "lm_head.weight" not in source.tensors
        return source.read("score.weight", (slice(0, 1), slice(0, 32)))

    assert torch.equal(head(opened("lm", 1)), head(opened("lm", 1)))
    assert not torch.equal(head(opened("lm", 1)), head(opened("lm", 2)))
    stored, scored = (load_file(checkpoints / folder / "model.safetensors") for folder in ("lm", "scalar"))
    assert torch.equal(opened("lm").read(NORM, (slice(0, 32),)), stored[NORM])
    assert torch.equal(head(opened("scalar")), scored["score.weight"])


def early_problems(model: dict[str, object], head: Head = "lm") -> str:
    """What `oppo validate` and a start say from the headers."""
    if head == "scalar":
        return "\n".join(service_problems(ServeConfig(reward=model)))
    here = {"path": "."}
    return "\n".join(supervised_problems(SFTConfig(run_dir="run", model=model, max_tokens=8, data=here, tokenizer=here)))


def both_refuse(directory: Path, head: Head) -> str:
    """The loading's message, which must have been said before."""
    early, late = early_problems({"checkpoint": directory}, head), refusal(directory, head)
    assert "do not fit" in early and all(sentence in early for sentence in re.findall(r"  - (.*)", late)[:3])
    return late


DROPPED = {
    "an extra layer": (tensor("model.layers.9.input_layernorm.weight"), "config.json that belongs"),
    "a bias of the MLP": (tensor("model.layers.0.mlp.up_proj.bias"), "Only biases of Qwen2"),
    "a bias of the output": (tensor("model.layers.0.self_attn.o_proj.bias"), "Only biases of Qwen2"),
    "a bias of the head": (tensor("lm_head.bias"), "Only biases of Qwen2"),
    "a bias of the score": (tensor("score.bias", 1), "Only biases of Qwen2"),
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
    folder = "scalar" if name == "a bias of the score" else "lm"
    rewrite(checkpoints / folder, change)
    assert says in both_refuse(checkpoints / folder, folder)


@pytest.mark.parametrize("change", [{"hidden_size": 64}, {"num_hidden_layers": 3}, {"num_hidden_layers": 5}, {"vocab_size": 65}])
def test_another_config_is_found_from_the_headers(checkpoints: Path, change: dict[str, int]) -> None:
    for folder, head in (("lm", "lm"), ("sharded", "lm"), ("scalar", "scalar")):
        edit(checkpoints / folder / "config.json", **change, layer_types=["full_attention"] * change.get("num_hidden_layers", 4))
        both_refuse(checkpoints / folder, head)


@pytest.mark.parametrize("extra", ["rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached"])
def test_tensors_that_follow_from_others_are_ignored(checkpoints: Path, extra: str) -> None:
    rewrite(checkpoints / "lm", tensor(f"model.layers.0.self_attn.{extra}", 2))
    shape, source = open_weights(ModelConfig(checkpoint=checkpoints / "lm"), "lm")
    rewrite(checkpoints / "scalar", lambda tensors: tensors.update({"lm_head.weight": torch.ones(64, 32)}))
    open_weights(ModelConfig(checkpoint=checkpoints / "scalar"), "scalar")


def test_a_head_beside_tied_embeddings(checkpoints: Path) -> None:
    """A head that equals them is the same as in transformers; another one is used, and so must not be dropped."""
    folder, tokens = checkpoints / "tied", torch.arange(6)[None]

    def differs() -> bool:
        return not torch.allclose(AutoModelForCausalLM.from_pretrained(folder)(tokens).logits, logits, rtol=0, atol=1e-5)

    logits = AutoModelForCausalLM.from_pretrained(folder)(tokens).logits
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    shape, _ = open_weights(ModelConfig(checkpoint=folder), "lm")
    assert shape.tied_embeddings and not differs()
    rewrite(folder, lambda tensors: tensors["lm_head.weight"][-1].add_(1.0))
    assert differs()
    assert "set tie_word_embeddings to false" in both_refuse(folder, "lm")
    edit(folder / "config.json", tie_word_embeddings=False)
    shape, source = open_weights(ModelConfig(checkpoint=folder), "lm")
    assert not shape.tied_embeddings and "lm_head.weight" in source.tensors


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
        assert "do not fit" in early_problems({"checkpoint": checkpoints / "lm", "lora": {"rank": 2, "adapter": tmp_path}})


def test_random_start_from_a_mapping_and_from_a_file(tmp_path: Path) -> None:
    hf = tiny_config("qwen3").to_dict()
    path = tmp_path / "config.json"
    path.write_text(json.dumps(hf))
    for init in (hf, path):
        shape, source = open_weights(ModelConfig(init=init), "scalar")
        assert isinstance(source, RandomSource) and set(source.tensors) == set(hf_tensors(shape, "scalar"))
    with pytest.raises(ConfigError, match="neither checkpoint nor init"):
        open_weights(ModelConfig(), "lm")

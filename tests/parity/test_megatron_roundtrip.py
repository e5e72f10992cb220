"""Hugging Face <-> Megatron torch_dist keeps every bit, against megatron-core's own reader and writer, on any layout."""

import io
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as torch_checkpoint

from oppo_megatron.config.model import ModelConfig
from oppo_megatron.errors import CheckpointError
from oppo_megatron.integrations import huggingface
from oppo_megatron.integrations.huggingface import Conversion, compare_weights
from oppo_megatron.mcore.weights.dist_source import read_plain_index, reason_of
from oppo_megatron.mcore.weights.hf_source import open_weights
from tests.parity.test_hf_roundtrip import assert_same_tensors
from tests.support.checkpoint_mutations import Evil
from tests.support.hf import convert, save_tiny
from tests.support.ranks import run_ranks

MODELS = {
    "qwen2-tied": ("qwen2", "lm", {"tie_word_embeddings": True}), "llama": ("llama", "lm", {}), "qwen3": ("qwen3", "lm", {}),
    "llama-reward": ("llama", "scalar", {}), "mistral": ("mistral", "lm", {"sliding_window": 8}),
    "qwen3-moe": ("qwen3_moe", "lm", {}), "gpt-oss": ("gpt_oss", "lm", {}),
}  # fmt: skip
AS = {"lm": "causal-lm", "scalar": "reward"}


@pytest.mark.parametrize(
    "name,tp,pp",
    [
        ("qwen2-tied", 1, 2),
        ("llama", 2, 2),
        ("qwen3", 2, 1),
        ("llama-reward", 1, 2),
        ("mistral", 2, 1),
        ("qwen3-moe", 2, 2),
        ("gpt-oss", 2, 1),
    ],
)
def test_megatron_core_loads_what_convert_writes(tmp_path: Path, name: str, tp: int, pp: int) -> None:
    family, head, changes = MODELS[name]
    save_tiny(tmp_path / "hf", family, head, **changes)
    flags = ["--to", "megatron", "--as", AS[head]]
    assert convert(tmp_path / "hf", tmp_path / "dist", *flags) == 0
    assert convert(tmp_path / "hf", tmp_path / "other", *flags, "--config", tmp_path / "hf" / "config.json") == 2
    run_ranks(
        tp * pp, "tests.parity.megatron_jobs:load_by_megatron", hf=str(tmp_path / "hf"), src=str(tmp_path / "dist"),
        dst=str(tmp_path / "back"), tp=tp, pp=pp, head=head, prefix="",
    )  # fmt: skip
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")


@pytest.mark.parametrize("to", ["megatron", "nemo"])
def test_check_compares_all_tensors_both_ways(tmp_path: Path, to: str, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny(tmp_path / "hf", "llama", "lm")
    assert convert(tmp_path / "hf", tmp_path / "dist", "--to", to, "--check") == 0
    assert convert(tmp_path / "dist", tmp_path / "back", "--check") == 0
    assert convert(tmp_path / "dist", tmp_path / "again", "--to", "megatron", "--check") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "largest difference of " in line]
    assert len(lines) == 3 and all("tensors between" in line and line.endswith("read back: 0") for line in lines)
    assert convert(tmp_path / "hf", tmp_path / "half", "--to", to, "--check", "--dtype", "bfloat16") == 0
    assert 0 < float(capsys.readouterr().out.rsplit(" ", 1)[1]) < 1e-2
    assert convert(tmp_path / "hf", tmp_path / "rm", "--to", to, "--as", "reward", "--fresh-head-seed", "3", "--check") == 0
    assert capsys.readouterr().out.rstrip().endswith("read back: 0")


def test_check_sees_another_tensor(tmp_path: Path) -> None:
    save_tiny(tmp_path / "b", "llama", "lm")
    shutil.copytree(tmp_path / "b", tmp_path / "a")
    tensors = load_file(tmp_path / "a/model.safetensors")
    tensors["model.norm.weight"][0] += 0.5
    save_file(tensors, tmp_path / "a/model.safetensors", metadata={"format": "pt"})
    assert convert(tmp_path / "b", tmp_path / "dist", "--to", "megatron") == 0
    assert compare_weights(tmp_path / "b", tmp_path / "dist", Conversion("lm"))[1] == 0
    assert compare_weights(tmp_path / "a", tmp_path / "dist", Conversion("lm"))[1] == pytest.approx(0.5)


def test_a_piece_that_would_run_code_is_refused_without_torchs_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """torch's own message says how to run it: set `weights_only` to False."""
    save_tiny(tmp_path / "hf", "llama", "lm")
    assert convert(tmp_path / "hf", tmp_path / "dist", "--to", "megatron") == 0
    for info in read_plain_index(tmp_path / "dist" / ".metadata").storage_data.values():
        with (tmp_path / "dist" / info.relative_path).open("r+b") as file:
            file.seek(info.offset)
            file.write(f"cposix\nsystem\n(S'touch {tmp_path}/ran'\ntR.".encode())
    capsys.readouterr()
    assert convert(tmp_path / "dist", tmp_path / "back") == 2
    said = capsys.readouterr().err
    assert "it names posix.system" in said and "do not load it with weights_only=False" in said
    assert "Re-running" not in said and not (tmp_path / "ran").exists()


def test_reasons_of_torchs_readers() -> None:
    for content in (b"\x80\x02garbage", b"cposix\nsystem\n(S'true'\ntR.", b""):
        with pytest.raises(Exception) as caught:
            torch.load(io.BytesIO(content), weights_only=True)
        reason = reason_of(caught.value)
        assert reason and "\n" not in reason and "set to" not in reason and "likely succeed" not in reason
        assert ("do not load it" in reason) == (content != b"")


@pytest.mark.parametrize("name,tp,pp,prefix,per_layer", [
    ("qwen2-tied", 1, 2, "", False), ("llama", 2, 2, "model.", False), ("qwen3", 2, 1, "module.", True),
    ("llama-reward", 1, 2, "", True), ("gpt-oss", 2, 2, "", False),
])  # fmt: skip
def test_convert_reads_what_megatron_saves(tmp_path: Path, name: str, tp: int, pp: int, prefix: str, per_layer: bool) -> None:
    family, head, changes = MODELS[name]
    save_tiny(tmp_path / "hf", family, head, **changes)
    saved = tmp_path / "lm" / "iter_0000010"
    run_ranks(
        tp * pp, "tests.parity.megatron_jobs:save_by_megatron", src=str(tmp_path / "hf"), dst=str(saved), tp=tp, pp=pp,
        head=head, prefix=prefix, per_layer=per_layer,
    )  # fmt: skip
    (tmp_path / "lm" / "latest_checkpointed_iteration.txt").write_text("10\n")
    flags = ["--as", AS[head], "--config", tmp_path / "hf" / "config.json"]
    assert convert(tmp_path / "lm", tmp_path / "back", *flags) == 0
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")


@pytest.mark.parametrize("name", ["qwen2-tied", "llama-reward", "mistral"])
def test_nemo_aligner_naming_and_back(tmp_path: Path, name: str) -> None:
    family, head, changes = MODELS[name]
    save_tiny(tmp_path / "hf", family, head, **changes)
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    assert convert(tmp_path / "hf", tmp_path / "nemo", "--to", "nemo", "--as", AS[head]) == 0
    index = torch_checkpoint.FileSystemReader(tmp_path / "nemo" / "model_weights").read_metadata().state_dict_metadata
    assert all(key.startswith("model.") for key in index)
    assert ("model.rm_head.weight" in index) == (head == "scalar")
    assert ("model.output_layer.weight" in index) == (not changes.get("tie_word_embeddings", False))
    assert index["model.decoder.layers.mlp.linear_fc1.weight"].size == (4, 96, 32)
    config = yaml.safe_load((tmp_path / "nemo" / "model_config.yaml").read_text())
    assert config["num_layers"] == 4 and config["num_query_groups"] == 4 and config["qkv_bias"] == (family == "qwen2")
    assert config.get("window_size") == ([7, 0] if name == "mistral" else None), "positions before a token's own, and behind"
    assert Path(config["tokenizer"]["type"], "tokenizer.json").is_file()
    assert convert(tmp_path / "nemo", tmp_path / "back", "--as", AS[head]) == 0
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")
    given, back = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "back"))
    assert all(back.get(key) == given.get(key) for key in ("model_type", "sliding_window"))


def test_windows_in_some_layers_only_are_none_of_nemos(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny(tmp_path / "hf", "qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=2)
    assert convert(tmp_path / "hf", tmp_path / "nemo", "--to", "nemo", "--as", "causal-lm") == 2
    assert "sliding window in some of its layers" in capsys.readouterr().err
    assert convert(tmp_path / "hf", tmp_path / "dist", "--to", "megatron", "--as", "causal-lm") == 0
    assert json.loads((tmp_path / "dist" / "config.json").read_text())["sliding_window"] == 8


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("dist")
    save_tiny(root / "hf", "llama")
    assert convert(root / "hf", root / "dist", "--to", "megatron") == 0
    return root / "dist"


@pytest.fixture
def dist(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "dist"))


def refusal(directory: Path, head: str = "lm") -> str:
    with pytest.raises(CheckpointError) as error:
        open_weights(ModelConfig(checkpoint=directory), head)
    return str(error.value)


def test_a_role_starts_from_it_and_a_fresh_head_is_drawn(dist: Path) -> None:
    _, source = open_weights(ModelConfig(checkpoint=dist), "scalar", fresh_head=True)
    assert source.tensors["score.weight"].shape == (1, 32) and "--fresh-head-seed" in refusal(dist, "scalar")


def test_rows_that_pad_the_vocabulary_are_left_out(dist: Path, tmp_path: Path) -> None:
    tensors = _tensors(dist)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        tensors[name] = torch.cat([tensors[name], torch.full((64, 32), 7.0)])
    _save(tensors, dist)
    assert convert(dist, tmp_path / "back") == 0
    save_tiny(tmp_path / "hf", "llama")
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")


@pytest.mark.parametrize(("change", "said"), [
    ({"intermediate_size": 40}, "mlp.linear_fc2.weight (layer 0) has shape [32, 48], config.json asks for [32, 40]"),
    ({"num_hidden_layers": 3}, "mlp.linear_fc1.weight holds 4 layers, config.json asks for 3"),
    ({"num_hidden_layers": 5}, "mlp.linear_fc1.weight holds 4 layers, config.json asks for 5"),
    ({"tie_word_embeddings": True}, "output_layer.weight has no place"),
])  # fmt: skip
def test_another_config_is_refused(dist: Path, change: dict[str, object], said: str) -> None:
    (dist / "config.json").write_text(json.dumps(json.loads((dist / "config.json").read_text()) | change))
    message = refusal(dist)
    assert said in message and (" layer " not in message or "num_hidden_layers" not in change)
    assert "tie_word_embeddings" in message or "tie_word_embeddings" not in change


def test_a_tensor_of_no_place_is_named(dist: Path) -> None:
    tensors = _tensors(dist)
    _save(tensors | {"decoder.layers.mlp.router.weight": torch.zeros(4, 8, 32)}, dist)
    assert "decoder.layers.mlp.router.weight has no place" in refusal(dist)
    _save(tensors | {"rm_head.weight": torch.ones(1, 32), "rm_head.bias": torch.full((1,), 0.5)}, dist)
    assert "bias of its scalar head is 0.5" in refusal(dist, "scalar")


@pytest.mark.parametrize("damage,said", [
    (lambda d: (d / "config.json").unlink(), "Copy the Hugging Face config.json"),
    (lambda d: (d / ".metadata").unlink(), "no index"), (lambda d: (d / "metadata.json").unlink(), "no metadata.json"),
    (lambda d: (d / "metadata.json").write_text('{"sharded_backend": "zarr"}'), "torch_dist alone"),
    (lambda d: (d / "metadata.json").write_text("[]"), "not a JSON object"),
    (lambda d: next(d.glob("*.distcp")).unlink(), "which is not a file in its folder"),
    (lambda d: (d / ".metadata").write_bytes(b"\x80\x04"), "not an index of weights"),
])  # fmt: skip
def test_what_is_not_whole_is_refused(dist: Path, damage, said: str) -> None:
    damage(dist)
    assert said in refusal(dist)


def test_no_pickle_is_let_run(dist: Path, tmp_path: Path) -> None:
    import pickle

    for evil in (Evil(str(tmp_path / "canary")), {"state_dict_metadata": Evil(str(tmp_path / "canary"))}):
        (dist / ".metadata").write_bytes(pickle.dumps(evil))
        assert "has no place in it" in refusal(dist)
    assert not (tmp_path / "canary").exists()


def test_a_damaged_piece_is_named(dist: Path, tmp_path: Path) -> None:
    file = next(dist.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match="cannot be read"):
        huggingface.convert(dist, tmp_path / "back", Conversion("lm"))
    assert not (tmp_path / "back").exists()


def test_folders_of_other_writers(dist: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "latest_checkpointed_iteration.txt").write_text("10")
    assert "iter_0000010, which holds no torch_dist" in refusal(root)
    (root / "iter_0000010" / "mp_rank_00").mkdir(parents=True)
    assert "--ckpt-convert-format torch_dist" in refusal(root)
    (root / "latest_checkpointed_iteration.txt").write_text("../../etc")
    assert "must name an iteration" in refusal(root)
    (root / "latest_checkpointed_iteration.txt").write_text("release")
    shutil.move(dist, root / "release")
    open_weights(ModelConfig(checkpoint=root), "lm")


def _tensors(dist: Path) -> dict[str, torch.Tensor]:
    index = torch_checkpoint.FileSystemReader(dist).read_metadata().state_dict_metadata
    tensors = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in index.items()}
    torch_checkpoint.load(tensors, checkpoint_id=dist, no_dist=True)
    return tensors


def _save(tensors: dict[str, torch.Tensor], dist: Path) -> None:
    for path in [*dist.glob("*.distcp"), dist / ".metadata"]:
        path.unlink()
    torch_checkpoint.save(tensors, checkpoint_id=dist, no_dist=True)

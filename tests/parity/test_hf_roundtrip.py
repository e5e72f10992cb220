"""Hugging Face -> ours -> Hugging Face keeps every bit, on every layout, and transformers loads what comes out."""

import itertools
import json
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from oppo_megatron.clock import ByTime
from oppo_megatron.config.model import ModelConfig
from oppo_megatron.errors import CheckpointError
from oppo_megatron.integrations import huggingface
from oppo_megatron.mcore.weights import hf_writer
from oppo_megatron.mcore.weights.hf_source import open_weights
from oppo_megatron.mcore.weights.hf_weights import rewrite_weights
from tests.support.hf import PHI_LONG, convert, save_tiny, tensors_of, tiny_model
from tests.support.ranks import run_ranks

MODELS = {
    "qwen2": ("qwen2", "lm", {}), "qwen2-tied": ("qwen2", "lm", {"tie_word_embeddings": True}), "llama": ("llama", "lm", {}),
    "qwen3": ("qwen3", "lm", {}), "qwen2-reward": ("qwen2", "scalar", {"tie_word_embeddings": True}),
    "llama-reward": ("llama", "scalar", {}), "mistral": ("mistral", "lm", {"sliding_window": 3}),
    "mixtral": ("mixtral", "lm", {}), "qwen3-moe-reward": ("qwen3_moe", "scalar", {}),
    "mistral-reward": ("mistral", "scalar", {"sliding_window": None}), "phi3": ("phi3", "lm", PHI_LONG),
    "phi3-reward": ("phi3", "scalar", {}), "olmo2": ("olmo2", "lm", {}), "gemma2": ("gemma2", "lm", {}),
    "gemma3-reward": ("gemma3_text", "scalar", {}), "gpt-oss": ("gpt_oss", "lm", {}),
}  # fmt: skip
OWN = ("phi3", "phi3-reward", "olmo2", "gemma2", "gemma3-reward", "gpt-oss")
ODD = {
    f"{name}-odd-vocabulary": (*MODELS[name][:2], MODELS[name][2] | {"vocab_size": 259})
    for name in ("qwen2", "qwen2-tied", "llama-reward")
}
"""A row of embedding and output layer for each of 259 tokens, which tensor ranks do not divide."""
TOKENS = torch.tensor([[5, 9, 1, 63, 2, 40]])


def assert_same_tensors(src: Path, dst: Path) -> None:
    expected, found = tensors_of(src), tensors_of(dst)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == found[name].dtype and torch.equal(tensor, found[name]), name


def assert_alike(src: Path, dst: Path, head: str = "lm") -> None:
    """By transformers' outputs, which rounding may change: the same tensors begin elsewhere in memory."""
    torch.testing.assert_close(outputs(src, head), outputs(dst, head), rtol=0, atol=1e-5)


def found_by_check(said: str) -> float:
    """The difference that `oppo convert --check` prints."""
    return float(said.rstrip().rpartition("in transformers: ")[2])


def outputs(directory: Path, head: str = "lm") -> torch.Tensor:
    loader = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    model, report = loader.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    with torch.no_grad():
        return model.eval()(TOKENS).logits


@pytest.mark.parametrize("name,tp,pp", [
    *(pytest.param(*each, marks=[pytest.mark.long] if each[0] in OWN and each[1] * each[2] < 4 else [])
      for each in itertools.product(MODELS, (1, 2), (1, 2))), ("qwen2-odd-vocabulary", 4, 1), ("qwen2-tied-odd-vocabulary", 2, 2),
    ("llama-reward-odd-vocabulary", 2, 1),
])  # fmt: skip
def test_export_gives_back_what_was_loaded(tmp_path: Path, name: str, tp: int, pp: int) -> None:
    family, head, changes = (MODELS | ODD)[name]
    src, dst = tmp_path / "src", tmp_path / "deep" / "dst"
    save_tiny(src, family, head, **changes)
    arguments = {"src": str(src), "dst": str(dst), "tp": tp, "pp": pp, "head": head}
    assert run_ranks(tp * pp, "tests.parity.megatron_jobs:load_and_export", **arguments) == [True] * (tp * pp)
    assert_same_tensors(src, dst)
    assert len(list(dst.glob("model-*-of-*.safetensors"))) > 1
    assert [path.name for path in dst.parent.iterdir()] == ["dst"], "nothing is left aside"
    assert_alike(src, dst, head)
    given, written = (json.loads((folder / "config.json").read_text()) for folder in (src, dst))
    assert all(written[key] == given[key] for key in ("architectures", "model_type", *({"sliding_window"} & given.keys())))


@pytest.mark.parametrize("name", MODELS)
def test_convert_keeps_every_bit_and_the_tokenizer(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    family, head, changes = MODELS[name]
    src, dst = tmp_path / "src", tmp_path / "dst"
    save_tiny(src, family, head, max_shard_size="20KB", **changes)
    (src / "tokenizer.json").write_text("{}")
    target = "causal-lm" if head == "lm" else "reward"
    assert convert(src, dst, "--as", target, "--check") == 0 and found_by_check(capsys.readouterr().out) < 1e-5
    assert_same_tensors(src, dst)
    assert [path.name for path in dst.glob("*.safetensors")] == ["model.safetensors"]
    assert (dst / "tokenizer.json").read_text() == "{}"
    assert_alike(src, dst, head)


def test_experts_in_one_tensor_are_read_and_written_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """transformers 5 reads both forms, older programs only a tensor per expert."""
    model = save_tiny(tmp_path / "apart", "mixtral")
    model.save_pretrained(tmp_path / "joined", save_original_format=False)
    assert any(name.endswith("experts.gate_up_proj") for name in tensors_of(tmp_path / "joined"))
    assert convert(tmp_path / "joined", tmp_path / "back", "--check") == 0 and found_by_check(capsys.readouterr().out) < 1e-5
    assert_same_tensors(tmp_path / "apart", tmp_path / "back")
    tensors = tensors_of(tmp_path / "apart")
    lost = "model.layers.1.block_sparse_moe.experts.3.w3.weight"
    wrong = tensors.pop(lost)
    save_file(tensors, tmp_path / "apart/model.safetensors", metadata={"format": "pt"})
    assert convert(tmp_path / "apart", tmp_path / "none") == 2
    assert f"{lost} is missing" in (said := capsys.readouterr().err) and len(said.splitlines()) < 4
    save_file(tensors | {lost: wrong[1:]}, tmp_path / "apart/model.safetensors", metadata={"format": "pt"})
    assert convert(tmp_path / "apart", tmp_path / "none") == 2
    assert f"{lost} has shape [47, 32], config.json asks for [48, 32]" in capsys.readouterr().err


def test_experts_of_four_bits_are_read_and_written_as_bfloat16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As OpenAI published GPT-OSS: a byte has two numbers, a scale 32.  transformers' own dequantisation is the reference."""
    src, dst, dice = tmp_path / "src", tmp_path / "dst", torch.Generator().manual_seed(4)
    save_tiny(src, "gpt_oss", intermediate_size=64)
    tensors, expected = {}, {}
    for name, tensor in tensors_of(src).items():
        expected[name] = tensors[name] = tensor.bfloat16()
        if tensor.dim() == 3:
            blocks, scales = f"{name}_blocks", f"{name}_scales"
            experts, inputs, outputs_ = tensor.shape
            tensors[blocks] = torch.randint(256, (experts, outputs_, inputs // 32, 16), dtype=torch.uint8, generator=dice)
            tensors[scales] = torch.randint(110, 126, (experts, outputs_, inputs // 32), dtype=torch.uint8, generator=dice)
            expected[name] = convert_moe_packed_tensors(tensors[blocks], tensors[scales])
            del tensors[name]
    save_file(tensors, src / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((src / "config.json").read_text())
    quantised = config | {"quantization_config": {"quant_method": "mxfp4"}}
    (src / "config.json").write_text(json.dumps(quantised))
    assert convert(src, dst) == 0
    found = tensors_of(dst)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    assert "quantization_config" not in json.loads((dst / "config.json").read_text())
    assert outputs(dst).isfinite().all()
    lost = "model.layers.1.mlp.experts.down_proj_scales"
    whole, blocks = (lost.replace("_scales", ending) for ending in ("", "_blocks"))
    save_file(tensors | {whole: expected[whole].contiguous()}, src / "model.safetensors", metadata={"format": "pt"})
    assert convert(src, tmp_path / "none") == 2
    assert f"{lost} has no place in the model of config.json. MXFP4 needs" in (said := capsys.readouterr().err)
    assert f"{blocks} has no place" in said
    del tensors[lost]
    save_file(tensors, src / "model.safetensors", metadata={"format": "pt"})
    assert convert(src, tmp_path / "none") == 2
    assert f"{whole} is missing" in (said := capsys.readouterr().err) and f"{blocks} has no place" in said


def test_convert_changes_the_dtype_and_the_check_sees_it(tmp_path: Path) -> None:
    src, dst = tmp_path / "src", tmp_path / "dst"
    save_tiny(src, "llama")
    assert huggingface.compare_outputs(src, shutil.copytree(src, tmp_path / "same"), "lm", False) == ("logits", 0.0)
    assert convert(src, dst, "--dtype", "bfloat16") == 0
    found = tensors_of(dst)
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in tensors_of(src).items())
    assert AutoModelForCausalLM.from_pretrained(dst).dtype == torch.bfloat16
    assert huggingface.compare_outputs(src, dst, "lm", False)[1] > 1e-4


def test_convert_splits_into_shards_of_the_size_asked(tmp_path: Path) -> None:
    save_tiny(tmp_path / "src", "llama", vocab_size=4096, hidden_size=128)  # 2 MiB embedding and head
    assert convert(tmp_path / "src", tmp_path / "dst", "--max-shard-mb", "3") == 0
    sizes = [path.stat().st_size for path in (tmp_path / "dst").glob("*.safetensors")]
    assert len(sizes) == 2 and max(sizes) < 3.1 * 2**20
    index = json.loads((tmp_path / "dst" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in tensors_of(tmp_path / "src").values())
    assert_alike(tmp_path / "src", tmp_path / "dst")


def test_convert_a_causal_lm_to_a_reward_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    src, dst = tmp_path / "src", tmp_path / "dst"
    save_tiny(src, "qwen2")
    assert convert(src, dst, "--as", "reward") == 2
    assert "--fresh-head-seed" in capsys.readouterr().err and not dst.exists()
    assert convert(src, dst, "--as", "reward", "--fresh-head-seed", "3", "--check") == 0
    assert "hidden states" in (said := capsys.readouterr().out) and found_by_check(said) < 1e-5
    config = json.loads((dst / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForSequenceClassification"] and len(config["id2label"]) == 1
    assert outputs(dst, "scalar").shape == (1, 1)
    with torch.no_grad():
        states = [AutoModel.from_pretrained(path).eval()(TOKENS).last_hidden_state for path in (src, dst)]
        torch.testing.assert_close(*states, rtol=0, atol=1e-5)
    assert convert(dst, tmp_path / "again", "--as", "reward", "--fresh-head-seed", "3") == 2
    assert convert(src, tmp_path / "lm", "--fresh-head-seed", "3") == 2


def test_where_a_conversion_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny(tmp_path / "src", "llama")
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "behind")
    monkeypatch.chdir(tmp_path / "here")
    for to in ("hf", "megatron"):
        assert convert(tmp_path / "src", "/", "--to", to) == 2
        assert "/ exists and is not empty" in capsys.readouterr().err
    assert convert(tmp_path / "src", tmp_path / "link") == 0
    assert (tmp_path / "link").is_symlink() and (tmp_path / "behind" / "config.json").is_file()
    assert convert(tmp_path / "src", ".") == 0 and (tmp_path / "here" / "config.json").is_file()
    assert convert(tmp_path / "absent", tmp_path / "dst", "--config", "config.json") == 2
    assert "absent does not exist" in capsys.readouterr().err


def test_mixed_dtypes_lose_no_bit(tmp_path: Path) -> None:
    model = tiny_model("llama").bfloat16()
    model.model.norm.float()
    model.save_pretrained(tmp_path / "src")
    assert {t.dtype for t in tensors_of(tmp_path / "src").values()} == {torch.bfloat16, torch.float32}
    assert convert(tmp_path / "src", tmp_path / "dst") == 0
    found = tensors_of(tmp_path / "dst")
    assert all(torch.equal(found[name], t.float()) for name, t in tensors_of(tmp_path / "src").items())


def test_an_error_in_writing_leaves_nothing_and_long_writes_tell_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tick of the clock is 1 s: a line every 5 tensors.  A directory with content is never overwritten."""
    dst = tmp_path / "dst"
    save_tiny(tmp_path / "src", "llama")
    shape, source = open_weights(ModelConfig(checkpoint=tmp_path / "src"), "lm")
    read, reads = source.read, []

    def fail_at_the_tenth(name: str, region: tuple[slice, ...]) -> torch.Tensor:
        reads.append(name)
        if len(reads) == 10:
            raise OSError("disk gone")
        return read(name, region)

    source.read = fail_at_the_tenth
    with pytest.raises(OSError, match="disk gone"):
        rewrite_weights(shape, source, dst, head="lm")
    assert [path.name for path in tmp_path.iterdir()] == ["src"]
    source.read, told, seconds = read, list[str](), count()
    monkeypatch.setattr(hf_writer, "by_time", lambda: ByTime(told.append, clock=lambda: float(next(seconds))))
    rewrite_weights(shape, source, dst, head="lm")
    assert told[:2] == [f"{dst}: {n} of {len(source.tensors)} tensors written, {n}s" for n in (5, 10)]
    before = {path.name: path.stat().st_mtime_ns for path in dst.iterdir()}
    with pytest.raises(CheckpointError, match="never overwritten"):
        rewrite_weights(shape, source, dst, head="lm")
    assert {path.name: path.stat().st_mtime_ns for path in dst.iterdir()} == before


def test_what_a_killed_run_left_is_replaced(tmp_path: Path) -> None:
    (tmp_path / ".dst.partial").mkdir()
    (tmp_path / ".dst.partial" / "model.safetensors").write_text("half")

    def values() -> Iterator[tuple[str, torch.Tensor]]:
        assert not (tmp_path / "dst").exists()
        yield "a", torch.arange(6.0).view(3, 2).T

    hf_writer.write_tensors(tmp_path / "dst", {"a": (2, 3)}, values(), {"model_type": "x"}, torch.float32)
    assert torch.equal(load_file(tmp_path / "dst" / "model.safetensors")["a"], torch.arange(6.0).view(3, 2).T)
    assert [path.name for path in tmp_path.iterdir()] == ["dst"]

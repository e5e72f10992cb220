"""Adapters on every layout equal peft's on one process: forward, steps of plain torch, and its directories both ways."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from oppo_megatron.cli.main import main
from oppo_megatron.config.model import TARGETS, LoraConfig, ModelConfig, OptimizerConfig, TrainedRoleConfig, TrainingLayoutConfig
from oppo_megatron.errors import CheckpointError
from oppo_megatron.layout.hf_layout import Head, adapter_parts
from oppo_megatron.layout.shape import ModelShape
from oppo_megatron.mcore.lora import is_adapter
from oppo_megatron.mcore.roles import as_it_began, load_role, load_training
from oppo_megatron.mcore.training import TrainedModel
from oppo_megatron.mcore.weights.hf_weights import FreshAdapters, export_weights, open_adapters
from oppo_megatron.modeldir.adapters import adapter_problems
from oppo_megatron.modeldir.headers import check_adapter
from tests.gloo.jobs_training import Minibatch, cached_outputs, full_outputs, loss_of
from tests.gloo.models import CPU, MAX_LENGTH, PATHS, gather_logits, world_groups
from tests.gloo.test_training import DATA, FULL, PROBES, SELECTIVE, SEQUENCE, SETTINGS, Case, case_id, plain_outputs, plain_steps
from tests.support.hf import SIZES, save_tiny, tensors_of
from tests.support.ranks import run_ranks

JOBS = "tests.gloo.test_lora:"


def train_adapters(
    models: dict[str, tuple[str, dict[str, Any]]], target: str, tp: int, pp: int, config: OptimizerConfig, data: list[Minibatch],
    probes: list[list[int]], layout: TrainingLayoutConfig,
) -> dict[str, Any]:  # fmt: skip
    groups = world_groups(tp, pp)
    answers = {}
    for name, (directory, settings) in models.items():
        head: Head = "scalar" if "scalar" in name else "lm"
        role = TrainedRoleConfig(checkpoint=Path(directory), lora=LoraConfig(**settings))
        chunks = load_training(role, layout, groups, head=head, role="model", max_length=MAX_LENGTH, device=CPU)
        frozen = [(p, p.detach().clone()) for chunk in chunks for p in chunk.parameters() if not p.requires_grad]
        plain = len(chunks) == 1 and not layout.sequence_parallel
        if plain:  # what decoding computes with is made before the steps, and reads adapters as they are
            chunks[0].decode_by("packed")
        trained = TrainedModel(chunks, config, len(data), layout)
        optimized = sum(p.numel() for group in trained.optimizer.param_groups for p in group["params"])
        trainable = sum(p.numel() for chunk in chunks for p in chunk.parameters() if p.requires_grad)
        assert optimized == trainable or trained.sharded, "the optimizer has adapters, and a scalar head, alone"
        assert 0 < trainable < sum(p.numel() for p, _ in frozen)
        reports = [trained.step(batch.share(groups).pack(), loss_of(chunks[0], batch.num_tokens)) for batch in data]
        assert all(torch.equal(p, before) for p, before in frozen), "a frozen weight has changed"
        out = cached_outputs(chunks[0], probes) if plain else full_outputs(chunks, probes)
        export_weights(chunks, Path(target) / name, base=Path(directory))
        answers[name] = {"norms": [r.grad_norm for r in reports], "losses": [r.stats.get("loss") for r in reports]}
        if out is not None:
            answers[name]["outputs"] = (out if head == "scalar" else gather_logits(out, chunks[0].vocab)).clone()
    return answers


def outputs_of_paths(directory: str, settings: dict[str, Any], tp: int, probes: list[list[int]]) -> dict[str, Any]:
    """Logits by each way of cached calls and by the full forward, with adapters and of the reference that shares weights."""
    groups = world_groups(tp, 1)
    role = TrainedRoleConfig(checkpoint=Path(directory), lora=LoraConfig(**settings))
    answers = {}
    for path in PATHS:
        model = load_role(role, groups, head="lm", max_length=MAX_LENGTH, device=CPU, path=path)
        bare, began = (as_it_began(model, groups, config) for config in (ModelConfig(), role))
        ours = dict(model.named_parameters())
        assert all(param is ours[name] for name, param in bare.named_parameters())
        assert all((param is ours[name]) != is_adapter(name) for name, param in began.named_parameters())
        assert not any(param.requires_grad for param in began.parameters())
        for whose, each in (("adapted", model), ("bare", bare)):
            out = cached_outputs(each, probes)
            assert out is not None
            answers[f"{whose}, {path}"] = gather_logits(out, model.vocab).clone()
        with torch.no_grad():  # as an update does
            for param in (param for name, param in ours.items() if is_adapter(name)):
                param.mul_(3.0)
        out = cached_outputs(began, probes)
        assert out is not None
        answers[f"began, {path}"] = gather_logits(out, model.vocab).clone()
    model = load_role(role, groups, head="lm", max_length=MAX_LENGTH, device=CPU)
    out = full_outputs([model], probes)
    assert out is not None
    answers["adapted, full"] = gather_logits(out, model.vocab).clone()
    return answers


peft = pytest.importorskip("peft", reason="peft is not installed: it is of the test extra")

Capture = pytest.CaptureFixture[str]
LORA: dict[str, dict[str, Any]] = {
    "qwen2": {"rank": 4, "alpha": 6.0, "targets": list(TARGETS)},
    "qwen3-scalar": {"rank": 3, "alpha": 3.0, "targets": ["q_proj", "v_proj", "up_proj", "down_proj"]},
    "gpt-oss": {"rank": 4, "alpha": 6.0, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]},
}
CASES = [Case(1, 1, 1), Case(2, 1, 2, SEQUENCE | SELECTIVE), Case(1, 2, 1, {"vpp": 2})]
WIDE = [Case(2, 1, 1), Case(1, 2, 1), Case(2, 2, 1, SEQUENCE | FULL)]
OUTPUT_ROUNDING = 4e-4
"""After steps of Adam, which moves a weight by the learning rate however small its gradient is: where that is all rounding, and
which way rounding goes differs by where tensors lie in memory, outputs differ by up to 2e-4."""


def load_hf(directory: str) -> Any:
    kind = AutoModelForSequenceClassification if "scalar" in directory else AutoModelForCausalLM
    return kind.from_pretrained(directory, dtype=torch.float32)


@pytest.fixture(scope="module")
def adapters(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    for name, settings in LORA.items():
        task = "SEQ_CLS" if "scalar" in name else "CAUSAL_LM"
        config = peft.LoraConfig(
            r=settings["rank"], lora_alpha=settings["alpha"], target_modules=settings["targets"], task_type=task
        )
        with torch.random.fork_rng():  # with a few other seeds a number lies at GPT-OSS's limit, where gradients jump
            torch.manual_seed(4)
            model = peft.get_peft_model(load_hf(models[name]), config)
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for key, param in model.named_parameters():
                if "lora_B" in key or ("score" in key and param.requires_grad):
                    param.copy_(0.3 * torch.randn(param.shape, generator=generator))
        model.save_pretrained(root / name)
    return {name: root / name for name in LORA}


def wrapped(directory: str, adapter: Path, trainable: bool = False) -> Any:
    return peft.PeftModel.from_pretrained(load_hf(directory), adapter, is_trainable=trainable).get_base_model()


@cache
def reference(directory: str, adapter: Path) -> dict[str, Any]:
    return plain_steps(wrapped(directory, adapter, trainable=True), SETTINGS)


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.long) for case in WIDE)], ids=case_id)
def test_steps_equal_peft_and_plain_torch(models: dict[str, str], adapters: dict[str, Path], case: Case, tmp_path: Path) -> None:
    tp, pp, dp, options = case
    answers = run_ranks(
        tp * pp * dp, f"{JOBS}train_adapters",
        models={name: (models[name], settings | {"adapter": adapters[name]}) for name, settings in LORA.items()},
        target=str(tmp_path), tp=tp, pp=pp, config=SETTINGS, data=DATA, probes=PROBES, layout=TrainingLayoutConfig(**options),
    )  # fmt: skip
    for name in LORA:
        expected = reference(models[name], adapters[name])
        for answer in (a[name] for a in answers):
            assert answer["norms"] == pytest.approx(expected["norms"], rel=1e-4)
            if "outputs" in answer:
                assert answer["losses"] == pytest.approx(expected["losses"], abs=2e-5)
                assert (answer["outputs"] - expected["outputs"]).abs().max() < OUTPUT_ROUNDING
        with torch.no_grad():  # what is written is a directory that peft reads
            model = wrapped(models[name], tmp_path / name).eval()
            outputs = torch.cat([plain_outputs(model, probe) for probe in PROBES])
        assert (outputs - expected["outputs"]).abs().max() < OUTPUT_ROUNDING
        start, end = (load_file(folder / "adapter_model.safetensors") for folder in (adapters[name], tmp_path / name))
        assert start.keys() == end.keys() and all(not torch.equal(start[key], end[key]) for key in start)


@pytest.mark.parametrize("tp", [1, 2])
def test_decoding_computes_as_training_and_the_reference_as_the_base_or_the_given_adapters(
    models: dict[str, str], adapters: dict[str, Path], tp: int
) -> None:
    (first, *_) = run_ranks(
        tp, f"{JOBS}outputs_of_paths", directory=models["qwen2"],
        settings=LORA["qwen2"] | {"adapter": adapters["qwen2"]}, tp=tp, probes=PROBES,
    )  # fmt: skip
    with torch.no_grad():
        adapted, bare = wrapped(models["qwen2"], adapters["qwen2"]).eval(), load_hf(models["qwen2"]).eval()
        adapted_outputs = torch.cat([plain_outputs(adapted, probe) for probe in PROBES])
        expected = {
            "adapted": adapted_outputs, "began": adapted_outputs,
            "bare": torch.cat([plain_outputs(bare, probe) for probe in PROBES]),
        }  # fmt: skip
    assert (expected["adapted"] - expected["bare"]).abs().max() > 0.1, "the adapters do something"
    for way, outputs in first.items():
        assert (outputs - expected[way.split(",")[0]]).abs().max() < 2e-5, way


def test_merging_equals_pefts(models: dict[str, str], adapters: dict[str, Path], tmp_path: Path, capsys: Capture) -> None:
    for name, target in (("qwen2", "causal-lm"), ("qwen3-scalar", "reward")):
        arguments = [models[name], str(tmp_path / name), "--adapter", str(adapters[name]), "--as", target]
        assert main(["convert", *arguments, "--check"]) == 0 and capsys.readouterr().out.rstrip().endswith("read back: 0")
        theirs = peft.PeftModel.from_pretrained(load_hf(models[name]), adapters[name]).merge_and_unload().state_dict()
        found = tensors_of(tmp_path / name)
        assert all((found[key] - theirs[key]).abs().max() < 1e-5 for key in found)
        assert main(["convert", str(adapters[name]), str(tmp_path / "no")]) == 2


def test_an_adapters_scalar_head_needs_none_below(adapters: dict[str, Path], tmp_path: Path) -> None:
    name = next(name for name in LORA if "scalar" in name)
    save_tiny(tmp_path / "lm", name.partition("-")[0])
    head = "base_model.model.score.weight"
    arguments = [str(tmp_path / "lm"), str(tmp_path / "rm"), "--as", "reward", "--adapter", str(adapters[name])]
    assert main(["convert", *arguments]) == 0
    found = tensors_of(tmp_path / "rm")["score.weight"]
    assert torch.equal(found, load_file(adapters[name] / "adapter_model.safetensors")[head])


def test_adapters_that_do_not_fit_and_damaged_ones_are_refused(adapters: dict[str, Path], tmp_path: Path) -> None:
    settings = LORA["qwen2"] | {"adapter": adapters["qwen2"]}
    assert adapter_problems("actor.lora", LoraConfig(**settings)) == []
    told = adapter_problems("actor.lora", LoraConfig(**settings | {"rank": 8, "alpha": 1.0, "targets": ["q_proj"]}))
    assert len(told) == 3 and "its r is 4, but actor.lora.rank is 8" in told[0]
    shape = ModelShape.from_hf({"model_type": "qwen2", **SIZES, "hidden_size": 64, "rms_norm_eps": 1e-6})
    with pytest.raises(CheckpointError, match="the model and its rank ask for"):
        open_adapters(adapters["qwen2"], shape, LoraConfig(**LORA["qwen2"]), "lm")
    copy = Path(shutil.copytree(adapters["qwen2"], tmp_path / "adapter"))
    file = copy / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:200])
    (damage,) = check_adapter("actor", LoraConfig(**LORA["qwen2"] | {"adapter": copy}))
    assert damage.startswith("actor.lora.adapter: ") and "adapter_model.safetensors` is truncated" in damage


@pytest.mark.parametrize("change,said", [
    ({"use_dora": True}, "use_dora is True"), ({"bias": "all"}, "bias is 'all'"),
    ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"), ({"peft_type": "IA3"}, "LORA alone"),
    ({"target_modules": "all-linear"}, "target_modules are 'all-linear'"),
])  # fmt: skip
def test_what_is_not_computed_is_refused(adapters: dict[str, Path], tmp_path: Path, change: dict[str, Any], said: str) -> None:
    copy = Path(shutil.copytree(adapters["qwen2"], tmp_path / "adapter"))
    config = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps(config | change))
    assert said in "".join(adapter_problems("actor.lora", LoraConfig(**LORA["qwen2"], adapter=copy)))


def test_fresh_adapters_change_nothing_and_are_pefts_in_spread(models: dict[str, str]) -> None:
    role = TrainedRoleConfig(checkpoint=Path(models["qwen2"]), lora=LoraConfig(rank=64))
    shape = ModelShape.from_hf({"model_type": "qwen2", **SIZES, "rms_norm_eps": 1e-6})
    assert role.lora is not None
    source = FreshAdapters(adapter_parts(shape, role.lora, "lm"), seed=3)
    theirs = peft.get_peft_model(load_hf(models["qwen2"]), peft.LoraConfig(r=64, target_modules=list(TARGETS)))
    for name, param in theirs.state_dict().items():
        if "lora_" in name:
            key = name.replace(".default", "")
            ours = source.read(key, (slice(None), slice(None)))
            assert ours.shape == param.shape and bool((ours == 0).all()) == ("lora_B" in name)
            assert float(ours.std()) == pytest.approx(float(param.std()), rel=0.1)

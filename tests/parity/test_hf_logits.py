"""Logits, values and kernels are those of transformers and torch, on every layout, with windows and scalar heads."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from oppo_megatron.mcore.layers import fixed_norm, gated, rms_norm
from tests.support.hf import CAPS, PHI_LONG, PHI_SHORT, SIZES, save_tiny, tiny_model
from tests.support.ranks import run_ranks

SCALED = {"linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}, "llama3": {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}, "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32},}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}), "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}), "qwen3": ("qwen3", {}),
    "llama-mha": ("llama", {"num_key_value_heads": 8}),
    "mixtral": ("mixtral", {"sliding_window": 8}), "qwen3-moe": ("qwen3_moe", {}),
    "qwen3-moe-unnormalised": ("qwen3_moe", {"norm_topk_prob": False, "use_sliding_window": True, "sliding_window": 8}),
    **{f"llama-{kind}": ("llama", {"rope_parameters": rope}) for kind, rope in SCALED.items()},
    "phi3": ("phi3", {"sliding_window": 8}), "phi3-long": ("phi3", PHI_LONG), "phi3-short": ("phi3", PHI_SHORT),
    "olmo2": ("olmo2", {}), "gemma2": ("gemma2", CAPS | {"sliding_window": 8}),
    "gemma3": ("gemma3_text", {
        "sliding_window": 8, "sliding_window_pattern": 3, "query_pre_attn_scalar": 12, "final_logit_softcapping": 5.0}),
    "gemma3-scaled": ("gemma3_text", {"sliding_window": 8, "sliding_window_pattern": 2, "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
    "gpt-oss": ("gpt_oss", {}),
}  # fmt: skip
OWN = ("phi3", "olmo2", "gemma2", "gemma3", "gpt-oss")
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]
TOLERANCE = 1e-4


def ragged_sequences(lengths: tuple[int, ...] = (50, 1, 17)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(SIZES["vocab_size"], (n,), generator=generator).tolist() for n in lengths]


def our_outputs(world: int, **job: Any) -> Tensor:
    (ours,) = [x for x in run_ranks(world, "tests.parity.megatron_jobs:full_logits", **job) if x is not None]
    return ours


def compare(directory: Path, hf: Any, head: str, tp: int, pp: int) -> None:
    sequences = ragged_sequences()
    ours = our_outputs(tp * pp, src=str(directory), tp=tp, pp=pp, head=head, sequences=sequences)
    with torch.no_grad():
        if head == "lm":
            theirs = torch.cat([hf(torch.tensor([tokens])).logits[0] for tokens in sequences])
        else:  # the score of every prefix: a value head's outputs
            prefixes = [tokens[: n + 1] for tokens in sequences for n in range(len(tokens))]
            theirs = torch.cat([hf.score(hf.model(torch.tensor([p])).last_hidden_state)[0, -1] for p in prefixes])
            last = torch.tensor([len(tokens) for tokens in sequences]).cumsum(0) - 1
            whole = torch.cat([hf(torch.tensor([tokens])).logits[0] for tokens in sequences])
            assert (ours[last] - whole).abs().max() < TOLERANCE
    assert theirs.std() > 0.1 and ours.shape == theirs.shape
    assert (ours - theirs).abs().max() < TOLERANCE


@pytest.mark.parametrize("model", MODELS)
def test_logits_equal_transformers(tmp_path: Path, model: str) -> None:
    family, changes = MODELS[model]
    compare(tmp_path, save_tiny(tmp_path, family, **changes), "lm", 1, 1)


@pytest.mark.parametrize("model,tp,pp", [
    pytest.param(model, tp, pp, marks=[pytest.mark.long] if model in OWN and tp * pp < 4 else [])
    for model in ("qwen2", "qwen2-tied", "qwen3", "llama-llama3", "mixtral", "qwen3-moe", *OWN) for tp, pp in LAYOUTS[1:]
])  # fmt: skip
def test_logits_equal_transformers_on_every_layout(tmp_path: Path, model: str, tp: int, pp: int) -> None:
    family, changes = MODELS[model]
    compare(tmp_path, save_tiny(tmp_path, family, **changes), "lm", tp, pp)


@pytest.mark.parametrize("window", [1, 8, 17, None])
def test_a_sliding_window_is_that_of_mistral(tmp_path: Path, window: int | None) -> None:
    compare(tmp_path, save_tiny(tmp_path, "mistral", sliding_window=window), "lm", 1, 1)


@pytest.mark.parametrize("tp,pp", LAYOUTS)
def test_scalar_head_equals_transformers_classifier(tmp_path: Path, tp: int, pp: int) -> None:
    compare(tmp_path, save_tiny(tmp_path, "qwen2", "scalar"), "scalar", tp, pp)


ODD = {"vocab_size": 259}
SOME = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}
CASES: dict[str, tuple[str, str, int, int, dict[str, Any]]] = {
    "a vocabulary that 2 tensor ranks do not divide": ("qwen2", "lm", 2, 1, {**ODD, "tie_word_embeddings": True}),
    "nor 4": ("qwen2", "lm", 4, 1, ODD), "nor 2 and 2 stages": ("qwen2", "lm", 2, 2, {**ODD, "tie_word_embeddings": True}),
    **{f"a window, tp {tp}, pp {pp}": ("mistral", "lm", tp, pp, {"sliding_window": 8, "head_dim": 16, "vocab_size": 65})
       for tp, pp in LAYOUTS[1:]},
    **{f"a window in some layers of {family}": (family, "lm", 1, 2, SOME) for family in ("qwen2", "qwen3")},
    **{f"a scalar head of {family}": (family, "scalar", 1, 1, {})
       for family in ("llama", "qwen3", "olmo2", "gemma3_text", "gpt_oss")},
    "a scalar head of mistral": ("mistral", "scalar", 1, 1, {"sliding_window": 8}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_windows_vocabularies_and_heads(tmp_path: Path, case: str) -> None:
    family, head, tp, pp, changes = CASES[case]
    compare(tmp_path, save_tiny(tmp_path, family, head, **changes), head, tp, pp)


WIDE = {"hidden_size": 256, "intermediate_size": 512}
"""Numbers of the order of real models': sums of a few dozen terms would round alike by luck, or far apart by bad luck."""


def outputs(model: Any, head: str, sequences: list[list[int]]) -> Tensor:
    """transformers' logits [T, V], or the scalar head's value [T] at every token, in the model's own type."""
    inputs = [torch.tensor([tokens]) for tokens in sequences]
    with torch.no_grad():
        if head == "lm":
            return torch.cat([model(tokens).logits[0] for tokens in inputs]).float()
        return torch.cat([model.score(model.model(tokens).last_hidden_state)[0, :, 0] for tokens in inputs]).float()


def rms(x: Tensor) -> float:
    return float(x.pow(2).mean().sqrt())


@pytest.fixture(scope="module", params=[("qwen2", "lm"), ("qwen3", "lm"), ("llama", "lm"), ("qwen2", "scalar")], ids="-".join)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Tensor, Tensor]:
    family, head = request.param
    model, sequences = tiny_model(family, head, **WIDE), ragged_sequences()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "norm" not in name:
                param.mul_(0.2)  # logits near 1
    model.bfloat16()
    directory = tmp_path_factory.mktemp("bfloat16")
    model.save_pretrained(directory)
    return directory, head, outputs(model, head, sequences), outputs(model.float(), head, sequences)


@pytest.mark.parametrize("tp,pp", LAYOUTS)
def test_outputs_are_those_of_transformers(saved: tuple[Path, str, Tensor, Tensor], tp: int, pp: int) -> None:
    directory, head, half, exact = saved
    job = {"src": str(directory), "tp": tp, "pp": pp, "head": head, "sequences": ragged_sequences(), "dtype": "bfloat16"}
    ours, spread = our_outputs(tp * pp, **job), float(exact.std())
    assert ours.shape == exact.shape and spread > 0.5
    assert torch.equal(ours, ours.bfloat16().float()) == (head == "lm"), "logits are rounded, values are not"
    assert rms(ours - half) < 0.03 * spread and float((ours - half).abs().max()) < 0.15 * spread
    assert 0 < rms(ours - exact) < 1.1 * rms(half - exact)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
@pytest.mark.parametrize("shape", [(1, 8), (7, 1, 48), (5, 3, 64), (0, 1, 16)])
def test_output_and_gradients_are_those_of_torch(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(len(shape))
    x = (3 * torch.randn(shape)).to(dtype).requires_grad_()
    weight = torch.rand(shape[-1]).to(dtype).requires_grad_()
    grad = torch.randn(shape).to(dtype)
    outputs = [norm(x) for norm in (lambda x: rms_norm(x, weight, 1e-5), lambda x: F.rms_norm(x, shape[-1:], weight, 1e-5))]
    found, expected = ([out, *torch.autograd.grad(out, (x, weight), grad)] for out in outputs)
    found.append(fixed_norm(weight.detach(), 1e-5)(x.detach()))
    for one, other in zip(found, [*expected, expected[0]], strict=True):
        assert one.dtype == dtype and one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_a_row_of_zeros_has_a_finite_gradient_and_frozen_weights_have_none() -> None:
    x, weight = torch.zeros(2, 16, requires_grad=True), torch.ones(16)
    out = rms_norm(x, weight, 1e-6)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert out.abs().amax() == 0
    torch.testing.assert_close(grad, torch.full((2, 16), 1e3))  # 1 / sqrt(eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 2), (7, 1, 48), (5, 3, 64), (0, 1, 16)])
def test_output_and_gradient_are_the_same_to_the_bit(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(len(shape))
    gate_up = (5 * torch.randn(shape)).to(dtype).requires_grad_()
    grad = torch.randn(*shape[:-1], shape[-1] // 2).to(dtype)
    gate, up = torch.chunk(gate_up, 2, dim=-1)
    both = (gated(gate_up, "silu"), F.silu(gate) * (up + 0.0))
    (out, found), (expected_out, expected) = ((out, *torch.autograd.grad(out, gate_up, grad)) for out in both)
    assert out.dtype == found.dtype == dtype and torch.equal(out, expected_out) and torch.equal(found, expected)


def test_the_gradient_is_that_of_finite_differences_and_gate_and_up_alone_are_kept_for_it() -> None:
    kept: list[int] = []
    gate_up = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert torch.autograd.gradcheck(gated, (gate_up, "silu"))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.data_ptr()), lambda tensor: tensor):
        gated(gate_up, "silu")
    assert kept == [gate_up.data_ptr()]
    (grad,) = torch.autograd.grad(gated(gate_up, "silu").square().sum(), gate_up, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()

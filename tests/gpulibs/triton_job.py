"""The package's Triton kernels without a GPU: `python -m tests.gpulibs.triton_job interpreted|compiled FILE`."""

import os
import random
import sys
import warnings
from typing import Any

INTERPRETED = sys.argv[1] == "interpreted"
os.environ |= {"TRITON_INTERPRET": "1"} if INTERPRETED else {}

import torch  # noqa: E402
import triton  # noqa: E402
from torch import Tensor  # noqa: E402

from oppo_megatron.mcore import attention, gate_kernel, layers  # noqa: E402
from oppo_megatron.mcore.kv import paged, triton_kernel  # noqa: E402
from oppo_megatron.mcore.kv.cached_plan import PagedCall  # noqa: E402

TABLES = 200


def reference(
    q_TND: Tensor, k_PKGD: Tensor, v_PKGD: Tensor, call: PagedCall, scale: float, window: int | None, cap: float | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Causal attention in float64, sequence by sequence."""
    outputs = []
    parts = q_TND.split(call.new_S.tolist()), call.table_SW.long(), call.length_S.tolist()
    for q_nND, table_W, length in zip(*parts, strict=True):
        keys, values = (pool[table_W].flatten(0, 1)[:length].double() for pool in (k_PKGD, v_PKGD))
        keys, values = (x.repeat_interleave(q_nND.shape[1] // x.shape[1], 1) for x in (keys, values))
        behind_nL = torch.arange(length - len(q_nND), length)[:, None] - torch.arange(length)
        hidden_nL = (behind_nL < 0) | (behind_nL >= (window or length))
        scores_Nnl = torch.einsum("nhd,lhd->hnl", q_nND.double(), keys) * scale
        scores_Nnl = scores_Nnl if cap is None else cap * (scores_Nnl / cap).tanh()
        scores_Nnl = scores_Nnl.masked_fill(hidden_nL, -torch.inf)
        if sinks is not None:
            column_Nn1 = sinks.double()[:, None, None].expand(*scores_Nnl.shape[:2], 1)
            scores_Nnl = torch.cat([scores_Nnl, column_Nn1], -1)
        outputs.append(torch.einsum("hnl,lhd->nhd", scores_Nnl.softmax(-1)[..., :length], values))
    return torch.cat(outputs)


def difference(draws: random.Random) -> tuple[str, float]:
    """Blocks in a random order, some shared by sequences; entries past a sequence's end are arbitrary."""
    groups, repeat, dim = draws.choice([1, 2]), draws.choice([1, 3, 7]), draws.choice([8, 16, 24, 64])
    block = draws.choice([5, 16, 32])
    dtype = draws.choice([torch.float32, torch.float16])  # the interpreter cannot multiply bfloat16
    count, most = draws.randint(1, 3), draws.choice([1, 1, 9])
    new = [draws.randint(1, most) for _ in range(count)]
    lengths = [n + draws.choice([0, draws.randint(0, 30), draws.randint(0, 140)]) for n in new]
    longest = max(lengths) + draws.randint(0, 70)
    width = -(-longest // block)
    blocks = count * width + 3
    table = torch.tensor([draws.sample(range(blocks), width) for _ in range(count)], dtype=torch.int32)
    generator = torch.Generator().manual_seed(draws.randrange(2**31))
    shapes = (sum(new), groups * repeat, dim), *[(blocks, block, groups, dim)] * 2
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    call = PagedCall(table, torch.tensor(new, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32), max(new), longest)
    window = draws.choice([None, 1, draws.randint(2, 60)])
    cap = draws.choice([None, 0.7, 30.0])
    sinks = draws.choice([None, torch.randn(groups * repeat, generator=generator).to(dtype) * 3])
    found = triton_kernel.triton_attention(q, k, v, call, dim**-0.5, window, cap, sinks)
    assert found.dtype == dtype
    return str(dtype), float((found.double() - reference(q, k, v, call, dim**-0.5, window, cap, sinks)).abs().max())


def turn_difference(draws: random.Random) -> tuple[str, float]:
    """Queries and whole pools of the kernel that rotates and caches, against `apply_rope` and indexing."""
    groups, repeat, dim, tokens = draws.choice([1, 2]), draws.choice([1, 3, 7]), draws.choice([8, 24, 64]), draws.randint(1, 9)
    turned, block, dtype = draws.choice([dim, dim // 2]), draws.choice([5, 16]), draws.choice([torch.float32, torch.float16])
    generator = torch.Generator().manual_seed(draws.randrange(2**31))
    qkv = torch.randn(tokens, groups, repeat + 2, dim, generator=generator).to(dtype)
    cos, sin = torch.randn(2, tokens, 1, turned, generator=generator)
    pools = torch.randn(2, 4, block, groups, dim, generator=generator).to(dtype)
    places = torch.tensor(draws.sample(range(4 * block), tokens))
    expected, at = pools.clone(), (places // block, places % block)
    qk = attention.apply_rope(qkv[:, :, :-1], cos.unsqueeze(1), sin.unsqueeze(1)).to(dtype)
    expected[0][at], expected[1][at] = qk[:, :, -1], qkv[:, :, -1]
    found = triton_kernel.triton_turn(qkv, cos, sin, *at, *pools)
    assert found.dtype == dtype and torch.equal(pools[1], expected[1])
    far = (found - qk[:, :, :-1].flatten(1, 2)).abs().max(), (pools[0] - expected[0]).abs().max()
    return str(dtype), float(max(far))


def gate_difference(draws: random.Random) -> tuple[str, float]:
    """Outputs and gradients of gated activations, some on the clamp, infinite or not numbers, against torch's."""
    activation, dtype = draws.choice(list(layers.ACTIVATIONS)), draws.choice([torch.float32, torch.float16])
    shape = *draws.choice([(draws.randint(0, 5),), (3, draws.randint(1, 4))]), 2 * draws.choice([1, 8, 37, 1024, 1500])
    clamp = draws.choice([None, (7.0, 1.702), (0.7, 1.0)])
    generator = torch.Generator().manual_seed(draws.randrange(2**31))
    values = (2 * torch.randn(shape, generator=generator)).to(dtype)
    if clamp is not None:
        values[torch.rand(shape, generator=generator) < 0.2] = clamp[0] * draws.choice([-1, 1])
    odd = [torch.nan, torch.inf, -torch.inf] if activation == "silu" else [torch.nan]  # torch's GELU takes tails for 0
    values[torch.rand(shape, generator=generator) < 0.01] = draws.choice(odd)
    grad = torch.randn(*shape[:-1], shape[-1] // 2, generator=generator).to(dtype)
    if draws.random() < 0.3:  # not contiguous
        values, grad = values.mT.contiguous().mT, grad[..., :1].expand_as(grad)
    found = []
    for kernels in (None, gate_kernel):
        layers.gate_kernels = lambda _, kernels=kernels: kernels
        given = values.clone().requires_grad_()
        out = layers.gated(given, activation, clamp)
        (of_given,) = torch.autograd.grad(out, given, grad)
        torch.testing.assert_close(layers.activated(values, activation, clamp), out.detach(), rtol=0, atol=0, equal_nan=True)
        found.append(torch.cat([out.detach().flatten(), of_given.flatten()]))
    plain, ours = found
    assert ours.dtype == dtype and torch.equal(plain.isnan(), ours.isnan())
    assert torch.equal(plain.isposinf(), ours.isposinf()) and torch.equal(plain.isneginf(), ours.isneginf())
    plain, ours = plain.nan_to_num(0, 0, 0), ours.nan_to_num(0, 0, 0)
    return str(dtype), float(((plain - ours).abs() / (1 + plain.abs())).max()) if len(plain) else 0.0


def compiled() -> dict[str, Any]:
    """Bytes of machine code and of shared memory for GPUs."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def built(kernel: Any, capability: int, pointers: dict[str, str], values: dict[str, Any]) -> tuple[int, int]:
        signature = pointers | dict.fromkeys(values, "constexpr")
        ordered = {name: signature[name] for name in kernel.arg_names}
        source = ASTSource(kernel, ordered, {(kernel.arg_names.index(name),): value for name, value in values.items()})
        code = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_stages": 2})
        return len(code.asm["cubin"]), code.metadata.shared

    found: dict[str, Any] = {}
    gates = dict.fromkeys(("gate_up", "out", "grad", "grads"), "*bf16") | {"width": "i32", "limit": "fp32", "gain": "fp32"}
    for capability, clamped in ((80, True), (90, False)):
        for kernel in (gate_kernel.gate_tile, gate_kernel.gate_grad_tile):
            values = {"CLAMPED": clamped, "GELU": not clamped, "B": 1024}
            found[f"sm_{capability}, {kernel.__name__}"] = built(kernel, capability, gates, values)
    numbers = dict.fromkeys(("tables", "starts", "lengths"), "*i32") | dict.fromkeys(("scale", "cap"), "fp32")
    numbers |= dict.fromkeys(("width", "window"), "i32")
    numbers |= dict.fromkeys(("q", "k", "v", "sinks", "out"), "*bf16") | dict.fromkeys(("sums", "peaks"), "*fp32")
    turning = dict.fromkeys(("blocks", "offsets"), "*i64") | dict.fromkeys(("cos", "sin"), "*fp32")
    turning |= dict.fromkeys(("qkv", "q", "k", "v"), "*bf16")
    for capability, dim, step, many in ((80, 256, 32, True), (90, 64, 64, False), (90, 128, 64, True)):
        sizes = 2, 7, dim, 256, 64 if many else 16, dim, step, 1 if many else 4
        values: dict[str, Any] = {"MANY": many, "BOUND": many, "CAP": not many} | dict(zip("GRDKAEJF", sizes, strict=True))
        values |= {"sinks": None} if many else {}
        found[f"sm_{capability}, dimension {dim}"] = built(triton_kernel.attend_tile, capability, numbers, values)
        values = {"G": 2, "X": 9, "D": dim, "TURNED": dim, "K": 256, "A": 16, "E": dim}
        found[f"sm_{capability}, dimension {dim}, turned"] = built(triton_kernel.turn_tile, capability, turning, values)
    return found


def refused() -> tuple[Any, list[str]]:
    """The kernel that a machine gets on which Triton can be imported, but cannot launch anything, and its warnings."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        return paged.by_triton(torch.device("cpu")), [str(each.message) for each in told]


if __name__ == "__main__":
    draws = random.Random(1)
    kinds = (difference, turn_difference, gate_difference) if INTERPRETED else ()
    torch.save([[of(draws) for _ in range(TABLES)] for of in kinds] or (compiled(), refused()), sys.argv[2])

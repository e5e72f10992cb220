"""The package's Triton kernels against torch's, and against the time of reading and writing their memory alone.

`attend.py DEVICE OUT`: into OUT/figures.json.  "attend": of a decode step without flash-attn, for ragged lengths, `attend_one`
as a captured step calls it (dense cache, mask, torch's memory-efficient kernel), and the kernel of paged caches.  "gate": gated
activations and their gradients.  On a CPU Triton's interpreter computes the numbers, and nothing is timed.
"""

# ruff: noqa: E402

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

DEVICE, OUT = sys.argv[1], Path(sys.argv[2])
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

import torch

try:
    import triton

    triton_attention = importlib.import_module("oppo_megatron.mcore.kv.triton_kernel").triton_attention
    gate_kernel = importlib.import_module("oppo_megatron.mcore.gate_kernel")
except ImportError as error:
    print(f"nothing to compare with: {error}")
    sys.exit(0)

from oppo_megatron.mcore import layers
from oppo_megatron.mcore.kv.cached_plan import PagedCall, attend_one, beyond_mask


def case(name: str, rows: int, groups: int, repeat: int, dim: int, limit: int, mean: float, dtype: torch.dtype) -> dict[str, Any]:
    place, generator = torch.device(DEVICE), torch.Generator().manual_seed(1)
    lens = (256 + torch.empty(rows).log_normal_(mean, 1.0, generator=generator)).clamp(max=limit).int()
    if DEVICE == "cpu":
        lens = (lens % 200 + 1).int()
    longest = min(-(-int(lens.max()) // 256) * 256, limit)
    K, W = 256, -(-limit // 256)
    length_B = lens.to(place)
    q = torch.randn(rows, groups, repeat, dim, device=place, dtype=dtype)
    layers = 4 if DEVICE == "cuda" else 1  # other caches in turn, so that the L2 does not hold them
    k = [torch.randn(rows, groups, limit, dim, device=place, dtype=dtype) for _ in range(layers)]
    v = [torch.randn(rows, groups, limit, dim, device=place, dtype=dtype) for _ in range(layers)]
    # The same in blocks, in an order of their own.
    order = torch.randperm(rows * W, generator=generator).to(place)
    table = order.view(rows, W).int()
    pools = []
    for dense in (k, v):
        whole = [torch.nn.functional.pad(x, (0, 0, 0, W * K - limit)).transpose(1, 2) for x in dense]
        blocks = [x.reshape(rows * W, K, groups, dim) for x in whole]
        pools.append([torch.empty(x.shape, dtype=dtype, device=place).index_copy_(0, order, x) for x in blocks])
    mask = beyond_mask(length_B.long() - 1, slice(0, longest), dtype, None)
    call = PagedCall(table, torch.ones_like(length_B), length_B, 1, limit)
    scale = dim**-0.5
    turn = [0]

    def dense_step() -> Any:
        i = turn[0] = (turn[0] + 1) % layers
        return attend_one(q, k[i][:, :, :longest], v[i][:, :, :longest], mask, scale)

    def paged_step() -> Any:
        i = turn[0] = (turn[0] + 1) % layers
        return triton_attention(q.flatten(1, 2), pools[0][i], pools[1][i], call, scale).flatten(1)

    turn[0] = 0
    ours = dense_step().float()
    turn[0] = 0
    theirs = paged_step().float()
    valid = 2 * int(lens.sum()) * groups * dim * dtype.itemsize
    found: dict[str, Any] = {"case": name, "rows": rows, "mean": float(lens.float().mean()), "reach": longest}
    found["difference"] = float((ours - theirs).abs().max() / ours.abs().max())
    return found | timed({"masked_us": dense_step, "triton_us": paged_step}, valid)


def timed(works: dict[str, Callable[[], Any]], moved: int) -> dict[str, float]:
    """Microseconds of each, and of a copy that reads and writes `moved` bytes."""
    if DEVICE != "cuda":
        return {}
    source = torch.empty(2**30, dtype=torch.uint8, device=DEVICE)
    works = works | {"copy": lambda: torch.empty_like(source).copy_(source)}
    found = {what: 1e3 * triton.testing.do_bench_cudagraph(work, rep=50) for what, work in works.items()}
    return found | {"least_us": found.pop("copy") * moved / (2 * 2**30)}


def gates(name: str, tokens: int, width: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Without autograd's engine, which would work on the stream of the forward pass, outside the capture."""
    gate_up = torch.randn(tokens, 2 * width, device=DEVICE, dtype=dtype)
    grad, saved = torch.randn(tokens, width, device=DEVICE, dtype=dtype), SimpleNamespace(saved_tensors=(gate_up,))
    saved.activation, saved.clamp = "silu", None
    layers.gate_kernels = lambda _: None
    works: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "forward": (lambda: layers.activated(gate_up, "silu"), lambda: gate_kernel.triton_gate(gate_up, "silu")),
        "backward": (lambda: layers._Gated.backward(saved, grad)[0], lambda: gate_kernel.triton_gate_grad(gate_up, grad, "silu")),
    }
    found = []
    for way, (plain, ours) in works.items():
        theirs, mine = plain().float(), ours().float()
        difference = float((theirs - mine).abs().max() / theirs.abs().max())
        moved = (3 if way == "forward" else 5) * tokens * width * dtype.itemsize
        line = {"case": name, "pass": way, "tokens": tokens, "width": width, "difference": difference}
        found.append(line | timed({"torch_us": plain, "triton_us": ours}, moved))
    return found


def main() -> None:
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    rows = [(112, 256 * 9), (16, 256 * 9), (2, 256 * 9)] if DEVICE == "cuda" else [(3, 256)]
    found = []
    for count, limit in rows:
        for name, groups, repeat, dim in (("0.5B", 2, 7, 64), ("7B", 4, 7, 128))[: None if DEVICE == "cuda" else 1]:
            found.append(case(name, count, groups, repeat, dim, limit, 5.5, dtype))
            write("attend", found)
    found = []
    for name, tokens, width in [("0.5B", 4096, 4864), ("7B", 4096, 18944)] if DEVICE == "cuda" else [("tiny", 3, 100)]:
        for line in gates(name, tokens, width, dtype):
            found.append(line)
            write("gate", found)


def write(part: str, found: list[dict[str, Any]]) -> None:
    print({k: (round(v, 4) if isinstance(v, float) else v) for k, v in found[-1].items()}, flush=True)
    path = OUT / "figures.json"
    tree = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(tree | {part: found}, indent=1))


if __name__ == "__main__":
    try:
        main()
    except triton.runtime.errors.InterpreterError as error:
        if "0-dimensional" not in str(error):
            raise
        print(f"nothing is compared: Triton {triton.__version__}'s interpreter does not run with numpy 2.4 or newer ({error})")

"""Attention through flash-attn's Python, whose compiled half is replaced: `python -m tests.gpulibs.flash_job FILE`."""

import inspect
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

from tests.gpulibs.stubs import stand_in

stand_in(["flash_attn_2_cuda"])

import flash_attn  # noqa: E402  (behind the stand-in)
import torch  # noqa: E402
from flash_attn import flash_attn_interface  # noqa: E402
from torch import Tensor  # noqa: E402

from oppo_megatron.mcore.kv import paged  # noqa: E402
from oppo_megatron.mcore.kv.paged import PagedKVCache  # noqa: E402

LEAST_BLOCK = 256
"""Positions that a block has a multiple of: the compiled half refuses others."""
CALLS = ([600, 3, 257], [1, 1, 1], [5, 90, 1], [1, 1, 1])


def attend(
    q_TND: Tensor, k_PKGD: Tensor, v_PKGD: Tensor, lens: list[int], lengths: list[int], table_SW: Tensor, scale: float,
    causal: bool, left: int, right: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The last `lens` of each sequence's `lengths` positions attend to those before, and to `left` of them where not -1.

    With the logarithms of the softmaxes' sums [N, T]."""
    assert causal and right == 0 and k_PKGD.shape[1] % LEAST_BLOCK == 0
    out, log_sums = torch.empty_like(q_TND), list[Tensor]()
    for part, length, table_W, q_nND in zip(out.split(lens), lengths, table_SW.long(), q_TND.split(lens), strict=True):
        k_LGD, v_LGD = (pool[table_W].flatten(0, 1)[:length].float() for pool in (k_PKGD, v_PKGD))
        heads = q_nND.shape[1] // k_LGD.shape[1]
        k_LND, v_LND = (x.repeat_interleave(heads, 1) for x in (k_LGD, v_LGD))
        scores_NnL = torch.einsum("nhd,lhd->hnl", q_nND.float(), k_LND) * scale
        behind_nL = torch.arange(length - len(q_nND), length)[:, None] - torch.arange(length)
        seen_nL = (behind_nL >= 0) & (behind_nL <= (length if left < 0 else left))
        scores_NnL = scores_NnL.masked_fill(~seen_nL, -torch.inf)
        part.copy_(torch.einsum("hnl,lhd->nhd", scores_NnL.softmax(-1), v_LND))
        log_sums.append(scores_NnL.logsumexp(-1))
    return out, torch.cat(log_sums, 1)


def varlen_fwd(
    q: Tensor, k: Tensor, v: Tensor, out: None, ends_q: Tensor, ends_k: Tensor, used_k: None, left_pad: None, table: Tensor,
    slopes: None, most_q: int, most_k: int, dropout: float, scale: float, zero: bool, causal: bool, left: int, right: int,
    softcap: float, give_softmax: bool, generator: None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    lens, lengths = ends_q.diff().tolist(), ends_k.diff().tolist()
    assert max(lens) <= most_q and max(lengths) <= most_k and not dropout and not softcap
    (found, log_sums), none = attend(q, k, v, lens, lengths, table, scale, causal, left, right), q.new_empty(0)
    return found, log_sums, none.clone(), none.clone()


def fwd_kvcache(
    q: Tensor, k: Tensor, v: Tensor, new_k: None, new_v: None, used_k: Tensor, cos: None, sin: None, index: None,
    left_pad: None, table: Tensor, slopes: None, out: None, scale: float, causal: bool, left: int, right: int,
    softcap: float, interleaved: bool, splits: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert q.shape[1] == 1 and not softcap
    found, log_sums = attend(q[:, 0], k, v, [1] * len(q), used_k.tolist(), table, scale, causal, left, right)
    return found[:, None], log_sums.t().unsqueeze(-1).contiguous()


def bound(name: str, calls: list[str]) -> Callable[..., Any]:
    function = getattr(flash_attn, name)
    signature = inspect.signature(function)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(f"{name}({', '.join(signature.bind(*args, **kwargs).arguments)})")
        return function(*args, **kwargs)

    return call


def outputs() -> dict[str, Any]:
    """Outputs of sequences of unlike lengths over shared keys, in prefill and decode: gathered, and by flash-attn."""
    generator, dtype = torch.Generator().manual_seed(1), torch.bfloat16
    sizes: dict[str, Any] = {
        "num_layers": 1, "num_kv_heads": 2, "head_dim": 64, "num_slots": 3, "max_length": 700, "dtype": dtype,
        "rope": (torch.ones(700, 64), torch.zeros(700, 64)), "device": torch.device("cpu"),
    }  # fmt: skip
    caches = PagedKVCache(**sizes), PagedKVCache(**sizes, kernel=paged.PagedKernel(paged.flash_attn))
    found: list[list[Tensor]] = [[], []]
    calls: list[str] = []
    names, sinks = ("flash_attn_varlen_func", "flash_attn_with_kvcache"), torch.linspace(-2, 4, 8, dtype=dtype)
    with mock.patch.multiple(flash_attn, **{name: bound(name, calls) for name in names}):
        for cache in caches:
            for seq_id in range(3):
                cache.open(seq_id)
        for lens in CALLS:
            q, k, v = (torch.randn(sum(lens), heads, 64, generator=generator, dtype=dtype) for heads in (8, 2, 2))
            for cache, out in zip(caches, found, strict=True):
                plan = cache.begin(range(3), lens)
                out += [plan.attend(0, q, k, v, 64**-0.5, window) for window in (None, 1, 100)]
                out += [plan.attend(0, q, k, v, 64**-0.5, window, sinks=sinks) for window in (None, 100)]
                cache.commit(plan)
    return {"gathered": found[0], "flash-attn": found[1], "calls": sorted(set(calls))}


def main(file: str) -> None:
    compiled = flash_attn_interface.flash_attn_gpu
    compiled.varlen_fwd, compiled.fwd_kvcache = varlen_fwd, fwd_kvcache
    operation = flash_attn_interface._flash_attn_varlen_forward
    operation.register_kernel("cpu", operation._init_fn)  # its own, which is for CUDA devices only
    torch.save(outputs(), file)


if __name__ == "__main__":
    main(sys.argv[1])

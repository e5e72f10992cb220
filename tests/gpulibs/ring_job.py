"""Transformer-engine's ring with kernels replaced: `python -m tests.gpulibs.ring_job FOLDER SIZE KERNELS`.

The last SIZE of three ranks leave outputs and gradients of both ways in FOLDER.  The messages are real ones, by gloo; KERNELS are
flash-attn's or cuDNN's."""

import importlib.metadata
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from tests.gpulibs.stubs import COMPILED, import_transformer_engine, stand_in

stand_in(COMPILED)
os.environ["TORCHDYNAMO_DISABLE"] = "1"
versions = importlib.metadata.version
with mock.patch.object(importlib.metadata, "version", lambda name: "2.8.3" if name == "flash-attn" else versions(name)):
    import_transformer_engine()

import torch  # noqa: E402  (behind the stand-ins)
import torch.distributed as dist  # noqa: E402
import transformer_engine.pytorch.utils as te_utils  # noqa: E402
import transformer_engine_torch as tex  # noqa: E402
from flash_attn import flash_attn_interface  # noqa: E402
from torch import Tensor, multiprocessing  # noqa: E402
from transformer_engine.pytorch import cpp_extensions  # noqa: E402
from transformer_engine.pytorch.attention.dot_product_attention import context_parallel  # noqa: E402

from oppo_megatron.cluster.process_groups import use_ring_once  # noqa: E402
from oppo_megatron.mcore import compat  # noqa: E402
from oppo_megatron.mcore.context import ContextPlan, SequenceShare  # noqa: E402

LENGTHS = [37, 3, 1, 64]  # filled up: to 40, 4, 4 and 64 for two ranks
HEADS, KV_HEADS, DIM, SCALE = 4, 2, 16, 0.3  # not transformer-engine's own scale, DIM**-0.5
RANKS, CPU = 3, torch.device("cpu")
CAPABILITY = {"flash-attn": (8, 0), "cuDNN": (9, 0)}  # of GPUs on which transformer-engine prefers them
sent: list[Any] = []  # messages of the ring


def sequences(ends_q: Tensor, ends_k: Tensor) -> Iterator[tuple[slice, slice]]:
    for q, k in zip(ends_q.unfold(0, 2, 1).tolist(), ends_k.unfold(0, 2, 1).tolist(), strict=True):
        yield slice(*q), slice(*k)


def scores(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    found = torch.einsum("nhd,lhd->hnl", q.float(), k.float().repeat_interleave(q.shape[1] // k.shape[1], 1)) * scale
    return found.masked_fill(torch.ones_like(found[0]).triu(1).bool(), -torch.inf) if causal else found


def varlen_fwd(
    q: Tensor, k: Tensor, v: Tensor, out: None, ends_q: Tensor, ends_k: Tensor, used_k: None, left_pad: None, table: None,
    slopes: None, most_q: int, most_k: int, dropout: float, scale: float, zero: bool, causal: bool, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Output [T, N, D] and the logarithms of the softmaxes' sums [N, T]."""
    assert not dropout and len(q) == ends_q[-1] and len(k) == ends_k[-1]
    assert int(ends_q.diff().max()) <= most_q and int(ends_k.diff().max()) <= most_k
    made, log_sums = torch.empty_like(q), torch.empty(q.shape[1], len(q))
    for own, seen in sequences(ends_q, ends_k):
        found = scores(q[own], k[seen], scale, causal)
        values = v[seen].float().repeat_interleave(q.shape[1] // k.shape[1], 1)
        made[own] = torch.einsum("hnl,lhd->nhd", found.softmax(-1), values).to(q.dtype)
        log_sums[:, own] = found.logsumexp(-1)
    return made, log_sums, q.new_empty(0), torch.zeros(2)


def varlen_bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    ends_q: Tensor, ends_k: Tensor, slopes: None, most_q: int, most_k: int, dropout: float, scale: float, zero: bool,
    causal: bool, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients by the given output and log-sums of all keys."""
    group = q.shape[1] // k.shape[1]
    for own, seen in sequences(ends_q, ends_k):
        p = (scores(q[own], k[seen], scale, causal) - log_sums[:, own, None]).exp()
        pulled = dout[own].float()
        dp = torch.einsum("nhd,lhd->hnl", pulled, v[seen].float().repeat_interleave(group, 1))
        ds = p * (dp - (pulled * out[own].float()).sum(-1).t()[:, :, None]) * scale
        dq[own] = torch.einsum("hnl,lhd->nhd", ds, k[seen].float().repeat_interleave(group, 1)).to(q.dtype)
        for grad, by, rows in ((dk, ds, q[own].float()), (dv, p, pulled)):
            grad[seen] = torch.einsum("hnl,nhd->lhd", by, rows).unflatten(1, (-1, group)).sum(2).to(grad.dtype)
    return dq, dk, dv, q.new_empty(0)


def fused_fwd(given: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    """As cuDNN: log-sums [T, N, 1]."""
    lengths = given["cu_seqlens_q"], given["cu_seqlens_kv"]
    assert all(torch.equal(ends, given[f"cu_seqlens_{x}_padded"]) for ends, x in zip(lengths, ("q", "kv"), strict=True))
    most, causal = (given["max_seqlen_q"], given["max_seqlen_kv"]), given["attn_mask_type"] == "padding_causal"
    tensors = given["q"], given["k"], given["v"]
    out, log_sums, _, dice = varlen_fwd(
        *tensors, None, *lengths, None, None, None, None, *most, given["dropout"], given["attn_scale"], False, causal
    )
    return out, [log_sums.t().unsqueeze(-1).contiguous(), dice]


def fused_bwd(given: dict[str, Any]) -> tuple[Tensor, ...]:
    lengths, most = (given["cu_seqlens_q"], given["cu_seqlens_kv"]), (given["max_seqlen_q"], given["max_seqlen_kv"])
    tensors, causal = (given["q"], given["k"], given["v"]), given["attn_mask_type"] == "padding_causal"
    log_sums = given["aux_ctx_tensors"][0][..., 0].t()
    return varlen_bwd(
        given["d_o"], *tensors, given["o"], log_sums, *map(torch.empty_like, tensors), *lengths, None, *most,
        given["dropout"], given["attn_scale"], False, causal,
    )  # fmt: skip


def half(ends: Tensor, which: int) -> Tensor:
    """Positions of the first or second half of each sequence."""
    return torch.cat([torch.arange(a, b).chunk(2)[which] for a, b in ends.unfold(0, 2, 1).tolist()])


def second_half_lse_correction(log_sums: Tensor, more: Tensor, ends: Tensor, packed: bool) -> None:
    assert packed
    log_sums[:, half(ends, 1)] = torch.logaddexp(log_sums[:, half(ends, 1)], more)


def out_correction(out: Tensor, part: Tensor, log_sums: Tensor, own: Tensor, ends: Tensor, second: bool, packed: bool) -> None:
    rows = half(ends, 1) if second else torch.arange(len(out))
    out[rows] += (part.float() * (own - log_sums[:, rows]).exp().t().unsqueeze(-1)).to(out.dtype)


def grad_correction(grad: Tensor, part: Tensor, ends: Tensor, first: str, second: str) -> None:
    whole = "none" not in (first, second)
    for which, do in enumerate((first, second)):
        if do != "none":
            rows = half(ends, which)
            grad[rows] = (part[rows] if whole else part) + (grad[rows] if do == "add" else 0)


class Instant:
    """A stream or an event of a device that has finished all that it was given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def nothing(self, *args: Any) -> None: ...

    wait_event = record_event = wait_stream = record = wait = nothing


class WaitsOnce:
    """A message that may be waited for again, as NCCL's: gloo's would never come a second time."""

    def __init__(self, message: Any):
        self._message = message

    def wait(self) -> None:
        message, self._message = self._message, Instant()
        message.wait()


@contextmanager
def tensors_on_cuda(kernels: str) -> Iterator[None]:
    """Tensors say that they are on a CUDA device on which these kernels are taken."""
    with ExitStack() as stack:
        replaced: list[tuple[Any, str, Any]] = [
            (torch.Tensor, "is_cuda", property(lambda self: True)), (torch.cuda, "stream", lambda stream: nullcontext()),
            (te_utils, "_get_device_compute_capability", lambda device: CAPABILITY[kernels]),
            *((torch.cuda, name, Instant) for name in ("Stream", "Event", "current_stream")),
        ]  # fmt: skip
        for where, name, value in replaced:
            stack.enter_context(mock.patch.object(where, name, value, create=True))
        yield


def call_bound(signature: inspect.Signature, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    bound = signature.bind(*given, **named)
    bound.apply_defaults()
    return function(bound.arguments)


def replace_kernels() -> None:
    send = context_parallel.flash_attn_p2p_communicate

    def communicate(*given: Any) -> list[WaitsOnce]:
        sent.append(given)
        return [WaitsOnce(message) for message in send(*given)]

    context_parallel.flash_attn_p2p_communicate = communicate
    compiled = flash_attn_interface.flash_attn_gpu
    compiled.varlen_fwd, compiled.varlen_bwd = varlen_fwd, varlen_bwd
    for name in ("forward", "backward"):
        operation = getattr(flash_attn_interface, f"_flash_attn_varlen_{name}")
        operation.register_kernel("cpu", operation._init_fn)  # its own, which is for CUDA devices only
    for name, fused in {"fused_attn_fwd": fused_fwd, "fused_attn_bwd": fused_bwd}.items():
        signature = inspect.signature(getattr(context_parallel, name))
        setattr(context_parallel, name, partial(call_bound, signature, fused))
    tex.get_fused_attn_backend = lambda *_: cpp_extensions.fused_attn.FusedAttnBackend["F16_arbitrary_seqlen"]
    cpp_extensions.get_cudnn_version = lambda: 91000
    tex.thd_read_half_tensor = lambda x, ends, which: x[half(ends, which)]
    tex.thd_read_second_half_lse = lambda x, ends, packed, length: x[:, half(ends, 1)].contiguous()
    tex.thd_second_half_lse_correction, tex.thd_out_correction = second_half_lse_correction, out_correction
    tex.thd_grad_correction = grad_correction


class Case:
    """A rank's tensors for sequences of these lengths, and a pull at the outputs."""

    def __init__(self, group: dist.ProcessGroup, lengths: list[int], dtype: torch.dtype = torch.float16):
        share = SequenceShare(lengths, [0], group, CPU, 4)
        self.plan = ContextPlan(share, (torch.ones(64, DIM), torch.zeros(64, DIM)), share.size + 2)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.query, self.key, self.value, self.pull = (
            torch.randn(share.size + 2, heads, DIM, generator=generator).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
        )

    def attend(self, **options: Any) -> list[Tensor]:
        """Output and gradients."""
        leaves = [x.clone().requires_grad_() for x in (self.query, self.key, self.value)]
        out = self.plan.attend(0, *leaves, SCALE, **options)
        out.backward(self.pull.flatten(1))
        return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def compare(rank: int, folder: str, size: int, kernels: str) -> None:
    replace_kernels()
    compat.install()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    group = dist.new_group(range(RANKS - size, RANKS))
    if isinstance(group, dist.ProcessGroup):
        compare_on(group, folder, kernels)
    dist.barrier()


def compare_on(group: dist.ProcessGroup, folder: str, kernels: str) -> None:
    use_ring_once(group, CPU, [group])
    sinks = torch.linspace(-1, 1, HEADS, dtype=torch.float16)
    whole, other = Case(group, LENGTHS), Case(group, LENGTHS[:2])
    cases: dict[str, Callable[[], list[Tensor]]] = {
        "no window": whole.attend,
        "a wide window": partial(whole.attend, window=66),
        "a window": partial(whole.attend, window=5),
        "a cap": partial(whole.attend, cap=3.0),
        "sinks": partial(whole.attend, sinks=sinks),
        "float32": Case(group, LENGTHS, torch.float32).attend,
        "no kernel": other.attend,
    }
    found: dict[str, Any] = {"gathered": {name: run() for name, run in cases.items()}, "ring": {}, "sent": {}, "warned": {}}
    for name, run in cases.items():
        os.environ["NVTE_FLASH_ATTN"] = str(int(name != "no kernel"))
        os.environ["NVTE_FUSED_ATTN"] = str(int(name != "no kernel" and kernels == "cuDNN"))
        sent.clear()
        with tensors_on_cuda(kernels), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found["ring"][name] = run()
        found["sent"][name], found["warned"][name] = len(sent), [str(each.message) for each in told]
    torch.save(found, Path(folder) / f"{group.rank()}.pt")


if __name__ == "__main__":
    multiprocessing.spawn(compare, (sys.argv[1], int(sys.argv[2]), sys.argv[3]), nprocs=RANKS)

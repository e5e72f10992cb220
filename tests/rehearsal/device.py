"""A CUDA device that is not there, as torch and megatron-core ask for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor

from oppo_megatron.mcore.kv.cached_plan import PagedCall
from tests.rehearsal.streams import Clock, merge
from tests.rehearsal.watch import DEVICE, Watch, memory_of

MEMORY_BYTES = 80 << 30


class Stream:
    """A stream of the watched device, or its present one where `number` says so."""

    def __init__(self, watch: Watch, number: int | None = None):
        self._watch, self.number = watch, watch.streams.new() if number is None else number

    @property
    def clock(self) -> Clock:
        """The time that the next operation comes later than, for what other streams do."""
        return self._watch.streams.clocks[self.number]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.number == self.number

    def __hash__(self) -> int:
        return self.number

    def wait_stream(self, other: Stream) -> None:
        merge(self.clock, self._watch.streams.host)
        merge(self.clock, other.clock)

    def wait_event(self, event: Event) -> None:
        merge(self.clock, event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._watch)
        event.record(self)
        return event

    def synchronize(self) -> None:
        with self._watch.streams.on(self.number):
            self._watch.waits_for("synchronize")


class Event:
    def __init__(self, watch: Watch):
        self._watch, self.clock = watch, dict[int, int]()

    def record(self, stream: Stream | None = None) -> None:
        number = self._watch.streams.current if stream is None else stream.number
        self.clock = dict(self._watch.streams.clocks[number])

    def wait(self, stream: Stream | None = None) -> None:
        number = self._watch.streams.current if stream is None else stream.number
        merge(self._watch.streams.clocks[number], self.clock)

    def synchronize(self) -> None:
        self._watch.waits_for("synchronize", until=self.clock)

    def query(self) -> bool:
        return True


class Graph:
    """A captured step: a replay reads and writes what the capture has, but for what was made within it."""

    def __init__(self, watch: Watch):
        self._watch, self._made = watch, set[int]()
        self.reads, self.writes, self._lost = set[int](), set[int](), False
        watch.graphs.add(self)

    def free(self, memory: int) -> None:
        self._lost = self._lost or memory in self.reads or memory in self.writes

    def replay(self) -> None:
        if self._lost:
            self._watch.fault("a captured step is replayed over memory that has been freed")
        told = self._watch.streams.launch(self.reads, self.writes)
        if told:
            self._watch.fault(told)

    def capture_begin(self, *_: Any) -> None:
        self._capture = self._captured()
        self._capture.__enter__()

    def capture_end(self) -> None:
        self._capture.__exit__(None, None, None)

    @contextmanager
    def _captured(self) -> Iterator[None]:
        watch, launch = self._watch, self._watch.streams.launch

        def noted(reads: Any, writes: Any, fresh: Any = ()) -> str | None:
            reads, writes, fresh = set(reads), set(writes), set(fresh)
            self._made |= fresh
            self.reads |= reads - self._made
            self.writes |= writes - self._made
            return launch(reads, writes, fresh)

        watch.streams.launch, watch.capturing = noted, True  # type: ignore[method-assign]
        try:
            yield
        finally:
            watch.streams.launch, watch.capturing = launch, False  # type: ignore[method-assign]


def attention(
    watch: Watch, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Attention by torch's choice: flash takes no mask or float32, the memory-efficient kernel no groups of heads."""
    grouped = q.shape[1] != k.shape[1]
    assert not grouped or enable_gqa, "heads in groups, and not said so"
    assert attn_mask is None or attn_mask.dtype in (torch.bool, q.dtype), "a mask of another type than the queries"
    if attn_mask is None and q.dtype != torch.float32:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)[0]
    if grouped:
        watch.fault("no kernel of attention takes this: a mask, or float32, with heads in groups")
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(~attn_mask, -torch.inf)
        attn_mask = attn_mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    keeps = torch.is_grad_enabled()
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(q, k, v, attn_mask, keeps, 0.0, is_causal, scale=scale)[0]


def by_table(
    watch: Watch, q: Tensor, k: Tensor, v: Tensor, call: PagedCall, scale: float, window: int | None, cap: float | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """The Triton kernel of paged caches, as far as a device can be told of it."""
    out = torch.empty_like(q)
    given = [*([call.new_ends] if call.most_new > 1 else []), *([] if sinks is None else [sinks])]
    watch.uses([q, k, v, call.table_SW, call.length_S, *given], [out])
    watch.learn(out, None)
    return out


def turned(watch: Watch, qkv: Tensor, cos: Tensor, sin: Tensor, blocks: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The Triton kernel that rotates queries and keys and writes keys and values to paged caches."""
    assert qkv.dtype == k.dtype and cos.dtype == torch.float32 and blocks.dtype == offsets.dtype == torch.int64
    assert len(cos) == len(sin) == len(blocks) == len(offsets) == len(qkv), (cos.shape, blocks.shape, qkv.shape)
    out = qkv.new_empty(len(qkv), qkv.shape[1] * (qkv.shape[2] - 2), qkv.shape[3])
    watch.uses([qkv.contiguous(), cos, sin, blocks, offsets, k, v], [out])
    watch.learn(out, None)
    return out


def ring_of(group: Any, *_: Any) -> Callable[..., Tensor]:
    """Transformer-engine's messages of one pass to the next rank and from the one before, each over a pair of its own."""
    ranks, here = dist.get_process_group_ranks(group), group.rank()

    def attend(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        inbox = torch.empty_like(k)
        messages = [lambda: dist.isend(k.detach(), ranks[(here + 1) % len(ranks)], group)]
        messages.insert(here % 2, lambda: dist.irecv(inbox, ranks[here - 1], group))
        for message in [send() for send in messages[::-1]]:
            message.wait()
        return (q * (k.sum() + v.sum() + inbox.sum())).flatten(1)

    return attend


class FusedNorm(torch.autograd.Function):
    """Outputs that torch's kernel of rms_norm keeps on a GPU; a CPU build would compose it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        assert x.dtype == weight.dtype or weight.dtype == torch.float32, (x.dtype, weight.dtype)
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).flatten(0, -2).sum(0)


def moved(module: torch.nn.Module, target: torch.device | torch.dtype) -> torch.nn.Module:
    """`Module.to`, which for fake tensors would swap what cannot be swapped; what modules share stays shared."""
    shared: dict[Tensor, Tensor] = {}
    for each in module.modules():
        for name, old in each._parameters.items():
            if old is not None and old not in shared:
                new = torch.nn.Parameter(old.detach().to(target), old.requires_grad)
                new.__dict__.update({k: v for k, v in old.__dict__.items() if k not in new.__dict__})
                shared[old] = new
            each._parameters[name] = None if old is None else shared[old]
        for name, buffer in each._buffers.items():
            if buffer is not None and (isinstance(target, torch.device) or buffer.is_floating_point()):
                each._buffers[name] = buffer.to(target)
    return module


def install(watch: Watch) -> None:
    torch._C._set_only_lift_cpu_tensors(True)  # what a list becomes on the device is seen to come from the host
    for name, stand_in in {**_state(watch), **_running(watch)}.items():
        setattr(torch.cuda, name, stand_in)
    torch.cuda.random.get_rng_state = lambda *_, **__: torch.zeros(16, dtype=torch.uint8)
    F.scaled_dot_product_attention = lambda *a, **k: attention(watch, *a, **k)
    plain_norm = F.rms_norm
    F.rms_norm = lambda x, shape, weight=None, eps=None: (
        FusedNorm.apply(x, weight) if x.device.type == "cuda" else plain_norm(x, shape, weight, eps)
    )
    torch.nn.Module.to = moved
    fake_tensor.init_gpu_context = lambda *_: None  # which a CUDA build would make a tensor on the device for
    _tensors(watch)


def _state(watch: Watch) -> dict[str, Any]:
    properties = SimpleNamespace(total_memory=MEMORY_BYTES, major=9, minor=0, name="no device", multi_processor_count=132)
    return {
        "is_available": lambda: True, "is_initialized": lambda: False, "_lazy_init": lambda: None, "device_count": lambda: 8,
        "current_device": lambda: DEVICE, "set_device": lambda *_: None, "device": lambda *_: nullcontext(),
        "get_device_capability": lambda *_: (9, 0), "get_device_name": lambda *_: properties.name,
        "get_device_properties": lambda *_: properties, "empty_cache": lambda: None,
        "memory_reserved": lambda *_: 1 << 30, "max_memory_reserved": lambda *_: 2 << 30, "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0, "is_current_stream_capturing": lambda: watch.capturing,
    }  # fmt: skip


def _of(watch: Watch, kind: type) -> type:
    return type(kind.__name__, (kind,), {"__init__": lambda self, *_, **__: kind.__init__(self, watch)})


def _running(watch: Watch) -> dict[str, Any]:
    streams = watch.streams
    return {
        "Stream": _of(watch, Stream), "Event": _of(watch, Event), "current_stream": lambda *_: Stream(watch, streams.current),
        "default_stream": lambda *_: Stream(watch, streams.default), "stream": lambda stream: streams.on(stream.number),
        "synchronize": lambda *_: watch.waits_for("synchronize", all_streams=True), "CUDAGraph": _of(watch, Graph),
        "graph_pool_handle": lambda: object(),
    }  # fmt: skip


def _after_copies(watch: Watch, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that looks at memory of the host, without an operation of torch's."""

    def looks(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        watch.touches([tensor])
        return method(tensor, *args, **kwargs)

    return looks


def _tensors(watch: Watch) -> None:
    for name in ("tolist", "numpy"):
        setattr(Tensor, name, _after_copies(watch, getattr(Tensor, name)))
    FakeTensor.tolist = lambda self: watch.read(self).tolist()
    FakeTensor.numpy = lambda self, **_: np.asarray(watch.read(self))
    plain_data_ptr = torch.UntypedStorage.data_ptr
    torch.UntypedStorage.data_ptr = lambda self: self._cdata if self.device.type == "meta" else plain_data_ptr(self)  # type: ignore[method-assign]
    FakeTensor.data_ptr = lambda self: memory_of(self) + self.storage_offset() * self.dtype.itemsize
    Tensor.cuda = lambda self, *_, **__: self.to(DEVICE)  # type: ignore[assignment]
    Tensor.is_pinned = lambda self, *_: memory_of(self) in watch.pinned  # type: ignore[method-assign]

    def pinned(self: Tensor, *_: Any) -> Tensor:
        assert self.device.type == "cpu", "only memory of the host is pinned"
        copied = self.clone()
        watch.pinned[memory_of(copied)] = copied
        return copied

    Tensor.pin_memory = pinned  # type: ignore[method-assign]

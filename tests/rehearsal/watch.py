"""Runs operations of CUDA tensors on fake ones; notes waits of the host for the device, and faults that a GPU would have.
CPU tensors are real; values on the device that come from them alone are known, others are read as a number of their type."""

import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from tests.rehearsal.shapes import Kept, Shapes, leaves
from tests.rehearsal.streams import HostCopies, Streams

DEVICE = torch.device("cuda", 0)
KNOWN_NUMBERS = 2**13
"""So many numbers of the device are known at the most; larger tensors are weights and activations."""
READS = {"_local_scalar_dense", "item", "is_nonzero"}
ANSWERS: dict[torch.dtype, Any] = {torch.bool: True, torch.float32: 0.5, torch.float64: 0.5, torch.bfloat16: 0.5}
WHOLE = 5
DEVICE_OF = torch.ops.prim.device.default
SHAPE_READERS = {"nonzero", "masked_select", "_unique2", "unique_dim", "equal"}
ROOTS = ("/oppo_megatron/", "/tests/rehearsal/defects")


class Watch(TorchDispatchMode):
    """A CUDA device within the block; waits are counted by `phase`, kind and function; `kept` is what is known of shapes."""

    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self.shapes = Shapes(kept)
        self.streams = Streams()
        self.phase, self.capturing = "start", False
        self.waits: Counter[tuple[str, str, str]] = Counter()
        self.lines: dict[str, str] = {}
        self.phases: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self.idle: Counter[str] = Counter()  # waits by phase after which nothing is left to do on their stream
        self.faults: Counter[str] = Counter()
        self.copies = HostCopies()
        self.graphs: weakref.WeakSet[Any] = weakref.WeakSet()  # the captured steps
        self.pinned: dict[int, Tensor] = {}
        self._known: dict[int, Tensor] = {}  # by storage: its numbers, flat, on the CPU

    @contextmanager
    def at(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        self.phases[phase] += 1
        try:
            yield
        finally:
            self.phase = before

    def fault(self, what: str) -> None:
        place, line = here()
        self.faults[f"{place}: {what}"] += 1
        self.lines[place] = line

    def waits_for(self, kind: str, *, all_streams: bool = False, until: dict[int, int] | None = None) -> None:
        place, line = here()
        self.waits[self.phase, kind, place] += 1
        self.lines[place] = line
        if self.capturing:
            self.fault(f"the host waits ({kind}) in a step that is captured")
        until = dict(self._clock()) if until is None else until
        self.idle[self.phase] += until == self._clock()
        self.streams.wait_for_all() if all_streams else self.streams.wait_for(until)
        self.copies.waited(self.streams.host)

    def read(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cuda":
            self._launch(reads=[tensor])
            self.waits_for("read")
        return self._numbers(tensor)

    def _numbers(self, tensor: Tensor) -> Tensor:
        known = self.known(tensor)
        if known is not None:
            return known.clone()
        return torch.full(tuple(tensor.shape), ANSWERS.get(tensor.dtype, WHOLE), dtype=tensor.dtype)

    def known(self, tensor: Tensor) -> Tensor | None:
        if not isinstance(tensor, FakeTensor):
            return tensor if tensor.numel() <= KNOWN_NUMBERS else None
        flat = self._known.get(memory_of(tensor))
        if flat is None or flat.dtype != tensor.dtype:
            return None
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def learn(self, tensor: Tensor, numbers: Tensor | None) -> None:
        """The whole memory of a tensor has these numbers, or unknown ones."""
        memory = memory_of(tensor)
        numbers_there = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
        if numbers is None or numbers_there > KNOWN_NUMBERS:
            self._known.pop(memory, None)
            return
        flat = torch.zeros(numbers_there, dtype=tensor.dtype)
        flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(numbers)
        self._known[memory] = flat

    def uses(self, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        self._launch(reads, writes)

    def touches(self, reads: Sequence[Tensor], writes: Sequence[Tensor] = ()) -> None:
        told = self.copies.touched(map(memory_of, reads), map(memory_of, writes))
        if told:
            self.fault(told)

    def end(self) -> None:
        for _, _, (place, line) in self.copies.arriving.values():
            self.faults[f"{place}: a copy to the host was not waited for"] += 1
            self.lines[place] = line

    def _now(self) -> tuple[int, int]:
        stream = self.streams.current
        return stream, self.streams.clocks[stream].get(stream, 0)

    def _clock(self) -> dict[int, int]:
        return self.streams.clocks[self.streams.current]

    def _launch(self, reads: Any = (), writes: Any = (), fresh: Any = ()) -> None:
        for each in () if self.capturing else fresh:  # what a captured step makes is in memory of its own
            weakref.finalize(each.untyped_storage(), self._forget, memory_of(each)).atexit = False
        self.launches[self.phase] += 1
        told = self.streams.launch(*(map(memory_of, tensors) for tensors in (reads, writes, fresh)))
        if told:
            self.fault(told)

    def _forget(self, memory: int) -> None:
        self.streams.free(memory)
        for graph in self.graphs:
            graph.free(memory)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled, and being left out takes longer than many an operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_OF:
            return args[0].fake_device
        kwargs = kwargs or {}
        tensors = [x for x in leaves((args, kwargs)) if isinstance(x, Tensor)]
        fakes = [x for x in tensors if isinstance(x, FakeTensor)]
        if not fakes and not _names_cuda(args, kwargs):
            if self.copies:
                self.touches(tensors, written_by(func, args, kwargs))
            return func(*args, **kwargs)
        name = func.name().partition("::")[2].partition(".")[0]
        if name in READS:
            return self.read(args[0]).item() if name != "is_nonzero" else bool(self.read(args[0]).item())
        if name in SHAPE_READERS or _indexes_by_mask(name, args):
            return self._shaped_by_values(func, name, args, kwargs)
        if name in ("repeat_interleave", "repeat_interleave_Tensor") and kwargs.get("output_size") is None:
            self.waits_for("read")
        on_its_way = self._note_copies(name, args, kwargs)
        out = self._brought_back(name, args, self.shapes.run(func, args, kwargs))
        self._account(func, name, args, kwargs, out)
        if on_its_way is not None:
            arrives = on_its_way is False
            self.copies.begin(out if arrives else on_its_way, self._now(), here(), arrives=arrives)
        return out

    def _shaped_by_values(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        tensors = [x for x in leaves((args, kwargs)) if isinstance(x, Tensor)]
        self._launch(reads=[x for x in tensors if isinstance(x, FakeTensor)])
        self.waits_for(name)
        numbers = {id(x): self.known(x) for x in tensors}
        if any(known is None for known in numbers.values()):
            assert name in ("equal", "nonzero"), f"{name} of numbers that are not known"
            return True if name == "equal" else self._placed(torch.empty(0, tensors[0].dim(), dtype=torch.int64))
        out = func(*tree_map(lambda x: numbers.get(id(x), x), args), **kwargs)
        return tree_map(lambda x: self._placed(x) if isinstance(x, Tensor) else x, out)

    def _placed(self, numbers: Tensor) -> Tensor:
        with self.shapes.mode:
            fake = torch.empty(numbers.shape, dtype=numbers.dtype, device=DEVICE)
        self._launch(fresh=[fake])
        self.learn(fake, numbers)
        return fake

    def _note_copies(self, name: str, args: Any, kwargs: Any) -> Tensor | bool | None:
        """Note copies between host and device, and waits; returns the host tensor that a copy reads meanwhile, or False."""
        if name in ("index", "index_put", "index_put_") and args[0].device.type == "cuda":
            for each in args[1]:
                if isinstance(each, Tensor) and each.device.type == "cpu" and each.dim():
                    self.waits_for("pageable")
        if name not in ("_to_copy", "to", "copy_"):
            return None
        source = args[1] if name == "copy_" else args[0]
        target = args[0].device if name == "copy_" else _target(args, kwargs, source.device)
        way = source.device.type, target.type
        asynchronous = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
        a_number = source.dim() == 0 and name == "copy_"  # which the kernel is given
        if way == ("cpu", "cuda") and not a_number:
            if memory_of(source) not in self.pinned or not source.is_contiguous() or _converts(name, args, kwargs):
                self.waits_for("pageable")
            elif not asynchronous:
                self.waits_for("blocking copy")
            else:
                return source
        elif way == ("cuda", "cpu"):
            self.uses([source], [])
            if asynchronous and (name != "copy_" or memory_of(args[0]) in self.pinned):
                return False
            self.waits_for("read")
        return None

    def _brought_back(self, name: str, args: Any, out: Any) -> Any:
        if name in ("_to_copy", "to") and isinstance(out, FakeTensor) and out.device.type == "cpu":
            return self._numbers(args[0]).to(out.dtype)
        if name == "copy_" and not isinstance(args[0], FakeTensor):
            return args[0].copy_(self._numbers(args[1]))
        return out

    def _account(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        inputs = [x for x in leaves((args, kwargs)) if isinstance(x, FakeTensor)]
        outputs = [x for x in leaves(out) if isinstance(x, FakeTensor)]
        written = [x for x in written_by(func, args, kwargs) if isinstance(x, FakeTensor)]
        there = {memory_of(x) for x in inputs}
        fresh = [x for x in outputs if memory_of(x) not in there]
        if not written and not fresh:
            return  # a view
        self._launch(inputs, written, fresh)
        numbers = self._computed(func, name, args, kwargs, [*written, *fresh])
        if numbers is None:
            for each in (*written, *fresh):
                self._known.pop(memory_of(each), None)
            return
        for each, known in zip(outputs, leaves(numbers), strict=False):
            if memory_of(each) not in there and isinstance(known, Tensor):
                self.learn(each, known)

    def _computed(self, func: Any, name: str, args: Any, kwargs: Any, changed: list[Tensor]) -> Any | None:
        """The operation on known numbers (written in place where it does that); None where something is not known."""
        if any(x.numel() > KNOWN_NUMBERS for x in changed) or "rand" in name:
            return None
        tensors = [x for x in leaves((args, kwargs)) if isinstance(x, Tensor)]
        numbers = {id(x): self.known(x) for x in tensors}
        if name == "copy_" and numbers[id(args[0])] is None and numbers[id(args[1])] is not None:
            whole = args[0].numel() * args[0].dtype.itemsize == args[0].untyped_storage().nbytes()
            self.learn(args[0], numbers[id(args[1])] if whole else None)
            return args[0]
        if any(known is None for known in numbers.values()):
            return None
        on_cpu = tree_map(lambda x: _on_cpu(numbers.get(id(x), x)), (args, kwargs))
        try:
            with torch.inference_mode(False):
                return func(*on_cpu[0], **on_cpu[1])
        except NotImplementedError:  # an operation of GPUs alone
            return None


def memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def written_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    found: list[Any] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += leaves(args[position] if position < len(args) else kwargs.get(argument.name))
    return [x for x in found if isinstance(x, Tensor)]


def _converts(name: str, args: Any, kwargs: Any) -> bool:
    """Whether a copy changes the type, which torch does on the host, in ordinary memory."""
    if name == "copy_":
        return args[0].dtype != args[1].dtype
    types = [x for x in (*args[1:], *kwargs.values()) if isinstance(x, torch.dtype)]
    return any(each != args[0].dtype for each in types)


def _names_cuda(args: Any, kwargs: Any) -> bool:
    return any(isinstance(x, torch.device) and x.type == "cuda" for x in (*args, *kwargs.values()))


def _target(args: Any, kwargs: Any, default: torch.device) -> torch.device:
    for each in (*args[1:], *kwargs.values()):
        if isinstance(each, torch.device | Tensor):
            return each if isinstance(each, torch.device) else each.device
    return default


def _on_cpu(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _indexes_by_mask(name: str, args: Any) -> bool:
    return name == "index" and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])


def here() -> tuple[str, str]:
    """The product's innermost function, as `room/file.py function`, and file with line; or megatron-core's."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        for root in ROOTS:
            if root in file and "/tests/rehearsal/watch" not in file:
                place = file.rpartition(root)[2] if root == ROOTS[0] else Path(file).name
                return f"{place} {frame.f_code.co_name}", f"{place}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere", "?"

"""Moves trained weights to the layout of decoding or scoring; with equal layouts the models share parameters.

Layouts cut the same Hugging Face tensors (`Part`), so ranks compute their copies without a message.
"""

from __future__ import annotations

import time
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from threading import Thread

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from oppo_megatron.layout.hf_layout import Part
from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.mcore.device import new_stream
from oppo_megatron.mcore.groups import RoleGroups
from oppo_megatron.mcore.lora import is_adapter
from oppo_megatron.mcore.model import RoleModel

ROUND_BYTES = 64 << 20  # staged per round and pair of ranks


@dataclass(frozen=True)
class MoveReport:
    """`bytes_moved`: between ranks, over the role."""

    bytes_moved: int
    seconds: float


@dataclass(frozen=True)
class _Piece:
    """Rows and columns of a parameter; its storage may be replaced."""

    param: Parameter
    rows: Sequence[slice]
    columns: slice

    @classmethod
    def of(cls, params: dict[str, Parameter], part: Part, cut: slice) -> _Piece:
        if part.cut == 1:
            return cls(params[part.param], part.rows, cut)
        return cls(params[part.param], part.spans(cut.start, cut.stop), slice(None))

    def views(self) -> list[Tensor]:
        matrix = self.param.data if self.param.dim() == 2 else self.param.data.unsqueeze(1)
        return [matrix[rows, self.columns] for rows in self.rows]

    @property
    def numel(self) -> int:
        return sum(view.numel() for view in self.views())


_Aside = list[tuple[list[_Piece], Tensor]]
"""Received values, and the pieces that they will fill."""


@dataclass(frozen=True)
class Across:
    """How weights pass from the ranks that train a role to others that use it: stages of the training layout, and groups."""

    training: RolePlacement
    serving: RolePlacement
    num_stages: int
    group: dist.ProcessGroup
    ready: dist.ProcessGroup  # on CPUs, for news of the weights
    staged: bool = True  # a begun move receives into tensors of its own


class Reallocation:
    """Moves weights to a serving model of equal dtype; every rank that has either model calls `move`.

    Without `across` each rank has both.
    """

    def __init__(
        self,
        training: Sequence[RoleModel],
        serving: RoleModel | None,
        round_bytes: int = ROUND_BYTES,
        across: Across | None = None,
    ):
        self._across = across
        self._begun: Future[_Aside | None] | None = None
        models = [*training, *([] if serving is None else [serving])]
        if across is None:
            assert serving is not None
            ours, theirs = serving.groups, training[0].groups
            assert sorted(ours.ranks) == sorted(theirs.ranks), (ours.ranks, theirs.ranks)
            sizes = [(groups.ranks, groups.tp, groups.pp, groups.ep) for groups in (ours, theirs)]
            self.shared = len(training) == 1 and sizes[0] == sizes[1]
            if self.shared:
                share_parameters(training[0], serving)
                return
            self._group = ours.all
            source, target = (_Layout(model, model.groups, model.num_stages) for model in (training[0], serving))
        else:
            self.shared, self._group = False, across.group
            source = _Layout(models[0], across.training, across.num_stages)
            target = _Layout(models[0], across.serving, across.serving.pp)
        self._digested, layout = (training, source) if training else (models, target)
        stage_of = {part.hf_name: stage for stage in reversed(range(len(layout.stages))) for part in layout.stages[stage]}
        self._names = {name: (number, stage_of[name]) for number, name in enumerate(sorted(stage_of))}
        self._like = next(models[-1].parameters())
        assert len({next(model.parameters()).dtype for model in models}) == 1, "weights of two dtypes cannot be moved bit for bit"
        self._own: list[tuple[_Piece, _Piece]] = []
        sends, receives, moved = defaultdict[int, list[_Piece]](list), defaultdict[int, list[_Piece]](list), 0
        rank = dist.get_rank()
        trained = {chunk.stage: dict(chunk.named_parameters()) for chunk in training}
        served = {} if serving is None else dict(serving.named_parameters())
        for receiver in target.ranks:
            for sender, stage, sent, received, numel in _copies(source, target, receiver):
                out = _Piece.of(trained[stage], *sent) if sender == rank else None
                into = _Piece.of(served, *received) if receiver == rank else None
                if out is not None and into is not None:
                    self._own.append((out, into))
                elif out is not None:
                    sends[receiver].append(out)
                elif into is not None:
                    receives[sender].append(into)
                moved += numel * (sender != receiver)
        self._bytes, limit = moved * self._like.itemsize, round_bytes // self._like.itemsize
        self._sends = {peer: _rounds(pieces, limit) for peer, pieces in sends.items()}
        self._receives = {peer: _rounds(pieces, limit) for peer, pieces in receives.items()}

    @torch.no_grad()
    def move(self) -> MoveReport:
        """Move the weights, or complete a move that was begun.  Raises RuntimeError of the back end if a peer is lost."""
        if self.shared:
            return MoveReport(0, 0.0)
        began, aside = time.perf_counter(), self._end()
        for source, target in self._own:
            _fill([target], _flat([source]))
        if aside is None:
            for number in range(max(map(len, [*self._sends.values(), *self._receives.values()]), default=0)):
                for pieces, values in self._exchange([number]):
                    _fill(pieces, values)
        for pieces, values in aside or ():
            _fill(pieces, values)
        if self._like.device.type == "cuda":
            torch.cuda.synchronize(self._like.device)
        return MoveReport(self._bytes, time.perf_counter() - began)

    @torch.no_grad()
    def begin(self) -> None:
        """Tell that the trained weights are there and, unless the move pauses decoding, send them, or receive them aside.

        For ranks that have one of the models.  Until `move` or `drop`, the trained weights may not change.
        """
        across, self._begun = self._across, Future[_Aside | None]()
        assert across is not None and not self._own
        thread = Thread(target=self._complete, args=(across, self._begun), name="weights", daemon=True)
        thread.start()

    @property
    def arrived(self) -> bool:
        return self._begun is None or self._begun.done()

    @torch.no_grad()
    def digest(self) -> int:
        """Checksum of the trained weights, on ranks that train, else of the serving ones; equal in any layout.

        Collective of the ranks that train, and of the others.
        """
        sums = torch.zeros(len(self._names), dtype=torch.int64, device=self._like.device)
        for model in self._digested:
            params, groups = dict(model.named_parameters()), model.groups
            for part in model.parts(groups.tp, model.stage, model.num_stages, groups.ep):
                number, stage = self._names[part.hf_name]
                if model.stage == stage and groups.place < part.shares(groups.tp):
                    views = _Piece.of(params, part, slice(0, _width(part, groups.tp))).views()
                    for view in views:
                        sums[number] += _bits(view).sum(dtype=torch.int64)
        dist.all_reduce(sums, group=self._digested[0].groups.all)
        return zlib.crc32(sums.cpu().numpy().tobytes())

    def drop(self) -> None:
        """End a begun move without a change of the serving model."""
        self._end()

    def _end(self) -> _Aside | None:
        begun, self._begun = self._begun, None
        return None if begun is None else begun.result()

    def _complete(self, across: Across, begun: Future[_Aside | None]) -> None:
        """In a thread, because gloo and NCCL report nothing that nobody waits for."""
        try:
            leader, rank, news = across.training.ranks[0], dist.get_rank(), torch.zeros(1)
            if rank == leader:
                for work in [dist.isend(news, peer, across.ready) for peer in across.serving.ranks]:
                    assert work is not None, "the leader is in the group"
                    work.wait()
            elif rank in across.serving.ranks:
                dist.recv(news, leader, across.ready)
            aside = None
            if across.staged:
                with torch.no_grad(), self._stream():
                    numbers = range(max(map(len, [*self._sends.values(), *self._receives.values()]), default=0))
                    aside = self._exchange(numbers)
                    if self._like.device.type == "cuda":
                        torch.cuda.current_stream(self._like.device).synchronize()
            begun.set_result(aside)
        except BaseException as error:
            begun.set_exception(error)

    def _stream(self) -> AbstractContextManager[None]:
        device = self._like.device
        return torch.cuda.stream(new_stream(device)) if device.type == "cuda" else nullcontext()

    def _exchange(self, numbers: Iterable[int]) -> _Aside:
        """Pass one message of each number per pair of ranks, pieces in the same order; return what came."""
        transfers, filled = [], []
        for number in numbers:
            for peer, rounds in self._sends.items():
                for pieces in rounds[number : number + 1]:
                    transfers.append(dist.P2POp(dist.isend, _flat(pieces), peer, self._group))
            for peer, rounds in self._receives.items():
                for pieces in rounds[number : number + 1]:
                    values = self._like.new_empty(sum(piece.numel for piece in pieces))
                    transfers.append(dist.P2POp(dist.irecv, values, peer, self._group))
                    filled.append((pieces, values))
        for work in dist.batch_isend_irecv(transfers) if transfers else ():
            work.wait()
        return filled


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32 if values.itemsize == 4 else torch.int16)


def share_parameters(training: RoleModel, serving: RoleModel) -> None:
    """Give `serving` the parameters of `training`, except adapters it lacks."""
    trained = dict(training.named_parameters())
    for path, old in list(serving.named_parameters()):
        new, (owner, _, name) = trained.pop(path), path.rpartition(".")
        assert new.shape == old.shape and new.dtype == old.dtype, (path, old.shape, new.shape)
        setattr(serving.get_submodule(owner), name, new)
    lacking = sorted(name for name in trained if serving.adapters is not None or not is_adapter(name))
    assert not lacking, f"parameters that the serving model lacks: {lacking}"


class _Layout:
    def __init__(self, model: RoleModel, placed: RoleGroups | RolePlacement, num_stages: int):
        self.ranks, self.tp, self.pp = placed.ranks, placed.tp, placed.pp
        self.stages = [model.parts(self.tp, stage, num_stages, placed.ep) for stage in range(num_stages)]

    def holders(self, stage: int, part: Part, share: int) -> Sequence[int]:
        size = len(self.ranks) // self.pp
        return self.ranks[stage % self.pp * size :][:size][share :: part.shares(self.tp)]


_Cut = tuple[Part, slice]
"""A range of a rank's share of a tensor, along its cut."""


def _copies(source: _Layout, target: _Layout, receiver: int) -> Iterator[tuple[int, int, _Cut, _Cut, int]]:
    """Yield sender, its stage, sent cut, filled cut, elements; replicas take turns."""
    found = {part.hf_name: (stage, part) for stage in reversed(range(len(source.stages))) for part in source.stages[stage]}
    place = target.ranks.index(receiver)
    for part in target.stages[place * target.pp // len(target.ranks)]:
        stage, held = found[part.hf_name]  # of tied embeddings the first
        width, held_width = _width(part, target.tp), _width(held, source.tp)
        first = place % part.shares(target.tp) * width
        for share in range(held.shares(source.tp)):
            start, stop = max(first, share * held_width), min(first + width, (share + 1) * held_width)
            if start >= stop:
                continue
            ranks = source.holders(stage, held, share)
            sender = receiver if receiver in ranks else ranks[receiver % len(ranks)]
            sent, filled = (slice(start - begin, stop - begin) for begin in (share * held_width, first))
            numel = (stop - start) * (part.num_rows if part.cut == 1 else prod(part.hf_shape[1:]))
            yield sender, stage, (held, sent), (part, filled), numel


def _width(part: Part, tp: int) -> int:
    return part.hf_shape[1] // tp if part.cut == 1 else part.num_rows


def _rounds(pieces: Sequence[_Piece], limit: int) -> list[list[_Piece]]:
    """Split by `limit` elements or one piece."""
    rounds: list[list[_Piece]] = []
    staged = 0
    for piece in pieces:
        if not rounds or staged + piece.numel > limit:
            rounds.append([])
            staged = 0
        staged += piece.numel
        rounds[-1].append(piece)
    return rounds


def _flat(pieces: Sequence[_Piece]) -> Tensor:
    """Return values, [n]; a single contiguous view is not copied."""
    parts = [view.flatten() for piece in pieces for view in piece.views()]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _fill(pieces: Sequence[_Piece], values: Tensor) -> None:
    views = [view for piece in pieces for view in piece.views()]
    for view, part in zip(views, values.split([view.numel() for view in views]), strict=True):
        view.copy_(part.view_as(view))

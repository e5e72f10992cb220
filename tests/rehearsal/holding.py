"""One role on one rank of a layout, built and used by the product on fake CUDA tensors: the bytes of each kind of memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from math import ceil
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from oppo_megatron.algorithms.advantages import NOTHING_SEEN
from oppo_megatron.algorithms.algorithm import Algorithm
from oppo_megatron.algorithms.experience import Experience
from oppo_megatron.cluster import process_groups
from oppo_megatron.cluster.process_groups import SharedGroups
from oppo_megatron.config.derived import max_context
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.engine.sampler import Sampling, draw
from oppo_megatron.engine.scoring import ScoringWorker
from oppo_megatron.layout.activations import MASK_NUMBERS
from oppo_megatron.layout.placements import RolePlacement, named_roles, role_placements, training_placements, world_size
from oppo_megatron.mcore import experts, roles, training
from oppo_megatron.mcore.device import on_device
from oppo_megatron.mcore.groups import RoleGroups, build_groups
from oppo_megatron.mcore.model import RoleModel, step
from oppo_megatron.mcore.weights.weight_sync import share_parameters
from oppo_megatron.records import Prompt, Rollout
from oppo_megatron.schedule.plan import cache_slots
from oppo_megatron.schedule.rounds import Growth
from oppo_megatron.train import roles as train_roles
from oppo_megatron.train.actor import Actor, Critic
from oppo_megatron.train.roles import TrainedRole
from oppo_megatron.train.update import UpdateSettings
from tests.rehearsal import device
from tests.rehearsal.asking import forked
from tests.rehearsal.peers import Alone
from tests.rehearsal.watch import DEVICE, Watch, here, memory_of
from tests.support.configs import run_of

SCALAR_ROLES, MIX = ("critic", "reward"), experts.mix
Measured = dict[str, float]
ROUNDED = 512
"""torch's allocator gives multiples of so many bytes."""


class Meter(Watch):
    """Counts the memory that is held now, and the most at once since the last `span` began."""

    def __init__(self) -> None:
        super().__init__({})
        self.held = self.most = 0
        self.tp, self.passed = 1, None  # tensor ranks; pairs that go to each, and to each replica if replicas divide experts
        self._alive: set[int] = set()

    def _launch(self, reads: Any = (), writes: Any = (), fresh: Any = ()) -> None:
        for each in tree_leaves(fresh):
            if isinstance(each, FakeTensor) and each.device.type == "cuda":
                self._count(each)

    def _account(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        super()._account(func, name, args, kwargs, out)
        if name == "logsumexp" and args[0].device.type == "cuda":  # on a GPU a call of several kernels, with this between them
            self.most = max(self.most, self.held + args[0].nbytes)

    def _numbers(self, tensor: Any) -> Any:
        if self.passed is not None and here()[0] in ("mcore/experts.py __init__", "mcore/experts.py mix"):
            return torch.full(tuple(tensor.shape), self.passed, dtype=tensor.dtype)
        return super()._numbers(tensor)

    def mix(self, x_TH: Any, chosen_TK: Any, *args: Any, replicas: Any = None, **options: Any) -> Any:
        """Let routers choose experts evenly."""
        self.passed = chosen_TK.numel() // (self.tp * (1 if replicas is None else replicas.size()))
        return MIX(x_TH, chosen_TK, *args, replicas=replicas, **options)

    def _count(self, tensor: FakeTensor) -> None:
        storage, memory = tensor.untyped_storage(), memory_of(tensor)
        if memory in self._alive:
            return
        self._alive.add(memory)
        size = -(-storage.nbytes() // ROUNDED) * ROUNDED
        self.held += size
        self.most = max(self.most, self.held)
        weakref.finalize(storage, self._free, memory, size)

    def _free(self, memory: int, size: int) -> None:
        self._alive.discard(memory)
        self.held -= size

    @contextmanager
    def span(self) -> Iterator[Span]:
        found = Span(self.held)
        self.most = self.held
        yield found
        found.kept, found.peak = self.held - found.before, self.most - found.before


class Span:
    """`kept`: bytes held at the end beyond those at the beginning; `peak`: the most at once, beyond those."""

    def __init__(self, before: int):
        self.before, self.kept, self.peak = before, 0, 0


def answering(peers: Alone) -> Callable[[dict[str, Any]], Any]:
    """The bytes of each kind that `role` takes on `rank` by `settings`, or {"error": why none are known}."""

    def measured(asked: dict[str, Any]) -> Measured:
        return Measurement(run_of(asked["settings"]), asked["role"], asked["rank"], peers).run()

    return lambda asked: forked([lambda: measured(asked)])[0]


class Measurement:
    """The role `name` of a configuration on `rank`, for the rest of this process."""

    def __init__(self, config: TrainConfig, name: str, rank: int, peers: Alone):
        self.config, self.name = config, name
        self.placement = role_placements(config)[name]
        self.training = training_placements(config).get(name)
        self.role: Any = named_roles(config)[name]
        self.head: Literal["lm", "scalar"] = "scalar" if name in SCALAR_ROLES else "lm"
        self.found: Measured = {}
        self.meter = Meter()
        device.install(self.meter)
        size = world_size(config)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        process_groups.world_timeout = lambda: timedelta(seconds=60)
        peers.stand(self.meter, rank, size)
        self.groups = SharedGroups()
        roles.load_weights = lambda *_, **__: None  # type: ignore[assignment]
        roles.fill_adapters = lambda *_, **__: None  # type: ignore[assignment]
        self.meter.tp, experts.mix = (self.training or self.placement).tp, self.meter.mix
        train_roles.Reallocation = _allocated  # type: ignore[misc, assignment]

    def run(self) -> Measured:
        with self.meter:
            model = self._load() if self.training is None else self._train(self.training)
            self._cached(model)
        return self.found

    def _counted(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            with self.meter.span() as taken:
                out = function(*args, **kwargs)
            self.found[kind] = self.found.get(kind, 0) + taken.kept
            return out

        return counted

    def _groups(self, placement: RolePlacement) -> RoleGroups:
        groups = build_groups(placement.ranks, placement.tp, placement.pp, self.name, self.groups, placement.cp, placement.ep)
        assert groups is not None
        return groups

    def _load(self) -> RoleModel:
        set_rope = RoleModel.set_rope
        RoleModel.set_rope = self._counted("buffers", set_rope)  # type: ignore[method-assign]
        with self.meter.span() as taken:
            model = roles.load_role(
                self.role, self._groups(self.placement), head=self.head, max_length=max_context(self.config),
                device=DEVICE, path="fused", role=self.name,
            )  # fmt: skip
        self.found["weights"] = taken.kept - self.found["buffers"]
        return model.requires_grad_(False)

    # Training: what is built, and two updates, the first of which makes the optimizer's state.

    def _train(self, placement: RolePlacement) -> RoleModel:
        role = self._trained_role(placement)
        algorithm = Algorithm.of(self.config)
        member = Actor(role, algorithm, 1.0) if self.name == "actor" else Critic(role, algorithm, 1)
        rollout = self.config.rollout
        rows = rollout.group_size * ceil(placement.dp * self._rows_of_a_micro_batch / rollout.group_size)
        with self.meter.span() as first:
            self._update(member, min(rollout.batch_size, rows))
        self.found["buffers"] += self._gather_buffer()
        self.found["optimizer"] += first.kept - self._gather_buffer()
        with self.meter.span() as second:
            self._update(member, self.config.rollout.batch_size)
        self.found["update"] = second.peak
        self.found["left behind"] = second.kept
        role.publish()
        return role.serving

    @property
    def _rows_of_a_micro_batch(self) -> int:
        config = self.config
        length = config.data.max_prompt_tokens + config.rollout.max_response_tokens - 1
        return max(1, config.runtime.micro_batch_tokens // length)

    def _trained_role(self, placement: RolePlacement) -> TrainedRole:
        serving = self._groups(self.placement)
        own = serving if placement == self.placement else self._groups(placement)
        RoleModel.set_rope = self._counted("buffers", RoleModel.set_rope)  # type: ignore[method-assign]
        training.get_megatron_optimizer = self._counted("optimizer", training.get_megatron_optimizer)
        train_roles.TrainedModel = self._counted("state", train_roles.TrainedModel)  # type: ignore[misc, assignment]
        with self.meter.span() as taken:
            role = train_roles.build_trained_role(
                self.role, serving, own, head=self.head, role=self.name, max_length=max_context(self.config), device=DEVICE,
                num_updates=10,
            )  # fmt: skip
        state = self.found.pop("state")
        self.found["gradients"] = state - self.found["optimizer"]
        self.found["weights"] = taken.kept - state - self.found["buffers"]
        return role

    def _gather_buffer(self) -> int:
        from megatron.core.parallel_state import get_global_memory_buffer

        return sum(each.nbytes for each in get_global_memory_buffer().buffer.values())

    def _update(self, member: Actor | Critic, rows: int) -> None:
        config = self.config
        prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
        numbers, tokens = [0.0] * response, [1] * response
        batch = [
            Rollout(Prompt(i, i, "", (1,) * prompt), i, tokens, numbers, numbers, [0] * response, 0, 1, "length")
            for i in range(rows)
        ]
        each, lengths = torch.zeros(rows * response, device=DEVICE), on_device([response] * rows, DEVICE)
        counted, pairs = torch.ones(rows, dtype=torch.bool), [[i, i + 1] for i in range(0, rows, config.rollout.group_size)]
        figures: Any = None
        experience = Experience(each, each, each, each, each, each, each, lengths, NOTHING_SEEN, figures, counted, pairs)
        settings = replace(UpdateSettings.of(config, 2, DEVICE), epochs=1)
        if isinstance(member, Actor):
            member.update(batch, experience, 0.1, settings)
        else:
            member.update(batch, experience, settings)

    # Cached calls: several of a micro-batch's tokens, and a decode step.

    def _cached(self, model: RoleModel) -> None:
        slots = cache_slots(self.config, self.name, self.placement)
        with self.meter.span() as taken:
            cache = model.new_cache(slots, None, self.config.runtime.kv_layout)
        self.found["kv_cache"] = taken.kept
        worker = Reader(self.name, model, cache, temperature=1.0)  # type: ignore[arg-type]
        peaks = []
        for past, lens in self._reads(slots):
            worker.reset()
            self._open(cache, past)
            with self.meter.span() as taken:
                worker.read(past, lens, draws=self.name == "actor")
            peaks.append(taken.peak)
        self.found["reading"] = max(peaks)
        if self.name == "actor":
            worker.reset()
            self._decode(model, cache)

    def _open(self, cache: Any, past: Sequence[int]) -> None:
        for seq_id, length in enumerate(past):
            cache.open(seq_id)
            cache.reserve(seq_id, length)
            cache.advance(seq_id, length)

    def _reads(self, slots: int) -> Iterator[tuple[list[int], list[int]]]:
        """Cached and new tokens: like and unlike lengths, many that go on, and one that fills a piece of a mask beside others."""
        budget, longest = self.config.runtime.micro_batch_tokens, max_context(self.config) - 1
        num = min(slots, max(1, budget // longest))
        yield [0] * num, [min(budget // num, longest)] * num
        long = min(longest, budget // 2)
        lens = [long, *[max(1, min((budget - long) // max(slots - 1, 1), longest))] * (slots - 1)]
        yield [0] * slots, lens
        new = min(budget // slots, longest - 1)
        yield [longest - new] * slots, [new] * slots
        shape = named_roles(self.config)[self.name].init
        masked = MASK_NUMBERS // (shape["num_attention_heads"] // shape["num_key_value_heads"] * longest)
        num = -(-masked // (longest - 1))  # sequences that go on, of which a mask is as large as it may be
        left, rest = slots - num, budget - masked
        if left > 0 and rest > 0:
            past, lens = [longest - masked // num] * num, [masked // num] * num
            new = max(1, min(rest // left, longest - 1))
            yield [*past, *[longest - new] * left], [*lens, *[new] * left]
            left = min(left, -(-rest // longest))
            yield [*past, *[0] * left], [*lens, *[min(rest // left, longest)] * left]

    def _decode(self, model: RoleModel, cache: Any) -> None:
        slots = range(cache.num_slots)
        self._open(cache, [max_context(self.config) - 2 - seq_id % 2 for seq_id in slots])
        with self.meter.span() as taken:
            if model.pre_process:
                inputs = on_device([1] * len(slots), DEVICE)
            else:
                inputs = next(model.parameters()).new_empty(len(slots), 1, model.shape.hidden_size)
            out = step(model, cache, slots, [1] * len(slots), inputs)
            if model.groups.is_last_stage:
                draw(model.logits(out), Sampling.of(self.config.rollout, 0), slots, [0] * len(slots), model.vocab).table()
            del inputs, out
        self.found["decoding"] = taken.peak


class Reader(ScoringWorker):
    def read(self, past: Sequence[int], lens: Sequence[int], *, draws: bool) -> None:
        growths = enumerate(zip(past, lens, strict=True))
        batch = tuple(Growth(seq_id, before, new, 0 if draws else new) for seq_id, (before, new) in growths)
        self._round.sequences = {g.seq_id: [1] * (g.past + g.new + 1) for g in batch}
        if not self.model.pre_process:
            self._round.hidden = self.new_hidden(sum(lens))
        self._prefill(batch)
        if self.model.groups.is_last_stage and not draws:
            self._score(batch)
        self._round.hidden = None
        self._outputs.clear()


def _allocated(chunks: Sequence[RoleModel], serving: RoleModel, across: None) -> None:
    """Begins as `Reallocation` does, but without a plan of moves: other ranks would have a part in it."""
    ours, theirs = serving.groups, chunks[0].groups
    if len(chunks) == 1 and (ours.tp, ours.pp, ours.copies, ours.ep) == (theirs.tp, theirs.pp, theirs.copies, theirs.ep):
        share_parameters(chunks[0], serving)

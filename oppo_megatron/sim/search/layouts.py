"""A role's layouts, without those that another beats in every respect."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from math import ceil, lcm
from statistics import fmean
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from oppo_megatron.config.derived import batch_rows, max_context, members, minibatch_parts, most_sequences
from oppo_megatron.config.model import RoleConfig, TrainedRoleConfig, TrainingLayoutConfig
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.checks import serving_problems
from oppo_megatron.layout.layouts import Sizes, fills_shards, layouts_of, vocab_rows
from oppo_megatron.layout.memory import Memory
from oppo_megatron.layout.placements import RolePlacement, has_own_training_weights, named_roles
from oppo_megatron.layout.role_memory import SCALAR_ROLES, both_memory, is_one_model, laid_out, served_stages, trained_stages
from oppo_megatron.layout.shape import model_limits
from oppo_megatron.modeldir.headers import read_hf_config
from oppo_megatron.sim.clusters.cluster import Cluster
from oppo_megatron.sim.pricing.model import Decoding, LaidModel, decode_s
from oppo_megatron.sim.pricing.prices import StepWork, Weights, inference_s, reallocation_s, trained_model, update_s
from oppo_megatron.sim.runs.loop import Recorded
from oppo_megatron.sim.runs.step_costs import StepCosts
from oppo_megatron.sim.runs.virtual import VirtualRun
from oppo_megatron.sim.search.blocks import TRAINERS, Times, nanoseconds

RESPONSES, STEPS, MOST_STEPS = 2048, 4, 48
"""Steady steps observed: enough for these responses, within both limits."""


@dataclass(frozen=True)
class Steady:
    """`reads`: tokens that a role reads, relative to reading each response once."""

    decoding: Decoding
    reads: Mapping[str, float] = field(default_factory=dict)


def steady_work(config: TrainConfig, plain: Decoding, lengths: Callable[[int], int]) -> Steady:
    """Mean work of a step; `plain` is the batch if nothing is carried."""
    if not config.overlap.inter:
        return Steady(plain)
    run = _Observed(config, lengths, plain.prompt_tokens)
    read, sorted_lengths, positions = dict.fromkeys(run.books, 0), list[Any](), 0.0
    count, longest = min(MOST_STEPS, max(STEPS, RESPONSES // batch_rows(config))), max(plain.lengths)
    for step in run.steps(count + longest):
        before, run.before = run.before, {role: book.prefilled_tokens for role, book in run.books.items()}
        if step.clock > longest:  # the responses that began together have ended
            read = {role: read[role] + run.before[role] - before[role] for role in read}
            sorted_lengths.append(np.sort(np.array(list(run.got.values()), dtype=np.int64))[::-1])
            positions += run.positions
        run.got, run.positions = {}, 0.0
        if len(sorted_lengths) == count:
            break
    table = np.zeros((len(sorted_lengths), max(map(len, sorted_lengths))))
    for row, own in enumerate(sorted_lengths):
        table[row, : len(own)] = own
    decoded = tuple(tokens for tokens in np.rint(table.mean(axis=0)).astype(int).tolist() if tokens)
    own_position = sum(tokens * tokens / 2 for tokens in decoded) / sum(decoded)
    carried = max(0, round(positions / table.sum() - own_position))  # tokens before those decoded in the step
    once = {role: batch_rows(config) * (plain.prompt_tokens + fmean(plain.lengths) * (role != "actor")) for role in read}
    reads = {role: tokens / len(table) / once[role] for role, tokens in read.items()}
    return Steady(Decoding(plain.prompt_tokens + carried, decoded, plain.captured), reads)


class _Observed(VirtualRun):
    """`got`: decoded tokens by sequence; `positions`: sum over them; `before`: tokens read so far."""

    def __init__(self, config: TrainConfig, lengths: Callable[[int], int], prompt_tokens: int):
        roomy = config.with_values({"runtime.kv_cache_mb": None})
        if not config.overlap.backfill:  # one round per step, which ends with its batch
            most = config.rollout.max_response_tokens
            roomy = roomy.with_values({"overlap.chunk": most})
        super().__init__(roomy, StepCosts(), lengths, prompt_tokens=prompt_tokens, endless=True)
        self.books = {"actor": self.planner.actor, **self.planner.scorers}
        self.got: dict[int, int] = {}
        self.positions = 0.0
        self.before = dict.fromkeys(self.books, 0)

    def _recorded(self, done: Recorded) -> None:
        super()._recorded(done)
        if done.grown is None or done.chunk is None:
            return
        counts, columns = np.minimum(done.grown.counts, done.chunk.clock - done.begun), done.grown.columns
        self.positions += float((counts * (columns.response_tokens + counts / 2)).sum())
        for seq_id, tokens in zip(columns.seq_ids.tolist(), counts.tolist(), strict=True):
            self.got[seq_id] = self.got.get(seq_id, 0) + tokens


MOST_STAGES = 8
VIRTUAL = (1, 2, 4)
"""Virtual stages per rank that are tried."""
SHARED = (1, 2, 4, 8)
"""Ranks that are tried to share a sequence, and replicas to divide experts."""
LEAST_SHARE = 4096
"""Tokens of the longest sequence that a rank keeps if others share it."""
NOTHING: list[Any] = [(None, 0)]
RECOMPUTED: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")

Bytes = npt.NDArray[np.int64]
"""A role's bytes, [kind, piece], over equal runs of ranks. Kinds: lasting (sum of roles); activations and kernels (largest)."""


@dataclass(frozen=True, eq=False)
class Option:
    """A layout of a role.  `number`: its position among all layouts of the role on as many ranks."""

    number: int
    serving: Sizes
    train: TrainingLayoutConfig | None
    times: Times
    memory: Bytes

    @property
    def training(self) -> Sizes | None:
        train = self.train
        if train is None:
            return None
        return Sizes(
            train.tp or self.serving.tp, train.pp or self.serving.pp, train.dp or self.serving.dp, train.vpp, train.cp, train.ep
        )

    def over(self, pieces: int) -> Bytes:
        return np.repeat(self.memory, pieces // self.memory.shape[1], axis=1)


def undominated(options: Iterable[Option], weigh: Callable[[Option], Option], most_bytes: int) -> list[Option]:
    """Options that fit a rank and that none beats or equals in times and memory. `weigh` adds the move, slow to compute."""
    fitting = [option for option in options if option.memory.sum(axis=0).max() <= most_bytes]
    pieces = lcm(*(option.memory.shape[1] for option in fitting))
    kept, rows = list[Option](), np.zeros((0, 2 + 3 * pieces), dtype=np.int64)
    for option in sorted(fitting, key=lambda each: (each.times.total, each.number)):
        row = _row(option, pieces)
        if (rows <= row).all(axis=1).any():
            continue
        option = weigh(option)
        row = _row(option, pieces)
        if (rows <= row).all(axis=1).any():
            continue
        stay = np.flatnonzero(~(rows >= row).all(axis=1))
        kept = [*(kept[place] for place in stay.tolist()), option]
        rows = np.concatenate([rows[stay], row[None]])
    return sorted(kept, key=lambda each: (each.times.total, each.number))


def _row(option: Option, pieces: int) -> Bytes:
    times = option.times.serving, option.times.update + option.times.weights
    return np.concatenate([np.array(times, dtype=np.int64), option.over(pieces).reshape(-1)])


@dataclass(frozen=True)
class PriceTable:
    """Layouts, priced once by role and number of ranks. `apart`: the actor trains on other ranks, as a role TRAINERS."""

    config: TrainConfig
    cluster: Cluster
    decoding: Decoding
    steady: Steady
    budget: int
    apart: bool = False
    _fronts: dict[tuple[str, int], list[Option]] = field(default_factory=dict)
    _prices: dict[tuple[str, int], tuple[list[Any], list[Any]]] = field(default_factory=dict)
    _moves: dict[tuple[str, Sizes, Sizes | None], int] = field(default_factory=dict)
    _decoded: dict[Sizes, float] = field(default_factory=dict)

    def with_config(self, config: TrainConfig) -> PriceTable:
        """Use other micro-batches, on which decoding and moves do not depend."""
        return replace(self, config=config, _fronts={}, _prices={})

    def with_trainers(self) -> PriceTable:
        return replace(self, apart=True, _fronts={})

    @cached_property
    def roles(self) -> tuple[str, ...]:
        return (*self._settings, TRAINERS) if self.apart else tuple(self._settings)

    @cached_property
    def _settings(self) -> Mapping[str, RoleConfig]:
        return named_roles(self.config)

    @cached_property
    def _shapes(self) -> Mapping[str, Mapping[str, Any]]:
        return {name: read_hf_config(role) for name, role in self._settings.items()}

    def front(self, role: str, size: int) -> list[Option]:
        key = (role, size)
        if key not in self._fronts:
            self._fronts[key] = undominated(self.options(role, size), lambda each: self._weigh(role, each), self.budget)
        return self._fronts[key]

    def least(self, role: str, size: int) -> Times | None:
        servings, trainings = self._choices(role, size)
        if not servings or not trainings:
            return None
        return Times(min(serving_ns for _, serving_ns in servings), min(update_ns for _, update_ns in trainings))

    def options(self, role: str, size: int) -> Iterator[Option]:
        """Yield every layout that the checks admit, without its move of weights."""
        known: dict[Any, Bytes] = {}
        pairs = product(*self._choices(role, size))
        for number, ((serving, serving_ns), (train, update_ns)) in enumerate(pairs):
            times = Times(serving_ns, update_ns)
            if train is None:
                yield Option(number, serving, None, times, _bytes(self._served(role, serving, serving)))
                continue
            if serving is None:
                sizes = _training_sizes(train)
                yield Option(number, sizes, train, times, _bytes(self._trained("actor", sizes, train)))
                continue
            common = lcm(serving.tp, train.tp or 1)
            if all(fills_shards(self._shapes[role]["vocab_size"], tp, common) for tp in (serving.tp, train.tp or 1)):
                yield Option(number, serving, train, times, self._trained_bytes(role, serving, train, known))

    def _trained_bytes(self, role: str, serving: Sizes, train: TrainingLayoutConfig, known: dict[Any, Bytes]) -> Bytes:
        """`known`: bytes by layout and padded vocabulary, which both layouts' tensor ranks divide."""
        training = _training_sizes(train)
        if not has_own_training_weights(_over(serving), _over(training), train.vpp):
            pairs = zip(self._served(role, serving, training), self._trained(role, serving, train), strict=True)
            return _bytes([both_memory(*pair, one_model=is_one_model(train)) for pair in pairs])
        common = lcm(serving.tp, training.tp)
        rows = vocab_rows(self._shapes[role]["vocab_size"], common) * common
        serves, trains = ("serving", serving, rows), (training, train.recompute, rows)
        if serves not in known:
            known[serves] = _bytes(self._served(role, serving, training))
        if trains not in known:
            known[trains] = _bytes(self._trained(role, serving, train))
        return _together(known[serves], known[trains])

    def _served(self, role: str, serving: Sizes, training: Sizes) -> tuple[Memory, ...]:
        placed, continuous = _over(serving), self.config.overlap.continuous
        model = laid_out(self.config, role, placed, _over(training))
        stages = served_stages(self.config, role, placed, model, on_cpu=self.cluster.gpu.on_cpu)
        if role == "actor" and self.apart and continuous is not None and continuous.install == "staged":
            return tuple(replace(each, copy=each.weights) for each in stages)
        return stages

    def _trained(self, role: str, serving: Sizes, train: TrainingLayoutConfig) -> tuple[Memory, ...]:
        placed = _over(_training_sizes(train))
        model = laid_out(self.config, role, _over(serving), placed)
        return trained_stages(self.config, placed, model, train, on_cpu=self.cluster.gpu.on_cpu)

    def _choices(self, role: str, size: int) -> tuple[list[Any], list[Any]]:
        """Layouts and nanoseconds of serving and of training, None if the role does not serve or train."""
        servings, trainings = self._priced("actor" if role == TRAINERS else role, size)
        if self.apart:
            return NOTHING if role == TRAINERS else servings, NOTHING if role == "actor" else trainings
        return servings, trainings

    def _priced(self, role: str, size: int) -> tuple[list[Any], list[Any]]:
        key = (role, size)
        if key not in self._prices:
            settings, shape = self._settings[role], self._shapes[role]
            limits = replace(model_limits(shape), sequences=most_sequences(self.config) // members(self.config).size)
            tried = [sizes for sizes in layouts_of(size, limits) if self._is_tried(sizes)]
            fitting = [sizes for sizes in tried if not serving_problems(self.config, role, _over(sizes), shape)]
            servings, updates = [(sizes, self._serving_ns(role, sizes)) for sizes in fitting], list[Any]()
            if not isinstance(settings, TrainedRoleConfig):
                updates = NOTHING
            for train in self._trainings(role, size, settings.train) if isinstance(settings, TrainedRoleConfig) else ():
                sizes = _training_sizes(train)
                model = trained_model(self._model(role, sizes), _over(sizes), train)
                update = StepWork(self.config, self.decoding).update(model, train)
                updates.append((train, nanoseconds(update_s(model, update))))
            self._prices[key] = servings, updates
        return self._prices[key]

    def phases(
        self, role: str, size: int, *, update: bool
    ) -> Iterator[tuple[Sizes, TrainingLayoutConfig | None, int, tuple[Memory, ...]]]:
        """Yield layouts of decoding or scoring alone, or of the update alone, with nanoseconds, and memory by stage."""
        servings, trainings = self._priced(role, size)
        if not update:
            yield from ((sizes, None, time_ns, self._served(role, sizes, sizes)) for sizes, time_ns in servings)
            return
        for train, time_ns in trainings:
            if train is not None:
                sizes = _training_sizes(train)
                yield sizes, train, time_ns, self._trained(role, sizes, train)

    def _weigh(self, role: str, option: Option) -> Option:
        serving, vpp = _over(option.serving), 1
        if self.apart and role == "actor":  # from whole replicas, on as many ranks
            count = option.serving.num_ranks
            training = RolePlacement(tuple(range(count, 2 * count)), dp=count)
        elif role == TRAINERS or option.train is None or option.training is None:
            return option
        else:
            training, vpp = _over(option.training), option.train.vpp
        if not has_own_training_weights(serving, training, vpp):
            return option
        key = (role, option.serving, option.training)
        if key not in self._moves:
            source, target = Weights(training, vpp), Weights(serving)
            scalar = role in SCALAR_ROLES
            self._moves[key] = nanoseconds(reallocation_s(self.cluster, self._shapes[role], source, target, scalar=scalar))
        return replace(option, times=option.times._replace(weights=self._moves[key]))

    def _trainings(self, role: str, size: int, own: TrainingLayoutConfig) -> Iterator[TrainingLayoutConfig]:
        limits = model_limits(self._shapes[role], minibatch_parts(self.config))
        shares = [cp for cp in SHARED if size % cp == 0 and (cp == 1 or max_context(self.config) >= cp * LEAST_SHARE)]
        ways = [(cp, 1) for cp in shares] + [(1, ep) for ep in SHARED[1:] if limits.experts % ep == 0]
        tried = ((ep, sizes) for cp, ep in ways for sizes in layouts_of(size, limits, interleaved=True, cp=cp, ep=ep))
        for sizes in (sizes for ep, sizes in tried if sizes.ep == ep):
            # Sequence parallelism takes less time and less memory; gloo lacks its collectives.
            sequence_parallel = sizes.tp > 1 and (own.sequence_parallel or not self.cluster.gpu.on_cpu)
            for recompute in RECOMPUTED if self._is_tried(sizes) else ():
                yield own.model_copy(update=sizes._asdict() | {"sequence_parallel": sequence_parallel, "recompute": recompute})

    def _is_tried(self, sizes: Sizes) -> bool:
        """Tensor ranks within a node; at most 8 stages, or one per node."""
        per_node = self.cluster.gpus_per_node
        stages = max(MOST_STAGES, sizes.num_ranks // per_node)
        return sizes.tp <= per_node and sizes.pp <= stages and sizes.vpp in VIRTUAL

    def _serving_ns(self, role: str, sizes: Sizes) -> int:
        model, work = self._model(role, sizes), StepWork(self.config, self.decoding)
        batch = work.reading(model, prompts_only=role == "actor")
        seconds = inference_s(model, replace(batch, tokens=batch.tokens * self.steady.reads.get(role, 1.0)))
        if role == "actor":
            if sizes not in self._decoded:
                self._decoded[sizes] = decode_s(model, self.steady.decoding, work.turns(model.placement))
            seconds += self._decoded[sizes]
        return nanoseconds(seconds)

    def _model(self, role: str, sizes: Sizes) -> LaidModel:
        return LaidModel(self.cluster, self._shapes[role], role in SCALAR_ROLES, _over(sizes))


def _bytes(stages: Sequence[Memory]) -> Bytes:
    lasting = [ceil(each.total - each.activations - each.kernels) for each in stages]
    passing = [[ceil(each.activations) for each in stages], [ceil(each.kernels) for each in stages]]
    return np.array([lasting, *passing], dtype=np.int64)


def _together(one: Bytes, other: Bytes) -> Bytes:
    pieces = lcm(one.shape[1], other.shape[1])
    mine, theirs = (np.repeat(each, pieces // each.shape[1], axis=1) for each in (one, other))
    return np.concatenate([mine[:1] + theirs[:1], np.maximum(mine[1:], theirs[1:])])


def _training_sizes(train: TrainingLayoutConfig) -> Sizes:
    assert train.tp and train.pp and train.dp, "the table sets all sizes"
    return Sizes(train.tp, train.pp, train.dp, train.vpp, train.cp, train.ep)


def _over(sizes: Sizes) -> RolePlacement:
    return RolePlacement(tuple(range(sizes.num_ranks)), sizes.tp, sizes.pp, sizes.dp, sizes.cp, sizes.ep)

"""Builds a rank's roles: models, caches, workers, and the runner of their rounds."""

from __future__ import annotations

import os
from dataclasses import dataclass

from oppo_megatron.algorithms.algorithm import Algorithm
from oppo_megatron.algorithms.decode_gap import GapLimit
from oppo_megatron.cluster.world import World
from oppo_megatron.config.derived import max_context, members, num_updates, share_of_sequences
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.data.tokenizer import Tokenizer
from oppo_megatron.engine.executor import Executor, RoleWorker
from oppo_megatron.engine.generation import DecodeWorker
from oppo_megatron.engine.round_runner import RoundRunner
from oppo_megatron.engine.sampler import Sampling
from oppo_megatron.engine.scoring import ScorerRole, ScoringWorker
from oppo_megatron.engine.stopping import Quantile, Stopping
from oppo_megatron.engine.stream import ChunkOutlet, ListenWorker
from oppo_megatron.layout.placements import named_roles, shares_weights
from oppo_megatron.mcore.kv.paged_kernels import find_kernel
from oppo_megatron.mcore.kv.sequence_cache import SequenceCache
from oppo_megatron.mcore.model import DTYPES, Head, RoleModel
from oppo_megatron.mcore.roles import as_it_began, load_role
from oppo_megatron.schedule.checking.transport import transport_of
from oppo_megatron.schedule.links import most_streams
from oppo_megatron.schedule.plan import cache_slots, new_planner, round_generator
from oppo_megatron.train.actor import Actor, Critic
from oppo_megatron.train.logs.meter import RoundTracer
from oppo_megatron.train.roles import Topology, TrainedRole, build_trained_role

SCORERS: dict[ScorerRole, Head] = {"reference": "lm", "critic": "scalar", "reward": "scalar"}


@dataclass
class RoleBuilder:
    config: TrainConfig
    algorithm: Algorithm
    world: World
    topology: Topology
    tokenizer: Tokenizer
    total_steps: int  # of the run
    lengths: Quantile | None  # of a length trace

    def __post_init__(self) -> None:
        """Resolve `runtime.kv_layout: auto`: planner and caches must count slots the same way."""
        runtime, device = self.config.runtime, self.world.device
        if runtime.kv_layout == "auto":
            dtypes = {DTYPES[role.dtype] for role in named_roles(self.config).values()}
            layout = "dense" if any(find_kernel(device, dtype) is None for dtype in dtypes) else "paged"
            settled = runtime.model_copy(update={"kv_layout": layout})
            self.config = self.config.model_copy(update={"runtime": settled})

    @property
    def kv_budget_bytes(self) -> int | None:
        megabytes = self.config.runtime.kv_cache_mb
        return None if megabytes is None else int(megabytes * 2**20)

    def num_slots(self, role: str) -> int:
        return share_of_sequences(self.config, role, self.topology.site.placements[role].dp)

    def actor(self) -> Actor | None:
        role = self._trained("actor", "lm")
        if role is None:
            return None
        config, temperature = self.config, self.config.rollout.temperature
        gap_limit = GapLimit.of(config.guards.logprob_gap, config.actor.dtype, temperature)
        return Actor(role, self.algorithm, temperature, gap_limit=gap_limit)

    def critic(self) -> Critic | None:
        role = self._trained("critic", "scalar")
        return None if role is None else Critic(role, self.algorithm)

    def rounds(self, actor: Actor | None, critic: Critic | None, tracer: RoundTracer) -> RoundRunner:
        config, site = self.config, self.topology.site
        rank, device = self.world.rank, self.world.device
        decode, listen = self._decode_worker(actor), None if actor is not None else ListenWorker(device)
        scoring = self._scoring_workers(actor, critic)
        planner = new_planner(
            config,
            site,
            round_generator(config.overlap, site),
            self._stopping.limit,
            rank=None if config.logging.trace == "actions" else rank,  # schedules.txt shows all ranks
            transport=transport_of(device.type, os.environ, most_streams(site)),
        )
        first: RoleWorker | None = decode if decode is not None else listen
        assert first is not None
        workers = {"actor": first, **scoring}
        executor = Executor(
            rank,
            workers,
            self.topology.links,
            config.runtime.timeout_s,
            device,
            tracer,
            self.world.activity,
            tracer.spans.clock,
        )
        coords_by_role = {
            name: coords.replica
            for name, placement in site.placements.items()
            if (coords := placement.coords(rank)) is not None
        }
        return RoundRunner(planner, executor, coords_by_role, decode, listen, scoring, tracer.planned)

    @property
    def _stopping(self) -> Stopping:
        config, tokenizer = self.config, self.tokenizer
        return Stopping.of(
            config.rollout, tokenizer.eos_ids, config.seed, self.lengths, tokenizer.decode, config.debug.lengths
        )

    @property
    def heldout_stopping(self) -> Stopping:
        """As in training, but without forced lengths."""
        return Stopping.of(self.config.rollout, self.tokenizer.eos_ids, self.config.seed, decode=self.tokenizer.decode)

    def _decode_worker(self, actor: Actor | None) -> DecodeWorker | None:
        if actor is None:
            return None
        site, device = self.topology.site, self.world.device
        sends = self.world.rank in site.feeds
        return DecodeWorker(
            actor.role.serving,
            self._cache("actor", actor.role.serving),
            sampling=Sampling.of(self.config.rollout, self.config.seed, members(self.config)),
            stopping=self._stopping,
            outlet=ChunkOutlet(device) if sends else None,
            sync_steps=self.config.runtime.sync_steps(device.type),
        )

    def _scoring_workers(self, actor: Actor | None, critic: Critic | None) -> dict[str, ScoringWorker]:
        workers: dict[str, ScoringWorker] = {}
        for name, head in SCORERS.items():
            if self.topology.groups.get(name) is None:
                continue
            if name == "critic":
                assert critic is not None
                model = critic.role.serving
            elif name == "reference" and shares_weights(self.config):
                assert actor is not None
                groups = self.topology.groups[name]
                assert groups is not None
                model = as_it_began(actor.role.serving, groups, named_roles(self.config)[name])
            else:
                model = self._model(name, head).requires_grad_(False)
            cache = self._cache(name, model)
            temperature = self.config.algorithm.temperature(self.config.rollout.temperature)
            workers[name] = ScoringWorker(name, model, cache, temperature=temperature)
        return workers

    def _model(self, name: str, head: Head) -> RoleModel:
        groups = self.topology.groups[name]
        assert groups is not None
        length, device = max_context(self.config), self.world.device
        role = named_roles(self.config)[name]
        path, layers = self.config.runtime.decode_path, self.config.runtime.layers
        return load_role(role, groups, head=head, max_length=length, device=device, path=path, layers=layers)

    def _trained(self, name: str, head: Head) -> TrainedRole | None:
        groups, training = self.topology.groups.get(name), self.topology.training.get(name)
        if groups is None or training is None:
            return None
        role = build_trained_role(
            self.config.trained[name],
            groups,
            training,
            head=head,
            max_length=max_context(self.config),
            device=self.world.device,
            path=self.config.runtime.decode_path,
            layers=self.config.runtime.layers,
            num_updates=num_updates(self.config, name, self.total_steps),
        )
        for chunk in role.trained.chunks:  # every micro-batch of an update is a sign of life
            chunk.register_forward_pre_hook(lambda *_: self.world.activity.beat())
        return role

    def _cache(self, name: str, model: RoleModel) -> SequenceCache:
        cache = model.new_cache(self.num_slots(name), self.kv_budget_bytes, self.config.runtime.kv_layout)
        planned = cache_slots(self.config, name, self.topology.site.placements[name])
        assert cache.num_slots == planned, (name, cache.num_slots, planned)
        return cache

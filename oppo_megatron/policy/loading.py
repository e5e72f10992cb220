"""A policy on the ranks, in its own layout."""

from __future__ import annotations

from dataclasses import dataclass

from oppo_megatron.cluster.activity import Activity
from oppo_megatron.cluster.process_groups import use_once
from oppo_megatron.cluster.world import World
from oppo_megatron.config.model import ParallelConfig, RuntimeConfig
from oppo_megatron.data.tokenizer import Tokenizer
from oppo_megatron.engine.completions import PromptDecoder
from oppo_megatron.engine.executor import Links, build_links
from oppo_megatron.engine.sampler import Sampling
from oppo_megatron.engine.stopping import Stopping
from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.mcore.groups import RoleGroups, build_groups
from oppo_megatron.mcore.model import RoleModel
from oppo_megatron.mcore.roles import load_role
from oppo_megatron.mcore.weights.checkpoint import load_adapters
from oppo_megatron.policy.finding import Policy
from oppo_megatron.schedule.rounds import Site


@dataclass(frozen=True)
class PolicyPlacement:
    """Policies on all ranks, in one layout."""

    world: World
    groups: RoleGroups
    links: Links


def build_place(world: World, parallel: ParallelConfig) -> PolicyPlacement:
    """Collective; the world has `parallel.num_ranks` ranks."""
    ranks = tuple(range(world.size))
    groups = build_groups(ranks, parallel.tp, parallel.pp, "policy")
    assert groups is not None
    placement = RolePlacement(ranks, parallel.tp, parallel.pp, parallel.dp)
    links = build_links(Site({"actor": placement}))
    use_once(groups.made, world.device)
    links.use_once(world.device)
    return PolicyPlacement(world, groups, links)


@dataclass(frozen=True)
class LoadedPolicy:
    model: RoleModel
    tokenizer: Tokenizer
    placement: PolicyPlacement
    runtime: RuntimeConfig

    def decoder(
        self, sampling: Sampling, stopping: Stopping, *, num_slots: int, round_steps: int = 64, activity: Activity | None = None
    ) -> PromptDecoder:
        """Collective.  `num_slots`: sequences per replica at once."""
        return PromptDecoder(
            self.model,
            self.placement.links,
            self.runtime,
            num_slots=num_slots,
            sampling=sampling,
            stopping=stopping,
            round_steps=round_steps,
            activity=activity or self.placement.world.activity,
        )


def load_policy(
    policy: Policy, placement: PolicyPlacement, runtime: RuntimeConfig, tokenizer: Tokenizer, max_length: int
) -> LoadedPolicy:
    """Collective.  `max_length`: of prompt and response.  Raises CheckpointError."""
    model = load_role(policy.model, placement.groups, head="lm", max_length=max_length, device=placement.world.device)
    if policy.adapters is not None:
        load_adapters(*policy.adapters, model)
    return LoadedPolicy(model.requires_grad_(False), tokenizer, placement, runtime)

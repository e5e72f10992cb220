"""Process groups of a run, and its trained roles: the updated model and the one that decodes or scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from oppo_megatron.cluster.process_groups import SharedGroups, new_group, use_once, use_ring_once, waiting_for
from oppo_megatron.config.model import TrainedRoleConfig
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.engine.executor import Links, build_links
from oppo_megatron.layout.hf_layout import Head
from oppo_megatron.layout.placements import RolePlacement, round_placements, training_placements
from oppo_megatron.mcore.context import connect_ring
from oppo_megatron.mcore.device import on_device
from oppo_megatron.mcore.groups import RoleGroups, build_groups
from oppo_megatron.mcore.model import RoleModel
from oppo_megatron.mcore.roles import load_role, load_training
from oppo_megatron.mcore.training import TrainedModel
from oppo_megatron.mcore.weights.weight_sync import Across, MoveReport, Reallocation
from oppo_megatron.schedule.links import READY, WEIGHTS, moving, relaying
from oppo_megatron.schedule.rounds import Site


@dataclass
class TrainedRole:
    """The model that is trained and the one that is used; a rank may have one of them.

    `own_serving` is the trained module itself if layout and options allow it; then no weights are moved.
    """

    own_trained: TrainedModel | None
    own_serving: RoleModel | None
    reallocation: Reallocation | None

    @property
    def trained(self) -> TrainedModel:
        assert self.own_trained is not None, "this rank does not train the role"
        return self.own_trained

    @property
    def serving(self) -> RoleModel:
        assert self.own_serving is not None, "this rank trains the role only"
        return self.own_serving

    def retire(self) -> None:
        """Begin an update; until `publish` or `keep`, serving uses megatron-core's modules."""
        if self.own_serving is not None:
            self.own_serving.begin_weight_update()

    def keep(self) -> None:
        """End an update without new weights."""
        if self.reallocation is not None:
            self.reallocation.drop()
        if self.own_serving is not None:
            self.own_serving.end_weight_update()

    def publish(self) -> MoveReport:
        """Move the new weights to the serving model.  Collective of the role."""
        moved = MoveReport(0, 0.0)
        if self.reallocation is not None:
            with waiting_for("weights on their way from training to use"):
                moved = self.reallocation.move()
        if self.own_serving is not None:
            self.own_serving.end_weight_update()
        return moved

    def share(self, stats: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
        """Share statistics of the last stage with every rank that trains the role."""
        groups = self.trained.model.groups
        device = next(self.trained.model.parameters()).device
        values = on_device([stats.get(name, 0.0) for name in names], device, torch.float64)
        if groups.all.size() > 1:
            dist.broadcast(values, groups.output_rank, group=groups.all)
        return dict(zip(names, values.tolist(), strict=True))


def build_trained_role(
    config: TrainedRoleConfig, groups: RoleGroups | None, training: RoleGroups | None, *, head: Head, role: str,
    max_length: int, device: torch.device, num_updates: int, across: Across | None = None,
) -> TrainedRole:  # fmt: skip
    """Build the models that this rank has (`groups`: serving)."""
    layout = config.train
    plain = layout.vpp == 1 and not layout.sequence_parallel and layout.recompute == "none"
    placed = (groups, training) if across is None else (across.serving, across.training)
    sizes = [each.tp for each in placed if each is not None]
    both: Any = {"head": head, "role": role, "max_length": max_length, "device": device, "vocab_multiple": lcm(*sizes)}
    if plain and groups is not None and training is groups:
        serving = load_role(config, groups, **both)
        return TrainedRole(TrainedModel(serving, config.optimizer, num_updates, layout), serving, None)
    own_serving = None if groups is None else load_role(config, groups, path="module", **both).requires_grad_(False)
    chunks = [] if training is None else load_training(config, layout, training, **both)
    trained = TrainedModel(chunks, config.optimizer, num_updates, layout) if chunks else None
    moves = own_serving is not None or across is not None
    built = TrainedRole(trained, own_serving, Reallocation(chunks, own_serving, across=across) if moves else None)
    if own_serving is not None:  # only now: otherwise decoding would keep the weights that a shared model replaces
        own_serving.decode_by("packed")
    return built


class Relay(NamedTuple):
    """Groups on CPUs that bring a filter's verdicts to ranks that only train; nobody waits for those (None: not a member).

    `judging`: of the ranks that take part in rounds; `verdicts`: of their leader and the ranks that only train.
    """

    judging: dist.ProcessGroup | None
    verdicts: dist.ProcessGroup | None


@dataclass(frozen=True)
class Topology:
    """Placement of all roles, and this rank's groups; `training` updates actor and critic."""

    site: Site
    training_placements: dict[str, RolePlacement]
    groups: dict[str, RoleGroups | None]
    training: dict[str, RoleGroups | None]
    links: Links
    across: Across | None  # the actor's way to decode, if it is trained on other ranks
    relay: Relay | None

    @property
    def valuing(self) -> RolePlacement | None:
        """The critic's placement if its ranks only train."""
        return None if "critic" in self.site.placements else self.training_placements.get("critic")


def build_topology(config: TrainConfig, device: torch.device) -> Topology:
    """Create all process groups and links (`schedule/links.py`), and use each once."""
    trained, shared = training_placements(config), SharedGroups()
    site = Site.of(round_placements(config), trained)
    groups = {name: build_groups(p.ranks, p.tp, p.pp, name, shared) for name, p in site.placements.items()}
    training = {
        name: groups[name] if p == site.placements.get(name) else build_groups(p.ranks, p.tp, p.pp, name, shared, p.cp, p.ep)
        for name, p in trained.items()
    }
    across, serving = None, site.placements["actor"]
    if moved := moving(serving, trained["actor"]):
        group, ready = new_group(moved, WEIGHTS), new_group(moved, READY, backend="gloo")
        stages, continuous = trained["actor"].pp * config.actor.train.vpp, config.overlap.continuous
        staged = continuous is not None and continuous.install == "staged"
        across = Across(trained["actor"], serving, stages, group, ready, staged)
    relay = None
    if config.filter is not None and config.overlap.continuous is not None and site.followers:
        made = [(name.ranks, new_group(name.ranks, name.label, backend="gloo")) for name in relaying(site)]
        relay = Relay(*(group if dist.get_rank() in ranks else None for ranks, group in made))
    links = build_links(site)
    own = dict.fromkeys(group for role in (*groups.values(), *training.values()) if role for group in role.made)
    use_once([None, *own], device)
    if across is not None and dist.get_rank() in moved:
        use_once([across.group], device)
        use_once([across.ready], torch.device("cpu"))
    if relay is not None:
        use_once([group for group in relay if group is not None], torch.device("cpu"))
    links.use_once(device)
    for name, role in training.items():
        if role is not None and config.trained[name].train.vpp > 1:
            stages = role.collection.pp
            use_ring_once(stages, device, [stages, None] if stages.size() == 2 else [stages])  # an interleaved pipeline of two
        if role is not None:
            connect_ring(role, device)
    return Topology(site, trained, groups, training, links, across, relay)

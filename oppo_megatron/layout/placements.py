"""Ranks and shares of roles, numbered as in megatron-core: tensor ranks, then replicas, then stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from oppo_megatron.config.model import ActorTrainingConfig, AdaptedRoleConfig, ParallelConfig, RoleConfig
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.config.supervised import SupervisedConfig


class RankCoordinates(NamedTuple):
    replica: int
    stage: int
    shard: int


@dataclass(frozen=True)
class RolePlacement:
    """`len(ranks) == tp * pp * dp * cp`; the `cp` ranks that share sequences have a copy of the weights each.

    `ep` neighbouring replicas divide the experts.
    """

    ranks: tuple[int, ...]
    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1

    @property
    def layout(self) -> tuple[int, ...]:
        more = (self.cp, self.ep) if self.ep > 1 else (self.cp,) if self.cp > 1 else ()
        return (self.tp, self.pp, self.dp, *more)

    @property
    def copies(self) -> int:
        return self.dp * self.cp

    def rank(self, copy: int, stage: int, shard: int) -> int:
        return self.ranks[(stage * self.copies + copy) * self.tp + shard]

    def stage_ranks(self, copy: int, stage: int) -> tuple[int, ...]:
        first = (stage * self.copies + copy) * self.tp
        return self.ranks[first : first + self.tp]

    def replica_ranks(self, replica: int) -> tuple[int, ...]:
        return tuple(rank for stage in range(self.pp) for rank in self.stage_ranks(replica, stage))

    def coords(self, rank: int) -> RankCoordinates | None:
        index = self._indices.get(rank)
        if index is None:
            return None
        outer, shard = divmod(index, self.tp)
        stage, copy = divmod(outer, self.copies)
        return RankCoordinates(copy, stage, shard)

    def output_rank(self, replica: int = 0) -> int:
        """First tensor rank of the last stage."""
        return self.rank(replica, self.pp - 1, 0)

    @cached_property
    def _indices(self) -> Mapping[int, int]:
        return {rank: index for index, rank in enumerate(self.ranks)}


def role_placements(config: TrainConfig) -> dict[str, RolePlacement]:
    pool = pools(config)
    actor = _placement(config.actor, pool["actor"])
    with_actor = {"reference": actor} if config.placement.reference == "actor" else {}
    scorers = {name: role for name, role in named_roles(config).items() if name != "actor"}
    return {"actor": actor} | {name: _placement(role, with_actor.get(name, pool["scorer"])) for name, role in scorers.items()}


def round_placements(config: TrainConfig) -> dict[str, RolePlacement]:
    """Return placements of the roles that take part in rounds, which a critic does not if its ranks only train."""
    found = role_placements(config)
    others = {rank for name, placement in found.items() if name != "critic" for rank in placement.ranks}
    trainers = set(training_placements(config)["actor"].ranks)
    if "critic" in found and trainers.isdisjoint(others) and trainers.issuperset(found["critic"].ranks):
        del found["critic"]
    return found


def training_placements(config: TrainConfig) -> dict[str, RolePlacement]:
    pool, found = pools(config), dict[str, RolePlacement]()
    for name, role in config.trained.items():
        serving, train = _placement(role, pool["actor" if name == "actor" else "scorer"]), role.train
        tp, pp, dp, ranks = train.tp or serving.tp, train.pp or serving.pp, train.dp or serving.dp, serving.ranks
        others = train.ranks if isinstance(train, ActorTrainingConfig) else None
        if others is not None:
            ranks = parse_ranks(others)
        if others is not None or train.cp > 1:
            dp = train.dp or max(1, len(ranks) // (tp * pp * train.cp))
        found[name] = RolePlacement(ranks, tp, pp, dp, train.cp, train.ep)
    return found


def trains_apart(config: TrainConfig) -> bool:
    """True if no rank both trains the actor and decodes or scores."""
    held = {rank for placement in round_placements(config).values() for rank in placement.ranks}
    return held.isdisjoint(training_placements(config)["actor"].ranks)


def has_own_training_weights(serving: RolePlacement, training: RolePlacement, vpp: int) -> bool:
    """True if a trained role holds its weights twice; virtual stages hold other layers than serving."""
    same = (serving.ranks, serving.tp, serving.pp) == (training.ranks, training.tp, training.pp)
    return not same or vpp > 1 or training.ep > 1


def pools(config: TrainConfig) -> dict[str, RolePlacement]:
    """For roles that name none."""
    placement = config.placement
    if placement.mode == "single":
        return {"actor": RolePlacement((0,)), "scorer": RolePlacement((0,))}
    actor = _over(tuple(range(placement.actor.num_ranks)), placement.actor)
    if placement.mode == "colocated":
        return {"actor": actor, "scorer": _over(actor.ranks, placement.scorer or placement.actor)}
    scorer, first = placement.scorer or ParallelConfig(), len(actor.ranks)
    return {"actor": actor, "scorer": _over(tuple(range(first, first + scorer.num_ranks)), scorer)}


def world_size(config: TrainConfig | SupervisedConfig) -> int:
    if isinstance(config, SupervisedConfig):
        return config.parallel.num_ranks
    placements = *role_placements(config).values(), *training_placements(config).values()
    return 1 + max(rank for placement in placements for rank in placement.ranks)


def layout_tree(config: TrainConfig | SupervisedConfig) -> dict[str, list[Any]]:
    """Ranks, tp, pp and dp of every model, in JSON types."""
    if isinstance(config, SupervisedConfig):
        found = {"model": supervised_placement(config)}
    else:
        trained = {f"{name}, trained": placement for name, placement in training_placements(config).items()}
        found = role_placements(config) | trained
    return {name: [list(placement.ranks), *placement.layout] for name, placement in found.items()}


def supervised_placement(config: SupervisedConfig) -> RolePlacement:
    layout = config.parallel
    return RolePlacement(tuple(range(layout.num_ranks)), layout.tp, layout.pp, layout.dp, layout.cp, layout.ep)


def shares_weights(config: TrainConfig) -> bool:
    placements = role_placements(config)
    own = config.actor.lora is not None and config.reference is None
    return own and placements.get("reference") == placements["actor"]


def decodes_and_scores(placements: Mapping[str, RolePlacement]) -> bool:
    actor = set(placements["actor"].ranks)
    return any(actor & set(placement.ranks) for name, placement in placements.items() if name != "actor")


def named_roles(config: TrainConfig) -> Mapping[str, RoleConfig]:
    """Roles' sections; a null reference is the initial actor."""
    actor, reference = config.actor, config.reference
    if config.ppo.kl.mode == "none":
        reference = None
    elif reference is None:
        model = actor.model_dump(include=set(MODEL_FIELDS))
        adapted = actor.lora is not None and actor.lora.adapter is not None  # new adapters add nothing
        reference = AdaptedRoleConfig(**model, lora=actor.lora) if adapted else RoleConfig(**model)
    others = {"reference": reference, "critic": config.critic, "reward": config.reward}
    return {"actor": actor} | {name: role for name, role in others.items() if role is not None}


def scorers_leader(placements: Mapping[str, RolePlacement]) -> int:
    """First rank of a scorer; without one the actor's output rank."""
    name = next((name for name in ("critic", "reward", "reference") if name in placements), None)
    return placements["actor"].output_rank() if name is None else placements[name].ranks[0]


def parse_ranks(text: str) -> tuple[int, ...]:
    """`0-2,5` -> (0, 1, 2, 5)"""
    spans = (part.partition("-") for part in text.split(","))
    return tuple(rank for first, _, last in spans for rank in range(int(first), int(last or first) + 1))


MODEL_FIELDS = ("checkpoint", "init", "dtype")


def _placement(role: RoleConfig, pool: RolePlacement) -> RolePlacement:
    """By default the pool's layout if it fits, else replicas."""
    ranks = pool.ranks if role.ranks is None else parse_ranks(role.ranks)
    if role.parallel is not None:
        return _over(ranks, role.parallel)
    if len(ranks) == len(pool.ranks):
        return RolePlacement(ranks, pool.tp, pool.pp, pool.dp)
    return RolePlacement(ranks, 1, 1, len(ranks))


def _over(ranks: tuple[int, ...], layout: ParallelConfig) -> RolePlacement:
    return RolePlacement(ranks, layout.tp, layout.pp, layout.dp)


ALONE = "self"


class GroupName(NamedTuple):
    label: str
    ranks: tuple[int, ...]


def group_name(label: str, ranks: Sequence[int]) -> GroupName:
    return GroupName(label if len(ranks) > 1 else ALONE, tuple(ranks))


def model_groups(ranks: Sequence[int], tp: int, pp: int, role: str, cp: int = 1, ep: int = 1) -> Iterator[tuple[str, GroupName]]:
    """Yield (part, group) of a model on `ranks` (tensor fastest, then context, data, pipeline); `dp`: all copies.

    With `ep`, of ranks that hold one set of experts: `exchange` (of one tensor rank), `experts` (of a stage), `experts_pp` (of
    all stages); `experts_dp`: of ranks with the same experts.

    Roles share groups of equal ranks and part, except tensor groups: roles that decode and prefill at once would wait for each
    other.
    """
    per_stage = len(ranks) // pp
    assert per_stage % tp == 0 and per_stage * pp == len(ranks), (ranks, tp, pp)
    stages, replicas, shards = range(pp), range(per_stage // tp), range(tp)

    def rank(p: int, d: int, t: int) -> int:
        return ranks[p * per_stage + d * tp + t]

    ends = sorted({0, pp - 1})
    members = {
        "tp": [[rank(p, d, t) for t in shards] for p in stages for d in replicas],
        "pp": [[rank(p, d, t) for p in stages] for d in replicas for t in shards],
        "dp": [[rank(p, d, t) for d in replicas] for p in stages for t in shards],
        "mp": [[rank(p, d, t) for p in stages for t in shards] for d in replicas],
        "embedding": [[rank(p, d, t) for p in ends] for d in replicas for t in shards],
        "position": [[rank(0, d, t)] for d in replicas for t in shards],
        "tp_dp": [[rank(p, d, t) for d in replicas for t in shards] for p in stages],
        ALONE: [[each] for each in ranks],
        "all": [list(ranks)],
    }
    if cp > 1:
        members |= {
            "context": [[rank(p, d + c, t) for c in range(cp)] for p in stages for d in replicas[::cp] for t in shards],
            "data": [[rank(p, d + c, t) for d in replicas[::cp]] for p in stages for c in range(cp) for t in shards],
        }
    if ep > 1:
        peers, first = range(ep), replicas[::ep]
        members |= {
            "exchange": [[rank(p, d + e, t) for e in peers] for p in stages for d in first for t in shards],
            "experts": [[rank(p, d + e, t) for e in peers for t in shards] for p in stages for d in first],
            "experts_pp": [[rank(p, d + e, t) for p in stages for e in peers for t in shards] for d in first],
            "experts_dp": [[rank(p, d + e, t) for d in first] for p in stages for e in peers for t in shards],
        }
    for part, groups in members.items():
        label = f"{role}.tp" if part == "tp" else part
        yield from ((part, group_name(label, own)) for own in groups)

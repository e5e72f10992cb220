"""A plan as a configuration, with as few settings as possible."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from oppo_megatron.config.model import PlacementMode, format_ranks
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.layouts import Sizes
from oppo_megatron.layout.placements import named_roles
from oppo_megatron.sim.search.blocks import Block
from oppo_megatron.sim.search.enumeration import Plan
from oppo_megatron.sim.search.layouts import Option

Place = tuple[Block, Sizes]


class _Pools(NamedTuple):
    mode: PlacementMode
    actor: Place
    scorer: Place
    reference: Place
    with_actor: bool

    def of(self, role: str) -> Place:
        return {"actor": self.actor, "reference": self.reference}.get(role, self.scorer)


def planned_config(config: TrainConfig, plan: Plan) -> TrainConfig:
    roles = named_roles(config)
    blocks, options = dict(zip(roles, plan.blocks, strict=True)), dict(zip(roles, plan.options, strict=True))
    pools = _pools({name: (blocks[name], options[name].serving) for name in roles})
    tree = config.model_dump() | {"placement": _placement(pools)}
    for name, option in options.items():
        own = _own(pools, name, (blocks[name], option.serving))
        if name != "reference" or config.reference is not None or any(own.values()):
            tree[name] = roles[name].model_dump() | own | _training(option)
    if plan.micro_batch_tokens:
        tree["runtime"]["micro_batch_tokens"] = plan.micro_batch_tokens
    if not any(blocks["actor"].overlaps(block) for name, block in blocks.items() if name != "actor"):
        tree["overlap"] |= {"schedule": "auto"} if tree["overlap"]["schedule"] == "woven" else {}
    return TrainConfig.model_validate(tree)


def _pools(places: Mapping[str, Place]) -> _Pools:
    actor, own = places["actor"]
    pool, others = (Block(0, actor.size), own), {name: place for name, place in places.items() if name != "actor"}
    if max(block.end for block, _ in places.values()) == 1:
        return _Pools("single", pool, pool, pool, with_actor=False)
    with_actor = "reference" in others and others["reference"][0] == actor
    scorers = [place for name, place in others.items() if not (name == "reference" and with_actor)]
    if scorers and actor.first == 0 and {block for block, _ in scorers} == {Block(actor.end, scorers[0][0].size)}:
        return _Pools("disaggregated", pool, scorers[0], pool if with_actor else scorers[0], with_actor)
    together = bool(others) and all(block == actor for block, _ in others.values())
    scorer = next(iter(others.values())) if together else pool
    return _Pools("colocated", pool, scorer, scorer, with_actor=False)


def _placement(pools: _Pools) -> dict[str, Any]:
    if pools.mode == "single":
        return {"mode": "single"}
    tree: dict[str, Any] = {"mode": pools.mode, "actor": _sizes(pools.actor[1])}
    if pools.mode == "disaggregated" or pools.scorer != pools.actor:
        tree["scorer"] = _sizes(pools.scorer[1])
    return tree | ({"reference": "actor"} if pools.with_actor else {})


def _own(pools: _Pools, name: str, place: Place) -> dict[str, Any]:
    if pools.mode == "single" or place == pools.of(name):
        return {"ranks": None, "parallel": None}
    ranks = None if place[0] == pools.of(name)[0] else format_ranks(place[0].ranks)
    return {"ranks": ranks, "parallel": _sizes(place[1])}


def _training(option: Option) -> dict[str, Any]:
    if option.train is None or option.training is None:
        return {}
    same = option.training[:3] == option.serving[:3]
    return {"train": option.train.model_dump() | (dict.fromkeys(("tp", "pp", "dp")) if same else {})}


def _sizes(sizes: Sizes) -> dict[str, int]:
    return {"tp": sizes.tp, "pp": sizes.pp, "dp": sizes.dp}

"""A plan as a configuration, with as few settings as possible."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oppo_megatron.config.model import format_ranks
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.layouts import Sizes
from oppo_megatron.layout.placements import named_roles
from oppo_megatron.sim.search.blocks import Block
from oppo_megatron.sim.search.enumeration import Plan
from oppo_megatron.sim.search.layouts import Option

Place = tuple[Block, Sizes]


def planned_config(config: TrainConfig, plan: Plan) -> TrainConfig:
    roles = named_roles(config)
    blocks, options = dict(zip(roles, plan.blocks, strict=True)), dict(zip(roles, plan.options, strict=True))
    places = {name: (blocks[name], options[name].serving) for name in roles}
    placement, pools = _placement(places)
    tree = config.model_dump() | {"placement": placement}
    for name, option in options.items():
        own = _own(places[name], pools[name])
        if name != "reference" or config.reference is not None or any(own.values()):
            tree[name] = roles[name].model_dump() | own | _training(option)
    if plan.micro_batch_tokens:
        tree["runtime"]["micro_batch_tokens"] = plan.micro_batch_tokens
    if not any(blocks["actor"].overlaps(block) for name, block in blocks.items() if name != "actor"):
        tree["overlap"] |= {"schedule": "auto"} if tree["overlap"]["schedule"] == "woven" else {}
    return TrainConfig.model_validate(tree)


def _placement(places: Mapping[str, Place]) -> tuple[dict[str, Any], Mapping[str, Place]]:
    """Return `placement`, and the ranks and layout that it gives each role."""
    actor, own = places["actor"]
    if max(block.end for block, _ in places.values()) == 1:
        return {"mode": "single"}, places
    pool, others = (Block(0, actor.size), own), {name: place for name, place in places.items() if name != "actor"}
    with_actor = {name for name in ("reference",) if name in others and others[name][0] == actor}
    scorers = [place for name, place in others.items() if name not in with_actor]
    if scorers and actor.first == 0 and {block for block, _ in scorers} == {Block(actor.end, scorers[0][0].size)}:
        tree = {"mode": "disaggregated", "actor": _sizes(own), "scorer": _sizes(scorers[0][1])}
        tree |= dict.fromkeys(with_actor, "actor")
        return tree, {name: pool if name in {"actor", *with_actor} else scorers[0] for name in places}
    together = bool(others) and all(block == actor for block, _ in others.values())
    scorer = next(iter(others.values())) if together else pool
    tree = {"mode": "colocated", "actor": _sizes(own)} | ({"scorer": _sizes(scorer[1])} if scorer != pool else {})
    return tree, {name: pool if name == "actor" else scorer for name in places}


def _own(place: Place, pool: Place) -> dict[str, Any]:
    if place == pool:
        return {"ranks": None, "parallel": None}
    return {"ranks": None if place[0] == pool[0] else format_ranks(place[0].ranks), "parallel": _sizes(place[1])}


def _training(option: Option) -> dict[str, Any]:
    if option.train is None or option.training is None:
        return {}
    same = option.training[:3] == option.serving[:3]
    return {"train": option.train.model_dump() | (dict.fromkeys(("tp", "pp", "dp")) if same else {})}


def _sizes(sizes: Sizes) -> dict[str, int]:
    return {"tp": sizes.tp, "pp": sizes.pp, "dp": sizes.dp}

"""A plan as a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from oppo_megatron.config.model import PlacementMode
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.layouts import Sizes, format_ranks
from oppo_megatron.layout.placements import named_roles
from oppo_megatron.sim.search.exact import Plan
from oppo_megatron.sim.search.homes import Home
from oppo_megatron.sim.search.options import Option


class _Laid(NamedTuple):
    home: Home
    option: Option

    @property
    def place(self) -> tuple[Home, Sizes]:
        return self.home, self.option.serving


class _Pools(NamedTuple):
    """What `placement` says: where roles are that say nothing themselves."""

    mode: PlacementMode
    actor: tuple[Home, Sizes]
    scorer: tuple[Home, Sizes]
    reference: tuple[Home, Sizes]
    beside_actor: bool

    def of(self, role: str) -> tuple[Home, Sizes]:
        return {"actor": self.actor, "reference": self.reference}.get(role, self.scorer)


def planned_config(config: TrainConfig, plan: Plan) -> TrainConfig:
    """The configuration with the plan's ranks and layouts, in as few words as say it."""
    roles = named_roles(config)
    laid = {name: _Laid(*each) for name, each in zip(roles, zip(plan.homes, plan.options, strict=True), strict=True)}
    pools = _pools(laid)
    tree = config.model_dump() | {"placement": _placement_tree(pools, laid)}
    for name, each in laid.items():
        own = _own(pools, name, each)
        if name != "reference" or config.reference is not None or any(own.values()):
            tree[name] = roles[name].model_dump() | own | _training(each)
    tree["actor"]["generate"] = None
    actor = laid["actor"].home
    if not any(actor.meets(each.home) for name, each in laid.items() if name != "actor"):
        tree["overlap"] |= {"schedule": "auto"} if tree["overlap"]["schedule"] == "woven" else {}
    return TrainConfig.model_validate(tree)


def _pools(laid: Mapping[str, _Laid]) -> _Pools:
    actor = laid["actor"]
    pool = (Home(0, actor.home.size), actor.option.serving)
    others = {name: each for name, each in laid.items() if name != "actor"}
    if max(each.home.end for each in laid.values()) == 1:
        return _Pools("single", actor.place, actor.place, actor.place, beside_actor=False)
    beside = [name for name, each in others.items() if name == "reference" and each.home == actor.home]
    scorers = [each for name, each in others.items() if name not in beside]
    behind = {each.home for each in scorers} == {Home(actor.home.end, scorers[0].home.size)} if scorers else False
    if actor.home.first == 0 and behind:
        scorer = scorers[0].place
        return _Pools("disaggregated", pool, scorer, pool if beside else scorer, beside_actor=bool(beside))
    together = all(each.home == actor.home for each in others.values())
    scorer = next(iter(others.values())).place if others and together else pool
    return _Pools("colocated", pool, scorer, scorer, beside_actor=False)


def _placement_tree(pools: _Pools, laid: Mapping[str, _Laid]) -> dict[str, Any]:
    if pools.mode == "single":
        return {"mode": "single"}
    tree: dict[str, Any] = {"mode": pools.mode, "actor": _sizes(pools.actor[1])}
    if pools.mode == "disaggregated" or pools.scorer != pools.actor:
        tree["scorer"] = _sizes(pools.scorer[1])
    return tree | ({"reference": "actor"} if pools.beside_actor else {})


def _own(pools: _Pools, name: str, each: _Laid) -> dict[str, Any]:
    """What a role says of its ranks and its layout."""
    if pools.mode == "single" or each.place == pools.of(name):
        return {"ranks": None, "parallel": None}
    ranks = None if each.home == pools.of(name)[0] else format_ranks(each.home.ranks)
    return {"ranks": ranks, "parallel": _sizes(each.option.serving)}


def _training(each: _Laid) -> dict[str, Any]:
    train = each.option.train
    if train is None:
        return {}
    serving, training = each.option.serving, each.option.training
    assert training is not None, "a role that is trained has a training layout"
    sizes = dict.fromkeys(("tp", "pp", "dp")) if training[:3] == serving[:3] else {}
    return {"train": train.model_dump() | sizes}


def _sizes(sizes: Sizes) -> dict[str, int]:
    return {"tp": sizes.tp, "pp": sizes.pp, "dp": sizes.dp}

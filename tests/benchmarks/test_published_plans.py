"""ReaL's published plans as configurations, and their price."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.published.tables import PLANS, SHAPES, PublishedPlan
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.checks import check_layouts
from oppo_megatron.layout.placements import layout_tree, named_roles
from oppo_megatron.modeldir.headers import read_hf_config
from oppo_megatron.sim.clusters.cluster import GPUS, INSIDE, Between, Cluster, published
from oppo_megatron.sim.pricing.decoding import Decoding
from oppo_megatron.sim.pricing.prices import Prices
from tests.unit.test_sim_search_plan import tree


def decode_micro_batches(plan: PublishedPlan) -> int:
    """The printed number, times the stages where there are several."""
    call = plan.call("ActorGen")
    return call.micro_batches * call.pp


def published_tree(plan: PublishedPlan, **runtime: Any) -> dict[str, Any]:
    """A plan of ReaL whose calls are all on the same ranks, as a configuration."""

    def sizes(name: str) -> dict[str, int]:
        call = plan.call(name)
        return {"tp": call.tp, "pp": call.pp, "dp": call.dp}

    def shape(name: str) -> dict[str, Any]:
        return {**SHAPES[plan.call(name).model], "max_position_embeddings": 4096}

    train = {"recompute": "full"}
    return tree(
        placement={"mode": "colocated", "actor": sizes("ActorGen")},
        actor={"init": shape("ActorGen"), "train": sizes("ActorTrain") | train},
        critic={"init": shape("CriticInf"), "parallel": sizes("CriticInf"), "train": sizes("CriticTrain") | train},
        reward={"init": shape("RewInf"), "parallel": sizes("RewInf")},
        reference={"init": shape("RefInf"), "parallel": sizes("RefInf")},
        rollout={"batch_size": plan.batch, "max_response_tokens": 1024},
        data={"path": "rows.jsonl", "max_prompt_tokens": 1024},
        ppo={"minibatches": 8},
        overlap={"intra": False, "inter": False, "weave": [decode_micro_batches(plan), "auto"]},
        runtime={"device": "cpu", "dtype": "bfloat16", "micro_batch_tokens": 8192, **runtime},
    )


TOGETHER = [plan for plan in PLANS if plan.name != "7b-searched"]


@pytest.mark.parametrize("plan", TOGETHER, ids=lambda plan: plan.name)
def test_published_plans_load_as_configurations(plan: PublishedPlan) -> None:
    """All but Table 4, whose actor decodes on other ranks than it is trained on."""
    loaded = TrainConfig.model_validate(published_tree(plan))
    assert check_layouts(loaded, {name: read_hf_config(role) for name, role in named_roles(loaded).items()}) == []
    layouts = layout_tree(loaded)
    for role, call in (("actor", "ActorGen"), ("actor, trained", "ActorTrain"), ("critic, trained", "CriticTrain")):
        found = plan.call(call)
        assert layouts[role][1:] == [found.tp, found.pp, found.dp]


@pytest.mark.parametrize("plan", TOGETHER, ids=lambda plan: plan.name)
def test_generation_of_published_plans_is_priced(plan: PublishedPlan) -> None:
    """Nothing is fitted but the host's time for a layer; each of a step's micro-batches costs it."""
    nodes, network = len(plan.call("ActorGen").nodes), Between(19e-6, 25e9, 1, published("a test"))
    cluster = Cluster(nodes, 8, GPUS["h100"], INSIDE["h100"], network)
    loaded = TrainConfig.model_validate(published_tree(plan))
    told = {True: (plan.call("ActorGen").seconds, plan.wall_s), False: (plan.no_graph_s, plan.no_graph_wall_s)}
    for captured, (seconds, wall_s) in told.items():
        rows = Prices(loaded, cluster, Decoding(1024, [1024] * plan.batch, captured)).rows()
        generation = rows["actor", "prompts"] + rows["actor", "decode"]
        assert generation == pytest.approx(seconds, rel=0.09)
        assert 0.8 < sum(rows.values()) / wall_s < 1.0

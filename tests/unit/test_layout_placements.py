"""Placements of roles: coords_by_role and ranks are inverse, and each mode has default places."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from oppo_megatron.config.model import RoleConfig
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.placements import (
    RolePlacement,
    has_own_training_weights,
    named_roles,
    parse_ranks,
    role_placements,
    shares_weights,
    training_placements,
    world_size,
)


def configure(**sections: Any) -> TrainConfig:
    base: dict[str, Any] = {
        "run_dir": "run", "tokenizer": {"path": "tok"}, "data": {"path": "rows.jsonl"},
        "actor": {"checkpoint": "a", "dtype": "bfloat16"}, "critic": {"checkpoint": "a"},
        "rewards": [{"kind": "verifier", "name": "gsm8k"}], "rollout": {"batch_size": 8, "max_response_tokens": 8},
    }  # fmt: skip
    for name, section in sections.items():
        base[name] = {**base.get(name, {}), **section}
    return TrainConfig.model_validate(base)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.randoms(use_true_random=False))
def test_coords_by_role_and_ranks_are_inverse(tp: int, pp: int, dp: int, random: Any) -> None:
    ranks = random.sample(range(100), tp * pp * dp)
    placement = RolePlacement(tuple(ranks), tp, pp, dp)
    coords_by_role = {placement.coords(rank): rank for rank in ranks}
    assert len(coords_by_role) == len(ranks)
    assert all(coords is not None and placement.rank(*coords) == rank for coords, rank in coords_by_role.items())
    replicas = [placement.replica_ranks(replica) for replica in range(dp)]
    assert sorted(rank for replica in replicas for rank in replica) == sorted(ranks)
    for d, p in ((d, p) for d in range(dp) for p in range(pp)):
        assert placement.stage_ranks(d, p) == replicas[d][p * tp : (p + 1) * tp]
    assert placement.coords(100) is None
    assert placement.output_rank(dp - 1) == placement.stage_ranks(dp - 1, pp - 1)[0]


def test_default_places_of_each_mode() -> None:
    ranks = {name: placement.ranks for name, placement in role_placements(configure()).items()}
    assert ranks == {"actor": (0,), "reference": (1,), "critic": (1,)}
    sizes = {"tp": 2, "dp": 2}
    disaggregated = role_placements(configure(placement={"actor": sizes, "scorer": {"pp": 2}}))
    assert disaggregated["actor"] == RolePlacement((0, 1, 2, 3), 2, 1, 2)
    assert disaggregated["critic"] == RolePlacement((4, 5), 1, 2, 1)
    colocated = role_placements(configure(placement={"mode": "colocated", "actor": sizes}))
    assert colocated["actor"] == colocated["critic"] == colocated["reference"]
    assert set(role_placements(configure(placement={"mode": "single"})).values()) == {RolePlacement((0,))}


def test_a_reference_beside_the_actor() -> None:
    placement = {"actor": {"tp": 2}, "reference": "actor"}
    placements = role_placements(configure(placement=placement))
    assert placements["reference"] == placements["actor"] == RolePlacement((0, 1), 2)
    assert placements["critic"] == RolePlacement((2,))
    lora = {"lora": {"rank": 2, "alpha": 4}}
    assert shares_weights(configure(placement=placement, actor=lora)), "its weights are the actor's without adapters"
    assert not shares_weights(configure(placement={"actor": {"tp": 2}}, actor=lora))
    own = {"parallel": {"dp": 2}} | lora
    laid_out = role_placements(configure(placement=placement, actor=own))
    assert laid_out["reference"] == laid_out["actor"] == RolePlacement((0, 1), dp=2), "where the actor decodes"
    elsewhere = role_placements(configure(placement=placement, actor={"ranks": "1-2"}, critic={"ranks": "0"}))
    assert elsewhere["reference"] == elsewhere["actor"] == RolePlacement((1, 2), 2)
    named = configure(placement=placement, reference={"checkpoint": "a", "ranks": "2"})
    assert role_placements(named)["reference"] == RolePlacement((2,), 1, 1, 1), "ranks of its own come first"


def test_ranks_and_layouts_of_a_role() -> None:
    placement = {"mode": "colocated", "actor": {"pp": 4}}
    config = configure(placement=placement, critic={"ranks": "0-1"}, reference={"checkpoint": "a", "ranks": "5,4,3,2"})
    placements = role_placements(config)
    assert placements["critic"] == RolePlacement((0, 1), 1, 1, 2), "ranks alone: replicas"
    assert placements["reference"] == RolePlacement((5, 4, 3, 2), 1, 4, 1), "as many as the pool has: its layout"
    assert world_size(config) == 6


def test_training_is_over_the_same_ranks() -> None:
    config = configure(
        placement={"mode": "colocated", "actor": {"tp": 2, "pp": 2}},
        actor={"parallel": {"dp": 4}, "train": {"tp": 2, "pp": 1, "dp": 2}},
        critic={"train": {"vpp": 2}},
    )
    serving, training = role_placements(config), training_placements(config)
    assert serving["actor"].layout == (1, 1, 4) and training["actor"].layout == (2, 1, 2)
    assert training["critic"] == serving["critic"]
    assert has_own_training_weights(serving["actor"], training["actor"], 1)
    assert not has_own_training_weights(serving["critic"], training["critic"], 1)
    assert has_own_training_weights(serving["critic"], training["critic"], 2)


def test_a_null_reference_is_the_actors_model() -> None:
    roles = named_roles(configure(reward={"checkpoint": "rm"}))
    assert list(roles) == ["actor", "reference", "critic", "reward"]
    assert (roles["reference"].checkpoint, roles["reference"].dtype) == (roles["actor"].checkpoint, "bfloat16")


@pytest.mark.parametrize("ranks", [3, "3", "0-2,5", "00"])
def test_ranks_as_yaml_reads_them(ranks: object) -> None:
    assert RoleConfig.model_validate({"ranks": ranks}).ranks == str(ranks)


@pytest.mark.parametrize(
    "ranks", [" 1", "", "-1", -1, "1-", "0,,1", "a", "1 ,2", "\N{ARABIC-INDIC DIGIT ONE}", "9" * 5000, [0, 1], True, 1.5]
)
def test_ranks_that_are_none(ranks: object) -> None:
    with pytest.raises(ValidationError, match="ranks and spans of ranks with commas between them, as in 0-3,6"):
        RoleConfig.model_validate({"ranks": ranks})


@pytest.mark.parametrize(("text", "ranks"), [("3", (3,)), ("0-2,5", (0, 1, 2, 5)), ("4,1-2", (4, 1, 2))])
def test_ranks_in_words(text: str, ranks: tuple[int, ...]) -> None:
    assert parse_ranks(text) == ranks

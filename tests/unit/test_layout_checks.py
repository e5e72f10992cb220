"""Ranks and layouts of a run: each broken rule is the one problem, all come at once, and the nearest that pass are suggested."""

import math
import re
import time
from copy import deepcopy
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_megatron.config.model import format_ranks
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.config.supervised import SFTConfig
from oppo_megatron.layout.checks import check_layouts, check_supervised_layout
from oppo_megatron.layout.layouts import Limits, Sizes, layouts_of, nearest_counts, nearest_layouts, suggestion
from oppo_megatron.layout.placements import parse_ranks

SHAPE: dict[str, Any] = {
    "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 96, "max_position_embeddings": 256,
}  # fmt: skip
ROLES = ("actor", "reference", "critic", "reward")


def configure(changes: dict[str, Any]) -> TrainConfig:
    config: dict[str, Any] = {
        "run_dir": "run", "tokenizer": {"path": "tok"}, "data": {"path": "rows.jsonl", "max_prompt_tokens": 28},
        **{role: {"init": SHAPE} for role in ROLES}, "rewards": [{"kind": "model"}],
        "rollout": {"batch_size": 8, "max_response_tokens": 100}, "overlap": {"delta": {"initial": 0, "max": 4}},
    }  # fmt: skip
    for key, value in deepcopy(changes).items():
        *sections, last = key.split(".")
        place = config
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return TrainConfig.model_validate(config)


def problems_of(changes: dict[str, Any], **shape: Any) -> list[str]:
    return check_layouts(configure(changes), dict.fromkeys(ROLES, {**SHAPE, **shape}))


COLOCATED = {"placement.mode": "colocated"}
EIGHT = {"placement": {"mode": "colocated", "actor": {"tp": 2, "pp": 2, "dp": 2}}}
TWO = "tp 2 x pp 1 x dp 1"
BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"placement": {"mode": "single", "actor": {"tp": 2}}}, f"placement.actor is {TWO}, but placement.mode single has one"),
    ({"placement": {"mode": "single", "scorer": {"tp": 2}}}, "placement.scorer is tp 2 x pp 1 x dp 1, but placement.mode"),
    ({"placement.mode": "single", "critic.ranks": "0"}, "critic.ranks is 0, but placement.mode single has one process"),
    ({"placement.mode": "single", "critic.parallel": {"pp": 2}}, "critic.parallel is tp 1 x pp 2 x dp 1 = 2 ranks, but"),
    ({"actor.parallel": {"tp": 2}}, "actor.parallel is tp 2 x pp 1 x dp 1 = 2 ranks, but the role has 1"),
    (
        {"placement.scorer": {"tp": 2}, "critic.parallel": {"dp": 3}},
        "critic.parallel is tp 1 x pp 1 x dp 3 = 3 ranks, but the role has 2; make tp x pp x dp equal to that, or give the "
        "role other ranks; nearest that fit 2 ranks: tp 1 x pp 1 x dp 2, tp 1 x pp 2 x dp 1, tp 2 x pp 1 x dp 1",
    ),
    (
        {"placement.scorer": {"dp": 3}, "reward.parallel": {"tp": 2}},
        "reward.parallel is tp 2 x pp 1 x dp 1 = 2 ranks, but the role has 3, which equal replicas of 2 do not fill",
    ),
    (
        {**EIGHT, "critic.train": {"tp": 4}},
        "critic.train is tp 4 x pp 2 x dp 2 = 16 ranks (null sizes are taken from the role), but the role has 8",
    ),
    (
        {"placement": {"mode": "colocated", "actor": {"pp": 4}, "scorer": {"pp": 2}}},
        "placement.scorer is tp 1 x pp 2 x dp 1 = 2 ranks, but colocated scorers share the actor's 4 (tp 1 x pp 4 x dp 1)",
    ),
    ({"critic.ranks": "1,1"}, "critic.ranks is 1,1, but a rank holds one part of a role and rank 1 is named twice"),
    ({"critic.ranks": "1-3,2-4"}, "ranks 2-3 are named twice; name each once"),
    ({"critic.ranks": "2-1"}, "critic.ranks is 2-1, but 2-1 counts down; write 1-2"),
    ({"critic.ranks": "3,1-2"}, "critic.ranks is 3,1-2, but a role's parts lie on its ranks in counting order; write 1-3"),
    ({"critic.ranks": "5"}, "ranks 2-4 are without a role, but a run has ranks 0 to the highest, 5 of critic, and each"),
    ({"critic.ranks": "99999999999"}, "critic.ranks is 99999999999, but ranks end at 65535"),
    ({"placement.actor": {"tp": 10**9}}, "= 1000000000 ranks, but at most 65536 are allowed"),
    ({**EIGHT, "actor.train": {"tp": 1, "pp": 8, "dp": 1, "vpp": 2}}, "actor.train: 8 layers do not divide by pp 8 x vpp 2"),
    ({**COLOCATED, "actor.train.vpp": 2}, "actor.train.vpp is 2, but 1F1B interleaves the virtual stages of at least 2"),
    (
        {**EIGHT, "actor.train.cp": 3},
        "actor.train is tp 2 x pp 2 x dp 1 x cp 3 = 12 ranks (null sizes are taken from the role), but the role has 8, which "
        "equal replicas of 12 do not fill; make tp x pp x dp x cp equal to that, or give the role other ranks; nearest that",
    ),
    (
        {"placement.scorer": {"dp": 2}, "critic.train": {"dp": 2, "cp": 2}},
        "critic.train is tp 1 x pp 1 x dp 2 x cp 2 = 4 ranks (null sizes are taken from the role), but the role has 2; make",
    ),
    (
        {"placement.actor": {"dp": 8}, "actor.train.cp": 8, "data.max_prompt_tokens": 7, "rollout.max_response_tokens": 8},
        "actor.train.cp is 8, but sequences have at most 15 tokens, and each of its ranks reads two stretches of each; lower it "
        "to 7 or less",
    ),
    (
        {"placement.actor": {"dp": 2}, "actor.train.ep": 2},
        "actor.train: ep is 2, but the model has no experts that replicas could divide; set ep to 1; nearest that fit 2 ranks: "
        "tp 1 x pp 1 x dp 2",
    ),
    ({"critic.train.sequence_parallel": True}, "critic.train.sequence_parallel is true, but it shards over tensor ranks"),
    (
        {"placement.actor": {"dp": 8}, "ppo.minibatches": 2},
        "actor is trained with dp 8, but a minibatch has 4 rows (rollout.batch_size 8 / ppo.minibatches 2) and each replica "
        "needs one; lower actor.train.dp or ppo.minibatches; nearest that fit 8 ranks: tp 1 x pp 2 x dp 4",
    ),
    (
        {"placement.scorer": {"dp": 16}, "critic.parallel": {"tp": 4, "pp": 4}, "reward.ranks": "0", "reference.ranks": "0-15"},
        "reference has dp 16, but at most 12 sequences are in work at once (rollout.batch_size 8 + overlap.delta.max 4)",
    ),
    ({"overlap.schedule": "woven"}, "overlap.schedule is woven, but no rank holds both the actor and a scorer"),
    (
        # 128 tokens x 2 x 8 layers x 4 heads x 8 x 4 bytes = 256 KiB; the other roles have half the layers
        {"placement": {"actor": {"dp": 2}, "scorer": {"pp": 2}}, "runtime.kv_cache_mb": 0.2},
        "actor: runtime.kv_cache_mb is 0.2, but one sequence of 128 tokens needs 0.25 MiB on each rank; raise the budget or "
        "lower the prompt or response limit; nearest that fit 2 ranks: tp 1 x pp 2 x dp 1, tp 2 x pp 1 x dp 1",
    ),
    (
        {"placement.actor": {"tp": 4}, "critic.ranks": "0-3", "reward.ranks": "0-3", "placement.scorer": {"tp": 1},
         "critic.parallel": {"tp": 4}, "reward.parallel": {"tp": 4}, "runtime.kv_cache_mb": 0.25,
         "overlap.weave": ["auto", 129]},
        "reference: runtime.kv_cache_mb is 0.25, but a micro-batch of overlap.weave's prefill_tokens 129 has at least 2 "
        "sequences of 128 tokens, which need 0.5 MiB on each rank; raise the budget or lower overlap.weave's prefill_tokens; "
        "no layout fits 1 rank, the nearest numbers that one fits are 2, 4, 6",
    ),
]  # fmt: skip
UNUSUAL: list[dict[str, Any]] = [
    {}, EIGHT, {"placement": {"mode": "single", "actor": {}, "scorer": {"pp": 1}}},
    {"placement": {"actor": {"tp": 2}, "scorer": {"pp": 2}}, "critic.parallel": {"tp": 2}},
    {"placement.actor": {"tp": 2}, "critic.ranks": "2-3", "reward.ranks": "4", "reference.ranks": "4"},
    {"placement.actor": {"pp": 2}, "critic.ranks": "1-2", "reward.ranks": "0-1", "reference.ranks": "1"},
    {"placement.actor": {"pp": 2}, "critic.ranks": "1-2", "reward.ranks": "0-1", "overlap.schedule": "woven"},
    {**EIGHT, "placement.scorer": {"pp": 4, "dp": 2}, "overlap.schedule": "woven"},
    {**EIGHT, "actor.parallel": {"tp": 4, "dp": 2}, "actor.train": {"tp": 2, "dp": 1, "pp": 4, "vpp": 2}},
    {**EIGHT, "critic.train": {"vpp": 4, "sequence_parallel": True, "recompute": "full"}},
    {**EIGHT, "actor.train.cp": 2, "critic.train": {"tp": 1, "pp": 1, "cp": 4}},
    {"overlap.schedule": "woven", "overlap.intra": False}, {"placement.actor": {"dp": 12}, "actor.train": {"dp": 3, "pp": 4}},
    {"runtime.kv_cache_mb": 0.25, "overlap.weave": ["auto", 128]},
    {"runtime.kv_cache_mb": 0.25, "overlap.weave": ["auto", 10**6], "runtime.micro_batch_tokens": 128},  # which bounds them
]  # fmt: skip
CASES = BROKEN + [(changes, "") for changes in UNUSUAL]


@pytest.mark.parametrize(("changes", "expected"), CASES, ids=lambda value: str(value)[:60])
def test_broken_rule_is_the_one_problem(changes: dict[str, Any], expected: str) -> None:
    problems = problems_of(changes)
    assert len(problems) == bool(expected) and expected in "".join(problems), problems


@pytest.mark.parametrize("dp", [4, 2])
def test_a_layout_suggested_for_the_cache_holds_the_larger_micro_batch_of_fewer_replicas(dp: int) -> None:
    """A micro-batch has 2 of 8 sequences with 4 replicas, and 4 with 2."""

    def problems(layout: dict[str, int]) -> list[str]:
        cache = {"overlap.inter": False, "runtime.kv_cache_mb": 0.4, "overlap.weave": ["auto", 512]}
        return problems_of({"placement": {"mode": "colocated", "actor": layout}, **cache})

    found = problems({"pp": 4 // dp, "dp": dp})
    assert len(found) == 3, "the scorers"
    suggested = re.findall(r"tp (\d+) x pp (\d+) x dp (\d+)", found[0].partition("nearest that fit")[2])
    assert suggested
    for tp, pp, replicas in suggested:
        assert problems({"tp": int(tp), "pp": int(pp), "dp": int(replicas)}) == []


def test_numbers_and_divisions_in_messages() -> None:
    changes = {"placement.actor": {"dp": 2}, "rollout.batch_size": 1, "overlap.inter": False}
    text = "\n".join(problems_of(changes))
    assert "at most 1 sequence is in work" in text and "a minibatch has 1 row (" in text
    assert len(problems_of({"runtime.kv_cache_mb": 0.25, "overlap.weave": ["auto", 10**6]})) == 3, "the scorers"
    changes = {"placement.actor": {"dp": 9}, "actor.train": {"dp": 1, "pp": 3, "tp": 3}, "overlap.inter": False}
    text = "\n".join(problems_of(changes, num_hidden_layers=9, num_attention_heads=6, num_key_value_heads=3))
    assert "at most 8 sequences are in work at once (rollout.batch_size 8) and" in text
    # Each division is told once for a role that trains where it serves.
    problems = problems_of({"placement.actor": {"tp": 5}})
    assert [p.split(";")[0] for p in problems] == [
        f"actor: {what} not divide by tp 5"
        for what in ("8 attention heads do", "4 key/value heads do", "intermediate_size 96 does")
    ]
    assert all(problem.endswith("nearest that fit 5 ranks: tp 1 x pp 1 x dp 5") for problem in problems)
    # Tensor ranks of both layouts have a token.
    changes = {"placement": {"actor": {"tp": 3, "dp": 4}}, "actor.train": {"tp": 4, "dp": 3}}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 12}
    assert problems_of(changes, vocab_size=28, **heads) == []
    assert problems_of(changes, vocab_size=25, **heads) == [
        "actor.train: vocab_size 25, filled up to a multiple of 12 that tp 4 and tp 3 divide, leaves a tensor rank without a "
        "token; train and serve with equal tp, or lower one"
    ]


def test_all_problems_come_at_once_absurd_numbers_too_and_a_model_that_cannot_be_read_is_none_of_them() -> None:
    changes = {
        **EIGHT, "critic.ranks": "0-7,3", "reference.parallel": {"pp": 3}, "reward.ranks": "7-0", "actor.parallel": {"tp": 8},
        "actor.train": {"tp": 1, "vpp": 9, "sequence_parallel": True}, "runtime.kv_cache_mb": 0.001, "overlap.schedule": "woven",
    }  # fmt: skip
    text = "\n".join(problems_of(changes))
    for expected in (
        "rank 3 is named twice", "reference.parallel is tp 1 x pp 3 x dp 1 = 3 ranks", "7-0 counts down",
        "actor: 4 key/value heads do not divide by tp 8", "actor.train is tp 1 x pp 1 x dp 1 = 1 ranks",
        "8 layers do not divide by pp 1 x vpp 9", "actor.train.sequence_parallel is true", "critic: runtime.kv_cache_mb",
    ):  # fmt: skip
        assert expected in text
    start = time.thread_time()
    changes = {"actor.parallel": {"tp": 10**9, "pp": 10**9}, "critic.ranks": "0-99999999999", "reward.ranks": "7-5"}
    assert len(problems_of(changes)) == 2
    assert time.thread_time() - start < 1
    assert check_layouts(configure({"placement.actor": {"tp": 7}}), {}) == []
    (problem,) = check_layouts(configure({"actor.parallel": {"tp": 7}}), {})
    assert "nearest" not in problem


@given(*[st.integers(1, 4)] * 3, st.integers(1, 3), st.integers(1, 2), st.integers(1, 8), st.booleans())
@settings(max_examples=200)
def test_a_layout_passes_if_and_only_if_all_divides(
    tp: int, pp: int, dp: int, vpp: int, cp: int, num_ranks: int, sharded: bool
) -> None:
    """The critic on `num_ranks` ranks of its own, trained in a layout drawn at random; then the suggestions in turn."""
    shape = {"num_hidden_layers": 6, "num_attention_heads": 12, "num_key_value_heads": 6, "intermediate_size": 90}

    def problems(tp: int, pp: int, dp: int, cp: int, vpp: int) -> list[str]:
        train = {"tp": tp, "pp": pp, "dp": dp, "cp": cp, "vpp": vpp, "sequence_parallel": sharded}
        own = {"critic.ranks": f"2-{num_ranks + 1}" if num_ranks > 1 else "2", "critic.parallel": {"dp": num_ranks}}
        return problems_of({**own, "critic.train": train, "ppo.minibatches": 4}, **shape)

    rules = [
        tp * pp * dp * cp == num_ranks,
        all(count % tp == 0 for count in (12, 6, 90, 96)),
        6 % pp == 0 and 6 % (pp * vpp) == 0,
        vpp == 1 or pp > 1,
        dp <= 2,  # 8 rollouts in 4 minibatches
        tp > 1 or not sharded,
    ]
    found = problems(tp, pp, dp, cp, vpp)
    assert bool(found) == (not all(rules))
    for problem in found:
        shown = re.findall(
            r"tp (\d+) x pp (\d+) x dp (\d+)(?: x cp (\d+))?(?: with vpp (\d+))?", problem.partition("nearest ")[2]
        )
        for sizes in shown:
            assert problems(*(int(size or 1) for size in sizes)) == [], sizes


MIXTURE = {"model_type": "qwen3_moe", "num_experts": 12, "moe_intermediate_size": 24, "num_experts_per_tok": 2}


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 2), st.integers(1, 6))
@settings(max_examples=100)
def test_experts_pass_if_and_only_if_replicas_and_ranks_divide_them(tp: int, dp: int, cp: int, ep: int) -> None:
    shape = MIXTURE | {"num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 8}

    def problems(tp: int, pp: int, dp: int, cp: int, ep: int) -> list[str]:
        num_ranks = tp * pp * dp * cp
        own = {"critic.ranks": f"2-{num_ranks + 1}" if num_ranks > 1 else "2", "critic.parallel": {"dp": num_ranks}}
        train = {"tp": tp, "pp": pp, "dp": dp, "cp": cp, "ep": ep}
        return problems_of({**own, "critic.train": train, "rollout.batch_size": 64}, **shape)

    found = problems(tp, 1, dp, cp, ep)
    assert bool(found) == (not (ep == 1 or (cp == 1 and dp % ep == 0 and 12 % (tp * ep) == 0)))
    for problem in found:
        assert problem.startswith("critic.train: ") and "ep" in problem
        shown = re.findall(r"tp (\d+) x pp (\d+) x dp (\d+)(?: x cp (\d+))?(?: with ep (\d+))?", problem.partition("nearest ")[2])
        assert shown
        for sizes in shown:
            assert problems(*(int(size or 1) for size in sizes)) == [], sizes


@pytest.mark.parametrize(("parallel", "expected"), [
    ({"dp": 4, "ep": 3}, "model: dp 4 does not divide by ep 3, the number of replicas that divide experts; choose ep from 1, 2, "
     "4; nearest that fit 4 ranks: tp 1 x pp 1 x dp 4, "),
    ({"tp": 2, "dp": 4, "ep": 4}, "model: number of experts 12 does not divide by tp 2 x ep 4 = 8; choose ep from 1, 2; nearest "
     "that fit 8 ranks: tp 2 x pp 1 x dp 4 with ep 2, "),
    ({"dp": 2, "cp": 2, "ep": 2}, "model: ep is 2 and cp 2, but replicas that divide experts do not share sequences; set one of "
     "them to 1; nearest"),
    ({"tp": 2, "dp": 4, "ep": 2}, ""),
])  # fmt: skip
def test_supervised_layouts_of_experts(parallel: dict[str, int], expected: str) -> None:
    shape, config = SHAPE | MIXTURE, {"run_dir": "r", "tokenizer": {"path": "t"}, "data": {"path": "d"}, "model": {"init": SHAPE}}
    problems = check_supervised_layout(SFTConfig(**config, parallel=parallel), shape)
    assert len(problems) == bool(expected) and "".join(problems).startswith(expected), problems


def test_supervised_layouts() -> None:
    def problems(**parallel: int) -> list[str]:
        config = {"run_dir": "r", "tokenizer": {"path": "t"}, "data": {"path": "d"}, "model": {"init": SHAPE}}
        return check_supervised_layout(SFTConfig(**config, batch_size=4, parallel=parallel), SHAPE)

    assert problems(tp=2, pp=2, dp=4) == []
    (problem,) = problems(dp=5)
    assert problem.startswith("parallel.dp is 5, but a batch has 4 rows (batch_size)")
    assert problem.endswith("no layout fits 5 ranks, the nearest numbers that one fits are 4, 6, 3")
    assert "8 layers do not divide by pp 3" in problems(pp=3)[0]
    assert problems(tp=2, cp=512) == []
    (problem,) = problems(cp=600)
    assert problem.startswith("parallel.cp is 600, but sequences have at most 1024 tokens") and problem.endswith("to 512 or less")
    assert "at most 65536 are allowed" in problems(tp=10**6)[0]


UPTO12 = st.integers(1, 12)
LIMITS = st.builds(Limits, UPTO12, UPTO12, st.none() | st.integers(1, 8), st.sampled_from([1, 2]), experts=UPTO12)


def every_layout(num_ranks: int, limits: Limits, most_vpp: int) -> set[Sizes]:
    up_to = range(1, num_ranks + 1)
    found = set()
    for tp, pp, dp, vpp in product(up_to, up_to, up_to, range(1, most_vpp + 1)):
        chunk = limits.layers / pp / vpp
        fits = tp * pp * dp == num_ranks and limits.width / tp == limits.width // tp and chunk == int(chunk)
        fits = fits and tp >= limits.min_tp and (pp > 1 or vpp == 1)
        if fits and (limits.sequences is None or limits.sequences >= dp):
            found.add(Sizes(tp, pp, dp, vpp))
    return found


@given(UPTO12, LIMITS, st.booleans())
def test_all_that_fit_are_found_and_nothing_else(num_ranks: int, limits: Limits, interleaved: bool) -> None:
    found = list(layouts_of(num_ranks, limits, interleaved=interleaved))
    assert len(found) == len(set(found))
    assert set(found) == every_layout(num_ranks, limits, limits.layers if interleaved else 1)
    assert all(limits.admits(sizes) for sizes in found)


@given(st.builds(Sizes, *[st.integers(1, 8)] * 4, cp=st.integers(1, 2), ep=st.integers(1, 4)), st.integers(1, 24), LIMITS)
def test_nearest_first(asked: Sizes, num_ranks: int, limits: Limits) -> None:
    found = nearest_layouts(asked, num_ranks, limits, lambda sizes: True)
    distances = [sum(abs(math.log(a / b)) for a, b in zip(sizes, asked, strict=True)) for sizes in found]
    assert distances == pytest.approx(sorted(distances))
    if asked.num_ranks == num_ranks and limits.admits(asked):
        assert found[0] == asked


@given(st.integers(1, 30), LIMITS)
def test_nearest_numbers_of_ranks(num_ranks: int, limits: Limits) -> None:
    by_search, found = [n for n in range(1, 61) if any(layouts_of(n, limits))], nearest_counts(num_ranks, limits)[:3]
    expected = sorted(by_search, key=lambda count: (abs(count - num_ranks), count))[:3]
    if len(expected) == 3 and all(abs(count - num_ranks) < 30 for count in expected):
        assert found == expected
    assert all(any(layouts_of(count, limits)) for count in found)


def test_what_a_message_says() -> None:
    limits = Limits(width=4, layers=6, sequences=2)
    nearest = "; nearest that fit 8 ranks: tp 4 x pp 1 x dp 2, tp 4 x pp 2 x dp 1, tp 2 x pp 2 x dp 2"
    assert suggestion(Sizes(8), 8, limits) == nearest
    assert suggestion(Sizes(5), 5, limits) == "; no layout fits 5 ranks, the nearest numbers that one fits are 4, 6, 3"
    interleaved = "tp 1 x pp 4 x dp 1 with vpp 2, tp 1 x pp 4 x dp 1, tp 1 x pp 2 x dp 2 with vpp 2"
    assert suggestion(Sizes(1, 4, 1, 2), 4, Limits(1, 8)).endswith(interleaved)
    assert suggestion(Sizes(), 1, None) == ""
    assert suggestion(Sizes(1, 1, 8), 8, limits, lambda sizes: False) == "; no layout over 8 ranks would do"
    few = "; no layout fits 1 rank, the nearest numbers that one fits are 4, 8, 12"
    assert suggestion(Sizes(), 1, limits, lambda sizes: sizes.tp == 4).endswith(few)


@given(st.sets(st.integers(0, 40), min_size=1))
def test_ranks_are_written_as_they_are_read(ranks: set[int]) -> None:
    text = format_ranks(sorted(ranks))
    assert parse_ranks(text) == tuple(sorted(ranks))
    assert text.count(",") + 1 == sum(rank - 1 not in ranks for rank in ranks), "as few parts as there are runs"

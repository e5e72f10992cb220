"""The checker: sound schedules of random sites pass, each kind of fault is found and named, and it is fast."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_megatron.errors import ScheduleError
from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.schedule.actions import Action, Op, Payload, Schedule, parse_action, parse_schedule
from oppo_megatron.schedule.checking.checker import Fault, check, require_sound
from oppo_megatron.schedule.checking.timeline import simulate
from oppo_megatron.schedule.rounds import Growth, KVBudget, Round, Site
from oppo_megatron.schedule.weaving.components import add_communication
from oppo_megatron.schedule.weaving.costs import Costs, Linear
from oppo_megatron.schedule.weaving.generators import GENERATORS
from tests.support.schedules import LAYOUTS, ample_budgets, build, colocated, disaggregated, make_round, make_site

SPLIT = Site({"actor": RolePlacement((0, 1), 1, 2, 1), "reward": RolePlacement((2,))})
PAIR = Round(
    2, 2, (((Growth(0, 5, 2), Growth(1, 5, 2)), (Growth(2, 5, 9),)),),  # at most 9, and 2 steps
    {"reward": (((Growth(0, 0, 6), Growth(1, 0, 6)), (Growth(2, 0, 6),)),)},
)  # fmt: skip
"""Two decode micro-batches over two stages, and a reward model that listens."""
SOUND = build(PAIR, SPLIT)


def faults_of(schedule: Schedule, **budgets: KVBudget) -> list[Fault]:
    return check(schedule, PAIR, SPLIT, ample_budgets(SPLIT) | {role: [budget] for role, budget in budgets.items()})


def edited(rank: int, edit: Callable[[list[Action]], None]) -> Schedule:
    own = list(SOUND.of(rank))
    edit(own)
    return Schedule(dict(SOUND.actions) | {rank: tuple(own)})


def without(rank: int, text: str) -> Schedule:
    return edited(rank, lambda own: own.remove(parse_action(rank, text)))


def swapped(rank: int, one: str, other: str) -> Schedule:
    def edit(own: list[Action]) -> None:
        i, j = (own.index(parse_action(rank, text)) for text in (one, other))
        own[i], own[j] = own[j], own[i]

    return edited(rank, edit)


def only(faults: Sequence[Fault], kind: str) -> Fault:
    found = [fault for fault in faults if fault.kind == kind]
    assert found, [str(fault) for fault in faults]
    return found[0]


@st.composite
def rounds(draw: st.DrawFn) -> tuple[Round, Site, int]:
    actor, scorer = draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from(LAYOUTS))
    site = draw(st.sampled_from((colocated(actor), disaggregated(actor, scorer))))
    steps, ids = draw(st.integers(0, 4)), iter(range(1000))
    batch = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=3)

    def batches(role: str) -> tuple[tuple[tuple[Growth, ...], ...], ...]:
        replicas = [draw(st.lists(batch, max_size=3)) for _ in range(site.placements[role].dp)]
        return tuple(tuple(tuple(Growth(next(ids), *sizes) for sizes in each) for each in replica) for replica in replicas)

    decode = batches("actor") if steps else ()
    prefill = {role: batches(role) for role in site.placements if role != "actor"}
    return Round(draw(st.integers(1, 9)), steps, decode, prefill), site, draw(st.integers(0, 99))


@settings(max_examples=60)
@given(rounds())
def test_sound_schedules_pass(case: tuple[Round, Site, int]) -> None:
    round_, site, seed = case
    for rng in (None, random.Random(seed)):
        assert check(build(round_, site, rng), round_, site, ample_budgets(site)) == []
    for name, generator in GENERATORS.items():
        schedule = add_communication(generator(round_, site, Costs()), round_, site)
        assert check(schedule, round_, site, ample_budgets(site)) == [], name


def test_deadlock_names_the_cycle() -> None:
    site = make_site((1, 2, 1), {"reward": (0, 1, 2, 1)})
    round_ = Round(1, 1, (((Growth(0, 3, 1),),),), {"reward": (((Growth(0, 0, 3),),),)})
    turned = parse_schedule("""
        rank 0
          recv tokens actor m0 c1 s0 <- 1
          decode actor m0 c1 s0
          send hidden actor m0 c1 s0 -> 1
          prefill reward m0 c0
          send hidden reward m0 c0 -> 1
        rank 1
          recv hidden reward m0 c0 <- 0
          prefill reward m0 c0
          score reward m0 c0
          recv hidden actor m0 c1 s0 <- 0
          decode actor m0 c1 s0
          sample actor m0 c1 s0
          send tokens actor m0 c1 s0 -> 0
    """)
    fault = only(check(turned, round_, site, {}), "deadlock")
    assert "rank 0 waits at `recv tokens actor m0 c1 s0 <- 1`" in fault.message
    assert "rank 1 waits at `recv hidden reward m0 c0 <- 0`" in fault.message
    assert (fault.rank, fault.position, fault.action) == (0, 0, turned.of(0)[0])


def test_deadlock_of_two_roles_waiting_for_a_rank_that_has_ended_and_a_chain_which_is_told_once() -> None:
    """Each role's own order agrees on both ranks; only together they hang."""
    site = make_site((2, 1, 1), {"reward": (0, 2, 1, 1)})
    round_ = Round(2, 1, (((Growth(0, 3, 1),),),), {"reward": (((Growth(0, 0, 3),),),)})
    schedule = build(round_, site)
    own = schedule.of(1)
    faults = check(Schedule({0: schedule.of(0), 1: (*own[2:], *own[:2])}), round_, site, {})
    assert [fault.kind for fault in faults] == ["deadlock"]
    assert "rank 0 waits at `decode actor m0 c2 s0`, for rank 1 waits at `prefill reward m0 c1`" in faults[0].message
    # Rank 0 gets no tokens, so rank 1 gets no hidden state, so rank 2 no chunk
    fault = only(faults_of(Schedule({2: SOUND.of(2)})), "deadlock")
    assert (fault.rank, str(fault.action)) == (2, "recv chunk actor m0 c2 <- 1")
    assert "where no such message has been sent; rank 1 has ended" in fault.message
    faults = faults_of(without(1, "send tokens actor m1 c2 s0 -> 0"))
    assert [fault.kind for fault in faults] == ["missing", "order"]  # rank 0 meets another message
    faults = faults_of(without(0, "send hidden actor m1 c2 s1 -> 1"))
    assert [fault.kind for fault in faults] == ["missing", "deadlock"]
    for link in ("rank 1 waits at `recv hidden actor m1 c2 s1 <- 0`", "rank 0 waits at `recv tokens actor m1 c2 s1 <- 1`"):
        assert link in faults[1].message


def test_messages_to_a_wrong_peer_missing_at_both_ends_and_asked_for_in_another_order() -> None:
    def edit(own: list[Action]) -> None:
        at = own.index(parse_action(0, "send hidden actor m0 c2 s0 -> 1"))
        own[at] = replace(own[at], peer=2)

    faults = faults_of(edited(0, edit))
    assert str(only(faults, "foreign").action) == "send hidden actor m0 c2 s0 -> 2"
    assert "rank 0 has no `send hidden actor m0 c2 s0 -> 1`" in only(faults, "missing").message
    lists = {r: tuple(a for a in own if a.payload is not Payload.CHUNK) for r, own in SOUND.actions.items()}
    found = sorted((fault.rank, fault.kind, fault.action) for fault in faults_of(Schedule(lists)))
    assert found == [(1, "missing", None), (2, "missing", None)]
    (fault,) = faults_of(swapped(0, "recv tokens actor m0 c2 s1 <- 1", "recv tokens actor m1 c2 s1 <- 1"))
    assert fault.kind == "order"  # and not a second time as a deadlock
    assert "`recv tokens actor m1 c2 s1 <- 1`: the next message on this link is `send tokens actor m0 c2 s1" in fault.message


@pytest.mark.parametrize(("rank", "one", "other", "kind", "says"), [
    (0, "recv tokens actor m0 c2 s0 <- 1", "decode actor m0 c2 s1", "causality", "before the tokens"),
    (1, "decode actor m0 c2 s0", "sample actor m0 c2 s0", "causality", "does not follow its own decode"),
    (1, "recv hidden actor m0 c2 s0 <- 0", "decode actor m0 c2 s0", "causality", "not the last one received"),
    (1, "sample actor m0 c2 s0", "send tokens actor m0 c2 s0 -> 0", "causality", "not drawn yet"),
    (0, "decode actor m0 c2 s0", "send hidden actor m0 c2 s0 -> 1", "causality", "not the last one computed"),
    (0, "decode actor m0 c2 s0", "decode actor m1 c2 s0", "order", "by step, then micro-batch"),
    (2, "prefill reward m0 c1", "score reward m0 c1", "causality", "does not follow its own prefill"),
    (2, "prefill reward m0 c1", "prefill reward m1 c1", "order", "where m0 is due"),
    (1, "send tokens actor m1 c2 s1 -> 0", "send chunk actor m0 c2 -> 2", "", ""),
    (1, "sample actor m1 c2 s1", "send chunk actor m0 c2 -> 2", "causality", "knows the whole chunk"),
])  # fmt: skip
def test_what_is_used_before_it_is_there(rank: int, one: str, other: str, kind: str, says: str) -> None:
    faults = faults_of(swapped(rank, one, other))
    if not kind:
        assert faults == []
        return
    assert any(fault.kind == kind and says in fault.message and fault.rank == rank for fault in faults), faults


def test_prefilling_before_a_chunk_decoding_before_its_prompts_and_a_gather_before_the_last_tokens() -> None:
    def ahead(own: list[Action]) -> None:
        own[:2] = [replace(action, chunk=2) for action in own[:2]]

    fault = only(faults_of(edited(2, ahead)), "causality")
    assert str(fault.action) == "prefill reward m0 c2" and fault.position == 0
    assert "uses a chunk before it has been decoded" in fault.message
    after = faults_of(edited(2, lambda own: own.append(replace(own[0], chunk=2))))  # known by then, but of no use to this round
    assert [fault.kind for fault in after] == ["foreign"]
    site = make_site((1, 1, 1), {})
    round_ = Round(1, 1, (((Growth(0, 3, 1),),),), {"actor": (((Growth(0, 0, 3),),),)})
    schedule = build(round_, site)
    assert check(schedule, round_, site, {}) == []
    own = schedule.of(0)
    faults = check(Schedule({0: (*own[1:], own[0])}), round_, site, {})
    assert "comes before the actor's prefill" in only(faults, "causality").message
    site = make_site((1, 2, 2), {})
    round_ = make_round(site, prompts=0)
    schedule = build(round_, site)
    own = schedule.of(0)
    faults = check(Schedule(dict(schedule.actions) | {0: (*own[:-2], own[-1], own[-2])}), round_, site, {})
    assert [(fault.kind, fault.rank, fault.action) for fault in faults] == [("causality", 0, own[-1])]


def test_missing_doubled_and_foreign_actions_and_kv_budgets() -> None:
    missing = only(faults_of(without(2, "score reward m1 c1")), "missing")
    assert (missing.rank, missing.position, missing.action) == (2, 4, None) and "`score reward m1 c1`" in missing.message
    doubled = only(faults_of(edited(2, lambda own: own.append(own[0]))), "doubled")
    assert (doubled.rank, doubled.position) == (2, 5)
    for text, says in (
        ("decode actor m7 c2 s0", "nothing that round 2 asks"), ("decode actor m0 c2 s9", "nothing that round 2 asks"),
        ("decode actor m0 c1 s0", "nothing that round 2 asks"), ("prefill reward m0 c1", "is on ranks [2]"),
        ("prefill judge m0 c1", "no role of the site"),
    ):  # fmt: skip
        fault = only(faults_of(edited(0, lambda own, text=text: own.append(parse_action(0, text)))), "foreign")
        assert says in fault.message, fault
    fault = only(faults_of(edited(0, lambda own: own.append(replace(own[0], rank=1)))), "foreign")
    assert "names rank 1" in fault.message
    assert faults_of(SOUND, actor=KVBudget(3, 7)) == faults_of(SOUND, reward=KVBudget(4, 6, others=1)) == []
    for role, budget, message in (
        ("actor", KVBudget(1, 99), "actor replica 0 has 1 slots, but 3 sequences grow and 0 others keep theirs"),
        ("reward", KVBudget(3, 99, others=1), "reward replica 0 has 3 slots, but 3 sequences grow and 1 others"),
        ("actor", KVBudget(3, 6), "actor replica 0 has room for 6 tokens per sequence, but one grows to 7"),
    ):
        (fault,) = faults_of(SOUND, **{role: budget})
        assert fault.kind == "kv" and message in fault.message
    round_ = make_round(site := make_site((1, 1, 2), {}), prompts=0)
    faults = check(build(round_, site), round_, site, {"actor": [KVBudget(99, 99), KVBudget(3, 99)]})
    assert [(fault.kind, fault.rank) for fault in faults] == [("kv", 1)], "only the replica that overruns"


def test_round_and_site_must_belong_together_and_ten_faults_are_shown() -> None:
    site = make_site((1, 1, 1), {})
    with pytest.raises(ScheduleError, match="2 replicas of the actor role, which has 1"):
        check(Schedule({}), Round(1, 1, ((), ())), site, {})
    with pytest.raises(ScheduleError, match="1 replicas of the reward role, which has 0"):
        check(Schedule({}), Round(1, 0, (), {"reward": ((),)}), site, {})
    require_sound(SOUND, PAIR, SPLIT, ample_budgets(SPLIT))
    with pytest.raises(ScheduleError, match="round 2") as error:
        require_sound(Schedule({}), PAIR, SPLIT, ample_budgets(SPLIT))
    assert str(error.value).count("missing: ") == 10 and f"and {sum(1 for _ in SOUND) - 10} more" in str(error.value)
    # A rank that only listens may plan without the actor's part.
    listening = replace(PAIR, decode=())
    schedule = build(listening, SPLIT)
    assert [str(action) for action in schedule.of(2)][-1] == "recv chunk actor m0 c2 <- 1"
    assert check(schedule, listening, SPLIT, ample_budgets(SPLIT)) == []


def test_times_of_the_dry_run_and_what_stuck_ranks_wait_for() -> None:
    """One sequence, two stages, closed form: d + h, then d + s and h back, twice."""
    site = make_site((1, 2, 1), {})
    round_ = Round(1, 2, (((Growth(0, 3, 2),),),))
    costs = Costs(decode=Linear(3.0, 1.0), sample=Linear(1.0, 0.0), message_s=0.5)
    timeline = simulate(build(round_, site), round_, site, costs)
    assert timeline.makespan_s == pytest.approx(2 * (4 + 0.5 + 5 + 0.5))
    assert timeline.busy_s(0) == pytest.approx(8) and timeline.busy_s(1) == pytest.approx(10)
    assert timeline.bubble(0) == pytest.approx(12 / 20) and timeline.bubble() == pytest.approx(22 / 40)
    assert timeline.stuck == {}
    listening = replace(PAIR, prefill={})
    timeline = simulate(build(listening, SPLIT), listening, SPLIT)
    assert timeline.working == (0, 1), "only ranks that compute count as idle"
    assert timeline.bubble() == pytest.approx((timeline.bubble(0) + timeline.bubble(1)) / 2)
    timeline = simulate(without(1, "sample actor m0 c2 s0"), PAIR, SPLIT)
    assert timeline.stuck == {}  # the dry run knows no causality: messages go through
    timeline = simulate(without(1, "send tokens actor m0 c2 s0 -> 0"), PAIR, SPLIT)
    assert timeline.stuck[0].mistaken and "`send tokens actor m0 c2 s1 -> 0`" not in timeline.stuck[0].reason
    assert "`send tokens actor m1 c2 s0 -> 0`" in timeline.stuck[0].reason
    foreign = simulate(Schedule({2: (Action(2, Op.DECODE, "actor", 0, 2, 0),)}), PAIR, SPLIT)
    assert foreign.stuck[2].reason == "rank 2 holds nothing of the actor role"


def test_ten_thousand_actions_are_checked_in_half_a_second() -> None:
    site = colocated((2, 4, 2))
    round_ = make_round(site, steps=36, micro_batches=4, prefills=4)
    schedule, budgets = build(round_, site), ample_budgets(site)
    assert sum(1 for _ in schedule) > 10_000
    started = [time.process_time()]
    for _ in range(5):  # a busy machine may delay some
        assert check(schedule, round_, site, budgets) == []
        started.append(time.process_time())
    assert min(b - a for a, b in pairwise(started)) < 0.5, started

"""Generators: sound lists in the promised order, and tight weaves.  `python -m tests.unit.test_schedule_generators`: golden/."""

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.schedule.actions import Op, Schedule
from oppo_megatron.schedule.checking.checker import check
from oppo_megatron.schedule.checking.timeline import simulate
from oppo_megatron.schedule.packing import pack_by_tokens
from oppo_megatron.schedule.rounds import Growth, Round, Site
from oppo_megatron.schedule.weaving.components import add_communication
from oppo_megatron.schedule.weaving.costs import Costs, Linear, Lines
from oppo_megatron.schedule.weaving.cut import Cut, Work, choose_cut, even_ends, predict_s
from oppo_megatron.schedule.weaving.generators import GENERATORS, woven
from tests.support.schedule_interpreter import harm
from tests.support.schedules import ample_budgets, make_site

GOLDEN = Path(__file__).parent / "golden"
TENTH = Linear(0.1, 0.0)
COSTS = Costs(decode=Linear(1.0, 0.0), sample=TENTH, default_prefill=Linear(0.4, 0.0), score=TENTH, message_s=0.01)
SITES = {
    "pp1_colocated": (make_site((1, 1, 1), {"critic": (0, 1, 1, 1), "reward": (0, 1, 1, 1)}), ["sequential", "woven"]),
    "pp1_dp2_disaggregated": (make_site((1, 1, 2), {"reward": (2, 1, 1, 1)}), ["intra"]),
    "pp2_colocated": (make_site((1, 2, 1), {"critic": (0, 1, 2, 1), "reward": (0, 1, 2, 1)}), ["sequential", "intra", "woven"]),
    "pp2_layouts_differ": (make_site((1, 2, 1), {"reward": (0, 2, 1, 1)}), ["woven"]),
    "pp2_disaggregated": (make_site((1, 2, 1), {"reward": (2, 1, 2, 1)}), ["intra"]),
    "pp2_dp2_colocated": (make_site((1, 2, 2), {"reward": (0, 1, 2, 2)}), ["woven"]),
    "pp4_colocated": (make_site((1, 4, 1), {"reward": (0, 1, 4, 1)}), ["woven"]),
    "pp1_disaggregated": (make_site((1, 1, 1), {"reward": (1, 1, 1, 1)}), ["intra"]),
    "pp1_dp2_colocated": (make_site((1, 1, 2), {"reward": (0, 1, 1, 2)}), ["woven"]),
    "pp2_dp2_disaggregated": (make_site((1, 2, 2), {"reward": (4, 1, 2, 1)}), ["intra"]),
    "pp4_disaggregated": (make_site((1, 4, 1), {"reward": (4, 1, 1, 1)}), ["intra"]),
    "pp4_dp2_colocated": (make_site((1, 4, 2), {"reward": (0, 1, 4, 2)}), ["woven"]),
    "pp4_dp2_disaggregated": (make_site((1, 4, 2), {"reward": (8, 1, 1, 1)}), ["intra"]),
}


def schedules() -> Iterator[tuple[str, Schedule]]:
    """Every golden schedule: chunk 1 is decoded in 2 steps, chunk 0 is scored in 2 micro-batches."""
    for name, (site, names) in SITES.items():
        round_ = golden_round(site, batches=2 if name == "pp2_disaggregated" else 1)
        for generator in names:
            yield f"{name}.{generator}", add_communication(GENERATORS[generator](round_, site, COSTS), round_, site)


def golden_round(site: Site, batches: int) -> Round:
    actor = site.placements["actor"]
    decode = tuple(tuple((Growth(10 * d + m, 5, 2),) for m in range(batches)) for d in range(actor.dp))
    prompts = tuple(((Growth(10 * d, 0, 5),),) for d in range(actor.dp))
    scored = tuple(tuple((Growth(100 + 10 * d + j, 3, 4, 4),) for j in range(2)) for d in range(actor.dp))
    prefill = {role: scored[: placement.dp] for role, placement in site.placements.items()}
    return Round(1, 2, decode, prefill | {"actor": prompts})


SCORERS = ("reference", "critic", "reward")


@st.composite
def placements(draw: st.DrawFn) -> RolePlacement:
    tp, pp, dp = draw(st.sampled_from([(t, p, d) for t in (1, 2) for p in (1, 2, 4) for d in (1, 2) if t * p * d <= 8]))
    return RolePlacement(tuple(draw(st.permutations(range(8)))[: tp * pp * dp]), tp, pp, dp)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Round, Site, Costs]:
    roles = draw(st.lists(st.sampled_from(SCORERS), unique=True))
    site = Site({role: draw(placements()) for role in ("actor", *roles)})
    steps = draw(st.integers(0, 3))
    ids = iter(range(10_000))

    def batches(new: int, past: int, most: int) -> tuple[tuple[Growth, ...], ...]:
        sizes = draw(st.lists(st.integers(1, 3), max_size=most))
        return tuple(tuple(Growth(next(ids), past, new, 1) for _ in range(size)) for size in sizes)

    actor = site.placements["actor"]
    decode = tuple(batches(steps, 5, 3) for _ in range(actor.dp)) if steps else ()
    prompts = [draw(st.integers(0, len(replica))) for replica in decode]
    prefill = {role: tuple(batches(4, 3, 4) for _ in range(site.placements[role].dp)) for role in roles}
    if any(prompts):
        begun = [replica[:count] for replica, count in zip(decode, prompts, strict=True)]
        prefill["actor"] = tuple(tuple(tuple(Growth(g.seq_id, 0, 5) for g in batch) for batch in each) for each in begun)
    second = st.sampled_from([0.0, 0.1, 0.7, 3.0])
    line = st.builds(Linear, second, second)

    def lines(role: str) -> Lines:
        pp = site.placements[role].pp if role in site.placements else 1
        return draw(line) if draw(st.booleans()) else tuple(draw(line) for _ in range(pp))

    costs = Costs(lines("actor"), draw(line), {"critic": lines("critic")}, draw(line), draw(line), draw(second))
    return Round(2, steps, decode, prefill), site, costs


def whole(name: str, round_: Round, site: Site, costs: Costs) -> Schedule:
    return add_communication(GENERATORS[name](round_, site, costs), round_, site)


@given(cases(), st.sampled_from(sorted(GENERATORS)))
@settings(max_examples=200)
def test_every_schedule_is_sound(case: tuple[Round, Site, Costs], name: str) -> None:
    """The checker finds no fault (each action once, no deadlock, causality), and running it on values gives the reference."""
    round_, site, costs = case
    schedule = whole(name, round_, site, costs)
    assert check(schedule, round_, site, ample_budgets(site), costs) == []
    assert harm(schedule, round_, site) is None


@given(cases())
@settings(max_examples=60)
def test_which_part_comes_first(case: tuple[Round, Site, Costs]) -> None:
    round_, site, costs = case
    for name in ("sequential", "intra"):
        for own in GENERATORS[name](round_, site, costs).actions.values():
            actor_first = ["actor" if action.role == "actor" else "scorer" for action in own]
            assert actor_first == sorted(actor_first, reverse=name == "intra")


def test_prefill_moves_no_decode_micro_step_while_it_fits_and_gaps_are_not_joined_at_the_price_of_decoding() -> None:
    """Stage 0 decodes at 0 and 3.3; its gap of 2.3 s takes two micro-batches of 1 s, and the third comes in the next."""
    site = Site({"actor": RolePlacement((0, 1), pp=2), "reward": RolePlacement((0, 1), pp=2)})
    costs = Costs(Linear(1.0, 0.0), Linear(0.3, 0.0), {}, Linear(0.8, 0.0), Linear(0.0, 0.0), message_s=0.5)
    round_ = Round(1, 3, (((Growth(0, 1, 3),),),), {"reward": (tuple((Growth(j, 0, 9),) for j in range(1, 4)),)})
    names = [f"{a.op.value}{a.micro_batch if a.step is None else ''}" for a in woven(round_, site, costs).of(0)]
    assert names == ["decode", "prefill0", "prefill1", "decode", "prefill2", "decode"]
    # The first stage, 3 s of every 3, is the slow one: to delay the other's first micro-batch would delay the next step.
    costs = Costs((Linear(3.0, 0.0), Linear(1.0, 0.0)), Linear(0.0, 0.0), {}, Linear(2.0, 0.0), message_s=1.0)
    decode = tuple((Growth(m, 1, 4),) for m in range(2))
    round_ = Round(1, 4, (decode,), {"reward": (tuple((Growth(j, 0, 9),) for j in range(5, 8)),)})
    assert [a.op for a in woven(round_, site, costs).of(0)] == [Op.DECODE] * 8 + [Op.PREFILL] * 3


def test_one_stage_decodes_between_prefills_of_scorers_that_span_unequal_replicas() -> None:
    site = Site({"actor": RolePlacement((0, 1), dp=2), "critic": RolePlacement((0,)), "reward": RolePlacement((0, 1), tp=2)})
    decode = tuple((tuple(Growth(10 * d + i, 9, 16) for i in range(rows)),) for d, rows in enumerate((8, 7)))
    scored = (tuple((Growth(100 + j, 0, 9),) for j in range(4)),)
    round_ = Round(1, 16, decode, {"critic": scored, "reward": scored})
    for rank, roles in ((0, ("critic", "reward")), (1, ("reward",))):
        own, before = woven(round_, site, Costs()).of(rank), []
        for place, action in enumerate(own):
            if action.op is Op.PREFILL and action.role in roles:
                before.append(sum(earlier.op is Op.DECODE for earlier in own[:place]))
        assert len(before) == 4 * len(roles) and 0 < before[0] and before[-1] < 16
        assert all(a < b for a, b in pairwise(before)), f"rank {rank}: decode steps before each prefill: {before}"


def test_weaving_one_stage_takes_a_time_that_grows_with_the_replicas_not_with_their_square() -> None:
    site = Site({role: RolePlacement(tuple(range(1024)), dp=1024) for role in ("actor", *SCORERS)})
    batch = (Growth(0, 9, 64, 64),)
    round_ = Round(1, 64, ((batch,),) * 1024, dict.fromkeys(SCORERS, ((batch, batch),) * 1024))
    seconds = []
    for name in ("intra", "woven"):
        began = time.process_time()
        GENERATORS[name](round_, site, Costs())
        seconds.append(time.process_time() - began)
    assert seconds[1] < 4 * seconds[0], seconds  # about the same; ten times as long if each replica looks at all others


def test_golden_schedules() -> None:
    written = {path.stem: path.read_text(encoding="utf-8") for path in GOLDEN.glob("*.txt")}
    assert written == {name: schedule.text() for name, schedule in schedules()}


# The weave in virtual time: a step of a 7B-like stage (most of its decode is reading weights), and a small model on a CPU.
GPU = Costs(decode=Linear(2e-3, 5e-5), default_prefill=Linear(2e-4, 2e-5))
CPU = Costs(decode=Linear(5e-4, 4e-4), default_prefill=Linear(1e-3, 4e-4))
HEAVY_LAUNCH = Costs()  # a prefill micro-batch's fixed cost is that of decoding
MORE = (0.1, 0.5, 0.75, 1.5, 2.0)
SEQUENCES, STEPS, GRAIN = 64, 32, 32


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
@pytest.mark.parametrize("costs", [GPU, CPU], ids=["gpu", "cpu"])
@pytest.mark.parametrize("ratio", [0.25, 1.0, 4.0, *(pytest.param(each, marks=pytest.mark.long) for each in MORE)])
def test_woven_is_within_a_tenth_of_the_bound(pp: int, costs: Costs, ratio: float) -> None:
    """`ratio`: prefill work over the bubbles of decoding in one micro-batch.  Bound: critical path or busiest stage."""
    measured = measure(pp, costs, ratio)
    assert measured["woven"] <= 1.1
    assert measured["woven"] <= measured["intra"] + 0.01


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("costs", [GPU, CPU], ids=["gpu", "cpu"])
@pytest.mark.parametrize("slow", [{-1: 1.5}, {-1: 3.0}, {0: 2.0}, {0: 1.5, -1: 2.0}], ids=str)
@pytest.mark.parametrize("ratio", [pytest.param(0.25, marks=pytest.mark.long), 1.0, pytest.param(4.0, marks=pytest.mark.long)])
def test_woven_is_within_a_tenth_of_the_bound_if_stages_differ(pp: int, costs: Costs, slow: dict, ratio: float) -> None:
    """Some stages are `slow` times as long: the busiest is the slowest.  The cut was chosen by a true prediction."""
    measured = measure(pp, by_stage(costs, pp, slow), ratio)
    assert measured["woven"] <= 1.1
    assert measured["predicted"] == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("ratio", [0.25, 0.5, 1.0])
def test_a_cut_by_the_stages_beats_one_by_their_mean(pp: int, ratio: float) -> None:
    true = by_stage(GPU, pp, {-1: 3.0})
    mean = by_stage(GPU, pp, dict.fromkeys(range(pp), (pp + 2) / pp))
    assert measure(pp, true, ratio)["seconds"] <= measure(pp, true, ratio, believed=mean)["seconds"] * 1.001


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
@pytest.mark.parametrize("ratio", (0.25, 1.0, 4.0, *MORE))
def test_woven_where_only_large_prefill_pays(pp: int, ratio: float) -> None:
    """Few, long micro-batches fill the pipeline slowly: the bound then has to count (P - 1) of them on top."""
    measured = measure(pp, HEAVY_LAUNCH, ratio)
    assert measured["woven"] <= (1.1 if pp < 8 else 1.2)
    assert measured["woven filled"] <= 1.1


def by_stage(costs: Costs, pp: int, slow: dict[int, float]) -> Costs:
    """Stage p of `slow` takes slow[p] times as long; -1 is the last."""

    def lines(line: Linear) -> tuple[Linear, ...]:
        factors = [slow.get(p, slow.get(p - pp, 1.0)) for p in range(pp)]
        return tuple(Linear(line.fixed_s * f, line.per_token_s * f) for f in factors)

    return replace(costs, decode=lines(costs.decode_at(0)), prefill=dict.fromkeys(SCORERS, lines(costs.default_prefill)))


def measure(pp: int, costs: Costs, ratio: float, believed: Costs | None = None) -> dict[str, float]:
    """Makespans over max(decode path, busiest stage), `filled` with the filling; the cut is by `believed` costs."""
    site = Site({role: RolePlacement(tuple(range(pp)), pp=pp) for role in ("actor", *SCORERS)})
    bubbles = STEPS * max(pp - 1, 1) * costs.decode_at(0)(SEQUENCES)
    tokens = GRAIN * max(1, round(ratio * bubbles / (3 * GRAIN * costs.default_prefill.per_token_s)))
    asked = Work(SEQUENCES, STEPS, pp, dict.fromkeys(SCORERS, tokens))
    cut = choose_cut(asked, believed or costs, 8192, grain=GRAIN)
    round_ = make_round(cut, tokens)
    spans = {name: simulate(whole(name, round_, site, costs), round_, site, costs) for name in ("woven", "intra")}
    decoding = replace(round_, prefill={})
    critical = simulate(whole("woven", decoding, site, costs), decoding, site, costs)
    work = max(spans["woven"].busy_s(rank) for rank in range(pp))
    bound = max(critical.makespan_s, work)
    prefills = [span for rank in range(pp) for span in spans["woven"].spans[rank] if span.action.op is Op.PREFILL]
    longest = max(span.end_s - span.start_s for span in prefills)
    seconds, filled = spans["woven"].makespan_s, max(critical.makespan_s, work + (pp - 1) * longest)
    shares = {"predicted": predict_s(asked, cut, costs) / seconds, "woven": seconds / bound, "woven filled": seconds / filled}
    return shares | {"seconds": seconds, "intra": spans["intra"].makespan_s / bound}


def make_round(cut: Cut, tokens: int) -> Round:
    decode = tuple(tuple(Growth(i, 100, STEPS) for i in range(*run)) for run in pairwise(even_ends(64, cut.micro_batches)))
    bins = pack_by_tokens([GRAIN] * (tokens // GRAIN), cut.prefill_tokens)
    growths = tuple(tuple(Growth(i, 50, GRAIN, GRAIN) for i in members) for members in bins)
    return Round(1, STEPS, (decode,), dict.fromkeys(SCORERS, (growths,)))


def test_unequal_micro_batches_leave_gaps_in_one_piece() -> None:
    site = Site({"actor": RolePlacement(tuple(range(8)), pp=8), "reward": RolePlacement(tuple(range(8)), pp=8)})
    sizes = [20, 21, 23]
    decode = tuple(tuple(Growth(100 * m + i, 9, 32) for i in range(size)) for m, size in enumerate(sizes))
    round_ = Round(1, 32, (decode,), {"reward": (tuple((Growth(1000 + j, 0, 600),) for j in range(16)),)})
    alone = replace(round_, prefill={})
    ends = [simulate(whole("woven", r, site, Costs()), r, site, Costs()).makespan_s for r in (round_, alone)]
    assert ends[0] <= 1.01 * ends[1]


def test_a_large_round_is_planned_in_well_under_a_second() -> None:
    """64 steps, 8 stages, 2 replicas of 64 sequences in 8 micro-batches, 3 scorers of 16 micro-batches."""
    site = Site({role: RolePlacement(tuple(range(16)), pp=8, dp=2) for role in ("actor", *SCORERS)})
    batch = tuple(Growth(i, 9, 64, 64) for i in range(8))
    round_ = Round(1, 64, ((batch,) * 8,) * 2, dict.fromkeys(SCORERS, ((batch,) * 16,) * 2))
    began = time.process_time()
    whole("woven", round_, site, Costs())
    assert time.process_time() - began < 1.5  # 0.3 s where nothing else runs


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for stale in GOLDEN.glob("*.txt"):
        stale.unlink()
    for title, schedule in schedules():
        (GOLDEN / f"{title}.txt").write_text(schedule.text(), encoding="utf-8")

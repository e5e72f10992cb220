"""Parts of a step around the model: cutting an update, what controllers learn, delays, rejected batches, preferences."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file

from oppo_megatron.algorithms.experience import GreedyRows, ScoredBatch
from oppo_megatron.chunks import Chunk, ChunkRow
from oppo_megatron.cluster.activity import Activity
from oppo_megatron.config.ppo import KLConfig
from oppo_megatron.config.supervised import DPOConfig
from oppo_megatron.control.chunk_tuner import ChunkTuner
from oppo_megatron.control.delta_controllers import KLController
from oppo_megatron.data.prompts import PromptStream
from oppo_megatron.data.supervised_rows import Marked, Pair
from oppo_megatron.errors import DataError
from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.mcore.batch import MicroBatch
from oppo_megatron.mcore.training import StepReport
from oppo_megatron.overcommit.buffer import RolloutBuffer
from oppo_megatron.overcommit.scheduler import OvercommitScheduler
from oppo_megatron.records import Decision, Prompt, Rollout, StepSignals
from oppo_megatron.rundir.trace import SpanRecorder
from oppo_megatron.schedule.actions import Action, Op, Payload
from oppo_megatron.schedule.plan import scoring_delay
from oppo_megatron.schedule.rounds import Site
from oppo_megatron.schedule.weaving.costs import CostMeter, Costs, Linear
from oppo_megatron.train import updates
from oppo_megatron.train.guard import Facts, RejectedBatch
from oppo_megatron.train.logs.journal import StepFacts
from oppo_megatron.train.logs.meter import RoundTracer, StepClock
from oppo_megatron.train.reference_pass import UnusableFileError, key_of, missing_answers, read_logprobs, write_logprobs
from oppo_megatron.train.score_exchange import ScoreReport
from oppo_megatron.train.supervised_tasks import MarkedPreferences, PairPreferences, Preferences
from oppo_megatron.train.update import UpdateSettings, divide, each_alone, families, run_update, update_packing
from oppo_megatron.train.updates import Adaptation
from tests.unit.test_algorithms_advantages import batch, config, of_ppo
from tests.unit.test_data_prompts import plain_set
from tools.replay import read_rejected

CPU = torch.device("cpu")


class Recorder:
    """Stands for a trained model: keeps what it is given."""

    def __init__(self, dp: int, dp_rank: int):
        self.groups, self.model, self.steps = SimpleNamespace(dp=dp, dp_rank=dp_rank), self, list[list[MicroBatch]]()
        self.head = "lm"

    def step(self, batches: list[MicroBatch], loss: Any) -> StepReport:
        self.steps.append(batches)
        return StepReport(0.0, 0.0, {})


def rollouts(lengths: list[tuple[int, int]]) -> list[Rollout]:
    """Rollouts of so many prompt and response tokens; each response token is its rollout's number."""
    return [Rollout(Prompt(i, i, "", (0,) * prompt), i, tokens=[i] * response) for i, (prompt, response) in enumerate(lengths)]


@settings(deadline=None, max_examples=120)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=8), paired=st.booleans(),
    replicas=st.integers(1, 3), minibatches=st.integers(1, 3), budget=st.integers(34, 60),
)  # fmt: skip
def test_an_update_reads_each_row_once_within_the_budget(
    lengths: list[tuple[int, int]], paired: bool, replicas: int, minibatches: int, budget: int
) -> None:
    size, units = (2, lambda rows: [[*rows[i : i + 2]] for i in range(0, len(rows), 2)]) if paired else (1, each_alone)
    batch, cut = rollouts(lengths * size), UpdateSettings(2, minibatches, budget, 4, step=3, device=CPU, group_size=size)
    recorders = [Recorder(replicas, rank) for rank in range(replicas)]
    numbers_T = torch.cat([torch.full((len(rollout.tokens),), i) for i, rollout in enumerate(batch)])
    for recorder in recorders:
        run_update(recorder, batch, {"numbers": numbers_T}, lambda *_: None, cut, units=units)
    micros = [micro for recorder in recorders for step in recorder.steps for micro in step]
    assert all(len(micro.tokens_T) <= budget and len(micro.lengths) == size * len(micro.index) for micro in micros)
    assert all(torch.equal(micro.extra["numbers"], micro.targets_R) for micro in micros), "each row has its own numbers"
    found = [units([int(part[0]) for part in micro.targets_R.split(list(micro.counts))]) for micro in micros]
    assert sorted(unit for each in found for unit in each) == sorted(2 * units(range(len(batch)))), "once in each epoch"
    packing = update_packing(batch, replicas, cut, units=units)
    tokens, padded = sum(len(micro.tokens_T) for micro in micros), 0
    assert packing["packing_efficiency"] == pytest.approx(tokens / (len(micros) * budget))
    for step in zip(*(recorder.steps for recorder in recorders), strict=True):
        rows = [length for replica in step for micro in replica for length in micro.lengths]
        padded += len(rows) * max(rows)
    assert packing["padding_saved"] == pytest.approx(1 - tokens / padded)


def grouped(groups: list[tuple[int, list[int]]], size: int) -> list[Rollout]:
    """Groups of `size` rollouts (prompt tokens, response tokens of each); a token is its prompt's or its rollout's number."""
    return [
        Rollout(Prompt(i := number * size + place, i, "", (-number,) * prompt), i, tokens=[100 * i + k for k in range(length)])
        for number, (prompt, lengths) in enumerate(groups, 1)
        for place, length in enumerate(lengths)
    ]


@settings(deadline=None, max_examples=150)
@given(
    groups=st.integers(2, 4).flatmap(
        lambda size: st.lists(
            st.tuples(st.integers(1, 9), st.lists(st.integers(1, 9), min_size=size, max_size=size)), min_size=1, max_size=5
        )
    ),
    replicas=st.integers(1, 3), minibatches=st.integers(1, 2), budget=st.integers(18, 80),
)  # fmt: skip
def test_a_group_reads_its_prompt_once_unless_it_is_cut(
    groups: list[tuple[int, list[int]]], replicas: int, minibatches: int, budget: int
) -> None:
    size = len(groups[0][1])
    batch, base = grouped(groups, size), UpdateSettings(1, minibatches, budget, 4, step=3, device=CPU, group_size=size)
    numbers_T = torch.tensor([token for rollout in batch for token in rollout.tokens])
    read: dict[int, list[MicroBatch]] = {}
    for sharing in (1, size):
        cut, recorders = replace(base, sharing=sharing), [Recorder(replicas, rank) for rank in range(replicas)]
        for recorder in recorders:
            run_update(recorder, batch, {"numbers": numbers_T}, lambda *_: None, cut)
        read[sharing] = [micro for recorder in recorders for step in recorder.steps for micro in step]
        packing = update_packing(batch, replicas, cut)
        tokens = sum(len(micro.tokens_T) for micro in read[sharing])
        assert all(len(micro.tokens_T) <= budget and len(micro.rows_R) <= budget for micro in read[sharing])
        assert packing["packing_efficiency"] >= tokens / (len(read[sharing]) * budget) - 1e-9
        assert sorted(contexts(read[sharing])) == sorted(
            [*rollout.prompt.tokens, *rollout.tokens[: k + 1]] for rollout in batch for k in range(len(rollout.tokens))
        )
        assert all(torch.equal(micro.extra["numbers"], micro.targets_R) for micro in read[sharing])
    ours, own = (sum(len(micro.tokens_T) for micro in read[sharing]) for sharing in (size, 1))
    whole = max(prompt + sum(lengths) for prompt, lengths in groups) <= budget
    assert ours <= own
    if whole and replicas == 1:
        assert ours == own - (size - 1) * sum(prompt for prompt, _ in groups), "each prompt is read once"


def contexts(micros: list[MicroBatch]) -> Iterator[list[int]]:
    """For each row, the tokens that its output is computed from, and its target."""
    for micro in micros:
        starts = [sum(micro.lengths[:s]) for s in range(len(micro.lengths))]
        for row, target in zip(micro.rows_R.tolist(), micro.targets_R.tolist(), strict=True):
            s = max(s for s, start in enumerate(starts) if start <= row)
            before = micro.prefixes.get(s)
            first = [] if before is None else micro.tokens_T[starts[before] : starts[before] + micro.lengths[before]].tolist()
            yield [*first, *micro.tokens_T[starts[s] : row + 1].tolist(), target]


def test_groups_are_cut_between_replicas_if_that_balances_them() -> None:
    batch = grouped([(20, [10] * 4)] * 3, 4)
    units = [[row] for row in range(12)]
    assert divide(batch, units, 1, 100, 4) == [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]]
    assert divide(batch, units, 3, 100, 4) == [[[0, 1, 2, 3]], [[4, 5, 6, 7]], [[8, 9, 10, 11]]]
    halves = divide(batch, units, 2, 100, 4)  # 60 tokens each whole, 40 a half: 120 and 60, or 120 and 120
    assert max(sum(20 + 10 * len(unit) for unit in part) for part in halves) == 120
    one = divide(batch[:4], units[:4], 2, 100, 4)
    assert one == [[[0, 1]], [[2, 3]]] and divide(batch[:4], units[:4], 1, 40, 4) == [[[0, 1], [2, 3]]]
    assert divide(batch, units, 2, 100, 1) == [[[row] for row in range(k, 12, 2)] for k in (0, 1)]


def test_a_prompt_whose_end_was_read_by_other_experts_is_not_shared() -> None:
    batch = grouped([(3, [2, 2, 2])], 3)
    for rollout, first in zip(batch, ["AAAA", "AAAA", "BBBB"], strict=True):
        rollout.routes[:] = [first, "CCCC"]
    prompt = (-1, -1, -1)
    assert families(batch, [0, 1, 2], 3) == [(prompt, [batch[0].tokens, batch[1].tokens]), (prompt, [batch[2].tokens])]


@pytest.mark.parametrize(("settings", "scores"), [
    ({}, [0.5, -7.0, 3.0]), ({"reward_clip": 1.0}, [0.5, -1.0, 1.0]),
    ({"reward_clip": 1.0, "truncated": -2.0}, [0.5, -1.0, -2.0]),
    ({"reward_clip": 1.0, "reward_normalization": "batch"}, [0.5, -1.0, 1.0]),  # whose mean would say nothing
])  # fmt: skip
def test_delta_is_told_the_scores_that_are_trained_on(settings: dict[str, Any], scores: list[float]) -> None:
    told, buffer = list[StepSignals](), RolloutBuffer(3, 0, 1)
    rule = SimpleNamespace(value=0, observe=lambda step, signals: told.append(signals) or Decision(0, "", False))
    scheduler = OvercommitScheduler(PromptStream(plain_set(3), 1), buffer, rule)
    tuner, kl = ChunkTuner([32, 16, 64], 8), KLController(KLConfig())
    adaptation = Adaptation(None, scheduler, tuner, kl, None, CostMeter({"actor": 1}))  # no world or planner has a part in this
    facts = StepFacts(1, 0, 8)
    facts.scores = ScoreReport({}, 0.0, 0.0, [], {}, ess=1.0, measured=[])
    scheduler.begin_step()
    buffer.record(Chunk(0, 1, [ChunkRow(r.seq_id, 0, [1], [0.0], [0.0], version=0) for r in buffer.rollouts]))
    adaptation.learn_batch(facts, buffer.rollouts, of_ppo(config(**settings)).experience(batch(), 0.3))
    assert told[0].reward_mean == pytest.approx(sum(scores) / 3)
    adaptation.learn_batch(facts, buffer.rollouts, of_ppo(config()).experience(batch(), 0.3), actor_trained=False)
    assert len(told) == 1 and "warms up" in facts.delta_reason, "a policy that is not trained has no trend"


@pytest.mark.parametrize("generator", ["sequential", "woven"])
def test_costs_leave_out_the_first_step_and_woven_rounds_go_by_the_last(generator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill of 10 tokens a step takes 9, 4, 2 and 3 s."""
    monkeypatch.setattr(updates, "sum_over_ranks", lambda sums, device: list(sums))  # of one rank
    learned = list[float]()

    def read_s(costs: Costs) -> float:
        return costs.prefill_at("actor", 0)(10)

    planner = SimpleNamespace(generator=generator, learn=lambda costs: learned.append(read_s(costs)))
    world, meter = SimpleNamespace(device=None, activity=Activity()), CostMeter({"actor": 1})
    adaptation = Adaptation(world, None, None, None, planner, meter)
    assert adaptation.measured_costs() is None
    of_run = []
    for step, seconds in enumerate((9.0, 4.0, 2.0, 3.0), start=1):
        meter.add(Op.PREFILL, "actor", 0, 10, seconds)
        adaptation.learn_costs(step)
        of_run.append(read_s(adaptation.measured_costs()))
    assert of_run == pytest.approx([9.0, 4.0, 3.0, 3.0])
    late = [9.0, (4.5 + 4) / 1.5, (2.25 + 2 + 2) / 1.75, (1.125 + 1 + 1 + 3) / 1.875]
    assert learned == pytest.approx(late if generator == "woven" else [])


ROUNDS = [1.0, 3.0, 3.0, 3.0]  # prompts, two chunks while the actor decodes, the last chunk
ARRIVALS = [10.0, 20.0, 30.0]


@pytest.mark.parametrize(("update_s", "delay_s"), [
    (0.0, 0.0),
    (6.0, 0.0),  # over before the first chunk
    (12.0, 0.0),  # the first chunk waits, but the second finds the scorers idle
    (23.0, 0.0),  # they catch up just when the last chunk comes
    (24.0, 1.0),
    (40.0, 17.0),  # they never stand idle: 40 + 10 of work, and without the update they end at 33
])  # fmt: skip
def test_a_delay_is_absorbed_by_idle_time_before_the_last_chunk(update_s: float, delay_s: float) -> None:
    assert scoring_delay(update_s, [update_s, *ROUNDS], ARRIVALS) == pytest.approx(delay_s)


def test_a_delay_of_scorers_that_are_behind_anyway_or_work_before_their_rounds_is_whole() -> None:
    assert scoring_delay(5.0, [5.0, 20.0, 20.0, 20.0, 20.0], ARRIVALS) == pytest.approx(5.0)
    assert scoring_delay(6.0, [30.0, *ROUNDS], ARRIVALS) == pytest.approx(6.0)


@given(
    update_s=st.floats(0, 100), work=st.lists(st.floats(0, 50), min_size=1, max_size=6),
    waits=st.lists(st.floats(0, 50), max_size=5),
)  # fmt: skip
def test_a_delay_is_between_nothing_and_the_update(update_s: float, work: list[float], waits: list[float]) -> None:
    arrivals = [sum(waits[: n + 1]) for n in range(min(len(waits), len(work) - 1))]
    assert -1e-9 <= scoring_delay(update_s, [work[0] + update_s, *work[1:]], arrivals) <= update_s + 1e-9


def test_a_clock_tells_work_from_waits_for_chunks() -> None:
    hands = SimpleNamespace(time=100.0)
    clock = StepClock(lambda: hands.time)
    clock.meet()
    hands.time += 4.0  # the critic's update
    clock.begin()
    hands.time += 6.0  # one second of work, five of waiting
    clock.round(5.0, decoded=True)
    hands.time += 3.0
    clock.round(5.5, decoded=True)
    hands.time += 2.0
    clock.round(5.5, decoded=False)
    assert clock.work == pytest.approx([4.0, 1.0, 2.5, 2.0]) and clock.ends == pytest.approx([10.0, 13.0])
    assert scoring_delay(4.0, clock.work, clock.ends) == 0.0, "they waited: the update is absorbed"
    clock.meet()
    hands.time += 1.0
    clock.begin()
    assert (clock.work, clock.ends) == ([1.0], []), "a step forgets the one before"


def test_each_rank_feeds_its_stage_of_each_role() -> None:
    """Rank r takes r + 1 seconds for everything; the vectors of all ranks together give each stage its ranks' seconds."""
    all_ranks, stages, vectors = (0, 1, 2, 3), {"actor": 4, "critic": 2, "reward": 2}, []
    actor, critic, reward = RolePlacement(all_ranks, pp=4), RolePlacement((2, 3), pp=2), RolePlacement(all_ranks, tp=2, pp=2)
    site = Site({"actor": actor, "critic": critic, "reward": reward})
    for rank in all_ranks:
        tracer = RoundTracer(SpanRecorder(rank), CostMeter(stages), site, actions=False, schedules=None)
        for role, placement in site.placements.items():
            op = Op.DECODE if role == "actor" else Op.PREFILL
            for n in (1, 2, 3, 4) if rank in placement.ranks else ():
                tracer(Action(rank, op, role, 0, 1, 0), 10.0, 11.0 + rank, n)
        tracer(Action(rank, Op.SEND, "actor", 0, 1, 0, Payload.HIDDEN, 0), 10.0, 90.0, 0)
        vectors.append(tracer.meter.to_vector())
    costs = CostMeter(stages, [sum(column) for column in zip(*vectors, strict=True)]).costs(Costs())
    assert costs.decode == tuple(Linear(float(rank + 1), 0.0) for rank in range(4))
    assert costs.prefill["critic"] == (Linear(3.0, 0.0), Linear(4.0, 0.0))
    assert costs.prefill["reward"] == (Linear(1.5, 0.0), Linear(3.5, 0.0))


GREEDY = GreedyRows(torch.tensor([0.5, -2.0]), torch.tensor([3, 7]), torch.tensor([False, True]))


def rejected(greedy: GreedyRows | None) -> RejectedBatch:
    """Four rollouts, two to a prompt."""
    facts = Facts(3, 1, 9, 2, 0.1, "", "kl", {"kl_mean": 1.0}, {})
    batch = [Rollout(Prompt(i, i, "p", (1, 2)), i, [4, 5], [-1.0, -2.0], [-1.0, -2.0], [2, 2]) for i in (0, 1, 3, 4)]
    logp_T = torch.tensor([-1.0, -2.0] * 4)
    scored = ScoredBatch(logp_T, None, None, torch.arange(4.0), [2] * 4, torch.zeros(4, dtype=torch.bool), greedy=greedy)
    return RejectedBatch(facts, batch, scored)


def test_greedy_responses_come_back_and_without_them_there_are_none(tmp_path: Path) -> None:
    path = tmp_path / "step-3.safetensors"
    rejected(GREEDY).write(path)
    found = read_rejected(path).scored.greedy
    for name, expected in vars(GREEDY).items():
        assert torch.equal(getattr(found, name), expected) and getattr(found, name).dtype == expected.dtype, name
    rejected(None).write(path)
    assert not [name for name in load_file(path) if name.startswith("greedy")] and read_rejected(path).scored.greedy is None


@pytest.mark.parametrize(("name", "tensor", "told"), [
    ("greedy_scores_G", None, "greedy_lengths_G has 2 entries, not 0"),
    ("greedy_lengths_G", None, "greedy_lengths_G has 0 entries, not 2"),
    ("greedy_truncated_G", torch.zeros(1, dtype=torch.bool), "greedy_truncated_G has 1 entries, not 2"),
    ("greedy_scores_G", torch.zeros(3), "4 rollouts are not whole groups of 3 prompts"),
    ("greedy_scores_G", torch.zeros(2, dtype=torch.float64), "greedy_scores_G is missing or of another kind"),
])  # fmt: skip
def test_damaged_ones_are_refused(tmp_path: Path, name: str, tensor: torch.Tensor | None, told: str) -> None:
    path = tmp_path / "step-3.safetensors"
    rejected(GREEDY).write(path)
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors if tensor is None else tensors | {name: tensor}, path)
    with pytest.raises(DataError, match=told):
        read_rejected(path)


PATHS = {"run_dir": "r", "tokenizer": {"path": "t"}, "data": {"path": "d"}, "model": {"checkpoint": "m"}}


def marked(loss: str = "kto") -> MarkedPreferences:
    return MarkedPreferences(DPOConfig(**PATHS, max_tokens=8, dpo={"loss": loss}))


def micro_batches(task: Preferences[Any], rows: list[Any], budget: int) -> list[MicroBatch]:
    """Micro-batches of rows whose answers have the reference's log-probs -1, -2, ..."""
    missing = missing_answers(task.reference, (answer for row in rows for answer in task.answers(row)))
    task.reference.update({key: -float(number) for number, key in enumerate(missing, start=1)})
    return task.micro_batches(rows, budget, CPU)


def test_a_pair_is_in_one_micro_batch_with_the_references_log_probs() -> None:
    rows = [Pair([1] * n, [2] * (n % 5 + 1), [3] * (n % 3 + 1)) for n in range(1, 30)]
    task = PairPreferences(DPOConfig(**PATHS, max_tokens=8))
    micros = micro_batches(task, rows, 70)
    assert sorted(i for micro in micros for i in micro.index) == list(range(len(rows)))
    assert len(micros) > 5 and all(len(micro.tokens_T) <= 70 for micro in micros)
    for micro in micros:
        answered = [answer for i in micro.index for answer in task.answers(rows[i])]
        assert micro.tokens_T.tolist() == [token for prompt, answer in answered for token in [*prompt, *answer][:-1]]
        assert micro.targets_R.tolist() == [token for _, answer in answered for token in answer], "the EOS, too"
        assert micro.counts == [len(answer) for _, answer in answered] == micro.extra["counts"].tolist()
        assert micro.extra["reference"].tolist() == [task.reference[key_of(*each)] for each in answered]
        assert len(micro.tokens_T) == sum(task.num_tokens(rows[i]) for i in micro.index)
        assert len(micro.lengths) == 2 * len(micro.index)


def test_signs_follow_their_rows() -> None:
    rows = [Marked([1] * n, [2] * (1 + n % 4), [n % 2]) for n in range(1, 12)]
    for micro in micro_batches(marked(), rows, 30):
        assert micro.extra["sign"].tolist() == [1.0 if rows[i].wanted[0] else -1.0 for i in micro.index]
        assert len(micro.lengths) == len(micro.index)


def test_a_prompt_meets_the_completion_before_it_of_another_prompt_cut_if_too_long() -> None:
    rows = [Marked([1], [11], [1]), Marked([2], [12], [0]), Marked([2], [13], [1]), Marked([3], [14], [0])]
    others = [(row.prompt, row.completion) for row in marked().mismatched(rows)]
    assert others == [([1], [14]), ([2], [11]), ([2], [11]), ([3], [13])]
    long = [Marked([1] * 5, [2, 3], [1]), Marked([4], [5, 6, 7, 8, 9, 0, 1], [0])]
    assert [row.completion for row in marked().mismatched(long)] == [[5, 6, 7], [2, 3]]
    assert marked().mismatched(long[:1]) == () == marked().mismatched([long[0], long[0]])
    assert marked("apo_zero_unpaired").mismatched(long) == ()


def test_keys_tell_prompt_from_answer_and_a_file_gives_back_every_bit(tmp_path: Path) -> None:
    keys = [key_of([1, 2], [3]), key_of([1], [2, 3]), key_of([1, 2, 3], []), key_of([1, 2], [4]), key_of([2, 1], [3])]
    assert len(set(keys)) == len(keys) and all(len(key) == 16 for key in keys)
    assert list(missing_answers({}, [([1], [2]), ([1], [3]), ([1], [2])])) == [key_of([1], [2]), key_of([1], [3])]
    table = {key_of([n], [n + 1]): -n / 3 for n in range(50)}
    path = tmp_path / "folder" / "logprobs.safetensors"
    write_logprobs(path, table, "abc")
    assert read_logprobs(path, "abc") == table
    more = table | {key_of([7], [8, 9]): -1e-300}
    write_logprobs(path, more, "abc")
    assert read_logprobs(path, "abc") == more and os.listdir(path.parent) == [path.name]


def test_a_file_of_no_use_says_why(tmp_path: Path) -> None:
    path = tmp_path / "logprobs.safetensors"
    write_logprobs(path, {key_of([1], [2]): -1.0}, "a" * 64)
    another = "is of another reference.*fingerprint aaaaaaaaaaaa, this run's reference bbbbbbbbbbbb"
    with pytest.raises(UnusableFileError, match=another):
        read_logprobs(path, "b" * 64)
    whole, other = path.read_bytes(), save({"keys": torch.zeros(1)})
    for content, said in (
        (whole[:-1] + b"?", "is damaged"), (whole[:-5], "not a readable file"), (other, "is not a file of refer"),
    ):  # fmt: skip
        path.write_bytes(content)
        with pytest.raises(UnusableFileError, match=said):
            read_logprobs(path, "a" * 64)
    assert list(load_file(path)) == ["keys"], "what is not ours is left as it is"

"""Streamed scores, ragged decode and chunked prefill from the cache equal the full forward."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from oppo_megatron.engine.executor import Executor, Links, build_links
from oppo_megatron.engine.round_runner import Decoding, RoundRunner
from oppo_megatron.engine.scoring import ScoringWorker
from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.mcore.batch import join_rows, pack_responses
from oppo_megatron.mcore.fused import FusedStage
from oppo_megatron.mcore.groups import RoleGroups
from oppo_megatron.mcore.kv.sequence_cache import KVCache
from oppo_megatron.mcore.model import RoleModel, step
from oppo_megatron.mcore.training import forward_rows
from oppo_megatron.records import Prompt, Rollout
from oppo_megatron.schedule.planning.actor_book import ActorBook
from oppo_megatron.schedule.planning.planner import RoundPlanner
from oppo_megatron.schedule.planning.scoring_book import ScoringBook
from oppo_megatron.schedule.rounds import Site
from tests.gloo.models import MAX_LENGTH, PATHS, Whole, full_outputs, gather_logits, load, pass_on, stage_inputs, world_groups
from tests.support.ranks import run_ranks

JOBS = "tests.gloo.test_scoring:"
TEMPERATURE = 0.7
SIZES = [(1, 1), (1, 9), (5, 1), (3, 4), (7, 12), (2, 6), (4, 3), (1, 14), (6, 2)]
"""(prompt tokens, response tokens)"""
ROLES = ("reward", "reference", "critic")
STREAMED = (*ROLES, "process")
"""`process`: a reward model that gives an output at every response token."""
PREFILL_TOKENS = 16


class Growth:
    """Rollouts with a fixed end that grow by chunks of 0 to 5 tokens."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.rollouts, self.ends = [], []
        for i, (num_prompt, num_response) in enumerate(SIZES):
            tokens = tuple(self.random.randrange(64) for _ in range(num_prompt))
            self.rollouts.append(Rollout(Prompt(100 + i, i, "", tokens), admission=i))
            self.ends.append([self.random.randrange(64) for _ in range(num_response)])

    def rounds(self) -> Iterator[list[Rollout]]:
        clock = 0
        while not all(r.finished for r in self.rollouts):
            clock += 1
            for rollout, end in zip(self.rollouts, self.ends, strict=True):
                if not rollout.finished:
                    rollout.tokens[:] = end[: len(rollout.tokens) + self.random.choice([0, 1, 1, 2, 5])]
                    rollout.finish_clock = clock if rollout.tokens == end else None
            yield self.random.sample(self.rollouts, len(self.rollouts))


def _expected(role: str, model: RoleModel, rollouts: Sequence[Rollout]) -> Tensor | None:
    if role in ("reward", "process"):
        first = [r.num_tokens - 1 if role == "reward" else len(r.prompt.tokens) for r in rollouts]
        sequences = zip(rollouts, first, strict=True)
        return full_outputs(model, [Whole([*r.prompt.tokens, *r.tokens], [*range(k, r.num_tokens)]) for r, k in sequences])
    batches = pack_responses([r.prompt.tokens for r in rollouts], [r.tokens for r in rollouts], 40, torch.device("cpu"))
    outputs = forward_rows(
        model, batches,
        lambda batch, out: out if role == "critic" else out.figures(batch.targets_R, TEMPERATURE).logp_R,
    )  # fmt: skip
    return join_rows(outputs, [len(r.tokens) for r in rollouts], batches) if outputs else None


class Scorers:
    """Some scoring roles on the same ranks, in rounds that decode nothing."""

    def __init__(self, models: dict[str, RoleModel], slots: dict[str, int], links: Links, site: Site):
        rank = dist.get_rank()
        self.workers = {
            role: ScoringWorker(_kind(role), model, _cache(model, slots[role]), temperature=TEMPERATURE)
            for role, model in models.items()
        }
        actor = ActorBook(site.placements["actor"].dp, 1, lambda _: 1)
        books = {
            role: ScoringBook(_kind(role), site.placements[role].dp, slots[role], every_token=role == "process")
            for role in models
        }
        planner = RoundPlanner(site, "woven", ("auto", PREFILL_TOKENS), MAX_LENGTH, MAX_LENGTH, actor, books)
        executor = Executor(rank, dict(self.workers), links, 60.0, torch.device("cpu"), lambda *_: None)
        places = {role: placement.coords(rank) for role, placement in site.placements.items()}
        replicas = {role: place.replica for role, place in places.items() if place is not None}
        self.rounds = RoundRunner(planner, executor, replicas, None, None, self.workers)

    def advance(self, rollouts: Sequence[Rollout]) -> None:
        """Prefill what is new of each rollout; finished ones are then complete, in as many rounds as that takes."""
        self._round(rollouts)
        while self.rounds.owes(done := [r for r in rollouts if r.finished]):
            self._round(done)

    def error(self, role: str, rollouts: Sequence[Rollout]) -> float:
        """Largest difference from the full forward, over this replica's finished rollouts; 0 before the last stage."""
        worker, book = self.workers[role], self.rounds.planner.scorers[role]
        mine = [r for r in rollouts if book.replica(r.seq_id) == self.rounds.replicas[role]]
        expected = _expected(role, worker.model, mine) if mine else None
        if expected is None:
            return 0.0
        found = worker.collect(mine)
        assert found.shape == expected.shape == (len(mine) if role == "reward" else sum(len(r.tokens) for r in mine),)
        assert len(expected) == 1 or expected.std() > 0.05
        return float((found - expected).abs().max())

    def _round(self, rollouts: Sequence[Rollout]) -> None:
        self.rounds.run([], rollouts, 1, Decoding(0, 0, mock.Mock(side_effect=AssertionError("no round decodes"))))


def _score(role: str, model: RoleModel, slots: int, links: Links, site: Site) -> dict[str, float]:
    """Stream to a scorer; halfway the critic's weights change, and the first to finish are taken out and scored anew."""
    scorers = Scorers({role: model}, {role: slots}, links, site)
    cache, growth, errors, taken = scorers.workers[role].cache, Growth(slots), [0.0], list[Rollout]()
    assert cache.num_slots == slots
    with mock.patch.object(cache, "open", wraps=cache.open) as opened:
        for index, rollouts in enumerate(growth.rounds()):
            scorers.advance(rollouts)
            done = [r for r in rollouts if r.finished]
            if index == 2:
                if role == "critic":
                    with torch.no_grad():
                        next(model.parameters()).mul_(1.1)
                    model.end_weight_update()
                    scorers.rounds.scorers_changed()
                    assert not cache.seq_ids
                    scorers.advance(rollouts)
                errors.append(scorers.error(role, done))
                taken = done[:1]
                scorers.rounds.retire(taken)
                scorers.advance(taken)
        num_opened = opened.call_count
    scorers.rounds.executor.finish_sends()
    assert not cache.seq_ids, "all have finished, so no slot is taken"
    errors.append(scorers.error(role, growth.random.sample(growth.rollouts, len(SIZES))))
    return {"error": max(errors), "opened": num_opened, "taken": len(taken)}


def together(models: dict[str, str], tp: int, pp: int) -> dict[str, float]:
    """Three roles of different sizes at once, each with its own slots and evictions, woven into each other's gaps."""
    groups = world_groups(tp, pp)
    placement = RolePlacement(groups.ranks, groups.tp, groups.pp, groups.dp)
    site = Site({"actor": placement, **dict.fromkeys(ROLES, placement)})
    loaded = {role: load(models[role], groups, "lm" if role == "reference" else "scalar") for role in ROLES}
    scorers = Scorers(loaded, {"reward": 2, "reference": 9, "critic": 3}, build_links(site), site)
    growth = Growth(5)
    for rollouts in growth.rounds():
        scorers.advance(rollouts)
    scorers.rounds.executor.finish_sends()
    return {role: scorers.error(role, growth.rollouts) for role in ROLES}


def _kind(role: str) -> str:
    return "reward" if role == "process" else role


def _cache(model: RoleModel, slots: int) -> KVCache:
    layers, heads = len(model.decoder.layers), model.shape.num_kv_heads // model.groups.tp
    slot_bytes = 2 * layers * heads * MAX_LENGTH * model.shape.head_dim * 4
    return model.new_cache(len(SIZES), budget_bytes=slots * slot_bytes + 5)


def streamed_against_full(models: dict[str, str], tp: int, pp: int) -> dict[str, dict[str, float]]:
    """role/slots -> largest difference, and how many times a sequence was admitted."""
    groups: RoleGroups = world_groups(tp, pp)
    placement = RolePlacement(groups.ranks, groups.tp, groups.pp, groups.dp)
    reports = {}
    for role in STREAMED:
        site = Site({"actor": placement, role: placement})
        links = build_links(site)
        for slots in (len(SIZES), 3, 1):
            model = load(models[role], groups, "lm" if role == "reference" else "scalar")
            reports[f"{role}/{slots}"] = _score(role, model, slots, links, site)
    return reports


TOLERANCE = 1e-5
WIDE = [pytest.param(*each, marks=pytest.mark.long) for each in ((2, 1, 1), (1, 2, 1), (1, 1, 2))]


@pytest.fixture
def chosen(models: dict[str, str]) -> dict[str, str]:
    scalar = models["qwen2-scalar"]
    return {"reward": scalar, "reference": models["llama"], "critic": models["qwen3-scalar"], "process": scalar}


@pytest.mark.parametrize(("tp", "pp", "dp"), [(1, 1, 1), (2, 2, 1), (1, 2, 2), *WIDE])
def test_streamed_outputs_equal_the_full_forward(chosen: dict[str, str], tp: int, pp: int, dp: int) -> None:
    answers = run_ranks(tp * pp * dp, f"{JOBS}streamed_against_full", models=chosen, tp=tp, pp=pp)
    for answer in answers:
        assert set(answer) == {f"{role}/{slots}" for role in STREAMED for slots in (len(SIZES), 3, 1)}
        for name, report in answer.items():
            assert report["error"] < TOLERANCE, (name, report)
            assert report["taken"] == 1
    assert max(answer["reference/3"]["error"] for answer in answers) > 0
    if dp > 1:
        return
    # With too few slots sequences were evicted and admitted again; with enough they were not.
    assert answers[0]["reward/3"]["opened"] > len(SIZES) + 1
    assert answers[0][f"reward/{len(SIZES)}"]["opened"] == len(SIZES) + 1


@pytest.mark.parametrize(("tp", "pp", "dp"), [(1, 1, 1), (1, 2, 1), (1, 2, 2), (2, 2, 1)])
def test_three_roles_stream_side_by_side(chosen: dict[str, str], tp: int, pp: int, dp: int) -> None:
    answers = run_ranks(tp * pp * dp, f"{JOBS}together", models=chosen, tp=tp, pp=pp)
    for role in ROLES:
        errors = [answer[role] for answer in answers]
        assert max(errors) < TOLERANCE and sum(error > 0 for error in errors) >= tp * dp, (role, errors)


@dataclass
class Call:
    """A unit step: sequence `seq_ids[s]` grows by `lens[s]` of `tokens`; `rows` are the packed rows wanted (None: all)."""

    seq_ids: list[int]
    lens: list[int]
    tokens: list[int] = field(default_factory=list)
    rows: list[int] | None = None


@dataclass
class Walk:
    """Sequences that join, grow by decode and by ragged chunks, roll back and leave; every output is kept."""

    model: RoleModel
    cache: KVCache
    random: random.Random
    tokens: dict[int, list[int]] = field(default_factory=dict)
    visits: list[Whole] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    num_opened: int = 0
    num_rolled_back: int = 0

    def join_leave_roll_back(self) -> None:
        while self.cache.num_free and self.random.random() < 0.4:
            self._join()
        for seq_id in list(self.tokens):
            if len(self.tokens[seq_id]) > MAX_LENGTH - 8 or (len(self.tokens) > 1 and self.random.random() < 0.1):
                if self.random.random() < 0.5:
                    self.cache.exchange(seq_id, self.random.choice(list(self.tokens)))
                self.cache.close(seq_id)
                del self.tokens[seq_id]
            elif self.tokens[seq_id] and self.random.random() < 0.15:
                length = self.random.randint(0, len(self.tokens[seq_id]) - 1)
                self.cache.truncate(seq_id, length)
                del self.tokens[seq_id][length:]
                self.num_rolled_back += 1
        if not self.tokens:
            self._join()

    def _join(self) -> None:
        self.cache.open(self.num_opened)
        self.tokens[self.num_opened] = []
        self.num_opened += 1

    def grow(self) -> None:
        ids = self.cache.seq_ids
        if self.random.random() < 0.6:
            ids = self.random.sample(ids, self.random.randint(1, len(ids)))
        cut = self.random.randint(0, len(ids) - 1)
        decode = self.random.random() < 0.5
        calls = [self._call(part, decode) for part in (ids[:cut], ids[cut:]) if part]
        for call in calls:
            inputs = stage_inputs(self.model, torch.tensor(call.tokens))
            rows_R = None if call.rows is None else torch.tensor(call.rows)
            out = step(self.model, self.cache, call.seq_ids, call.lens, inputs, rows_R)
            pass_on(self.model, out)
            if self.model.groups.is_last_stage:
                self.outputs.append(self.model.logits(out) if self.model.head == "lm" else out)

    def _call(self, ids: list[int], decode: bool) -> Call:
        call = Call(ids, [1 if decode else self.random.randint(1, 7) for _ in ids])
        chosen: list[int] = []
        for seq_id, new in zip(ids, call.lens, strict=True):
            known = len(self.tokens[seq_id])
            self.tokens[seq_id] += [self.random.randrange(64) for _ in range(new)]
            rows = sorted(self.random.sample(range(new), self.random.randint(0, new)))
            chosen += [len(call.tokens) + r for r in rows]
            call.tokens += self.tokens[seq_id][known:]
            self.visits.append(Whole(list(self.tokens[seq_id]), [known + r for r in rows]))
        if decode or not chosen:
            for seq_id, new, visit in zip(ids, call.lens, self.visits[-len(ids) :], strict=True):
                visit.positions = list(range(len(self.tokens[seq_id]) - new, len(self.tokens[seq_id])))
        else:
            call.rows = chosen
        return call


def _compare(model: RoleModel, seed: int, num_steps: int) -> dict[str, float]:
    walk = Walk(model, model.new_cache(5), random.Random(seed))
    with mock.patch.object(FusedStage, "__call__", autospec=True, side_effect=FusedStage.__call__) as fused_calls:
        for _ in range(num_steps):
            walk.join_leave_roll_back()
            walk.grow()
        report = {"fused_calls": fused_calls.call_count, "opened": walk.num_opened, "rolled_back": walk.num_rolled_back}
    expected = full_outputs(model, walk.visits)
    if expected is None:
        return report
    found = torch.cat([gather_logits(out, model.vocab) if model.head == "lm" else out for out in walk.outputs])
    assert found.shape == expected.shape
    return {**report, "error": float((found - expected).abs().max()), "spread": float(expected.std())}


def cached_against_full(directories: dict[str, str], tp: int, pp: int, num_steps: int) -> dict[str, dict[str, float]]:
    """name/path -> largest difference between cached and full outputs, and how much the walk has met."""
    groups = world_groups(tp, pp)
    reports = {}
    for name, directory in directories.items():
        head = "scalar" if name.endswith("scalar") else "lm"
        for path in PATHS:
            model = load(directory, groups, head, path=path)
            reports[f"{name}/{path}"] = _compare(model, len(reports), num_steps)
    return reports


NUM_STEPS = 40
DIFFERENT, ALIKE = ("qwen2", "mistral", "qwen3-scalar"), ("qwen3", "llama", "mixtral")
OWN = ("phi3", "olmo2", "olmo2-scalar", "gemma2", "gemma3", "gpt-oss")
"""Models; of those that are alike each is tested on parallel groups at length alone."""


@pytest.mark.parametrize(("tp", "pp", "names"), [
    pytest.param(1, 1, DIFFERENT + ALIKE, id="tp1-pp1"), pytest.param(2, 1, DIFFERENT[:1], id="tp2-pp1"),
    pytest.param(1, 2, DIFFERENT, id="tp1-pp2"),
    pytest.param(2, 1, ("gemma2", "olmo2-scalar", "gpt-oss"), id="tp2-pp1-own-layers"),
    *(pytest.param(tp, pp, OWN, id=f"tp{tp}-pp{pp}-own-layers", marks=pytest.mark.long) for tp, pp in ((1, 1), (2, 2))),
    pytest.param(2, 1, DIFFERENT[1:] + ALIKE, id="tp2-pp1-others", marks=pytest.mark.long),
    pytest.param(1, 2, ALIKE, id="tp1-pp2-others", marks=pytest.mark.long),
    pytest.param(2, 2, DIFFERENT + ALIKE, id="tp2-pp2", marks=pytest.mark.long),
])  # fmt: skip
def test_cached_steps_equal_the_full_forward(models: dict[str, str], tp: int, pp: int, names: tuple[str, ...]) -> None:
    chosen = {name: models[name] for name in names}
    answers = run_ranks(tp * pp, f"{JOBS}cached_against_full", directories=chosen, tp=tp, pp=pp, num_steps=NUM_STEPS)
    speakers = [answer for answer in answers if "error" in answer[f"{names[0]}/fused"]]
    assert len(speakers) == tp  # the last stage
    for answer in speakers:
        for name, report in answer.items():
            assert report["error"] < TOLERANCE, (name, report)
            assert report["spread"] > 0.3 and report["rolled_back"] > 3 and report["opened"] > 8, (name, report)
            assert (report["fused_calls"] > 0) != name.endswith("/module"), (name, report)

"""Work for which there is not enough memory at once: in truth, or because a call says so after it has done a part."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from oppo_megatron.cluster.process_groups import use_once
from oppo_megatron.config.model import ModelConfig, OptimizerConfig, TrainingLayoutConfig
from oppo_megatron.engine import generation, scoring
from oppo_megatron.engine.links import build_links
from oppo_megatron.engine.round_runner import decoder
from oppo_megatron.engine.sampler import Sampling
from oppo_megatron.engine.stopping import Stopping
from oppo_megatron.errors import CapacityError
from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.mcore import out_of_memory
from oppo_megatron.mcore.batch import MicroBatch
from oppo_megatron.mcore.kv.cached_plan import StepPlan
from oppo_megatron.mcore.layers.vocab_parallel import token_logprobs
from oppo_megatron.mcore.model import RoleModel
from oppo_megatron.mcore.out_of_memory import MemoryLimit, MemoryLimits
from oppo_megatron.mcore.roles import load_role, load_training
from oppo_megatron.mcore.stage import step
from oppo_megatron.mcore.training import TrainedModel
from oppo_megatron.records import Prompt, Rollout
from oppo_megatron.schedule.actions import Action, Op
from oppo_megatron.schedule.rounds import Site
from oppo_megatron.train.update import UpdateSettings, run_update
from tests.gloo import jobs_device_decode, jobs_scoring
from tests.gloo.jobs_device_decode import Course, Way
from tests.gloo.jobs_generation import decode_round
from tests.gloo.models import CPU, load, world_groups
from tests.support.limits import room_for

TOLD = "[enforce fail] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."
VOCAB = 100_000  # what logits take is more than the allocator keeps: it goes back to the system when it is free
BIG = {
    "model_type": "qwen2", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": VOCAB, "max_position_embeddings": 128,
}  # fmt: skip
LENGTHS = [(5, 60), (3, 40), (8, 70), (2, 20), (6, 90), (4, 55), (9, 33), (1, 48)]
"""(prompt tokens, response tokens)"""
BUDGET = 400


def _failing(most: int, dice: random.Random) -> Callable[..., Tensor]:
    """`step`, without memory for more than `most` tokens: it fails before it has cached anything, or when it has all."""

    def failing(model: RoleModel, kv: Any, seq_ids: Any, lens: Sequence[int], *rest: Any) -> Tensor:
        if sum(lens) <= most:
            return step(model, kv, seq_ids, lens, *rest)
        if dice.random() < 0.5:
            kv.begin(seq_ids, lens)
        else:
            step(model, kv, seq_ids, lens, *rest)
        raise RuntimeError(TOLD)

    return failing


def decoded(directory: str, courses: list[Course], ways: list[Way]) -> list[dict[Way, Any]]:
    """As `jobs_device_decode.beside_each_other`, but the first of the ways alone has memory for all that it does at once."""
    model, dice = load(directory, world_groups(1, 1)), random.Random(3)

    def failing_lane(_: RoleModel, given: tuple[Any, ...]) -> None:
        tokens_B, plan, *_ = given
        if isinstance(plan, StepPlan) and len(tokens_B) > 2 and dice.random() < 0.3:
            raise RuntimeError(TOLD)

    found: list[dict[Way, Any]] = [{ways[0]: jobs_device_decode.travel(model, each, ways[0])} for each in courses]
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(generation, "step", _failing(3, dice)))
        stack.callback(model.register_forward_pre_hook(failing_lane).remove)
        stack.enter_context(mock.patch.object(out_of_memory, "gc"))  # nothing big is held here
        lowered = stack.enter_context(mock.patch.object(MemoryLimit, "lower", autospec=True, side_effect=MemoryLimit.lower))
        for course, answers in zip(courses, found, strict=True):
            for way in ways[1:]:
                answers[way] = jobs_device_decode.travel(model, course, way)
    assert lowered.call_count > 2 * len(courses)
    return found


def scored(models: dict[str, str], pp: int) -> dict[str, float]:
    """As `jobs_scoring.together`, with memory for fewer tokens than are planned, and of log-probs.

    Those run out where a whole micro-batch is scored first, for that is where they alone are made in splits.
    """
    dice, compute = random.Random(dist.get_rank()), scoring.ScoringWorker.compute
    failed, at = dict.fromkeys((Op.SCORE, Op.PREFILL), 0), Op.PREFILL

    def noted(worker: scoring.ScoringWorker, action: Action) -> int:
        nonlocal at
        at = action.op
        return compute(worker, action)

    def failing(out_R: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        in_turn = at is Op.SCORE or failed[Op.SCORE]
        if len(out_R) > 1 and in_turn and (not failed[at] or dice.random() < 0.2):
            failed[at] += 1
            raise RuntimeError(TOLD)
        return token_logprobs(out_R, *rest)

    with (
        mock.patch.object(out_of_memory, "gc"),
        mock.patch.object(scoring, "step", _failing(5, dice)),
        mock.patch.object(scoring, "token_logprobs", failing),
        mock.patch.object(scoring.ScoringWorker, "compute", noted),
    ):
        answer = jobs_scoring.together(models, 1, pp)
    assert (failed[Op.SCORE] > 0) == (dist.get_rank() == pp - 1), "the last stage alone gives log-probs"
    return answer


def _batch() -> list[Rollout]:
    dice = random.Random(2)
    return [
        Rollout(
            Prompt(i, i, "", tuple(dice.choices(range(VOCAB), k=prompt))), i, dice.choices(range(VOCAB), k=response)
        )
        for i, (prompt, response) in enumerate(LENGTHS)
    ]


def _model(**layout: Any) -> TrainedModel:
    groups = world_groups(layout.pop("tp", 1), 1)
    use_once(groups.made, CPU)  # as a run does: what connections take is no part of an update
    options = TrainingLayoutConfig(**layout)
    chunks = load_training(ModelConfig(init=BIG, init_seed=1), options, groups, head="lm", max_length=128, device=CPU)
    return TrainedModel(chunks, OptimizerConfig(lr=1e-3, eps=1e-4), 4, options)


def _update(
    trained: TrainedModel, budgets: list[int], memory_limit: MemoryLimit, batch: list[Rollout]
) -> tuple[list[Any], Tensor, list[int]]:
    """Reports of an optimizer step by each of the budgets, the weights then, and the budgets that it came to."""
    vocab = trained.model.vocab
    weights_T = torch.linspace(-1, 1, sum(len(rollout.tokens) for rollout in batch))

    def loss(micro: MicroBatch, output: Tensor, num_tokens: int, first: bool) -> tuple[Tensor, dict[str, Tensor]]:
        logp_R, entropy_R = token_logprobs(output, micro.targets_R, vocab)
        share = -(logp_R * micro.extra["weights"] + 0.01 * entropy_R).sum() / num_tokens
        return share, {"loss": share.detach()}

    reports, kept = [], []
    for number, budget in enumerate(budgets, start=1):
        settings = UpdateSettings(1, 1, budget, seed=3, step=number, device=CPU)
        reports += run_update(trained, batch, {"weights": weights_T}, loss, settings, memory_limit)
        kept.append(memory_limit.within(budget))
    return reports, torch.cat([p.detach().flatten() for p in trained.model.parameters()]), kept


def trained_within(rooms: list[int], short_ranks: list[int]) -> dict[str, Any]:
    """An update for which some ranks have too little memory: the first of `rooms` (MiB) in which it does not fit.

    Beside it those with enough, by the run's budget and by those that its two steps came to.
    """
    batch, short = _batch(), dist.get_rank() in short_ranks
    plain_reports, plain, _ = _update(_model(), [BUDGET] * 2, MemoryLimits().train, batch)
    told: list[str] = []
    memory_limit = MemoryLimit("train", "a training micro-batch", "tokens", tell=told.append)
    for room in rooms:
        model = _model()
        with room_for(room) if short else nullcontext():
            reports, weights, budgets = _update(model, [BUDGET] * 2, memory_limit, batch)
        halved = torch.tensor(memory_limit.times)
        dist.all_reduce(halved)
        if halved:
            break
    lower_reports, lower, _ = _update(_model(), budgets, MemoryLimits().train, batch)
    return {
        "most": memory_limit.most,
        "told": told,
        "from the whole": float((weights - plain).abs().max()),
        "moved": float((weights - torch.cat([p.detach().flatten() for p in _model().model.parameters()])).abs().max()),
        "grad_norm": [[each["grad_norm"] for each in some] for some in (reports, plain_reports)],
        "as if it had been so": bool(torch.equal(weights, lower)) and reports == lower_reports,
    }


def refused() -> list[str]:
    """Errors: of a sequence that does not fit alone, of a tensor-parallel rank, of a replica whose gradients have left."""
    errors, alone = [], dist.get_world_size() == 1
    for tp in (1,) if alone else (2, 1):
        model = _model(tp=tp)

        def failing(*_: Any, model: TrainedModel = model, leaves: bool = tp == 1 and not alone) -> None:
            if leaves:
                model.ddp[0].bucket_groups[0].grad_reduce_handle = "as if it were on its way"
            raise RuntimeError(TOLD)

        batch = [_batch()[4]] if alone else _batch()
        with mock.patch("tests.gloo.jobs_out_of_memory.token_logprobs", failing):
            errors.append(_error(partial(_update, model, [BUDGET], MemoryLimits().train, batch)))
    return errors


def _error(work: Callable[[], Any]) -> str:
    try:
        work()
    except CapacityError as error:
        return str(error)
    return "none"


def decoded_within(rooms: list[int], sync_steps: int) -> tuple[int | None, bool, float]:
    """In the first of `rooms` (MiB) that is too small: what a worker comes to decode at once, whether it draws the tokens that
    it draws with more memory, and the largest difference of log-probs."""
    shape = BIG | {"vocab_size": 4 * VOCAB, "num_hidden_layers": 1}
    groups = world_groups(1, 1)
    model = load_role(ModelConfig(init=shape, init_seed=1), groups, head="lm", max_length=32, device=CPU)
    answers = []
    limits: list[AbstractContextManager[None]] = [nullcontext(), *map(room_for, rooms)]
    for room in limits:
        rounds = decoder(
            model, model.new_cache(96), sampling=Sampling(seed=4), stopping=Stopping((), 3),
            links=build_links(Site({"actor": RolePlacement((0,))})), micro_batch_tokens=64, timeout_s=60.0, sync_steps=sync_steps,
        )  # fmt: skip
        rollouts = [Rollout(Prompt(i, i, "", (i, 7)), i) for i in range(96)]
        with room:
            decode_round(rounds, rollouts, 3, 0, 0)
        assert rounds.decode is not None
        most = rounds.decode.memory_limits.decode.most
        answers.append(rollouts)
        if most is not None:
            break
    plain, found = answers[0], answers[-1]
    logprobs = torch.tensor([[x for r in some for x in r.logprobs] for some in (plain, found)], dtype=torch.float64)
    same = [r.tokens for r in plain] == [r.tokens for r in found]
    return most, same, float((logprobs[0] - logprobs[1]).abs().max()) if same else 0.0

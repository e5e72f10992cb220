"""Log-probs, entropy and a user's loss: those of plain torch in any layout, and advantages are the same on all ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from oppo_megatron.algorithms.advantages import NOTHING_SEEN
from oppo_megatron.algorithms.algorithm import Algorithm
from oppo_megatron.algorithms.custom import AdvantageInputs, CustomAdvantage, CustomLoss, LossInputs
from oppo_megatron.algorithms.experience import ScoredBatch
from oppo_megatron.config.algorithm import AlgorithmConfig
from oppo_megatron.config.model import OptimizerConfig, TrainingLayoutConfig
from oppo_megatron.config.ppo import PPOConfig
from oppo_megatron.config.reliability import GuardsConfig
from oppo_megatron.errors import PluginError
from oppo_megatron.layout.layouts import vocab_rows
from oppo_megatron.mcore.training import StepReport, TrainedModel
from oppo_megatron.mcore.vocab import VocabShards, token_logprobs
from oppo_megatron.mcore.weights.hf_weights import export_weights
from oppo_megatron.plugins import Plugin
from oppo_megatron.records import Prompt, Rollout
from oppo_megatron.schedule.rounds import Site
from oppo_megatron.train.actor import Actor
from oppo_megatron.train.guard import Guard, Rollbacks
from oppo_megatron.train.roles import TrainedRole
from oppo_megatron.train.update import UpdateSettings
from tests.gloo.jobs_training import load_chunks
from tests.gloo.models import CPU, gather_logits, world_groups
from tests.support.ranks import run_ranks

JOBS = "tests.gloo.test_losses:"


def shards_of(vocab_size: int) -> VocabShards:
    return VocabShards(dist.group.WORLD, vocab_rows(vocab_size, dist.get_world_size()), vocab_size)


def shard_results(logits_RV: Tensor, targets_R: Tensor, temperature: float, weights_2R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probs, entropies, this shard's gradient of weights . (log-probs, entropies))."""
    vocab = shards_of(logits_RV.shape[-1])
    shard_RV = logits_RV.split(vocab.rows, dim=-1)[vocab.rank].clone().requires_grad_()
    before_RV = shard_RV.detach().clone()
    logprobs_R, entropy_R = token_logprobs(shard_RV, targets_R, vocab, temperature)
    (weights_2R * torch.stack([logprobs_R, entropy_R])).sum().backward()
    assert torch.equal(shard_RV, before_RV), "the logits are the caller's"
    assert torch.equal(gather_logits(before_RV, vocab), logits_RV) and shard_RV.grad is not None
    return logprobs_R.detach(), entropy_R.detach(), shard_RV.grad


def many(cases: list[tuple[Tensor, Tensor, float, Tensor]]) -> list[tuple[Tensor, Tensor, Tensor]]:
    return [shard_results(*case) for case in cases]


def finite_differences(logits_RV: Tensor, targets_R: Tensor, temperature: float, weights_2R: Tensor, step: float) -> Tensor:
    """Central differences of weights . (log-probs, entropies) by every logit of the whole vocabulary."""
    vocab = shards_of(logits_RV.shape[-1])

    def value(changed_RV: Tensor) -> Tensor:
        shard_RV = changed_RV.split(vocab.rows, dim=-1)[vocab.rank]
        both = torch.stack(token_logprobs(shard_RV, targets_R, vocab, temperature))
        return (weights_2R * both).double().sum()

    slopes = torch.zeros_like(logits_RV)
    for place in range(logits_RV.numel()):
        offset = torch.zeros(logits_RV.numel())
        offset[place] = step
        offset_RV = offset.view_as(logits_RV)
        slopes.view(-1)[place] = (value(logits_RV + offset_RV) - value(logits_RV - offset_RV)) / (2 * step)
    return slopes


Case = tuple[Tensor, Tensor, float, Tensor]


def make_cases() -> dict[str, Case]:
    generator = torch.Generator().manual_seed(0)

    def case(scale: float, temperature: float, rows: int = 6, vocab: int = 32) -> Case:
        logits = torch.randn(rows, vocab, generator=generator) * scale
        targets = torch.randint(vocab, (rows,), generator=generator)
        return logits, targets, temperature, torch.randn(2, rows, generator=generator)

    extreme = case(1.0, 1.0)
    extreme[0][0, 3], extreme[0][1, 17], extreme[0][2, :] = 1e4, -1e4, 5e3
    extreme[0][3, 5], extreme[1][3] = 300.0, 20  # the target is all but impossible
    return {"plain": case(2.0, 1.0), "cool": case(2.0, 0.5), "hot": case(1.0, 1.7), "extreme": extreme,
            "temperature 0 is 1": case(1.0, 0.0), "steep": case(40.0, 1.0),
            "tensor ranks have more rows than tokens": case(2.0, 0.7, vocab=30)}  # fmt: skip


LOGPROB_CASES = make_cases()


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_equal_torch_in_float64(tp: int) -> None:
    answers = run_ranks(tp, f"{JOBS}many", cases=list(LOGPROB_CASES.values()))
    for place, (name, (logits, targets, temperature, weights)) in enumerate(LOGPROB_CASES.items()):
        x = logits.double().requires_grad_()
        logq = torch.log_softmax(x / (temperature or 1.0), -1)
        logprobs = logq.gather(-1, targets[:, None])[:, 0]
        entropy = torch.special.entr(logq.exp()).sum(-1)
        # The gradient of q log q in closed form, which stays finite where q is 0.
        closed = -logq.detach().exp() * (logq.detach() + entropy.detach()[:, None])
        (weights[0].double() * logprobs).sum().backward()
        expected = x.grad + weights[1].double()[:, None] * closed / (temperature or 1.0)
        for answer in answers:
            found_logprobs, found_entropy, _ = answer[place]
            scale = 1 + logprobs.detach().abs()
            assert ((found_logprobs - logprobs.detach()).abs() / scale).max() < 3e-6, name
            assert (found_entropy - entropy.detach()).abs().max() < 2e-5, name
            assert torch.equal(found_logprobs, answers[0][place][0]), "equal on every tensor rank"
        gradient = torch.cat([answer[place][2] for answer in answers], -1)
        assert torch.isfinite(gradient).all() and (gradient - expected).abs().max() < 2e-5, name


@pytest.mark.parametrize("tp", [1, 2])
def test_gradients_equal_finite_differences(tp: int) -> None:
    logits, targets, temperature, weights = LOGPROB_CASES["cool"]
    small = (logits[:2, :6].contiguous(), targets[:2] % 6, temperature, weights[:, :2].contiguous())
    answers = run_ranks(tp, f"{JOBS}many", cases=[small])
    gradient = torch.cat([answer[0][2] for answer in answers], -1)
    keys = ("logits_RV", "targets_R", "temperature", "weights_2R")
    (slopes, *_) = run_ranks(tp, f"{JOBS}finite_differences", **dict(zip(keys, small, strict=True)), step=0.02)
    assert slopes.abs().max() > 0.1 and (gradient - slopes).abs().max() < 2e-3


LENGTHS = [(3, 9), (5, 2), (1, 7), (4, 4), (2, 8), (6, 1), (3, 3), (2, 5)]
GROUP, LONGEST = 2, 16


def by_token(response: LossInputs) -> Tensor:
    ratio = (response.logp_L - response.old_logp_L).exp()
    return -torch.sigmoid(3 * (ratio - 1)) * response.advantages_L + 0.01 * response.logp_L.square()


def by_sequence(response: LossInputs) -> Tensor:
    """The geometric mean of the ratios, clipped (GSPO)."""
    ratio, advantage = (response.logp_L - response.old_logp_L).mean().exp(), response.advantages_L.mean()
    return -torch.minimum(ratio * advantage, ratio.clamp(0.6, 1.6) * advantage)


def by_product(response: LossInputs) -> Tensor:
    ratio = (response.logp_L - response.old_logp_L).sum().exp()
    return -ratio * response.score


LOSSES = {"by_token": "token_mean", "by_sequence": "sequence_mean", "by_product": "sequence_sum"}
"""Each with a reduction; by_token also with all others."""
CASES = [*LOSSES.items(), ("by_token", "sequence_mean"), ("by_token", "group_token_mean"), ("by_sequence", "constant")]


def batch_of() -> list[Rollout]:
    dice = torch.Generator().manual_seed(4)

    def tokens(num: int) -> list[int]:
        return torch.randint(1, 64, (num,), generator=dice).tolist()

    rollouts = []
    for place, (prompt, response) in enumerate(LENGTHS):
        rollout = Rollout(Prompt(place, place, "", tuple(tokens(prompt))), place, tokens(response))
        rollout.logprobs[:] = (-4.2 + 0.6 * torch.randn(response, generator=dice)).tolist()
        rollout.versions[:], rollout.finish_reason = [0] * response, "eos"
        rollouts.append(rollout)
    return rollouts


def scored(batch: list[Rollout]) -> ScoredBatch:
    dice, lengths = torch.Generator().manual_seed(5), [len(r.tokens) for r in batch]
    return ScoredBatch(
        behaviour_logp_T=torch.tensor([x for r in batch for x in r.logprobs]), reference_logp_T=None, values_T=None,
        scores_B=torch.randn(len(batch), generator=dice), lengths_B=lengths,
        truncated_B=torch.zeros(len(batch), dtype=torch.bool), group_size=GROUP,
        tokens_T=torch.tensor([x for r in batch for x in r.tokens]),
        versions_T=torch.tensor([x for r in batch for x in r.versions]),
    )  # fmt: skip


def algorithm_of(name: str, reduction: str) -> Algorithm:
    choices = AlgorithmConfig.model_validate({"preset": "dr_grpo", "reduction": reduction})
    ppo = PPOConfig.model_validate({"kl": {"mode": "none"}})
    loss = CustomLoss(Plugin.load("algorithm.loss", f"{__name__}:{name}"), mean=reduction == "sequence_mean")
    return Algorithm(choices, ppo, GROUP, LONGEST, loss=loss)


def update(
    directory: str, target: str, tp: int, pp: int, name: str, reduction: str, minibatches: int, micro_batch_tokens: int
) -> list[float]:
    """Gradient norms of an update's optimizer steps on this job's ranks; the weights are written to `target`."""
    groups, layout = world_groups(tp, pp), TrainingLayoutConfig()
    (model,) = chunks = load_chunks(directory, groups, "lm", layout)
    algorithm, batch = algorithm_of(name, reduction), batch_of()
    trained = TrainedModel(chunks, OptimizerConfig(lr=0.01, eps=1e-2, clip_grad=0.0), total_steps=8, layout=layout)
    norms: list[float] = []
    plain = trained.step

    def step(*args: Any) -> StepReport:
        report = plain(*args)
        norms.append(report.grad_norm)
        return report

    trained.step = step  # type: ignore[method-assign]
    actor = Actor(TrainedRole(trained, model, None), algorithm, 1.0)
    settings = UpdateSettings(1, minibatches, micro_batch_tokens, seed=3, step=1, device=CPU, group_size=GROUP)
    actor.update(batch, algorithm.experience(scored(batch), 0.0), 0.0, settings)
    export_weights(model, Path(target))
    return norms


def whole_batch_norm(directory: str, name: str, reduction: str) -> float:
    """The gradient norm by definition: plain torch, a response at a time, every term weighted by hand."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    batch = batch_of()
    given, advantages = scored(batch), algorithm_of(name, reduction).experience(scored(batch), 0.0).advantages_T
    num_tokens, start, total = sum(len(r.tokens) for r in batch), 0, torch.zeros(())
    for row, rollout in enumerate(batch):
        prompt, length = rollout.prompt.tokens, len(rollout.tokens)
        logits = model(torch.tensor([[*prompt, *rollout.tokens]])).logits[0, len(prompt) - 1 : -1]
        logp = torch.log_softmax(logits, -1)[range(length), rollout.tokens]
        part = slice(start, start + length)
        start += length
        fields: dict[str, Any] = {
            "old_logp_L": torch.tensor(rollout.logprobs), "behaviour_logp_L": torch.tensor(rollout.logprobs),
            "advantages_L": advantages[part], "tokens_L": torch.tensor(rollout.tokens),
            "versions_L": torch.tensor(rollout.versions), "score": given.scores_B[row], "truncated": torch.tensor(False),
            "group": torch.tensor(row // GROUP), "num_tokens": num_tokens, "batch_size": len(batch), "group_size": GROUP,
        }  # fmt: skip
        loss = globals()[name](LossInputs(logp, **fields))
        tokens_of_group = sum(len(r.tokens) for r in batch[row // GROUP * GROUP : row // GROUP * GROUP + GROUP])
        if reduction == "sequence_mean":
            total = total + loss.mean() / len(batch)
        else:
            parts = {"token_mean": num_tokens, "constant": len(batch) * LONGEST, "sequence_sum": len(batch)}
            total = total + loss.sum() / parts.get(reduction, len(batch) / GROUP * tokens_of_group)
    total.backward()
    return float(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm())


def median_free(batch: AdvantageInputs) -> Tensor:
    return batch.scores_B - batch.scores_B.mean()


def by_rank(batch: AdvantageInputs) -> Tensor:
    return batch.scores_B + float(dist.get_rank() == 1)


def examine(name: str) -> str:
    custom = CustomAdvantage(Plugin.load("algorithm.advantage", f"{__name__}:{name}"))
    algorithm = replace(algorithm_of("by_token", "token_mean"), advantage=custom)
    run: Any = SimpleNamespace(
        guards=GuardsConfig(), actor=SimpleNamespace(dtype="float32"), rollout=SimpleNamespace(temperature=1.0)
    )
    guard = Guard(run, algorithm, dist.get_rank(), CPU, Site({}), 1, Rollbacks.__new__(Rollbacks))
    try:
        guard.examine(scored(batch_of()), 0.0, NOTHING_SEEN)
    except PluginError as error:
        return str(error)
    return "same"


def test_advantages_that_differ_between_ranks_are_refused_by_every_rank() -> None:
    assert run_ranks(2, f"{JOBS}examine", name="median_free") == ["same"] * 2
    said = run_ranks(2, f"{JOBS}examine", name="by_rank")
    assert len(set(said)) == 1 and said[0].startswith("algorithm.advantage tests.gloo.test_losses:by_rank returned")
    assert "other numbers on rank 1 than on rank 0 for the same batch; make it deterministic" in said[0]


ALONE = [(1, 1, 1, 1000), (1, 1, 1, 20)]
"""Ranks, tp, pp, and tokens of a micro-batch: one micro-batch for all, and several."""


@pytest.mark.parametrize(("name", "reduction"), CASES)
def test_a_custom_loss_has_the_whole_batchs_gradient(models: dict[str, str], tmp_path: Path, name: str, reduction: str) -> None:
    in_layouts = {1: [*ALONE, (2, 1, 1, 20)], 2: [ALONE[0], (2, 2, 1, 20), (2, 1, 2, 20)]}
    for minibatches, layouts in in_layouts.items() if LOSSES[name] == reduction else [(1, ALONE)]:
        expected: tuple[list[float], dict[str, Tensor]] | None = None
        for number, (world, tp, pp, tokens) in enumerate(layouts):
            target = tmp_path / f"{minibatches}-{number}"
            job = {"directory": models["qwen3"], "target": str(target), "tp": tp, "pp": pp, "name": name}
            more = {"reduction": reduction, "minibatches": minibatches, "micro_batch_tokens": tokens}
            norms = run_ranks(world, f"{JOBS}update", **job, **more)[0]
            weights = {key: x for file in target.glob("*.safetensors") for key, x in load_file(file).items()}
            if expected is None:
                expected = norms, weights
                assert len(norms) == minibatches
                if minibatches == 1:
                    assert norms == pytest.approx([whole_batch_norm(models["qwen3"], name, reduction)], rel=1e-4)
            assert norms == pytest.approx(expected[0], rel=1e-4)
            assert max(float((weights[key] - x).abs().max()) for key, x in expected[1].items()) < 1e-4

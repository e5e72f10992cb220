"""Log-probs, entropy and a user's loss: those of plain torch in any layout, and advantages are the same on all ranks."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
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
from oppo_megatron.mcore import vocab
from oppo_megatron.mcore.training import StepReport, TrainedModel
from oppo_megatron.mcore.vocab import OutputRows, VocabShards, likeliest_share
from oppo_megatron.mcore.weights.hf_weights import export_weights
from oppo_megatron.plugins import Plugin
from oppo_megatron.records import Prompt, Rollout
from oppo_megatron.schedule.rounds import Site
from oppo_megatron.train.actor import Actor
from oppo_megatron.train.guard import Guard, Rollbacks
from oppo_megatron.train.roles import TrainedRole
from oppo_megatron.train.update import UpdateSettings
from tests.gloo.jobs_training import load_chunks
from tests.gloo.models import CPU, world_groups
from tests.support.ranks import run_ranks

JOBS = "tests.gloo.test_losses:"


def shards_of(vocab_size: int, cap: float | None = None) -> VocabShards:
    return VocabShards(dist.group.WORLD, vocab_rows(vocab_size, dist.get_world_size()), vocab_size, cap)


class Case(NamedTuple):
    hidden_RH: Tensor
    weight_VH: Tensor
    targets_R: Tensor
    temperature: float
    weights_2R: Tensor
    cap: float | None = None


def outputs_of(hidden_RH: Tensor, weight_VH: Tensor, cap: float | None = None) -> OutputRows:
    shards = shards_of(len(weight_VH), cap)
    mine_VH = F.pad(weight_VH[shards.first : shards.first + shards.rows], (0, 0, 0, shards.rows - shards.num_tokens))
    return OutputRows(hidden_RH.clone().requires_grad_(), mine_VH.clone().requires_grad_(), shards)


def case_results(case: Case) -> list[dict[str, Tensor]]:
    """Figures and gradients of weights . (log-probs, entropies), whole on every rank, from one slice and from several."""
    found = []
    for width in (128, 5):
        out = outputs_of(case.hidden_RH, case.weight_VH, case.cap)
        with mock.patch.object(vocab, "slice_width", lambda *_, width=width, **__: width):
            figures = out.figures(case.targets_R, case.temperature)
            (case.weights_2R * torch.stack(figures[:2])).sum().backward()
        assert torch.equal(out.hidden_RH, case.hidden_RH) and not figures.largest_R.requires_grad
        with mock.patch.object(vocab, "SLICE_NUMBERS", 24):  # fewer rows at a time if ranks have more tokens
            likeliest_R = out.by_rows(partial(likeliest_share, shards=out.shards), case.targets_R)
        assert out.hidden_RH.grad is not None and out.weight_VH.grad is not None
        by_token = out.shards.gather(out.weight_VH.grad).flatten(0, 1)
        assert not by_token[len(case.weight_VH) :].any()
        gradients = {"hidden": out.shards.add(out.hidden_RH.grad), "weight": by_token[: len(case.weight_VH)]}
        found.append(
            gradients | {name: each_R.detach() for name, each_R in figures._asdict().items()} | {"likeliest": likeliest_R}
        )
    return found


def many(cases: list[Case]) -> list[list[dict[str, Tensor]]]:
    return [case_results(case) for case in cases]


def finite_differences(case: Case, step: float) -> Tensor:
    """Central differences of weights . (log-probs, entropies) by every number of the hidden states."""
    weight_VH = outputs_of(case.hidden_RH, case.weight_VH).weight_VH.detach()

    def value(hidden_RH: Tensor) -> Tensor:
        figures = OutputRows(hidden_RH, weight_VH, shards_of(len(case.weight_VH))).figures(case.targets_R, case.temperature)
        return (case.weights_2R * torch.stack(figures[:2])).double().sum()

    slopes = torch.zeros_like(case.hidden_RH)
    for place in range(slopes.numel()):
        offset = torch.zeros(slopes.numel())
        offset[place] = step
        offset_RH = offset.view_as(slopes)
        slopes.view(-1)[place] = (value(case.hidden_RH + offset_RH) - value(case.hidden_RH - offset_RH)) / (2 * step)
    return slopes


def make_cases() -> dict[str, Case]:
    generator = torch.Generator().manual_seed(0)

    def case(scale: float, temperature: float, rows: int = 6, size: int = 32) -> Case:
        hidden, weight = (torch.randn(n, 16, generator=generator) for n in (rows, size))
        targets = torch.randint(size, (rows,), generator=generator)
        return Case(hidden, weight * scale / 4, targets, temperature, torch.randn(2, rows, generator=generator))

    logits = torch.randn(6, 32, generator=generator)
    logits[0, 3], logits[1, 17], logits[2, :], logits[3, 5] = 1e4, -1e4, 5e3, 300.0
    extreme = case(1.0, 1.0)._replace(hidden_RH=logits, weight_VH=torch.eye(32))
    extreme.targets_R[3] = 20  # all but impossible
    return {"plain": case(2.0, 1.0), "cool": case(2.0, 0.5), "hot": case(1.0, 1.7), "extreme": extreme,
            "temperature 0 is 1": case(1.0, 0.0), "steep": case(40.0, 1.0), "capped": case(4.0, 0.7)._replace(cap=3.0),
            "tensor ranks have more rows than tokens": case(2.0, 0.7, size=30)}  # fmt: skip


FIGURE_CASES = make_cases()


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_equal_torch_in_float64(tp: int) -> None:
    answers = run_ranks(tp, f"{JOBS}many", cases=list(FIGURE_CASES.values()))
    for place, (name, case) in enumerate(FIGURE_CASES.items()):
        hidden, weight = (each.double().requires_grad_() for each in case[:2])
        logits = hidden @ weight.T
        logits = logits if case.cap is None else torch.tanh(logits / case.cap) * case.cap
        logq = torch.log_softmax(logits / (case.temperature or 1.0), -1)
        logp = logq.gather(-1, case.targets_R[:, None])[:, 0]
        entropy = torch.special.entr(logq.exp()).sum(-1).detach()
        # The gradient of q log q in closed form, which stays finite where q is 0.
        closed = -logq.detach().exp() * (logq.detach() + entropy[:, None]) / (case.temperature or 1.0)
        (case.weights_2R[0].double() * logp).sum().backward(retain_graph=True)
        logits.backward(case.weights_2R[1].double()[:, None] * closed)
        expected = {"hidden": hidden.grad, "weight": weight.grad, "logp_R": logp.detach(), "entropy_R": entropy}
        for found in (each for answer in answers for each in answer[place]):
            for kind, exact in expected.items():
                scale = 1 + exact.abs().max() if kind in ("hidden", "weight") else 1 + exact.abs()
                assert torch.isfinite(found[kind]).all()
                assert ((found[kind] - exact).abs() / scale).max() < 1e-5, (name, kind)
            assert torch.equal(
                found["likeliest"], likeliest_share(logits.detach(), case.targets_R, VocabShards(rows=logits.shape[1]))
            )
            torch.testing.assert_close(found["largest_R"], logits.abs().amax(-1).float(), rtol=1e-5, atol=1e-5)
        for answer in answers:
            assert all(torch.equal(each, answers[0][place][0][kind]) for kind, each in answer[place][0].items()), "on every rank"


@pytest.mark.parametrize("tp", [1, 2])
def test_gradients_equal_finite_differences(tp: int) -> None:
    whole = FIGURE_CASES["cool"]
    small = Case(whole.hidden_RH[:2, :6], whole.weight_VH[:6, :6], whole.targets_R[:2] % 6, 0.5, whole.weights_2R[:, :2])
    answers = run_ranks(tp, f"{JOBS}many", cases=[small])
    (slopes, *_) = run_ranks(tp, f"{JOBS}finite_differences", case=small, step=0.02)
    assert slopes.abs().max() > 0.1 and (answers[0][0][0]["hidden"] - slopes).abs().max() < 2e-3


def test_slices_round_bfloat16_as_all_logits_at_once_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors against float64; each slice's part of the hidden states' gradient is rounded.  The weight may be frozen."""
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, 64, generator=generator).bfloat16() for n in (192, 2000))
    hidden, targets, shares = (
        0.3 * hidden,
        torch.randint(2000, (192,), generator=generator),
        torch.randn(192, generator=generator),
    )

    def plain(logits_RV: Tensor) -> Tensor:
        wide_RV = logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()
        return wide_RV.log_softmax(-1).gather(-1, targets[:, None])[:, 0]

    def run(read: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype, trains: bool = True) -> list[Tensor]:
        given = hidden.to(dtype, copy=True).requires_grad_(), weight.to(dtype, copy=True).requires_grad_(trains)
        logp = read(*given)
        (shares * logp).sum().backward()
        return [logp.detach(), *(each.grad for each in given if each.grad is not None)]

    monkeypatch.setattr(vocab, "slice_width", lambda *_, **__: 128)
    sliced = lambda h, w: OutputRows(h, w, VocabShards(None, 2000, 2000)).figures(targets).logp_R  # noqa: E731
    at_once = lambda h, w: plain(F.linear(h, w))  # noqa: E731
    exact = run(at_once, torch.float64)
    ours, theirs = run(sliced, torch.bfloat16), run(at_once, torch.bfloat16)
    for mine, other, right, most in zip(ours, theirs, exact, (1.01, 1.3, 1.01), strict=True):
        error, usual = ((each.double() - right).norm() for each in (mine, other))
        assert 0 < error < most * usual
    assert [torch.equal(*both) for both in zip(ours, run(sliced, torch.bfloat16, trains=False), strict=False)] == [True, True]


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

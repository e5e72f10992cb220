"""Online DPO against a plain loop over groups: who is paired, the loss and its gradient, micro-batches, and what is reported.
The loop is the formula of arXiv 2402.04792 and of TRL's `OnlineDPOTrainer` (1.12.0); but a tie is no pair."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oppo_megatron.algorithms.algorithm import Algorithm
from oppo_megatron.algorithms.experience import Experience, ScoredBatch
from oppo_megatron.algorithms.losses import ActorTargets
from oppo_megatron.algorithms.pairs import pair_figures
from oppo_megatron.config.algorithm import AlgorithmConfig
from oppo_megatron.config.ppo import PPOConfig
from oppo_megatron.config.supervised import DPOLossConfig
from oppo_megatron.errors import RewardError

CHOICES = AlgorithmConfig.model_validate({"preset": "online_dpo"})
PPO = PPOConfig.model_validate({"kl": {"mode": "margin", "coefficient": 0.0}})
RULES: dict[str, dict[str, Any]] = {
    "sigmoid": {}, "another beta": {"beta": 0.7}, "smoothed": {"label_smoothing": 0.2}, "hinge": {"loss": "hinge"},
    "ipo": {"loss": "ipo"}, "robust": {"loss": "robust", "label_smoothing": 0.1},
    "averaged, with a second term": {"average": True, "beta": 2.0, "nll": 0.3},
}  # fmt: skip


def algorithm(size: int, drawn_at: float = 1.0, **rule: Any) -> Algorithm:
    return Algorithm(CHOICES, PPO, size, longest=64, drawn_at=drawn_at, dpo=DPOLossConfig(**rule))


def softplus(x: Tensor) -> Tensor:
    return torch.log1p(torch.exp(-x.abs())) + x.clamp(min=0)


def plain_pairs(scores: Sequence[float], size: int) -> list[tuple[int, int]]:
    """(better, worse) of each group whose scores are not all the same, the first of equals."""
    found = []
    for first in range(0, len(scores), size):
        group = list(scores[first : first + size])
        if max(group) > min(group):
            found.append((first + group.index(max(group)), first + group.index(min(group))))
    return found


def plain_loss(
    logp: Sequence[Tensor], reference: Sequence[Tensor], pairs: Sequence[tuple[int, int]], rule: DPOLossConfig
) -> Tensor:
    """The mean over the pairs of -log sigmoid(beta m) and its relatives, written out; 0 without a pair."""
    total = torch.zeros((), dtype=torch.float64)
    for better, worse in pairs:
        ratios = [(logp[row] - reference[row]).sum() / (len(logp[row]) if rule.average else 1) for row in (better, worse)]
        margin, eps = ratios[0] - ratios[1], rule.label_smoothing
        right, wrong = softplus(-rule.beta * margin), softplus(rule.beta * margin)
        if rule.loss == "hinge":
            loss = (1 - rule.beta * margin).clamp(min=0)
        elif rule.loss == "ipo":
            loss = (margin - 0.5 / rule.beta).square()
        elif rule.loss == "robust":
            loss = ((1 - eps) * right - eps * wrong) / (1 - 2 * eps)
        else:
            loss = (1 - eps) * right + eps * wrong
        total = total + loss - rule.nll * logp[better].mean()
    return total / max(1, len(pairs))


class Case:
    def __init__(self, seed: int, size: int, groups: int):
        generator = torch.Generator().manual_seed(seed)
        rows = size * groups
        self.size = size
        self.lengths = torch.randint(1, 6, (rows,), generator=generator)
        self.scores = torch.randint(0, 3, (rows,), generator=generator).float()
        self.logp_T, self.reference_T = -3 * torch.rand(2, int(self.lengths.sum()), generator=generator, dtype=torch.float64)
        self.behaviour_T = self.logp_T + 1.0  # nothing may depend on it

    def rows(self, x_T: Tensor) -> list[Tensor]:
        return list(x_T.split(self.lengths.tolist()))

    def scored(self) -> ScoredBatch:
        truncated = torch.zeros(len(self.lengths), dtype=torch.bool)
        return ScoredBatch(self.behaviour_T, self.reference_T, None, self.scores, self.lengths, truncated, self.size)

    def experience(self, made: Algorithm) -> Experience:
        return made.experience(self.scored(), 0.0)

    def shares(self, made: Algorithm, experience: Experience, parts: int) -> tuple[Tensor, list[dict[str, Tensor]], Tensor]:
        logp_T = self.logp_T.clone().requires_grad_()
        units = made.units(range(len(self.lengths)), experience)
        read = sorted(row for unit in units for row in unit)
        lengths = self.lengths[read].tolist()
        assert experience.counted_B is not None
        weights = dict(zip(read, made.row_weights(lengths, experience.counted_B[read].tolist()), strict=True))
        total, sums = torch.zeros((), dtype=torch.float64), []
        for part in range(parts):
            rows = [row for unit in units[part::parts] for row in unit]
            if not rows:
                continue
            known = (logp_T, experience.advantages_T, self.reference_T)
            pick = [torch.cat([self.rows(x_T)[row] for row in rows]) for x_T in known]
            share_T = torch.cat([torch.full((int(self.lengths[row]),), weights[row]) for row in rows])
            targets = ActorTargets(
                torch.full_like(pick[0], torch.nan), pick[1], pick[2], share_T=share_T, lengths_R=self.lengths[rows]
            )
            loss, stats = made.actor_loss(pick[0], torch.ones_like(pick[0]), targets, 0.0, sum(lengths))
            total = total + loss
            sums.append(vars(stats))
        (gradient_T,) = torch.autograd.grad(total, logp_T)
        return total.detach(), sums, gradient_T


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), size=st.integers(2, 5), groups=st.integers(1, 6), parts=st.integers(1, 4))
def test_loss_and_gradient_are_those_of_a_plain_loop(name: str, seed: int, size: int, groups: int, parts: int) -> None:
    case, made = Case(seed, size, groups), algorithm(size, **RULES[name])
    found, _, gradient_T = case.shares(made, case.experience(made), parts)
    assert made.dpo is not None
    logp_T = case.logp_T.clone().requires_grad_()
    pairs = plain_pairs(case.scores.tolist(), size)
    expected = plain_loss(case.rows(logp_T), case.rows(case.reference_T), pairs, made.dpo)
    assert float(found) == pytest.approx(float(expected.detach()), rel=1e-6, abs=1e-9)
    expected_T = torch.zeros_like(logp_T) if not pairs else torch.autograd.grad(expected, logp_T)[0]
    torch.testing.assert_close(gradient_T, expected_T, rtol=1e-6, atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), size=st.integers(2, 5), groups=st.integers(1, 6))
def test_of_each_group_two_rows_are_read_and_ties_are_counted(seed: int, size: int, groups: int) -> None:
    case, made = Case(seed, size, groups), algorithm(size)
    experience = case.experience(made)
    pairs = plain_pairs(case.scores.tolist(), size)
    units = made.units(range(size * groups), experience)
    assert len(units) == groups and all(len(set(unit)) == 2 for unit in units)
    assert [{row // size for row in unit} for unit in units] == [{group} for group in range(groups)]
    assert {frozenset(pair) for pair in pairs} <= {frozenset(unit) for unit in units}
    assert experience.counted_B is not None
    assert experience.counted_B.nonzero().flatten().tolist() == sorted(row for pair in pairs for row in pair)
    stats = experience.stats
    assert (stats.pairs, stats.ties) == (len(pairs), groups - len(pairs))
    if not pairs:
        assert stats.chosen_reward_mean is stats.rejected_reward_mean is None
        return
    for mean, place in ((stats.chosen_reward_mean, 0), (stats.rejected_reward_mean, 1)):
        assert mean == pytest.approx(sum(float(case.scores[pair[place]]) for pair in pairs) / len(pairs))


def test_two_responses_are_read_before_it_is_known_which_is_better() -> None:
    """The first micro-batch's forward pass need not wait for the scores."""
    two, three = algorithm(2), algorithm(3)
    assert two.reads_known and two.units([4, 5, 0, 1]) == [[4, 5], [0, 1]]
    assert not three.reads_known
    case = Case(7, 2, 5)
    assert two.units(range(10), case.experience(two)) == two.units(range(10))


@pytest.mark.parametrize("parts", [1, 3])
def test_figures_are_means_over_pairs(parts: int) -> None:
    case, made = Case(11, 3, 6), algorithm(3, beta=0.5)
    case.scores[3:6] = 1.0
    _, sums, _ = case.shares(made, case.experience(made), parts)
    reports = [{name: float(value) for name, value in each.items()} for each in sums]
    figures, pairs = pair_figures(reports), plain_pairs(case.scores.tolist(), 3)
    assert 0 < len(pairs) < 6, "some should tie"
    ratios = [float(x.sum()) for x in case.rows(case.logp_T - case.reference_T)]
    margins = [ratios[better] - ratios[worse] for better, worse in pairs]
    assert figures["pair_margin"] == pytest.approx(0.5 * sum(margins) / len(pairs))
    assert min(map(abs, margins)) > 1e-3, "a margin of rounding would count half"
    assert figures["pair_accuracy"] == sum(margin > 0 for margin in margins) / len(pairs)
    assert figures["implicit_reward_chosen"] == pytest.approx(0.5 * sum(ratios[i] for i, _ in pairs) / len(pairs))
    assert figures["implicit_reward_rejected"] == pytest.approx(0.5 * sum(ratios[i] for _, i in pairs) / len(pairs))
    assert figures["actor_loss"] == pytest.approx(sum(math.log1p(math.exp(-0.5 * m)) for m in margins) / len(pairs))
    assert figures["entropy"] == pytest.approx(1.0)
    assert tuple(figures) == made.figure_names


@pytest.mark.parametrize("rounded", [1e-7, -1e-7])
def test_what_only_rounding_makes_counts_for_nothing(rounded: float) -> None:
    """A policy that equals its reference prefers neither response; scores that are apart by rounding tie, or share a place."""
    case, made = Case(11, 3, 2), algorithm(3)
    case.logp_T = case.reference_T + rounded * torch.randn(len(case.logp_T), generator=torch.Generator().manual_seed(0))
    case.scores = torch.tensor([0.7, 0.7 + rounded, 0.7 - rounded, 2.0 + 2 * rounded, 1.0, 2.0 - 2 * rounded])
    experience = case.experience(made)
    assert (experience.stats.pairs, experience.stats.ties, experience.stats.equal_groups) == (1, 1, 0.5)
    assert experience.counted_B is not None and experience.counted_B.tolist() == [False] * 3 + [True, True, False]
    _, sums, _ = case.shares(made, experience, 1)
    assert pair_figures([{name: float(value) for name, value in each.items()} for each in sums])["pair_accuracy"] == 0.5


def test_where_all_groups_tie_nothing_is_learned_and_figures_are_zero() -> None:
    case, made = Case(3, 2, 3), algorithm(2)
    case.scores = torch.full((6,), 0.7)
    loss, sums, gradient_T = case.shares(made, case.experience(made), 1)
    assert float(loss) == 0 and gradient_T.tolist() == [0.0] * len(gradient_T)
    figures = pair_figures([{name: float(value) for name, value in each.items()} for each in sums])
    assert [figures[name] for name in made.figure_names if name != "entropy"] == [0.0] * 5


@pytest.mark.parametrize("size", [2, 3])
def test_a_score_that_is_no_number_leaves_no_finite_loss(size: int) -> None:
    case, made = Case(3, size, 2), algorithm(size)
    case.scores[0] = torch.nan
    with pytest.raises(RewardError, match="the score of row 0 is nan"):
        case.experience(made)
    experience = made.experience(case.scored(), 0.0, check=False)
    assert experience.advantages_T[0].isnan()
    loss, _, gradient_T = case.shares(made, experience, 1)
    assert loss.isnan() and gradient_T.isnan().any()


def test_scores_are_compared_as_the_settings_shape_them() -> None:
    case = Case(5, 2, 1)
    case.scores = torch.tensor([3.0, 9.0])
    clipped = Algorithm(CHOICES, PPO.model_copy(update={"reward_clip": 1.0}), 2, longest=64, dpo=DPOLossConfig())
    assert case.experience(clipped).stats.ties == 1
    scored = ScoredBatch(case.behaviour_T, case.reference_T, None, torch.ones(2), case.lengths, torch.tensor([True, False]), 2)
    penalised = Algorithm(CHOICES, PPO.model_copy(update={"truncated": 0.5}), 2, longest=64, dpo=DPOLossConfig())
    experience = penalised.experience(scored, 0.0)
    assert experience.stats.pairs == 1 and experience.advantages_T[0] == -1


def test_steps_of_a_process_reward_decide_by_their_sum() -> None:
    case, made = Case(9, 2, 2), algorithm(2)
    case.scores = torch.tensor([2.0, 1.0, 0.0, 1.0])
    steps_T = torch.rand(len(case.logp_T), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scored = ScoredBatch(
        case.behaviour_T, case.reference_T, None, case.scores, case.lengths, torch.zeros(4, dtype=torch.bool), 2, steps_T
    )
    advantages = case.rows(made.experience(scored, 0.0).advantages_T)
    assert [set(row.tolist()) for row in advantages] == [{1.0}, {-1.0}, {-1.0}, {1.0}]


def test_a_kl_is_known_only_if_draws_and_reference_have_one_temperature() -> None:
    """The loss and the reference are at temperature 1, whatever tokens are drawn at."""
    kls = [Case(2, 2, 3).experience(algorithm(2, drawn_at)).stats.kl_mean for drawn_at in (1.0, 0.9)]
    assert kls[0] is not None and kls[1] is None
    assert CHOICES.temperature(0.9) == 1.0 and AlgorithmConfig().temperature(0.9) == 0.9

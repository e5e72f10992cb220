"""Losses of DPO's family, KTO, SFT and reward models, and online DPO, against closed forms and a plain loop over groups."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from oppo_megatron.algorithms import supervised_losses
from oppo_megatron.algorithms.algorithm import Algorithm
from oppo_megatron.algorithms.experience import Experience, ScoredBatch
from oppo_megatron.algorithms.losses import ActorTargets
from oppo_megatron.algorithms.packed import token_noise
from oppo_megatron.algorithms.supervised_losses import (
    margin_losses,
    mean_loss,
    means,
    next_token_loss,
    pair_columns,
    pair_figures,
    preference_loss,
    preference_table,
    row_columns,
    table_of,
)
from oppo_megatron.config.algorithm import AlgorithmConfig
from oppo_megatron.config.evaluation import PREFERENCE_METRICS
from oppo_megatron.config.ppo import PPOConfig
from oppo_megatron.config.supervised import DPOLossConfig
from oppo_megatron.errors import RewardError

BETAS = st.sampled_from([0.01, 0.1, 1.0])


def double(*values: float, grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))


def nll(x: float) -> float:
    """-log sigmoid(x)"""
    return math.log1p(math.exp(-x)) if x > 0 else math.log1p(math.exp(x)) - x


def value_and_slope(margin: float, **rule: Any) -> tuple[float, float]:
    margin_P = double(margin, grad=True)
    losses_P = margin_losses(margin_P, DPOLossConfig(**rule))
    losses_P.sum().backward()
    return float(losses_P), float(margin_P.grad)


@given(st.floats(-40, 40), BETAS, st.sampled_from([0.1, 0.4]))
def test_robust_is_without_bias_over_flipped_pairs(margin: float, beta: float, share: float) -> None:
    """Its mean over pairs of which `share` are the wrong way round is the loss of pairs that are right; slopes alike."""
    right, wrong = (value_and_slope(m, beta=beta, loss="robust", label_smoothing=share) for m in (margin, -margin))
    value, slope = value_and_slope(margin, beta=beta)
    assert (1 - share) * right[0] + share * wrong[0] == pytest.approx(value, abs=1e-9)
    assert (1 - share) * right[1] - share * wrong[1] == pytest.approx(slope, abs=1e-9)


def test_sums_of_sequences() -> None:
    sums_S = supervised_losses.sequence_sums(torch.tensor([-1.0, -2.0, -4.0, -8.0, -16.0]), [2, 1, 2])
    assert sums_S.tolist() == [-3.0, -4.0, -24.0] and sums_S.dtype == torch.float64


LOGPS, REFERENCE, COUNTS = double(-5.0, -9.0, -3.0, -2.0), double(-6.0, -8.0, -4.0, -5.0), double(2.0, 4.0, 1.0, 5.0)


def test_pairs_and_their_figures() -> None:
    """Ratios 1, -1 and 1, 3: margins 2 and -2."""
    columns = pair_columns(LOGPS, REFERENCE, COUNTS, DPOLossConfig(beta=0.5))
    assert columns["loss"].tolist() == pytest.approx([nll(1.0), nll(-1.0)])
    assert columns["margin"].tolist() == [1.0, -1.0] and columns["accuracy"].tolist() == [1.0, 0.0]
    assert columns["reward_chosen"].tolist() == [0.5, 0.5] and columns["reward_rejected"].tolist() == [-0.5, 1.5]
    tie = pair_columns(double(-1.0, -2.0), double(-1.0, -2.0), double(1.0, 1.0), DPOLossConfig())
    assert float(tie["loss"]) == pytest.approx(math.log(2)) and float(tie["accuracy"]) == 0.5


@pytest.mark.parametrize(("dtype", "noise"), [("float32", 3e-6), ("bfloat16", 0.04)])
@pytest.mark.parametrize("average", [False, True])
def test_a_difference_that_rounding_could_make_has_no_side(dtype: str, noise: float, average: bool) -> None:
    """Policy equal to reference but for rounding: half, whatever the signs; ten times as much has a side."""
    signs_S = double(1, -1, -1, 1, 1, 1, -1, -1)
    rule, counts_S, reference_S = DPOLossConfig(average=average), COUNTS.repeat(2), REFERENCE.repeat(2)
    for factor, expected in ((1.0, [0.5, 0.5, 0.5, 0.5]), (10.0, [1.0, 0.0])):
        logp_S = reference_S + factor * noise * counts_S.sqrt() * signs_S
        pairs = pair_columns(logp_S, reference_S, counts_S, rule, token_noise(dtype))
        assert pairs["accuracy"].tolist()[: len(expected)] == expected
        rows = row_columns(logp_S, reference_S, counts_S, signs_S, DPOLossConfig(loss="kto"), 0.0, token_noise(dtype))
        assert rows["accuracy"].tolist() == [expected[0]] * 8


@given(st.floats(-30, 30), st.floats(0, 20), st.booleans(), BETAS)
def test_kto_against_its_equation(ratio: float, point: float, wanted: bool, beta: float) -> None:
    logp_S, rule = double(ratio - 7.0, grad=True), DPOLossConfig(loss="kto", beta=beta, wanted=1.25, unwanted=0.75)
    columns = row_columns(logp_S, double(-7.0), double(4.0), double(1.0 if wanted else -1.0), rule, point)
    x = beta * (ratio - point if wanted else point - ratio)
    weight, sign = (1.25, 1.0) if wanted else (0.75, -1.0)
    assert float(columns["loss"]) == pytest.approx(weight * (1 - sigmoid(x)), abs=1e-12)
    (slope,) = torch.autograd.grad(columns["loss"].sum(), logp_S)
    assert float(slope) == pytest.approx(-weight * sign * beta * sigmoid(x) * sigmoid(-x), abs=1e-12)
    assert float(columns["margin"]) == pytest.approx(x, abs=1e-12)
    assert float(columns["accuracy"]) == (0.5 if abs(x) <= beta * 2.5e-5 * 2 else x > 0)
    assert float(columns["reward"]) == pytest.approx(beta * ratio, abs=1e-12)
    assert float(columns["reference_point"]) == point


@pytest.mark.parametrize("cut", [0, 1, 3])
def test_shares_of_micro_batches_add_up_with_their_statistics(cut: int) -> None:
    generator = torch.Generator().manual_seed(1)
    logp_S, reference_S = (torch.randn(6, dtype=torch.float64, generator=generator) * 3 for _ in range(2))
    counts_S, rule = double(1, 2, 3, 4, 5, 6), DPOLossConfig(label_smoothing=0.1, nll=0.5, average=True)

    def share(first: int, last: int) -> tuple[Tensor, dict[str, Tensor]]:
        of = slice(2 * first, 2 * last)
        return mean_loss(pair_columns(logp_S[of], reference_S[of], counts_S[of], rule), 3)

    (whole, stats), parts = share(0, 3), [share(0, cut), share(cut, 3)]
    assert float(sum(loss for loss, _ in parts)) == pytest.approx(float(whole), rel=1e-6)
    assert set(stats) == {"count", "loss", "accuracy", "margin", "reward_chosen", "reward_rejected"}
    for name, value in stats.items():
        assert not value.requires_grad
        assert float(sum(part[name] for _, part in parts)) == pytest.approx(float(value), abs=1e-12)
    assert means({name: float(value) for name, value in stats.items()})["loss"] == pytest.approx(float(whole), rel=1e-6)
    table = table_of(pair_columns(logp_S, reference_S, counts_S, rule), PREFERENCE_METRICS)
    assert table.shape == (3, 4) and table[:, 0].tolist() == [1.0] * 3
    assert float(table[:, 1].mean()) == pytest.approx(float(whole), rel=1e-6)


def test_losses_stay_on_the_models_device_and_wait_for_no_value() -> None:
    with FakeTensorMode(), torch.no_grad():
        cuda = torch.device("cuda")
        logp_S = supervised_losses.sequence_sums(torch.empty(14, device=cuda), [2, 4, 3, 5])
        others = [torch.empty(4, dtype=torch.float64, device=cuda) for _ in range(2)]
        for columns in (
            pair_columns(logp_S, others[0], others[1], DPOLossConfig(average=True, nll=0.1)),
            row_columns(logp_S, *others, others[0], DPOLossConfig(loss="kto"), 0.5),
        ):
            loss, stats = mean_loss(columns, 4)
            table = table_of(columns, PREFERENCE_METRICS)
            assert {each.device.type for each in (loss, table, *stats.values())} == {"cuda"}
            assert loss.dtype == torch.float32 and table.dtype == torch.float64


CHOICES = AlgorithmConfig(preset="online_dpo")
PPO = PPOConfig(kl={"mode": "margin", "coefficient": 0.0})
RULES: dict[str, dict[str, Any]] = {
    "sigmoid": {}, "another beta": {"beta": 0.7}, "smoothed": {"label_smoothing": 0.2}, "hinge": {"loss": "hinge"},
    "ipo": {"loss": "ipo"}, "robust": {"loss": "robust", "label_smoothing": 0.1},
    "averaged, with a second term": {"average": True, "beta": 2.0, "nll": 0.3},
}  # fmt: skip


def algorithm(size: int, drawn_at: float = 1.0, ppo: PPOConfig = PPO, **rule: Any) -> Algorithm:
    return Algorithm(CHOICES, ppo, size, longest=64, drawn_at=drawn_at, dpo=DPOLossConfig(**rule))


def plain_pairs(scores: Sequence[float], size: int) -> list[tuple[int, int]]:
    """(better, worse) of each group whose scores are not all the same, the first of equals."""
    found = []
    for first in range(0, len(scores), size):
        group = list(scores[first : first + size])
        if max(group) > min(group):
            found.append((first + group.index(max(group)), first + group.index(min(group))))
    return found


def plain_loss(logp: list[Tensor], reference: list[Tensor], pairs: list[tuple[int, int]], rule: DPOLossConfig) -> Tensor:
    """The mean over the pairs of -log sigmoid(beta m) and its relatives, written out; 0 without a pair."""
    total = torch.zeros((), dtype=torch.float64)
    for better, worse in pairs:
        ratios = [(logp[row] - reference[row]).sum() / (len(logp[row]) if rule.average else 1) for row in (better, worse)]
        margin, eps = ratios[0] - ratios[1], rule.label_smoothing
        right, wrong = (torch.log1p(torch.exp(-x.abs())) + x.clamp(min=0) for x in (-rule.beta * margin, rule.beta * margin))
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
        generator, rows, self.size = torch.Generator().manual_seed(seed), size * groups, size
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

    def shares(self, made: Algorithm, experience: Experience, parts: int) -> tuple[Tensor, list[dict[str, float]], Tensor]:
        logp_T = self.logp_T.clone().requires_grad_()
        units = made.units(range(len(self.lengths)), experience)
        read = sorted(row for unit in units for row in unit)
        lengths = self.lengths[read].tolist()
        weights = dict(zip(read, made.row_weights(lengths, experience.counted_B[read].tolist()), strict=True))
        total, sums = torch.zeros((), dtype=torch.float64), []
        for part in range(parts):
            rows = [row for unit in units[part::parts] for row in unit]
            if not rows:
                continue
            known = (logp_T, experience.advantages_T, self.reference_T)
            pick = [torch.cat([self.rows(x_T)[row] for row in rows]) for x_T in known]
            share_T = torch.cat([torch.full((int(self.lengths[row]),), weights[row]) for row in rows])
            targets = ActorTargets(torch.full_like(pick[0], torch.nan), *pick[1:], share_T=share_T, lengths_R=self.lengths[rows])
            loss, stats = made.actor_loss(pick[0], torch.ones_like(pick[0]), targets, 0.0, sum(lengths))
            total = total + loss
            sums.append({name: float(value) for name, value in vars(stats).items()})
        (gradient_T,) = torch.autograd.grad(total, logp_T)
        return total.detach(), sums, gradient_T


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), size=st.integers(2, 5), groups=st.integers(1, 6), parts=st.integers(1, 4))
def test_loss_and_gradient_are_those_of_a_plain_loop(name: str, seed: int, size: int, groups: int, parts: int) -> None:
    case, made = Case(seed, size, groups), algorithm(size, **RULES[name])
    found, _, gradient_T = case.shares(made, case.experience(made), parts)
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
    assert not three.reads_known and two.units(range(10), Case(7, 2, 5).experience(two)) == two.units(range(10))


@pytest.mark.parametrize("parts", [1, 3])
def test_figures_are_means_over_pairs(parts: int) -> None:
    case, made = Case(11, 3, 6), algorithm(3, beta=0.5)
    case.scores[3:6] = 1.0
    _, sums, _ = case.shares(made, case.experience(made), parts)
    figures, pairs = pair_figures(sums), plain_pairs(case.scores.tolist(), 3)
    assert 0 < len(pairs) < 6, "some should tie"
    ratios = [float(x.sum()) for x in case.rows(case.logp_T - case.reference_T)]
    margins = [ratios[better] - ratios[worse] for better, worse in pairs]
    assert figures["pair_margin"] == pytest.approx(0.5 * sum(margins) / len(pairs))
    assert min(map(abs, margins)) > 1e-3, "a margin of rounding would count half"
    assert figures["pair_accuracy"] == sum(margin > 0 for margin in margins) / len(pairs)
    assert figures["implicit_reward_chosen"] == pytest.approx(0.5 * sum(ratios[i] for i, _ in pairs) / len(pairs))
    assert figures["implicit_reward_rejected"] == pytest.approx(0.5 * sum(ratios[i] for _, i in pairs) / len(pairs))
    assert figures["actor_loss"] == pytest.approx(sum(math.log1p(math.exp(-0.5 * m)) for m in margins) / len(pairs))
    assert figures["entropy"] == pytest.approx(1.0) and tuple(figures) == made.figure_names


@pytest.mark.parametrize("rounded", [1e-7, -1e-7])
def test_what_only_rounding_makes_counts_for_nothing(rounded: float) -> None:
    """A policy that equals its reference prefers neither response; scores that are apart by rounding tie, or share a place."""
    case, made = Case(11, 3, 2), algorithm(3)
    case.logp_T = case.reference_T + rounded * torch.randn(len(case.logp_T), generator=torch.Generator().manual_seed(0))
    case.scores = torch.tensor([0.7, 0.7 + rounded, 0.7 - rounded, 2.0 + 2 * rounded, 1.0, 2.0 - 2 * rounded])
    experience = case.experience(made)
    assert (experience.stats.pairs, experience.stats.ties, experience.stats.equal_groups) == (1, 1, 0.5)
    assert experience.counted_B.tolist() == [False] * 3 + [True, True, False]
    assert pair_figures(case.shares(made, experience, 1)[1])["pair_accuracy"] == 0.5


def test_where_all_groups_tie_nothing_is_learned_and_figures_are_zero() -> None:
    case, made = Case(3, 2, 3), algorithm(2)
    case.scores = torch.full((6,), 0.7)
    loss, sums, gradient_T = case.shares(made, case.experience(made), 1)
    assert float(loss) == 0 and gradient_T.tolist() == [0.0] * len(gradient_T)
    assert [value for name, value in pair_figures(sums).items() if name != "entropy"] == [0.0] * 5


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


def test_scores_are_compared_as_settings_shape_them_and_steps_decide_by_their_sum() -> None:
    case = Case(5, 2, 1)
    case.scores = torch.tensor([3.0, 9.0])
    assert case.experience(algorithm(2, ppo=PPO.model_copy(update={"reward_clip": 1.0}))).stats.ties == 1
    scored = replace(case.scored(), scores_B=torch.ones(2), truncated_B=torch.tensor([True, False]))
    experience = algorithm(2, ppo=PPO.model_copy(update={"truncated": 0.5})).experience(scored, 0.0)
    assert experience.stats.pairs == 1 and experience.advantages_T[0] == -1
    case, made = Case(9, 2, 2), algorithm(2)
    case.scores = torch.tensor([2.0, 1.0, 0.0, 1.0])
    steps_T = torch.rand(len(case.logp_T), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    advantages = case.rows(made.experience(replace(case.scored(), step_rewards_T=steps_T), 0.0).advantages_T)
    assert [set(row.tolist()) for row in advantages] == [{1.0}, {-1.0}, {-1.0}, {1.0}]


def test_a_kl_is_known_only_if_draws_and_reference_have_one_temperature() -> None:
    """The loss and the reference are at temperature 1, whatever tokens are drawn at."""
    kls = [Case(2, 2, 3).experience(algorithm(2, drawn_at)).stats.kl_mean for drawn_at in (1.0, 0.9)]
    assert [kl is None for kl in kls] == [False, True]
    assert CHOICES.temperature(0.9) == 1.0 and AlgorithmConfig().temperature(0.9) == 0.9


def test_next_token_shares_of_unequal_micro_batches_add_up_to_the_mean() -> None:
    logp_R = -torch.rand(11, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    shares = [next_token_loss(part, 11) for part in logp_R.split([1, 7, 3])]
    assert float(sum(loss for loss, _ in shares)) == pytest.approx(float(-logp_R.mean()))
    assert float(sum(stats["loss"] for _, stats in shares)) == pytest.approx(float(-logp_R.sum()))
    assert means({}) == {}, "an early stage has none"


@pytest.mark.parametrize(("far", "share"), [(2e-7, 0.5), (-2e-7, 0.5), (1e-5, 1.0), (-1e-5, 0.0)])
def test_scores_that_rounding_parts_are_a_tie(far: float, share: float) -> None:
    assert preference_table(torch.tensor([[3.0 + 3 * far, 3.0], [-0.1 + 0.1 * far, -0.1]]))[:, 2].tolist() == [share, share]
    assert preference_table(torch.tensor([[1.01, 1.0], [1.1, 1.0]]).bfloat16())[:, 2].tolist() == [0.5, 1.0]


@given(st.lists(st.tuples(st.floats(-30, 30), st.floats(-30, 30)), min_size=1, max_size=12), st.data())
def test_preference_loss_is_plain_arithmetic_and_shares_add_up(scores: list[tuple[float, float]], data: st.DataObject) -> None:
    scores_P2 = torch.tensor(scores, dtype=torch.float64, requires_grad=True)
    loss, stats = preference_loss(scores_P2, len(scores))
    right = (0.5 if abs(c - r) <= 4 * 2.0**-52 * max(abs(c), abs(r)) else c > r for c, r in scores)
    columns = {"loss": (nll(c - r) for c, r in scores), "accuracy": right, "margin": (c - r for c, r in scores)}
    assert means(stats) == pytest.approx({name: sum(each) / len(scores) for name, each in columns.items()}, abs=1e-12)
    assert float(loss) == pytest.approx(float(means(stats)["loss"]), abs=1e-12)
    cut = data.draw(st.integers(0, len(scores)))
    parts = [preference_loss(part, len(scores)) for part in scores_P2.split([cut, len(scores) - cut])]
    assert float(sum(loss for loss, _ in parts)) == pytest.approx(float(loss), abs=1e-12)
    for name, value in stats.items():
        assert not value.requires_grad
        assert float(sum(stats[name] for _, stats in parts)) == pytest.approx(float(value), abs=1e-12)


def test_gradients_by_finite_differences() -> None:
    generator = torch.Generator().manual_seed(2)
    logp_R = torch.randn(4, dtype=torch.float64, generator=generator, requires_grad=True)
    scores_P2 = torch.randn(3, 2, dtype=torch.float64, generator=generator, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: next_token_loss(x, 9)[0], logp_R)
    assert torch.autograd.gradcheck(lambda x: preference_loss(x, 5)[0], scores_P2)

"""The gap between decoding and training: rounding of whatever size passes, a defect on few tokens does not.
Legend: R tokens, V vocabulary."""

from __future__ import annotations

import pytest
import torch

from oppo_megatron.algorithms.decode_gap import GapLimit, gap_stats, judged_gap, rounding_scale
from oppo_megatron.config.reliability import GuardsConfig

VOCAB = 2048
AUTO = GapLimit.of(GuardsConfig(), "bfloat16", 1.0)


def exact_logits(num_tokens: int, offset: float, seed: int = 0) -> torch.Tensor:
    """[R, V], peaked as a trained policy's."""
    generator = torch.Generator().manual_seed(seed)
    return 4.0 * torch.randn(num_tokens, VOCAB, generator=generator, dtype=torch.float64) + offset


def computed(logits_RV: torch.Tensor, seed: int) -> torch.Tensor:
    """Logits as a model in bfloat16 gives them: hidden states rounded another way in each path, then each logit."""
    generator = torch.Generator().manual_seed(seed)
    noise_RV = 0.01 * torch.randn(logits_RV.shape, generator=generator, dtype=torch.float64)
    return (logits_RV + noise_RV).to(torch.bfloat16).double()


def sampled(logits_RV: torch.Tensor, seed: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(logits_RV.softmax(-1), 1, generator=generator)[:, 0]


def logprobs(logits_RV: torch.Tensor, tokens_R: torch.Tensor) -> torch.Tensor:
    return logits_RV.log_softmax(-1).gather(-1, tokens_R[:, None])[:, 0]


def judged(
    decoded_RV: torch.Tensor, trained_RV: torch.Tensor, tokens_R: torch.Tensor, limit: GapLimit = AUTO
) -> tuple[float, float]:
    """(what is held against the limit, the largest difference)."""
    difference_R = logprobs(trained_RV, tokens_R) - logprobs(decoded_RV, tokens_R)
    stats = gap_stats(difference_R, trained_RV.abs().amax(-1), torch.ones(len(tokens_R)), limit)
    figures = {name: float(value) for name, value in stats.items()}
    return judged_gap(limit, **figures), figures["max_logprob_gap"]


@pytest.mark.parametrize("offset", [0.0, 40.0, -40.0, 100.0])
def test_an_offset_that_all_logits_share_is_no_defect(offset: float) -> None:
    logits_RV = exact_logits(4000, offset)
    found, largest = judged(computed(logits_RV, 1), computed(logits_RV, 2), sampled(logits_RV))
    assert AUTO.nats is not None and found < AUTO.nats
    assert (largest > AUTO.nats) == (offset != 0), "what the largest difference alone would say"


@pytest.mark.parametrize("offset", [0.0, 40.0])
@pytest.mark.parametrize("defect", ["wrong position", "wrong temperature", "stale weight"])
def test_a_defect_shows_on_a_few_tokens(defect: str, offset: float) -> None:
    logits_RV = exact_logits(16, offset)
    trained_RV = {
        "wrong position": logits_RV.roll(1, 0),
        "wrong temperature": logits_RV / 0.7,
        "stale weight": logits_RV + 0.2 * (exact_logits(16, 0.0, seed=3)),
    }[defect]
    found, _ = judged(computed(logits_RV, 1), computed(trained_RV, 2), sampled(logits_RV))
    assert AUTO.nats is not None and found > AUTO.nats


def test_a_defect_of_two_tokens_among_thousands_shows() -> None:
    logits_RV = exact_logits(4000, 0.0)
    trained_RV = logits_RV.clone()
    trained_RV[100:102] = logits_RV[200:202]
    found, _ = judged(computed(logits_RV, 1), computed(trained_RV, 2), sampled(logits_RV))
    assert AUTO.nats is not None and found > AUTO.nats


def test_a_limit_that_is_given_is_for_every_token() -> None:
    logits_RV = exact_logits(4000, 40.0)
    found, largest = judged(computed(logits_RV, 1), computed(logits_RV, 2), sampled(logits_RV), GapLimit(0.25))
    assert found == largest > 0.25


def test_the_scale_is_that_of_one_rounding() -> None:
    sizes = torch.tensor([0.1, 16.0, 31.75, 32.0, 63.5, 64.0, 200.0])
    spacing = [float(torch.nextafter(x.bfloat16(), torch.tensor(1e9).bfloat16()) - x.bfloat16()) for x in sizes]
    assert rounding_scale(sizes).tolist() == [max(1.0, each / 0.125) for each in spacing] == [1, 1, 1, 2, 2, 4, 8]


def test_what_was_drawn_by_older_weights_is_not_looked_at() -> None:
    stats = gap_stats(torch.tensor([9.0, 0.1]), torch.ones(2), torch.tensor([0.0, 1.0]), AUTO)
    assert {name: float(value) for name, value in stats.items()} == pytest.approx(
        {"max_logprob_gap": 0.1, "max_usual_gap": 0.1, "num_fresh": 1.0, "num_beyond": 0.0}
    )

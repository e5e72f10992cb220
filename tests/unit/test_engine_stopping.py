"""Forced lengths: log-normal, and a function of the seed and the sequence alone."""

from __future__ import annotations

import math
from statistics import NormalDist, median, pstdev

from oppo_megatron.config.debug import ForcedLengths
from oppo_megatron.config.ppo import RolloutConfig
from oppo_megatron.engine.stopping import Stopping

EOS = 7


def stopping(limit: int = 10**6, seed: int = 3, **forced: float) -> Stopping:
    rollout = RolloutConfig(batch_size=4, max_response_tokens=limit)
    return Stopping.of(rollout, (EOS,), seed, forced=ForcedLengths(**forced) if forced else None)


def test_without_forced_lengths_eos_and_the_limit_end_a_response() -> None:
    plain = stopping(limit=40)
    assert plain.eos_ids == (EOS,)
    assert {plain.limit(seq_id) for seq_id in range(100)} == {40}


def test_forced_lengths_are_log_normal_and_ignore_eos() -> None:
    forced = stopping(median=2000, sigma=0.8)
    assert forced.eos_ids == ()
    logs = sorted(math.log(forced.limit(seq_id)) for seq_id in range(4000))
    assert abs(median(logs) - math.log(2000)) < 0.05
    assert abs(pstdev(logs) - 0.8) < 0.03
    expected = NormalDist(math.log(2000), 0.8)
    distance = max(abs(expected.cdf(x) - (i + 0.5) / len(logs)) for i, x in enumerate(logs))
    assert distance < 1.95 / math.sqrt(len(logs))  # Kolmogorov-Smirnov at the level 0.001


def test_forced_lengths_stay_within_one_and_the_limit() -> None:
    lengths = [stopping(limit=64, median=20, sigma=3).limit(seq_id) for seq_id in range(500)]
    assert min(lengths) == 1 and max(lengths) == 64
    assert len(set(lengths)) > 20


def test_forced_lengths_depend_on_seed_and_sequence_only() -> None:
    first, again = (stopping(median=100, sigma=1), stopping(median=100, sigma=1))
    assert [first.limit(i) for i in range(50)] == [again.limit(i) for i in reversed(range(50))][::-1]
    other = stopping(median=100, sigma=1, seed=4)
    assert [first.limit(i) for i in range(50)] != [other.limit(i) for i in range(50)]


def test_sigma_zero_makes_all_lengths_equal() -> None:
    assert {stopping(median=12, sigma=0).limit(seq_id) for seq_id in range(20)} == {12}

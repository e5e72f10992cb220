"""Tests whether the overlaps change the trained policy: the same chain by several seeds, sequential against OPPO."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from oppo_megatron.bench.suite import Lines

Figures = Mapping[str, Any]
"""A run's `step_s`, `reward_last`, `accuracy_before`, `accuracy_after`, as `demo.json` has them, and `reward_half`."""

COLUMNS = {
    "seed": "seed", "s/step seq.": "sequential.step_s", "s/step OPPO": "oppo.step_s", "ratio": "speedup",
    "reward seq.": "sequential.reward_half", "reward OPPO": "oppo.reward_half",
    "accuracy before": "sequential.accuracy_before", "after, seq.": "sequential.accuracy_after",
    "after, OPPO": "oppo.accuracy_after", "reward/s ratio": "reward_per_second",
}  # fmt: skip

COMPARED = {
    "reward, second half of the steps": "reward_half",
    "reward, last tenth": "reward_last",
    "held-out accuracy": "accuracy_after",
    "reward per second": "reward_rate",
}


def reward_half(lines: Lines) -> float:
    """Mean reward over the second half of a run's steps.

    The last steps of an overcommitting run train the long rollouts that were carried, which are the hard ones: alone they would
    say less of the policy than of the end of the prompts.
    """
    return mean(line["reward_mean"] for line in lines[len(lines) // 2 :])


def compare(demos: Mapping[int, Mapping[str, Figures]]) -> dict[str, Any]:
    """The figures of `demo.json`: a row a seed, and for each compared figure means, spread and a test of the difference."""
    rows = [_row(seed, demo) for seed, demo in demos.items()]
    tests = {
        label: difference([row[f"sequential.{key}"] for row in rows], [row[f"oppo.{key}"] for row in rows])
        for label, key in COMPARED.items()
    }
    return {"results": rows, "tests": tests}


def difference(base: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """Two samples that are paired by seed: mean and standard deviation of each and of `other` - `base`, and a p-value.

    The p-value is from the exact sign-flip test (Fisher 1935, section 21): of all ways to swap the two within pairs, the share
    whose mean difference is at least as far from 0.  Of n pairs it is at least 2^(1-n).
    """
    assert len(base) == len(other) >= 2, (len(base), len(other))
    differences = [b - a for a, b in zip(base, other, strict=True)]
    found = abs(sum(differences))
    flips = [abs(sum(s * d for s, d in zip(signs, differences, strict=True))) for signs in _signs(len(differences))]
    return {
        "base_mean": mean(base), "base_sd": stdev(base), "other_mean": mean(other), "other_sd": stdev(other),
        "difference_mean": mean(differences), "difference_sd": stdev(differences),
        "p": mean(flip >= found - 1e-12 for flip in flips),
    }  # fmt: skip


def remarks(result: Mapping[str, Any]) -> list[str]:
    """What the table does not say by itself."""
    lines = []
    for label, test in result["tests"].items():
        lines.append(
            f"{label}: sequential {test['base_mean']:.3f} (sd {test['base_sd']:.3f}), OPPO {test['other_mean']:.3f} "
            f"(sd {test['other_sd']:.3f}); difference {test['difference_mean']:+.3f} (sd {test['difference_sd']:.3f}), "
            f"sign-flip test over {len(result['results'])} seeds p = {test['p']:.2f}"
        )
    faster = f"OPPO's steps are {mean(row['speedup'] for row in result['results']):.2f} times as fast"
    gains = [row["reward_per_second"] for row in result["results"]]
    if None in gains:
        return [*lines, f"{faster}; reward per second is not compared, since a sequential run had no reward"]
    return [*lines, f"{faster}; reward per second is {mean(gains):.2f} times as much"]


def _row(seed: int, demo: Mapping[str, Figures]) -> dict[str, Any]:
    sequential, oppo = demo["sequential"], demo["oppo"]
    keys = ("step_s", "reward_half", "reward_last", "accuracy_before", "accuracy_after")
    speedup = sequential["step_s"] / oppo["step_s"]
    named = {f"{name}.{key}": demo[name][key] for name in ("sequential", "oppo") for key in keys}
    rates = {name: demo[name]["reward_half"] / demo[name]["step_s"] for name in ("sequential", "oppo")}
    named |= {f"{name}.reward_rate": rate for name, rate in rates.items()}
    gain = rates["oppo"] / rates["sequential"] if rates["sequential"] else None  # nothing was solved
    return {"seed": seed, "speedup": speedup, "reward_per_second": gain, **named}


def _signs(count: int) -> itertools.product[tuple[int, ...]]:
    return itertools.product((1, -1), repeat=count)

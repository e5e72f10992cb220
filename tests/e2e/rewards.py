"""Reward functions of the kind a user writes."""

from __future__ import annotations

import math
import os
import re
import time
from collections import Counter
from typing import Any


def brevity(prompt: str, response: str, fields: dict[str, Any], limit: int) -> float:
    return max(0.0, 1.0 - len(response) / limit)


def not_a_number(prompt: str, response: str, fields: dict[str, Any]) -> float:
    return math.nan


def failing(prompt: str, response: str, fields: dict[str, Any]) -> float:
    raise ValueError("no opinion")


def only_alone(prompt: str, response: str, fields: dict[str, Any]) -> float:
    if os.environ["WORLD_SIZE"] != "1":
        raise ValueError("cannot be shared")
    return float(len(response))


def poisoned(prompt: str, response: str, fields: dict[str, Any], prompts: list[str]) -> float:
    return math.nan if prompt in prompts else float(len(response))


CALLS: Counter[str] = Counter()


def breaks(prompt: str, response: str, fields: dict[str, Any], name: str, good: int, bad: float = math.inf) -> float:
    """NaN after `good` responses of the run `name`, for `bad` of them."""
    CALLS[name] += 1
    return math.nan if good < CALLS[name] <= good + bad else float(len(response))


def hangs(prompt: str, response: str, fields: dict[str, Any], after: int, how: str = "asleep") -> float:
    """A reward that never returns, after so many that did; `interpreter`: in a call that lets no other thread run."""
    CALLS["hangs"] += 1
    if CALLS["hangs"] > after:
        if how == "interpreter":
            re.match(r"(a|a)*$", "a" * 60 + "b")
        time.sleep(3600)
    return float(len(response))


def parity(prompt: str, response: str, fields: dict[str, Any], calls: str = os.devnull) -> float:
    """1 or 0 by the length of the response; each call, in whatever process, leaves a line in the file `calls`."""
    with open(calls, "a") as file:
        file.write(f"{prompt!r} {response!r}\n")
    return float(len(response) % 2)


def level(prompt: str, response: str, fields: dict[str, Any], flat: list[str]) -> float:
    """The same for all responses to a prompt of `flat`; for those to others a number that no other has."""
    CALLS[prompt] += 1
    return 1.0 if prompt in flat else float(CALLS[prompt])

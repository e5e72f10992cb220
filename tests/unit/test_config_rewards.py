"""Rules of a part of the reward: each broken one is the one problem, and no message repeats a secret."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from oppo_megatron.config.rewards import RewardPart, check_rewards, check_waits
from oppo_megatron.config.serve import ServeConfig

URL = "http://10.0.0.7:8900/score"
RULE = {"kind": "verifier"}
FUNCTION = {"kind": "python", "entry_point": "a.b:c"}


@pytest.mark.parametrize(
    "part",
    [
        {"kind": "http", "url": URL, "token_env": "REWARD_TOKEN", "timeout_s": 2, "give_up_s": 0},
        {"kind": "http", "url": "https://[::1]:1/"},
        {"kind": "http", "url": "http://host"},
        FUNCTION | {"isolate": 512, "timeout_s": 3, "options": {"a": 1}},
        FUNCTION | {"isolate": False},
        RULE | {"name": "gsm8k", "lenient": True, "answer": "solution"},
        RULE | {"name": "math", "isolate": 512, "timeout_s": 3},
        RULE | {"name": "multiple_choice"},
        RULE | {"name": "format", "pattern": "<think>.*</think>.*", "lenient": True},
        RULE | {"name": "length", "buffer_tokens": 4, "max_tokens": 9},
        RULE | {"name": "code", "lenient": True, "isolate": True},
    ],
    ids=str,
)
def test_right(part: dict[str, Any]) -> None:
    assert check_rewards([RewardPart(**part)], has_reward_model=False) == []
    written_out = RewardPart(**RewardPart(**part).model_dump())
    assert check_rewards([written_out], has_reward_model=False) == []


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"kind": "http"}, "rewards.0.url is missing"),
        ({"kind": "http", "url": "10.0.0.7:8900"}, "not the address of a service"),
        ({"kind": "http", "url": "ftp://host/"}, "not the address of a service"),
        ({"kind": "http", "url": "http:///score"}, "not the address of a service"),
        ({"kind": "http", "url": "http://host:99999/"}, "not the address of a service"),
        ({"kind": "http", "url": "http://[::1/"}, "not the address of a service"),
        ({"kind": "http", "url": "http://ho st/"}, "not the address of a service"),
        ({"kind": "http", "url": "http://me:s3cret@host/"}, "a user name or password"),
        ({"kind": "http", "url": "http://host/?key=s3cret"}, "a query or fragment"),
        ({"kind": "http", "url": "http://host/#s3cret"}, "a query or fragment"),
        ({"kind": "http", "url": URL, "token_env": "sk-s3cret"}, "not the name of an environment variable"),
        ({"kind": "http", "url": URL, "entry_point": "a:b", "isolate": True}, "entry_point and isolate, but only kind python"),
        ({"kind": "http", "url": URL, "name": "gsm8k"}, "kind http has no rule to name"),
        (FUNCTION | {"step_rewards": "min", "separator": "."}, "step_rewards and separator, but only kind process takes"),
        (FUNCTION | {"url": URL, "token_env": "A"}, "url and token_env, but only kind http takes them"),
        (FUNCTION | {"give_up_s": 3}, "give_up_s, but only kind http takes them"),
        (FUNCTION | {"timeout_s": 3}, "timeout_s, but only kind http, a function with isolate, and the rules math and code"),
        ({"kind": "verifier", "name": "gsm8k", "isolate": 512}, "isolate, but only kind python takes them"),
        (RULE, "without a `name`; add one of arithmetic, gsm8k, gsm8k_first, math, multiple_choice, format, length, code"),
        (RULE | {"name": "format"}, "without a `pattern`; add a regular expression"),
        (RULE | {"name": "length"}, "without `buffer_tokens`; add over how many tokens"),
        (RULE | {"name": "arithmetic", "lenient": True}, "has lenient, but only rule gsm8k or format or code takes"),
        (RULE | {"name": "math", "pattern": "."}, "of rule math and has pattern, but only rule format takes it; remove it"),
        (RULE | {"name": "code", "buffer_tokens": 3}, "has buffer_tokens, but only rule length takes it; remove it"),
        (RULE | {"name": "code", "max_tokens": 3}, "has max_tokens, but only rule length takes it; remove it"),
        (RULE | {"name": "math", "lenient": True}, "has lenient, but only rule gsm8k or format or code takes it; remove it"),
        (RULE | {"name": "gsm8k", "timeout_s": 2}, "timeout_s, but only kind http, a function with isolate, and the rules"),
        (FUNCTION | {"pattern": "."}, "of kind python and has pattern, but only rule format takes it; remove it"),
        (RULE | {"name": "code", "url": URL}, "url, but only kind http takes them"),
    ],
    ids=str,
)
def test_broken(part: dict[str, Any], expected: str) -> None:
    problems = check_rewards([RewardPart(**part)], has_reward_model=False)
    assert len(problems) == 1 and expected in problems[0] and "s3cret" not in problems[0]


def test_a_run_gives_up_before_its_ranks_do() -> None:
    parts = [RewardPart(kind="http", url=URL, give_up_s=600, timeout_s=30)]
    assert list(check_waits(parts, 631.0)) == [] == list(check_waits(parts, 631.0, 631.0))
    assert "is ended after stall_deadline_s 630" in next(check_waits(parts, 1800.0, 630.0))
    isolated = [RewardPart(kind="python", entry_point="a:b", isolate=True, timeout_s=50)]
    assert list(check_waits(isolated, 1800.0, 111.0)) == []
    assert "60 to start, and timeout_s" in next(check_waits(isolated, 1800.0, 110.0))
    rule = [RewardPart(kind="verifier", name="code")]
    assert list(check_waits(rule, 1800.0, 71.0)) == [] and "rewards.0 may wait 70 s" in next(check_waits(rule, 1800.0, 70.0))
    assert "rewards.0 may wait 630 s" in next(check_waits(parts, 630.0))
    parts[0].give_up_s = 0
    assert list(check_waits(parts, 31.0)) == []


def test_a_pattern_is_read_with_the_configuration() -> None:
    with pytest.raises(ValidationError, match=r"a regular expression \(missing \)"):
        RewardPart(kind="verifier", name="format", pattern="(<think>")


def test_a_service_has_no_counts_of_tokens() -> None:
    part = RewardPart(kind="verifier", name="length", buffer_tokens=4, max_tokens=9)
    (problem,) = ServeConfig(rewards=[part]).rules()
    assert "rewards.0 is of rule length, but a service gets no counts of tokens; name it in the run's file" in problem


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_token(host: str) -> None:
    assert list(ServeConfig(rewards=[RewardPart(kind="verifier", name="gsm8k")], host=host).rules()) == []

"""Rewards that can tell early: what each kind of part says of a prefix, where it settles, and what it is held to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from oppo_megatron.config.data import RewardPart
from oppo_megatron.config.run import TrainSettings
from oppo_megatron.config.settling import SettleConfig
from oppo_megatron.errors import ConfigError, RewardError
from oppo_megatron.overcommit.settling import Prefix
from oppo_megatron.rewards.functions import RewardSum, build_reward_functions
from oppo_megatron.rewards.protocol import ScoreItem
from oppo_megatron.rewards.verifiers import first_answer, first_settled, verify
from oppo_megatron.train.inputs import require_settling
from oppo_megatron.train.verdicts import read_prefix, require_as_settled

MODULE = """
def shape(prompt, response, fields, most=9):
    return 0.0 if len(response) > most else 1.0

def _settled(prompt, prefix, fields, most=9):
    return 0.0 if len(prefix) > most else None

shape.settled = _settled

def silent(prompt, response, fields):
    return 1.0

def broken(prompt, response, fields):
    return 1.0

def _broken(prompt, prefix, fields):
    return {"": None, "nan": float("nan")}[prefix]

broken.settled = _broken

def odd(prompt, response, fields):
    return 1.0

odd.settled = lambda prefix: None

class Counting:
    def __call__(self, prompt, response, fields):
        return float(min(len(response), 3))

    def settled(self, prompt, prefix, fields):
        return 3.0 if len(prefix) >= 3 else None

counting = Counting()
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "early_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


def python(name: str, **settings: Any) -> RewardPart:
    return RewardPart(kind="python", entry_point=f"early_rewards:{name}", **settings)


def rule(name: str, **settings: Any) -> RewardPart:
    return RewardPart.model_validate({"kind": "verifier", "name": name} | settings)


def settled(rewards: RewardSum, prefix: str, fields: dict[str, Any] | None = None) -> dict[str, float]:
    return rewards.settled(ScoreItem(7, "q", prefix, fields or {}), "rows.jsonl:3")


@pytest.mark.parametrize(
    ("text", "value", "early"),
    [
        ("5+4=9\n#### 9", 9, None), ("#### 9\n", 9, 1.0), ("#### 9\n#### 8", 9, 1.0), ("#### 9 apples\nmore", 9, 1.0),
        ("#### 9 #### 8\n", 9, 1.0), ("#### 1\n#### 9", 1, 0.0), ("####\n9", None, 0.0), ("9\nA: 9", None, None),
        ("", None, None),
    ],
)  # fmt: skip
def test_the_first_rule_goes_by_the_first_mark(text: str, value: int | None, early: float | None) -> None:
    assert first_answer(text) == value and first_settled(text, "9") == early
    rewards = build_reward_functions([rule("gsm8k_first")])
    assert rewards.score("", text, {"answer": "9"}, None, 0) == float(value == 9)
    assert settled(rewards, text, {"answer": "9"}) == ({} if early is None else {"gsm8k_first": early})


marked = st.text(alphabet="#19 \n.-", max_size=12)


@given(prefix=marked, rest=marked, expected=st.sampled_from(["1", "9", "-1"]))
@example(prefix="#### 1", rest="9\n", expected="1")
@example(prefix="#### 1\n", rest="#### 9", expected="1")
def test_a_settled_first_answer_stays_what_it_is(prefix: str, rest: str, expected: str) -> None:
    early = first_settled(prefix, expected)
    assert early is None or verify("gsm8k_first", prefix + rest, expected) == early == verify("gsm8k_first", prefix, expected)


def test_every_part_says_for_itself_what_is_settled() -> None:
    parts = [
        rule("format", pattern="<a>.*</a>"), rule("multiple_choice"), python("shape", options={"most": 20}),
        python("counting"), python("shape", isolate=True), RewardPart(kind="model"), rule("gsm8k"), python("silent"),
    ]  # fmt: skip
    rewards = build_reward_functions(parts)
    try:
        labels = [summand.label for summand in rewards.summands]
        shape, counting, isolated = labels[2:5]
        fields = {"answer": "A"}
        assert settled(rewards, "", fields) == {} == settled(rewards, "<a", fields)
        assert settled(rewards, "so", fields) == {"format": 0.0}
        assert settled(rewards, "<a> so far", fields) == {counting: 3.0, isolated: 0.0}
        all_told = settled(rewards, r"</think> \boxed{A} \boxed{B} no", fields)
        assert all_told == {"format": 0.0, "multiple_choice": 0.0, shape: 0.0, counting: 3.0, isolated: 0.0}
        assert rewards.never_settle() == {
            "model": "it is known at the end of a response only",
            "gsm8k": "its rule cannot tell before the end",
            "early_rewards:silent": "the function has no `settled`",
        }
    finally:
        rewards.close()


def test_a_pattern_that_looks_around_never_settles() -> None:
    (why,) = build_reward_functions([rule("format", pattern="(?=a)b")]).never_settle().values()
    assert "looks around" in why


@pytest.mark.parametrize(("prefix", "said"), [("x", "KeyError: 'x'"), ("nan", "it gave nan")])
def test_what_fails_to_tell_is_an_error_that_names_it(prefix: str, said: str) -> None:
    rewards = build_reward_functions([python("broken")])
    assert settled(rewards, "") == {}
    with pytest.raises(
        RewardError, match=r"sequence 7 \(of rows\.jsonl:3\): `settled` of reward part 'early_rewards:broken' failed: " + said
    ):
        settled(rewards, prefix)


def test_a_settled_of_another_signature_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"early_rewards:odd\.settled' takes \(prefix\).*but is called with \(prompt, resp"):
        build_reward_functions([python("odd")])


def test_a_run_that_could_end_nothing_early_is_refused() -> None:
    rewards = build_reward_functions([rule("format", pattern="a"), python("silent")])
    off, certain = (cast(TrainSettings, SimpleNamespace(settle=SettleConfig(mode=m))) for m in ("off", "certain"))
    require_settling(off, rewards)
    with pytest.raises(ConfigError) as caught:
        require_settling(certain, rewards)
    assert caught.value.problems == [
        "settle.mode is certain, but reward part 'early_rewards:silent' settles nothing: the function has no `settled`; give it "
        "what it needs (docs/rewards.md), or set settle.mode to off"
    ]


EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CHAIN = "Q: 7+5-3=?\nA:"
LINES = "7+5=12\n12-3=9\n#### 9"


@given(
    kept=st.integers(0, len(LINES)),
    then=st.text(alphabet="7+5=12\n# ", max_size=3),
    rest=st.text(alphabet="93#\n ", max_size=3),
)
@example(kept=len(LINES), then="", rest="\n")
@example(kept=len(LINES), then=" ", rest="9")
def test_the_example_of_worked_solutions_settles_at_the_first_slip(kept: int, then: str, rest: str) -> None:
    rewards = build_reward_functions([RewardPart(kind="python", entry_point=f"{EXAMPLES / 'arithmetic' / 'worked.py'}:worked")])
    (label,) = (summand.label for summand in rewards.summands)
    assert rewards.score(CHAIN, LINES, {}, None, 0) == 1.0
    prefix = LINES[:kept] + then
    early = rewards.settled(ScoreItem(0, CHAIN, prefix))
    assert early in ({}, {label: 0.0}) and (early or LINES.startswith(prefix) or not prefix.removeprefix(LINES).strip())
    if early:
        assert rewards.score(CHAIN, prefix + rest, {}, None, 0) == 0.0


SOLVED = "6/4 = <<6/4=1.5>>1.5\n2*(1.5+1) = <<2*(1.5+1)=5>>5\n#### 5"


@given(
    cut=st.integers(0, len(SOLVED)),
    rest=st.lists(
        st.sampled_from(["<<1+1=2>>", "<<1+1=3>>", "<<2/3=0.67>>", "<<1/0=1>>", "<<x=1>>", "#", "####", " 5", "6", "\n"])
    ),
    end=st.integers(0, 20),
)
@example(cut=len(SOLVED), rest=["\n", "<<1+1=3>>", "#### 6"], end=15)
@example(cut=18, rest=["<<1+1=3>>", "\n#### 5"], end=0)
def test_the_example_on_gsm8k_never_takes_back_what_it_has_settled(cut: int, rest: list[str], end: int) -> None:
    """For any beginning of a text, all that begin so get what it was settled as."""
    rewards = build_reward_functions([RewardPart(kind="python", entry_point=f"{EXAMPLES / 'gsm8k' / 'worked.py'}:worked")])
    (label,) = (summand.label for summand in rewards.summands)
    fields, text = {"answer": "#### 5"}, SOLVED[:cut] + "".join(rest)
    assert rewards.score("", SOLVED, fields, None, 0) == 1.0
    assert rewards.settled(ScoreItem(0, "", SOLVED + "\n", fields)) == {label: 1.0}
    assert rewards.settled(ScoreItem(0, "", SOLVED[:18] + "<<1+1=3>>", fields)) == {label: 0.0}
    early = rewards.settled(ScoreItem(0, "", text[: max(0, len(text) - end)], fields))
    assert not early or early[label] == rewards.score("", text, fields, None, 0)


def decode(tokens: Sequence[int]) -> str:
    """A token is a byte."""
    return bytes(tokens).decode("utf-8", "replace")


@given(text=st.text(alphabet="ab<>/é", max_size=12))
def test_the_shortest_settled_prefix_is_found(text: str) -> None:
    """Against all prefixes in turn.  A prefix that ends within a character says nothing of that character."""
    rewards = build_reward_functions([rule("format", pattern="a[^<]*<b>é*"), python("shape", options={"most": 5})])
    tokens = list(text.encode())
    read = read_prefix(rewards, ScoreItem(1, "", text, {}), tokens, decode, "")
    prefixes = (settled(rewards, decode(tokens[:n]).rstrip("\ufffd")) for n in range(1, len(tokens) + 1))
    first = next((n for n, found in enumerate(prefixes, start=1) if len(found) == 2), 0)
    assert read.num_tokens == first
    if first:
        assert read.parts == (0.0, 0.0)


def test_half_a_character_settles_nothing() -> None:
    rewards = build_reward_functions([rule("format", pattern="é")])
    half = list("é".encode())[:1]
    assert math.isnan(read_prefix(rewards, ScoreItem(1, "", decode(half), {}), half, decode, "").parts[0])


def test_parts_that_are_open_are_no_numbers() -> None:
    rewards = build_reward_functions([rule("format", pattern="a"), python("counting")])
    read = read_prefix(rewards, ScoreItem(1, "", "b", {}), [98], decode, "")
    assert read.num_tokens == 0 and read.parts[0] == 0.0 and math.isnan(read.parts[1])


def test_a_reward_is_held_to_what_it_was_settled_as() -> None:
    item, labels, note = ScoreItem(7, "", "b" * 900, {}), ("format", "answer"), Prefix((0.0, 1.0), 2)
    require_as_settled({"format": 0.0, "answer": 1.0}, note, labels, item, "rows.jsonl:3", "bb")
    require_as_settled({"answer": 1.0}, note, labels, item, "rows.jsonl:3", "bb")
    with pytest.raises(RewardError) as caught:
        require_as_settled({"format": 0.0, "answer": 0.5}, note, labels, item, "rows.jsonl:3", "bb")
    assert str(caught.value) == (
        "sequence 7 (of rows.jsonl:3): reward part 'answer' was settled as 1 by the first 2 tokens, but gives 0.5 for the "
        "response; its `settled` must speak only where every continuation gets the same: correct it, or set settle.mode to off. "
        f"Settled at: 'bb'; the response: ...'{'b' * 500}' (900 characters)"
    )

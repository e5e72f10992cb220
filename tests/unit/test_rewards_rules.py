"""Rules that read a response in this process: choices, formats, lengths, and the lenient reader of numbers."""

from __future__ import annotations

import time
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oppo_megatron.config.rewards import RewardPart, compile_pattern
from oppo_megatron.errors import ConfigError, RewardError
from oppo_megatron.rewards.functions import build_reward_functions
from oppo_megatron.rewards.rules import choices
from oppo_megatron.rewards.verifiers import flexible_answer, format_score, length_score

THINK = r"<think>.*?</think>\s*<answer>.*?</answer>"


def rule(name: str, **settings: Any) -> RewardPart:
    return RewardPart(kind="verifier", name=name, **settings)


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        (r"so \boxed{B}", "B"), (r"\boxed{\text{(B)}}.", "B"), (r"\boxed{ (b). }", "B"), (r"\boxed{\textbf{(C) }}", "C"),
        (r"Is it \boxed{C}? The answer is C.\boxed{C}", "C"), (r"The answer is A. \boxed{D}", "D"),
        ("The answer is B", "B"), ("the answer is (b).", "B"), ("Answer: **C**", "C"), ("**Answer:** C", "C"),
        ("**Final answer**: D", "D"), ("The correct option is B, because", "B"), ("The answer is B because of this", "B"),
        ("The answer choice is [E]", "E"), ("Answer is: J\n", "J"), ("The answer is B) Paris", "B"),
        ("Option A is wrong.\nSo the answer is C.\nThat is all.", "C"), ("The answer is A\nAnswer: A", "A"),
        ("B", "B"), ("(B)", "B"), ("B.", "B"), ("We see.\n\n  **B**  ", "B"), ("B) Paris", "B"), ("(b) Paris", "B"),
        ("[A]", "A"),
        ("C: the third", "C"), ("thinking (A), (B)\nB", "B"),
        ("<answer>B</answer>", "B"), ("<answer>(B) Paris</answer>", "B"), ("<answer> b.\n</answer>", "B"),
        ("hm <answer>B", "B"),
        ('The answer is "B".', "B"), ("Answer：B", "B"),
        ("答案：Ｂ", "B"), ("答案是 B。", "B"),
        ("Answer:B", "B"), ("The answer is `B`", "B"),
        (r"The answer is $\boxed{B}$", "B"), (r"\boxed{B) Paris}", "B"),
        ("**Final Answer**\n\nB", "B"), ("Answer: B) Paris", "B"),
        (r"<think>\boxed{A}? \boxed{C}</think> \boxed{B}", "B"), ("<think>The answer is A</think>\nThe answer is B", "B"),
        ("The answer is A</think>B", "B"), ("<think>The answer is B</think>\n", "B"), ("'B'", "B"),
        *((text, "B") for text in (
            "Therefore, option B is correct.", "B is the correct answer.", "B is correct.", r"$\boxed{\textbf{(B)}\ 12}$",
            "答案选B。", "故选B。", "故选：B．", "因此，正确选项是B。", "选择 B", "所以应选择 (B)。", "B - Paris",
            "<answer>Option B</answer>",
            "I would choose B.", "The answer is 'B'.", "B<|eot_id|>", "B</s>", "The answer is probably B.",
            "The answer is definitely (B)", r"\boxed{Option B}", "Let me see. A is wrong. C is wrong. So it's B.",
            "It must be B.", "B\n\nExplanation: Paris is the capital.", "B. Paris\n\nExplanation: the capital.", "Choice B",
            "Option (B)", "**Option B**", "✅ **B. Paris**", "【答案】：B", "本题选B", "因此，选B。", "选项A错误，选项B正确。",
            "La réponse est B.", "Ответ: B",
        )),
    ],
)  # fmt: skip
def test_a_choice_is_read(response: str, letter: str) -> None:
    assert choices.choice(response) == letter
    assert choices.verify(response, letter) == 1.0 and choices.verify(response, "H") == 0.0


@pytest.mark.parametrize(
    "response",
    [
        "", "  \n", "Paris", "A dog", "I think so", "The answer is a dog", "The answer is I think B", "The answer is Because",
        "The answer is A or B", "The answer is (A) and (B)", "The answer is A, B", "The answer is A. No, the answer is B.",
        "Answer: A\nAnswer: B", r"\boxed{A} or \boxed{B}", r"\boxed{A, B}", r"\boxed{AB}", r"\boxed{x^2} and \boxed{B}",
        r"\boxed{K}", r"\boxed{B", "(A) is wrong, (B) is right", "The answer is not (B)", "(A) or (B)", "K", "b", "AB",
        "<answer>Paris</answer>", "<answer>A</answer> <answer>B</answer>",
        r"\boxed{A} <answer>B</answer>", "<answer>A or B</answer>",
        "A. London\nB. Paris\nWho knows?", "不选B", "If A is correct, then B is correct.", "I doubt that B is correct.",
        "Option B is incorrect.", "A is correct. B is correct.", "B is right above A.",
        "<answer>K</answer>", 'The answer is "A" or "B".', "答案：A或B\n答案：B",
    ],
)  # fmt: skip
def test_none_or_several_choices_are_none(response: str) -> None:
    assert choices.choice(response) is None
    assert all(choices.verify(response, letter) == 0.0 for letter in choices.LETTERS)


@pytest.mark.parametrize(("value", "letter"), [("B", "B"), ("(b)", "B"), ("C.", "C"), (0, "A"), (3, "D")])
def test_expected_letters(value: Any, letter: str) -> None:
    assert choices.expected_letter(value) == letter


@pytest.mark.parametrize("value", [None, "", "Paris", "K", "1", "AB", 10, -1, 1.0, True, ["A"]])
def test_an_expected_answer_that_is_no_choice_is_an_error(value: Any) -> None:
    with pytest.raises(RewardError, match="is not a choice; give a letter"):
        choices.verify("A", value)


@pytest.mark.parametrize(
    "text", ["*" * 100_000, "answer " * 20_000, "answer:" + "*" * 9999, r"\boxed{" * 20_000, "<answer>" * 20_000]
)
def test_a_long_response_is_read_at_once(text: str) -> None:
    began = time.thread_time()
    assert choices.choice(text) is None
    assert time.thread_time() - began < 5.0


@pytest.mark.parametrize(
    ("pattern", "match", "response", "score"),
    [
        (THINK, "full", "<think>a\nb</think>\n<answer>4</answer>", 1.0),
        (THINK, "full", "<think>a</think><answer>4</answer> and more", 0.0),
        (THINK, "full", "well <think>a</think><answer>4</answer>", 0.0),
        (THINK, "search", "well <think>a</think><answer>4</answer> and more", 1.0),
        (r"^<think>(?!.*<think>)(.*?)</think>.*$", "full", "<think>a</think> 4", 1.0),
        (r"^<think>(?!.*<think>)(.*?)</think>.*$", "full", "<think>a<think>b</think> 4", 0.0),
        (r"\d+", "full", "12", 1.0),
        (r"\d+", "full", "12\n", 0.0),
        (r"\d+", "search", "a", 0.0),
        ("", "full", "", 1.0),
        ("(?-s:.)", "full", "\n", 0.0),
    ],
)
def test_formats(pattern: str, match: str, response: str, score: float) -> None:
    rewards = build_reward_functions([rule("format", pattern=pattern, lenient=match == "search", weight=2.0)])
    rewards.check({})
    reward = rewards.evaluate("", response, {}, None, 0)
    assert reward.parts == {"format": score} and reward.total == 2.0 * score


def test_a_catastrophic_pattern_ends() -> None:
    began = time.monotonic()
    pattern = compile_pattern(r"(?:\w+\s?)+#(?=b)|((a|b|ab)*)*c(?<=q)")
    assert format_score("ab" * 5000, pattern, whole=True) == 0.0
    assert 0.9 < time.monotonic() - began < 30.0, "it ran into the limit, or the case no longer tests it"


@given(num_tokens=st.integers(0, 200), longest=st.integers(1, 100), data=st.data())
def test_length_is_the_papers_equation(num_tokens: int, longest: int, data: st.DataObject) -> None:
    buffer = data.draw(st.integers(1, longest))
    expected = Fraction(longest - buffer - num_tokens, buffer)
    expected = Fraction(0) if expected > 0 else Fraction(-1) if num_tokens > longest else expected
    score = length_score(num_tokens, longest, buffer)
    assert score == pytest.approx(float(expected), abs=1e-12) and -1.0 <= score <= 0.0


def test_length_of_the_paper_itself() -> None:
    """Equals TRL's get_soft_overlong_punishment(max_completion_len=20480, soft_punish_cache=4096)."""
    assert [length_score(n, 20480, 4096) for n in (1, 16384, 18432, 20480, 20481)] == [0.0, 0.0, -0.5, -1.0, -1.0]


def test_length_counts_tokens_up_to_the_runs_limit() -> None:
    rewards = build_reward_functions([rule("length", buffer_tokens=4, weight=0.5)], max_response_tokens=8)
    assert [rewards.evaluate("", "x", {}, None, 0, num_tokens=n).total for n in (4, 6, 8)] == [0.0, -0.25, -0.5]
    own = build_reward_functions([rule("length", buffer_tokens=2, max_tokens=6)], max_response_tokens=8)
    assert own.evaluate("", "x", {}, None, 0, num_tokens=7).total == -1.0


@pytest.mark.parametrize(
    ("settings", "longest", "reason"),
    [
        ({"buffer_tokens": 4}, None, "the longest response, which is not known here; add `max_tokens`"),
        ({"buffer_tokens": 9}, 8, "buffer_tokens 9 of rule length is above its max_tokens 8; lower it"),
        ({"buffer_tokens": 4, "max_tokens": 12}, 8, "begins at 8 tokens.*max_response_tokens 8; lower max_tokens"),
    ],
)
def test_a_length_that_says_nothing_is_refused(settings: dict[str, int], longest: int | None, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        build_reward_functions([rule("length", **settings)], max_response_tokens=longest)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("I have 3 and then 7 apples", 7), ("it costs $1,200.50.", Fraction(2401, 2)), ("from -5 to -3", -3),
        ("7-5", 5), ("10 - 3", 3), ("GPT-4", 4), ("so it is 1/2", Fraction(1, 2)), ("3\n#### 5\nor 6", 5), ("8\nA: 4", 4),
        ("#### Step 1\nadd\n#### Step 2\nSo it is 18.", 18), ("#### Final Answer\n\\boxed{18}", 18),
        (r"#### \boxed{18}", 18), ("#### The answer is 18", 18),
        ("#### none, 5", None), ("no number", None), ("", None), ("3/0", None), ("9" * 6000, None),
    ],
)  # fmt: skip
def test_the_flexible_method_takes_the_last_number(text: str, value: Any) -> None:
    assert flexible_answer(text) == value
    rewards = build_reward_functions([rule("gsm8k", lenient=True)])
    assert rewards.score("", text, {"answer": 11 if value is None else float(value)}, None, 0) == float(value is not None)

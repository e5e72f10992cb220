"""Verifiers: every real answer is read, every wrong one refused, and no row without a number is scored."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oppo_megatron.errors import RewardError
from oppo_megatron.rewards.verifiers import ANSWER_OF, expected_answer, gsm8k_answer, parse_number, verify


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(("name", "num_rows"), [("gsm8k_train", 7473), ("gsm8k_test", 1319)])
def test_every_real_answer_is_right_by_itself_and_no_other(shared_data: Path, name: str, num_rows: int) -> None:
    answers = [row["answer"] for row in rows_of(shared_data / f"{name}.jsonl")]
    assert len(answers) == num_rows
    for answer in answers:
        bare = answer.rsplit("#### ", 1)[1]
        assert gsm8k_answer(answer) == int(bare.replace(",", ""))
        assert verify("gsm8k", answer, answer) == verify("gsm8k", answer, bare) == 1.0
        assert verify("gsm8k", answer, int(bare.replace(",", "")) + 1) == 0.0


def test_real_preference_pairs(shared_data: Path) -> None:
    for row in rows_of(shared_data / "gsm8k_preference_pairs.jsonl"):
        assert verify("gsm8k", row["chosen"], row["ground_truth"]) == 1.0
        assert verify("gsm8k", row["rejected"], row["ground_truth"]) == 0.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("#### 72", 72), ("work 3\n#### 1,234,567", 1234567), ("####72", 72), ("#### $18.", 18), ("#### -$5", -5),
        ("#### $-5", -5), ("#### \u22125", -5), ("#### +5", 5), ("#### 18.50", Fraction(37, 2)),
        ("#### .5", Fraction(1, 2)), ("#### 1/2", Fraction(1, 2)), ("#### -6 / 4", Fraction(-3, 2)),
        ("#### 12 apples", 12), ("#### 12%", 12), ("#### 4\n#### 5", 5), ("#### 4 #### 5", 5), ("#### 5\nA: 6\n", 6),
        ("A: 6\n#### 5", 5), ("#### 5\nthat is all", 5), ("so\nA: $1,200.0", 1200), ("#### 2000km", 2000),
        ("#### 5 km/h.", 5), ("#### 20m^2", 20), ("#### **72**", 72), ("#### $72$", 72), (r"#### \$72", 72),
        (r"#### \frac{1}{2}", Fraction(1, 2)), ("#### 3 1/2", Fraction(7, 2)), ("####　７２", 72), ("#### 42元", 42),
        ("#### 1 234 567", 1234567), ("#### 1.5e3", 1500), ("<think>#### 5</think>\n#### 6", 6),
        ("#### 2 million", 2_000_000), ("#### 5万", 50_000), ("#### 2 dozen eggs", 24), ("#### The answer is 3", 3),
        ("#### $\\boxed{3}$", 3), ("#### 3<|im_end|>", 3), ("#### 3</s>\n", 3),
    ],
)  # fmt: skip
def test_final_answers(text: str, value: Any) -> None:
    assert gsm8k_answer(text) == value
    assert ANSWER_OF["arithmetic"](text) == value


@pytest.mark.parametrize(
    "text",
    [
        "", "\n", "72", "the answer is 72", "####", "#### none", "#### 5\n#### ?", "A: 5\nand more", "#### 3+4",
        "#### 3 + 4",
        "#### 12abc", "#### 1,2", "#### 1,2345", "#### 1.2.3", "#### 1/0", "#### 1/2/3", "#### 1 2", "#### --5",
        "#### 5=5", "A: 5 = 5",
        "#### 5x", "#### 5 pi",
        "#### 0,125", "#### 12 - x", "#### 12!", "#### " + "9" * 6000, "#### \u0663",
    ],
)  # fmt: skip
def test_no_final_answer(text: str) -> None:
    assert gsm8k_answer(text) is None
    assert verify("gsm8k", text, "5") == 0.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12), ("1+2=3\n3+4=7\n", 7), ("so 7 = 14/2", 7), ("x\n#### 4", 4),
        ("7 = ", None), ("1+2=3\nand so on", None), ("3+4", None), ("####\n3=3", None),
    ],
)  # fmt: skip
def test_arithmetic_also_takes_an_unmarked_last_line(text: str, value: int | None) -> None:
    assert ANSWER_OF["arithmetic"](text) == value


@given(value=st.fractions(max_denominator=10**6), name=st.sampled_from(sorted(ANSWER_OF)))
def test_every_fraction_equals_itself_however_scaled(value: Fraction, name: str) -> None:
    scaled = f"{value.numerator * 3}/{value.denominator * 3}"
    assert verify(name, f"#### {scaled}", str(value)) == 1.0
    assert verify(name, f"#### {value + 1}", str(value)) == 0.0


@given(value=st.decimals(allow_nan=False, allow_infinity=False, places=3))
def test_every_decimal_is_exact_with_or_without_commas(value: Any) -> None:
    assert parse_number(f"{value:f}") == parse_number(f"{value:,f}") == Fraction(value)


@given(text=st.text())
def test_no_text_breaks_a_verifier(text: str) -> None:
    for response in (text, f"#### {text}", f"A: {text}"):
        for name in ANSWER_OF:
            assert verify(name, response, "1") in (0.0, 1.0)


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (72, 72), (10**400, 10**400), (0.1, Fraction(1, 10)), ("72", 72), (" $1,000 ", 1000), ("a\n#### 3", 3),
        ("b\nA: 4", 4), ("1/2", Fraction(1, 2)),
    ],
)  # fmt: skip
def test_expected_answers(value: Any, number: Any) -> None:
    assert expected_answer(value) == number


@pytest.mark.parametrize("value", [None, "", "many", "####", True, float("nan"), float("inf"), [1], "7+5", "the answer is 7"])
def test_an_expected_answer_without_a_number_is_an_error(value: Any) -> None:
    with pytest.raises(RewardError, match="has no number"):
        verify("gsm8k", "#### 5", value)

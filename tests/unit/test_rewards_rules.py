"""Rules that read a response in this process: choices, formats, lengths, numbers, and forms of final answers."""

import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oppo_megatron.config.data import TokenizerConfig
from oppo_megatron.config.rewards import RewardPart, compile_pattern
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.data.tokenizer import load_tokenizer
from oppo_megatron.errors import ConfigError, RewardError
from oppo_megatron.rewards.functions import build_reward_functions
from oppo_megatron.rewards.rules import choices
from oppo_megatron.rewards.rules.math_answers import ANSWER, expected_text, found_answer, grade
from oppo_megatron.rewards.verifiers import flexible_answer, format_score, length_score, literals
from oppo_megatron.train.inputs import unearned_formats
from tests.support.configs import least_config
from tests.support.tokenizers import CharacterTokenizer, save_byte_level

THINK = r"<think>.*?</think>\s*<answer>.*?</answer>"


def rule(name: str, **settings: Any) -> RewardPart:
    return RewardPart(kind="verifier", name=name, **settings)


@pytest.mark.parametrize(("response", "letter"), [
    (r"so \boxed{B}", "B"), (r"\boxed{\text{(B)}}.", "B"), (r"\boxed{ (b). }", "B"), (r"\boxed{\textbf{(C) }}", "C"),
    (r"Is it \boxed{C}? The answer is C.\boxed{C}", "C"), (r"The answer is A. \boxed{D}", "D"), ("The answer is B", "B"),
    ("the answer is (b).", "B"), ("Answer: **C**", "C"), ("**Answer:** C", "C"), ("**Final answer**: D", "D"),
    ("The correct option is B, because", "B"), ("The answer is B because of this", "B"), ("The answer choice is [E]", "E"),
    ("Answer is: J\n", "J"), ("The answer is B) Paris", "B"), ("Option A is wrong.\nSo the answer is C.\nThat is all.", "C"),
    ("The answer is A\nAnswer: A", "A"), ("B", "B"), ("(B)", "B"), ("B.", "B"), ("We see.\n\n  **B**  ", "B"), ("B) Paris", "B"),
    ("(b) Paris", "B"), ("[A]", "A"), ("C: the third", "C"), ("thinking (A), (B)\nB", "B"), ("<answer>B</answer>", "B"),
    ("<answer>(B) Paris</answer>", "B"), ("<answer> b.\n</answer>", "B"), ("hm <answer>B", "B"), ('The answer is "B".', "B"),
    ("Answer：B", "B"), ("答案：Ｂ", "B"), ("答案是 B。", "B"), ("Answer:B", "B"), ("The answer is `B`", "B"),
    (r"The answer is $\boxed{B}$", "B"), (r"\boxed{B) Paris}", "B"), ("**Final Answer**\n\nB", "B"), ("Answer: B) Paris", "B"),
    (r"<think>\boxed{A}? \boxed{C}</think> \boxed{B}", "B"), ("<think>The answer is A</think>\nThe answer is B", "B"),
    ("The answer is A</think>B", "B"), ("<think>The answer is B</think>\n", "B"), ("'B'", "B"),
    *((text, "B") for text in ("Therefore, option B is correct.", "B is the correct answer.", "B is correct.",
        r"$\boxed{\textbf{(B)}\ 12}$", "答案选B。", "故选B。", "故选：B．", "因此，正确选项是B。", "选择 B", "所以应选择 (B)。",
        "B - Paris", "<answer>Option B</answer>", "I would choose B.", "The answer is 'B'.", "B<|eot_id|>", "B</s>",
        "The answer is probably B.", "The answer is definitely (B)", r"\boxed{Option B}",
        "Let me see. A is wrong. C is wrong. So it's B.", "It must be B.", "B\n\nExplanation: Paris is the capital.",
        "B. Paris\n\nExplanation: the capital.", "Choice B", "Option (B)", "**Option B**", "✅ **B. Paris**", "【答案】：B",
        "本题选B", "因此，选B。", "选项A错误，选项B正确。", "La réponse est B.", "Ответ: B")),
])  # fmt: skip
def test_a_choice_is_read(response: str, letter: str) -> None:
    assert choices.choice(response) == letter
    assert choices.verify(response, letter) == 1.0 and choices.verify(response, "H") == 0.0


@pytest.mark.parametrize("response", [
    "", "  \n", "Paris", "A dog", "I think so", "The answer is a dog", "The answer is I think B", "The answer is Because",
    "The answer is A or B", "The answer is (A) and (B)", "The answer is A, B", "The answer is A. No, the answer is B.",
    "Answer: A\nAnswer: B", r"\boxed{A} or \boxed{B}", r"\boxed{A, B}", r"\boxed{AB}", r"\boxed{x^2} and \boxed{B}", r"\boxed{K}",
    r"\boxed{B", "(A) is wrong, (B) is right", "The answer is not (B)", "(A) or (B)", "K", "b", "AB", "<answer>Paris</answer>",
    "<answer>A</answer> <answer>B</answer>", r"\boxed{A} <answer>B</answer>", "<answer>A or B</answer>",
    "A. London\nB. Paris\nWho knows?", "不选B", "If A is correct, then B is correct.", "I doubt that B is correct.",
    "Option B is incorrect.", "A is correct. B is correct.", "B is right above A.", "<answer>K</answer>",
    'The answer is "A" or "B".', "答案：A或B\n答案：B",
])  # fmt: skip
def test_none_or_several_choices_are_none(response: str) -> None:
    assert choices.choice(response) is None and all(choices.verify(response, letter) == 0.0 for letter in choices.LETTERS)


def test_expected_letters() -> None:
    letters = {"B": "B", "(b)": "B", "C.": "C", 0: "A", 3: "D"}
    assert {value: choices.expected_letter(value) for value in letters} == letters
    for value in (None, "", "Paris", "K", "1", "AB", 10, -1, 1.0, True, ["A"]):
        with pytest.raises(RewardError, match="is not a choice; give a letter"):
            choices.verify("A", value)


@pytest.mark.parametrize("response", [
    "10^{10^{10}}", "9" * 100_000, "(" * 50_000, "$" * 50_000, "answer is " * 20_000, "**" * 50_000,
    r"\boxed{" * 20_000, r"\frac{" * 20_000, "\\" * 50_000, "1," * 50_000, "= 1 " * 20_000, "<answer>" * 20_000,
    r"\( " * 20_000, "a" + "\n" * 50_000 + "b", "answer " * 20_000, "answer:" + "*" * 9999,
], ids=lambda response: response[:9])  # fmt: skip
def test_a_long_response_is_searched_at_once(response: str) -> None:
    for read in (found_answer, flexible_answer, choices.choice):
        began = time.thread_time()
        read(response)
        assert time.thread_time() - began < 2.0
    assert choices.choice(response) is None


@pytest.mark.parametrize(("pattern", "match", "response", "score"), [
    (THINK, "full", "<think>a\nb</think>\n<answer>4</answer>", 1.0),
    (THINK, "full", "<think>a</think><answer>4</answer> and more", 0.0),
    (THINK, "full", "well <think>a</think><answer>4</answer>", 0.0),
    (THINK, "search", "well <think>a</think><answer>4</answer> and more", 1.0),
    (r"^<think>(?!.*<think>)(.*?)</think>.*$", "full", "<think>a</think> 4", 1.0),
    (r"^<think>(?!.*<think>)(.*?)</think>.*$", "full", "<think>a<think>b</think> 4", 0.0), (r"\d+", "full", "12", 1.0),
    (r"\d+", "full", "12\n", 0.0), (r"\d+", "search", "a", 0.0), ("", "full", "", 1.0), ("(?-s:.)", "full", "\n", 0.0),
])  # fmt: skip
def test_formats(pattern: str, match: str, response: str, score: float) -> None:
    rewards = build_reward_functions([rule("format", pattern=pattern, lenient=match == "search", weight=2.0)])
    rewards.check({})
    reward = rewards.evaluate("", response, {}, None, 0)
    assert reward.parts == {"format": score} and reward.total == 2.0 * score


def test_a_catastrophic_pattern_ends() -> None:
    began = time.monotonic()
    assert format_score("ab" * 5000, compile_pattern(r"(?:\w+\s?)+#(?=b)|((a|b|ab)*)*c(?<=q)"), whole=True) == 0.0
    assert 0.9 < time.monotonic() - began < 30.0, "it ran into the limit, or the case no longer tests it"


@given(num_tokens=st.integers(0, 200), longest=st.integers(1, 100), data=st.data())
def test_length_is_the_papers_equation(num_tokens: int, longest: int, data: st.DataObject) -> None:
    buffer = data.draw(st.integers(1, longest))
    expected = Fraction(longest - buffer - num_tokens, buffer)
    expected = Fraction(0) if expected > 0 else Fraction(-1) if num_tokens > longest else expected
    score = length_score(num_tokens, longest, buffer)
    assert score == pytest.approx(float(expected), abs=1e-12) and -1.0 <= score <= 0.0


def test_length_of_the_paper_itself() -> None:
    """The first line equals TRL's get_soft_overlong_punishment(max_completion_len=20480, soft_punish_cache=4096)."""
    assert [length_score(n, 20480, 4096) for n in (1, 16384, 18432, 20480, 20481)] == [0.0, 0.0, -0.5, -1.0, -1.0]
    rewards = build_reward_functions([rule("length", buffer_tokens=4, weight=0.5)], max_response_tokens=8)
    assert [rewards.evaluate("", "x", {}, None, 0, num_tokens=n).total for n in (4, 6, 8)] == [0.0, -0.25, -0.5]
    own = build_reward_functions([rule("length", buffer_tokens=2, max_tokens=6)], max_response_tokens=8)
    assert own.evaluate("", "x", {}, None, 0, num_tokens=7).total == -1.0


@pytest.mark.parametrize(("settings", "longest", "reason"), [
    ({"buffer_tokens": 4}, None, "the longest response, which is not known here; add `max_tokens`"),
    ({"buffer_tokens": 9}, 8, "buffer_tokens 9 of rule length is above its max_tokens 8; lower it"),
    ({"buffer_tokens": 4, "max_tokens": 12}, 8, "begins at 8 tokens.*max_response_tokens 8; lower max_tokens"),
])  # fmt: skip
def test_a_length_that_says_nothing_is_refused(settings: dict[str, int], longest: int | None, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        build_reward_functions([rule("length", **settings)], max_response_tokens=longest)


@pytest.mark.parametrize(("text", "value"), [
    ("I have 3 and then 7 apples", 7), ("it costs $1,200.50.", Fraction(2401, 2)), ("from -5 to -3", -3), ("7-5", 5),
    ("10 - 3", 3), ("GPT-4", 4), ("so it is 1/2", Fraction(1, 2)), ("3\n#### 5\nor 6", 5), ("8\nA: 4", 4),
    ("#### Step 1\nadd\n#### Step 2\nSo it is 18.", 18), ("#### Final Answer\n\\boxed{18}", 18), (r"#### \boxed{18}", 18),
    ("#### The answer is 18", 18), ("#### none, 5", None), ("no number", None), ("", None), ("3/0", None), ("9" * 6000, None),
])  # fmt: skip
def test_the_flexible_method_takes_the_last_number(text: str, value: Any) -> None:
    assert flexible_answer(text) == value
    rewards = build_reward_functions([rule("gsm8k", lenient=True)])
    assert rewards.score("", text, {"answer": 11 if value is None else float(value)}, None, 0) == float(value is not None)


DOCUMENTED = "<think>.*</think>.*"


def format_config(pattern: str, **rollout: Any) -> TrainConfig:
    rewards = [{"kind": "verifier", "name": "format", "pattern": pattern}]
    return least_config(Path("run"), rewards=rewards, rollout={"batch_size": 8, "max_response_tokens": 100, **rollout})


@pytest.mark.parametrize("pattern, found", [
    (DOCUMENTED, ["<think>", "</think>"]), (r"^<think>\n.*?\n</think>\n<answer>.*$", ["<think>", "</think>", "<answer>"]),
    (r"\[THINK\].{2,}\[/THINK\]", ["[THINK]", "[/THINK]"]),
    (r"(?:<\|begin_of_thought\|>)?[^<]*\d+(?!x)", ["<|begin_of_thought|>", "x"]), (r".*", []),
])  # fmt: skip
def test_literals_of_a_pattern(pattern: str, found: list[str]) -> None:
    assert literals(pattern) == found


def test_a_tag_that_is_a_special_token(tmp_path: Path) -> None:
    path = save_byte_level(tmp_path, ["a b c <answer>"], additional_special_tokens=["<think>", "</think>"])
    tokenizer = load_tokenizer(TokenizerConfig(path=path))
    (warning,) = unearned_formats(format_config(DOCUMENTED), tokenizer, "2+2?")
    assert "it asks for '<think>', but special tokens (" in warning and "no text in a response" in warning
    assert not unearned_formats(format_config("<answer>.*</answer>"), tokenizer, "2+2?")


def test_a_prompt_that_opens_the_thought_and_a_stop_before_the_rest() -> None:
    for prompt in ("<assistant><think>\n", "<assistant>\n<think>\n\n</think>\n\n"):
        (warning,) = unearned_formats(format_config(DOCUMENTED), CharacterTokenizer(), prompt)
        assert "the first prompt ends with it" in warning
    assert not unearned_formats(format_config(DOCUMENTED), CharacterTokenizer(), "Use <think> and </think>. 2+2?")
    pattern = "<think>.*</think><answer>.*</answer>"
    (warning,) = unearned_formats(format_config(pattern, stop=["</think>"]), CharacterTokenizer(), "2+2?")
    assert "it asks for '</think><answer>', but rollout.stop ends a response there" in warning
    assert not unearned_formats(format_config(pattern, stop=["</answer>"]), CharacterTokenizer(), "2+2?")


# fmt: off
RIGHT = [
    ('<answer>42</answer>', '42'), ('<answer>42.</answer>', '42'), ('(42)', '42'), ('"42"', '42'), ('Answer:42', '42'),
    ('Answer：42', '42'), ('\\$3', '\\$3'), ('3', '\\$3'), ('The answer is 42', '42'), ('The answer is $42$.', '42'),
    ('**42**', '42'), ('Final Answer: **42**', '42'), ('**Final Answer**\n\n42', '42'), ('**Final Answer:** \\(42\\)', '42'),
    ('最终答案是４２。', '42'), ('答案：42', '42'), ('So we get 42.', '42'), ('Therefore, Tom has 42 apples left.', '42'),
    ('x = 42', '42'), ('$x = 42$', '42'), ('\\[ x = 42 \\]', '42'), ('thus\n$$\n42\n$$', '42'), ('\\boxed{42}', '42'),
    ('<think>\\boxed{41}</think> \\boxed{42}', '42'), ('\\boxed{41} no, \\boxed{42}', '42'), ('\\boxed{\\frac{1}{2}}', '0.5'),
    ('\\boxed{\\dfrac12}', '\\frac{1}{2}'), ('\\boxed{50\\%}', '0.5'), ('\\boxed{50\\%}', '50'),
    ('\\boxed{3\\frac{1}{2}}', '3.5'), ('3 1/2', '7/2'), ('1,234', '1234'), ('1.234,5', '1234.5'), ('12,5', '12.5'),
    ('\\boxed{1{,}234}', '1234'), ('\\boxed{1\\,234}', '1234'), ('6.626e-34', '6.626 \\times 10^{-34}'), ('0.333333', '1/3'),
    ('\\boxed{(1,2)}', '(1, 2)'), ('\\boxed{\\{2,1\\}}', '\\{1,2\\}'), ('\\boxed{1, 2}', '2, 1'),
    ('\\boxed{x=1 \\text{ or } x=2}', '1,2'), ('$x=1$ or $x=2$', '1,2'), ('The answer is $1$ and $2$.', '1,2'),
    ('\\boxed{[1,\\infty)}', '[1, \\infty)'), ('\\boxed{(-\\infty,3]\\cup[5,\\infty)}', '(-\\infty, 3] \\cup [5, \\infty)'),
    ('\\boxed{\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}}', '\\begin{bmatrix} 1 & 2 \\\\ 3 & 4 \\end{bmatrix}'),
    ('\\boxed{\\text{Monday}}', 'monday'), ('The answer is Monday.', 'Monday'), ('\\boxed{\\infty}', 'infinity'),
    ('\\boxed{2\\sqrt{2}}', '\\sqrt{8}'), ('2*sqrt(2)', '2\\sqrt{2}'), ('2π', '2\\pi'), ('The answer is 5 km.', '5'),
    ('The answer is 5 kilometers', '5 km'), ('\\boxed{90^\\circ}', '90'), ('\\boxed{\\$5}', '5'), ('$5', '5'),
    ('It costs $5.', '5'), ('The answer is \\$5.', '5'), ('\\boxed{x^2+2x+1}', '(x+1)^2'), ('42.0', '42'),
    ('\\boxed{-\\frac{1}{2}}', '-0.5'), ('-5', '−5'), ('\\boxed{\\frac{\\sqrt{3}}{2}}', '\\sqrt{3}/2'),
    ('\\boxed{5\\text{ cm}}', '5'), ('\\boxed{1} and \\boxed{2}', '1, 2'), ('#### 42', '42'),
    ('The answer is 42 because 6*7 = 42.', '42'), ('The answer is 42. I hope it is correct.', '42'),
    ('Answer: 42\n\nThis answer is reasonable.', '42'), ('\\boxed{y=2x+3}', 'y=2x+3'), ('\\boxed{2x+3}', 'y=2x+3'),
    ('\\boxed{1011_2}', '1011_2'), ('\\boxed{0.\\overline{3}}', '0.\\overline{3}'), ('5!', '120'), ('\\boxed{10^{-3}}', '0.001'),
    ('\\boxed{\\pi}', '\\pi'), ('3.141593', '\\pi'), ('\\boxed{2^{10}}', '1024'), ('2^10', '1024'),
    ('\\boxed{x \\in [1,2]}', '[1,2]'), ('\\boxed{(p,q)=(3,2)}', '(3,2)'), ('\\boxed{\\pm 2}', '2, -2'),
    ('\\boxed{f(x)=x^2}', 'x^2'), ('Yes', 'yes'), ('\\boxed{\\text{(C)}}', 'C'), ('\\boxed{3+4i}', '3+4i'),
    ('<answer>\\boxed{42}</answer>', '42'), ('<think>hm</think><answer>42', '42'), ('$\\frac{1}{2}$ of the total', '1/2'),
    ('So the probability is $\\frac{3}{8}$.', '3/8'), ('= 42', '42'), ('≈ 3.14', '3.14'), ('2000km', '2000'), ('42%', '42'),
    ('1 000 000', '1000000'), ('\\boxed{x<3}', 'x < 3'), ('\\boxed{\\left(\\frac{1}{2}, 3\\right)}', '(0.5, 3)'),
    ('\\boxed{12\\text{ and }13}', '12, 13'), ('the sum is 3 + 4 = 7', '7'), ('\\boxed{\\mathrm{even}}', 'even'),
    ('Answer: A', 'A'), ('\\boxed{8 \\times 10^5}', '800000'), ('\\boxed{\\frac{10}{4}}', '2.5'),
    ('The final answer is: $\\boxed{42}$', '42'), ('So $x=42$ and we are done.', '42'), ('42 apples', '42'),
    ('Answer = 42', '42'), ('42 units', '42'), ('\\boxed{5\\,\\text{m/s}}', '5'), ('\\boxed{25\\pi\\text{ cm}^2}', '25\\pi'),
    ('\\boxed{\\{x: x>3\\}}', '\\{x: x>3\\}'), ('The final answer is $\\boxed{\\frac{63}{400}}$', '\\frac{63}{400}'),
    ('Answer: \\(\\frac{3}{4}\\)', '0.75'), ('**Answer: 42**', '42'), ('### Final Answer\n42', '42'),
    ('**Final Answer**\nThe integers are \\boxed{-2} and \\boxed{1}.', '1, -2'),
    ('<reasoning>6*7 is \\boxed{41}? no</reasoning>\n<answer>42</answer>', '42'), ('7,425,000', '7425000'),
    ('$28$ percent', '28\\%'), ('28 pct', '$28\\%$'), ('\\boxed{28 \\text{ percent}}', '28%'), ('0,25', '0.25'),
    ('\\boxed{\\frac{\\pi}{2}}', '\\pi/2'), ('\\boxed{(3, \\frac{\\pi}{2})}', '\\left( 3, \\frac{\\pi}{2} \\right)'),
    ('\\boxed{-12, -11, -10}', '-12;-11;-10'), ('\\boxed{(7,11), (11,7)}', '(11,7) or (7,11)'), ('\\boxed{4, 5}', 'AB=4, CD=5'),
    ('\\fbox{42}', '42'), ('\\boxed {42}', '42'), ('The answer to the problem is 42.', '42'),
    ('the correct answer is : 42', '42'), ('`42`', '42'), ('Answer: 42 USD', '\\$42'), ('€42', '42'), ('42€', '42'),
    ('\\boxed{\\text{42 cm}}', '42'), ('\\boxed{-\\infty}', '-\\infty'), ('∞', '\\infty'), ('√8', '2\\sqrt{2}'),
    ('x²+1', 'x^2+1'), ('\\boxed{\\ln 2}', '\\ln(2)'), ('\\boxed{e^{2}}', 'e^2'), ('\\boxed{\\frac{a}{b}}', 'a/b'),
    ('\\boxed{\\emptyset}', '\\emptyset'), ('\\boxed{\\mathbb{R}}', '\\mathbb{R}'), ('Thus, the total is **42**.', '42'),
    ('Hence x equals 42.', '42'), ('7 + 35 = 42', '42'), ('a = 1, b = 2', 'a=1, b=2'), ('</think>42', '42'),
    ('<thinking>41</thinking>42', '42'), ('-1/2', '-\\frac12'), ('+5', '5'), ('.5', '0.5'), ('5.', '5'), ('007', '7'),
    ('\\boxed{\\frac{\\frac{1}{2}}{3}}', '1/6'), ('\\boxed{\\sqrt[3]{8}}', '2'), ('\\boxed{3}', '3'), ('\\boxed{10\\%}', '10'),
    ('33.333333%', '1/3'), ('\\boxed{\\dfrac{\\sqrt{2}}{2}}', '\\frac{1}{\\sqrt{2}}'), ('The answer is: $$\\frac{1}{2}$$', '0.5'),
    ('答案是 42', '42'), ('最终答案为：42', '42'), ('100000000000000000000', '100000000000000000000'),
    ("The final answer is $10,455$. I hope it is correct.", "10455"),
    ("Final Answer: The volume of $ABCD$ is 120. I hope so.", "120"), ("Final Answer: The largest $n$ is 34.", "34"),
    (r"is $\boxed{11,\! 111,\! 100}$", "11111100"), ("$28$ %", r"$28\%$"),
    (r"$$\boxed{(2, 2)} \quad \text{and} \quad \boxed{(6, 2)}$$", "$$(2, 2), (6, 2)$$"),
    (r"\boxed{125\textnormal{ miles}}", "$125$ miles"), (r"$\boxed{(3, 7), (2, 3), (3,7)}$", "$(2,3),(3,7)$"),
    (r"$\boxed{k = 45} \quad \text{and} \quad \boxed{n = 2}$", "$$k = 45, n = 2$$"),
    (r"$\begin{pmatrix}1\\2\end{pmatrix} + \begin{pmatrix}5\\6\end{pmatrix}$", r"$\begin{pmatrix}6 \\ 8\end{pmatrix}$"),
    ("$x=1$, $y=2$", "x=1, y=2"), ("\\[\nx = \\frac{1}{2}\n\\]", "0.5"), ("Answer: \\( 9 \\)", "$9$"),
    ('\\boxed{2 \\leq x \\leq 5}', '[2,5]'), ('\\boxed{x \\geq 2}', '[2,\\infty)'),
    ("So, Janet makes $18 every day at the farmers' market.", '18'), ('<|assistant|> The solution: x = 3 or x = -5.', '3,-5'),
    ('The solutions are x = 3 and x = -5.', '-5, 3'), ('因此，小明一共有36个苹果。', '36'), ('答：一共需要36元。', '36'),
    ('故选：B', 'B'), ('所以，最后的结果是36。', '36'), ('The answer is $\\boxed{\\textbf{(B) } 12}$.', '12'),
    ('$\\boxed{\\textbf{(C)}\\ \\frac{3}{5}}$', '\\frac{3}{5}'), ('$\\boxed{\\emptyset}$', '\\varnothing'),
    ('$\\boxed{0.\\overline{3}}$', '\\frac{1}{3}'), ('The answer is 7.<|im_end|>', '7'), ('The answer is 7</s>', '7'),
    ('The answer is $7$.<|eot_id|>', '7'), ('$\\boxed{\\color{red}{7}}$', '7'), ('$\\boxed{\\bf 7}$', '7'),
    ('\\boxed{\\text{all real numbers}}', '\\mathbb{R}'), ('\\boxed{1\\text{ million}}', '1000000'),
    ('<answer>The answer is 42.</answer>', '42'), ('<answer>Final answer: $42$</answer>', '42'),
    ('<answer>She has 42 apples.</answer>', '42'), ('#### Step 1\nadd\n#### Step 2\nmultiply\n\nSo the total is 18.', '18'),
    ('#### Step 1: add 2 and 3\n5\n\n#### Step 2: multiply\nSo the total is 18.', '18'), ('Result: 18', '18'),
    ('Therefore, x = 18', '18'), ('My final answer is therefore 18.', '18'), ('Ans: 18', '18'), ('Ans. 18', '18'),
    ('ANS: 18', '18'), ('She earns $18 each day.', '18'), ('Therefore, he needs 18 more dollars.', '18'),
    ('There are 18 students in the class.', '18'), ('John paid a total of $18.', '18'), ('【答案】36', '36'), ('【答案】B', 'B'),
    ('所以，小明有36元。', '36'), ('即 36', '36'), ('综上所述，x=36。', '36'), ('答：他买了3支笔，一共花了36元。', '36'),
    ('共有36种不同的方法', '36'), ('La respuesta es 36.', '36'), ('Die Antwort ist 36.', '36'), ('La réponse est 36.', '36'),
    ('Ответ: 36', '36'), ('答えは36です。', '36'), ('정답은 36입니다.', '36'), ('\\boxed{\\$3.5\\text{ million}}', '3500000'),
    ('\\boxed{\\text{July } 4}', 'July 4'), ('\\boxed{\\mathrm{(A)}\\ 6}', 'A'), ('\\boxed{(A) 6}', '6'), ('\\boxed{A. 6}', 'A'),
    ('\\boxed{\\textbf{(A)}}', '\\textbf{(A) } 6'), ('\\boxed{6}', '\\textbf{(A) } 6'),
    ('\\boxed{\\text{(A)}~\\frac{1}{3}}', '\\textbf{(A) }\\frac{1}{3}'), ('Answer: 42 ∎', '42'), ('5 p.m.', '5'),
    ('5 p.m.', '5 PM'), ('\\boxed{12 (twelve)}', '12'), ('\\boxed{\\frac{1}{2}\\text{ cup}}', '0.5'),
]  # fmt: skip
WRONG = [
    ("$11a+c$", "$7 = 11a+c$"), ("$0$", "$a + 3z = 0$"), ("$1$", "$2x + z = 1$"), (r"$1 + \frac{1}{e}$", r"$1 - \frac{1}{e}$"),
    ("The answer is hard to find, 42 or so", "42"), ("$f(y)$", "$f(x)$"), ('41', '42'), ('-42', '42'), ('42', '-42'),
    ('420', '42'), ('4.2', '42'), ('\\boxed{41}, maybe 42', '42'), ('The answer is not 42', '42'),
    ('I saw 42 sheep.\nThe answer is 7', '42'), ('\\boxed{42} then \\boxed{43}', '42'),
    ('<think>\\boxed{42}</think>\\boxed{41}', '42'), ('\\boxed{(2,1)}', '(1,2)'), ('\\boxed{(1,2)}', '[1,2]'),
    ('\\boxed{[1,2)}', '[1,2]'), ('41 or 42', '42'), ('\\boxed{41, 42}', '42'), ('\\boxed{42}', '41, 42'),
    ('9.11e-31', '6.626e-34'), ('6.626e-31', '6.626e-34'), ('0', '1e-9'), ('0.0000001', '0.0000002'),
    ('\\boxed{(1, 6.6e-34)}', '(1, 9.1e-31)'), ('42 million', '42'), ('42 thousand', '42'), ('5x', '5'), ('\\boxed{5x}', '5'),
    ('\\boxed{5\\pi}', '5'), ('5 pi', '5'), ('0.5%', '0.5'), ('5%', '0.5'), ('1,234', '1.234'), ('1.234', '1234'),
    ('0,125', '125'), ('0.33', '1/3'), ('3.14', '\\pi'), ('1000.001', '1000.002'), ('1000001', '1000000'),
    ('\\boxed{\\text{listen}}', 'silent'), ('\\boxed{\\text{Tuesday}}', 'Monday'), ('\\boxed{\\infty}', '-\\infty'),
    ('\\boxed{\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}}', '\\begin{pmatrix}1&3\\\\2&4\\end{pmatrix}'), ('\\boxed{x>3}', 'x<3'),
    ('\\boxed{x \\le 3}', 'x < 3'), ('5 km', '5 m'), ('5 cents', '\\$5'), ('1011_3', '1011_2'), ('', '1'), ('no answer', '1'),
    ('\\boxed{42', '42'), ('\\boxed{}', '42'), ('There are 42 students, so I cannot tell.', '42'), ('see page 42', '42'),
    ('42 is a nice number but I do not know', '42'), ('5 + 3', '5'), ('12 - x', '12'), ('1/2', '2/1'), ('3 1/2', '3'),
    ('31/2', '3.5'), ('\\boxed{\\frac{2}{1}}', '1/2'), ('Step 42: unknown', '42'), ('The answer is between 40 and 42', '42'),
    ('The answer is 42 or 43', '42'), ('The answer is 3, 4', '3'), ('\\boxed{x=5}', 'y=5'), ('\\boxed{x+1}', 'x-1'),
    ('\\boxed{\\sqrt{2}}', '2'), ('2^{-1}', '2'), ('5!', '5'), ('50', '0.5'), ('1e5', '15'), ('I have 42', '42x'),
    ('42, 43, 44', '42'), ('\\boxed{4\\sqrt{2}}', '4'), ('yes', 'no'), ('on', 'no'), ('B', 'A'), ('(1,2,3)', '(1,2)'),
    ('\\{1,2\\}', '(1,2)'), ('12abc', '12'), ('\\boxed{\\frac{64}{400}}', '\\frac{63}{400}'), ('\\boxed{3}', '6'),
    ('<answer>41</answer> 42', '42'), ('42 then <answer>41</answer>', '42'), ('Answer: 41\nAnswer: 40', '41'),
    ('\\boxed{-\\frac{1}{2}}', '\\frac{1}{2}'), ('\\boxed{(1,2]}', '[1,2)'), ('\\boxed{\\{1,2\\}}', '(1,2)'),
    ('\\boxed{1, 2, 3}', '1, 2'), ('\\boxed{\\sqrt{3}}', '\\sqrt[3]{3}'), ('\\boxed{x^3}', 'x^2'), ('\\boxed{1.0001}', '1'),
    ('\\boxed{10}', '10^{2}'), ('$5$ million', '5'), ('5 dozen', '5'), ('AZYUK2A', '2'), ('\\boxed{12}', '1, 2'), ('1 2', '12'),
    ('4,2', '42'), ('4 2', '42'), ('2e3', '2'), ('33%', '1/3'), ('\\boxed{90^\\circ}', '\\frac{\\pi}{3}'),
    ('\\boxed{\\text{none}}', '0'), ('I am 42% sure', '42'), ('It is 42 or maybe 43.', '42'), ('not 42', '42'), ('42?', '43'),
    ('\\boxed{\\begin{pmatrix}1\\\\2\\end{pmatrix}}', '\\begin{pmatrix}2\\\\1\\end{pmatrix}'),
    ('\\boxed{\\begin{pmatrix}1&2\\end{pmatrix}}', '\\begin{pmatrix}1\\\\2\\end{pmatrix}'),
    ('\\boxed{[1,2]\\cup[3,4]}', '[1,2]\\cup(3,4]'), ('3 hours', '3 minutes'), ('\\boxed{i}', '1'), ('\\boxed{1+2i}', '1-2i'),
    ('\\boxed{\\pm 2}', '2'), ('1e-10', '2e-10'), ('0', '1e-20'), ('\\boxed{\\pi \\times 10^{-20}}', '2\\pi \\times 10^{-20}'),
    ('1.00000001e-9', '1.1e-9'), ('−42', '42'), ('１２', '21'), ('\\boxed{1\\text{ million}}', '1'),
    ('\\boxed{42\\text{ thousand}}', '42'), ('\\boxed{42\\text{ dozen}}', '42'), ('\\boxed{42\\text{ hundred}}', '42'),
    ('\\boxed{42 \\text{ billion}}', '42'), ('\\boxed{\\frac{1}{2}\\text{ million}}', '\\frac{1}{2}'),
    ('\\boxed{\\sqrt{2}\\text{ million}}', '\\sqrt{2}'), ('\\boxed{42 \\text{ if } n \\text{ is even}}', '42'),
    ('The solutions are x = 3 and x = -5.', '-5'), ('\\boxed{7 \\text{ cm by } 3 \\text{ cm}}', '7'),
    ('\\boxed{2 < x < 5}', '[2,5]'), ('\\boxed{x > 2}', '[2,\\infty)'), ('\\boxed{\\textbf{(B) } 6}', '\\textbf{(A) } 6'),
    ('小明不是36岁。', '36'), ('There are 42 students and 41 left.', '42'), ('#### 42\n#### Step 2: no\nSo it is 41.', '42'),
    ('\\boxed{5π}', '5'), ('\\boxed{5²}', '5'), ('\\boxed{2½}', '2'), ('\\boxed{5(y-x)}', '5(x-y)'), ('\\boxed{5(a-b)}', '5'),
    ('\\boxed{5(ab)}', '5'), ('\\boxed{5⋅x}', '5'), ('\\boxed{5 ≤ x}', '5'), ('\\boxed{5-xy}', '5'), ('5 AM', '5 PM'),
    ('\\boxed{\\frac{1}{2}bh}', '\\frac{1}{2}'),
]  # fmt: skip
# fmt: on


@pytest.mark.parametrize(("score", "cases"), [(1.0, RIGHT), (0.0, WRONG)], ids=["right", "wrong"])
def test_the_table_of_answers(score: float, cases: list[tuple[str, str]]) -> None:
    pytest.importorskip("math_verify")
    found = [(case, grade("", case[0], {ANSWER: expected_text(case[1])})) for case in cases]
    assert [case for case, given in found if given != score] == [] and len(RIGHT) > 100 and len(WRONG) > 100

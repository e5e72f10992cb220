"""The reward sum: weights, verifiers, a user's functions, mistakes found before the run, and failures that are never scores."""

import json
import math
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oppo_megatron.cluster.liveness.failures import FOLDER, ended_within, noted
from oppo_megatron.config.rewards import RewardPart
from oppo_megatron.errors import ConfigError, RewardError
from oppo_megatron.rewards.functions import build_reward_functions
from oppo_megatron.rewards.protocol import ScoreItem
from oppo_megatron.rewards.verifiers import ANSWER_OF, expected_answer, gsm8k_answer, parse_number, verify

GSM8K, MODEL = RewardPart(kind="verifier", name="gsm8k"), RewardPart(kind="model")


def python(entry_point: str, **settings: Any) -> RewardPart:
    return RewardPart(kind="python", entry_point=entry_point, **settings)


def test_weighted_sum_of_all_kinds_and_equal_parts_keep_their_own_labels(folder: Path) -> None:
    rewards = build_reward_functions([
        python("mine:numpy_scalar"), RewardPart(kind="model", weight=0.5), RewardPart(kind="verifier", name="gsm8k", weight=2.0),
        python("mine:Lengths.count", weight=-1.0, options={"scale": 0.1}),
    ])  # fmt: skip
    assert rewards.reads_model()
    reward = rewards.evaluate("q", "#### 5", {"answer": "5"}, model_score=3.0, seq_id=1)
    own = {"mine:Lengths.count": pytest.approx(0.6), "mine:numpy_scalar": 0.5}
    assert reward.parts == {"model": 3.0, "gsm8k": 1.0, **own} and reward.total == pytest.approx(1.5 + 2.0 - 0.6 + 0.5)
    assert rewards.score("q", "#### 5", {"answer": "5"}, 3.0, 1) == reward.total
    rewards = build_reward_functions([GSM8K.model_copy(update={"answer": column}) for column in ("a", "b", "c")])
    reward = rewards.evaluate("", "#### 1", {"a": 1, "b": 2, "c": 1}, None, 0)
    assert list(reward.parts.values()) == [1.0, 0.0, 1.0] and reward.total == 2.0 and not rewards.reads_model()


@pytest.mark.parametrize("score", [None, math.nan, -math.inf])
def test_a_missing_or_broken_model_score_is_an_error(score: float | None) -> None:
    with pytest.raises(RewardError, match="sequence 7.*'model' gave .*(not a number; give one|must be finite: correct)"):
        build_reward_functions([MODEL]).score("", "", {}, score, 7)
    with pytest.raises(RewardError, match="sequence 7: the weighted sum"):
        build_reward_functions([RewardPart(kind="model", weight=1e300)]).score("", "", {}, 1e300, 7)


def test_rows_are_checked_before_the_run_and_incomplete_parts_and_failing_entry_points_all_named(folder: Path) -> None:
    rewards = build_reward_functions([GSM8K, MODEL])
    rewards.check({"answer": "#### 4"})
    with pytest.raises(RewardError, match=r"gsm8k.*no column 'answer'.*it has: other"):
        rewards.check({"other": 1})
    with pytest.raises(RewardError, match=r"gsm8k.*'many' has no number"):
        rewards.check({"answer": "many"})
    with pytest.raises(RewardError, match="sequence 9.*no column 'answer'"):
        rewards.score("", "#### 1", {}, 0.0, 9)
    incomplete = [RewardPart(kind="verifier"), python("no_colon"), RewardPart(kind="model", options={"a": 1})]
    with pytest.raises(ConfigError) as caught:
        build_reward_functions([GSM8K, *incomplete])
    found = caught.value.problems
    assert len(found) == 3 and all(f"rewards.{i}" in problem for i, problem in enumerate(found, start=1))
    with pytest.raises(ConfigError) as caught:
        build_reward_functions([python("mine:absent"), python("absent_module:f")])
    assert len(caught.value.problems) == 2


def test_parts_that_are_known_are_not_evaluated_again() -> None:
    rewards = build_reward_functions([python("tests.e2e.rewards:failing", weight=2.0), GSM8K, MODEL])
    item = ScoreItem(3, "q", "#### 5", {"answer": "5"})
    assert rewards.parts(item, None, of=["gsm8k"]) == {"gsm8k": 1.0}, "no other part is looked at"
    assert rewards.reads_model(["gsm8k", "model"]) and not rewards.reads_model(["gsm8k"])
    with pytest.raises(RewardError, match="no opinion"):
        rewards.evaluate("q", "#### 5", {"answer": "5"}, 0.5, 3)
    reward = rewards.evaluate("q", "#### 5", {"answer": "5"}, 0.5, 3, known={"tests.e2e.rewards:failing": 0.25})
    assert reward.total == 2.0 * 0.25 + 1.0 + 0.5 and list(reward.parts) == ["tests.e2e.rewards:failing", "gsm8k", "model"]
    with pytest.raises(RewardError, match="'tests.e2e.rewards:failing' gave nan"):
        rewards.evaluate("q", "#### 5", {"answer": "5"}, 0.5, 3, known={"tests.e2e.rewards:failing": math.nan})


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_every_real_answer_is_right_by_itself_and_no_other(shared_data: Path) -> None:
    answers = [row["answer"] for name in ("train", "test") for row in rows_of(shared_data / f"gsm8k_{name}.jsonl")]
    assert len(answers) == 7473 + 1319
    for answer in answers:
        bare = answer.rsplit("#### ", 1)[1]
        assert gsm8k_answer(answer) == int(bare.replace(",", ""))
        assert verify("gsm8k", answer, answer) == verify("gsm8k", answer, bare) == 1.0
        assert verify("gsm8k", answer, int(bare.replace(",", "")) + 1) == 0.0
    for row in rows_of(shared_data / "gsm8k_preference_pairs.jsonl"):
        assert verify("gsm8k", row["chosen"], row["ground_truth"]) == 1.0
        assert verify("gsm8k", row["rejected"], row["ground_truth"]) == 0.0


@pytest.mark.parametrize(("text", "value"), [
    ("#### 72", 72), ("work 3\n#### 1,234,567", 1234567), ("####72", 72), ("#### $18.", 18), ("#### -$5", -5), ("#### $-5", -5),
    ("#### \u22125", -5), ("#### +5", 5), ("#### 18.50", Fraction(37, 2)), ("#### .5", Fraction(1, 2)),
    ("#### 1/2", Fraction(1, 2)), ("#### -6 / 4", Fraction(-3, 2)), ("#### 12 apples", 12), ("#### 12%", 12),
    ("#### 4\n#### 5", 5), ("#### 4 #### 5", 5), ("#### 5\nA: 6\n", 6), ("A: 6\n#### 5", 5), ("#### 5\nthat is all", 5),
    ("so\nA: $1,200.0", 1200), ("#### 2000km", 2000), ("#### 5 km/h.", 5), ("#### 20m^2", 20), ("#### **72**", 72),
    ("#### $72$", 72), (r"#### \$72", 72), (r"#### \frac{1}{2}", Fraction(1, 2)), ("#### 3 1/2", Fraction(7, 2)),
    ("####　７２", 72), ("#### 42元", 42), ("#### 1 234 567", 1234567), ("#### 1.5e3", 1500),
    ("<think>#### 5</think>\n#### 6", 6), ("#### 2 million", 2_000_000), ("#### 5万", 50_000), ("#### 2 dozen eggs", 24),
    ("#### The answer is 3", 3), ("#### $\\boxed{3}$", 3), ("#### 3<|im_end|>", 3), ("#### 3</s>\n", 3),
])  # fmt: skip
def test_final_answers(text: str, value: Any) -> None:
    assert gsm8k_answer(text) == value and ANSWER_OF["arithmetic"](text) == value


@pytest.mark.parametrize("text", [
    "", "\n", "72", "the answer is 72", "####", "#### none", "#### 5\n#### ?", "A: 5\nand more", "#### 3+4", "#### 3 + 4",
    "#### 12abc", "#### 1,2", "#### 1,2345", "#### 1.2.3", "#### 1/0", "#### 1/2/3", "#### 1 2", "#### --5", "#### 5=5",
    "A: 5 = 5", "#### 5x", "#### 5 pi", "#### 0,125", "#### 12 - x", "#### 12!", "#### " + "9" * 6000, "#### \u0663",
])  # fmt: skip
def test_no_final_answer(text: str) -> None:
    assert gsm8k_answer(text) is None and verify("gsm8k", text, "5") == 0.0


@pytest.mark.parametrize(("text", "value"), [
    ("12", 12), ("1+2=3\n3+4=7\n", 7), ("so 7 = 14/2", 7), ("x\n#### 4", 4), ("7 = ", None), ("1+2=3\nand so on", None),
    ("3+4", None), ("####\n3=3", None),
])  # fmt: skip
def test_arithmetic_also_takes_an_unmarked_last_line(text: str, value: int | None) -> None:
    assert ANSWER_OF["arithmetic"](text) == value


@given(value=st.fractions(max_denominator=10**6), name=st.sampled_from(sorted(ANSWER_OF)))
def test_every_fraction_equals_itself_however_scaled(value: Fraction, name: str) -> None:
    scaled = f"{value.numerator * 3}/{value.denominator * 3}"
    assert verify(name, f"#### {scaled}", str(value)) == 1.0
    assert verify(name, f"#### {value + 1}", str(value)) == 0.0


@given(value=st.decimals(allow_nan=False, allow_infinity=False, places=3), text=st.text())
def test_every_decimal_is_exact_with_or_without_commas_and_no_text_breaks_a_verifier(value: Any, text: str) -> None:
    assert parse_number(f"{value:f}") == parse_number(f"{value:,f}") == Fraction(value)
    for response in (text, f"#### {text}", f"A: {text}"):
        assert {verify(name, response, "1") for name in ANSWER_OF} <= {0.0, 1.0}


@pytest.mark.parametrize(("value", "number"), [
    (72, 72), (10**400, 10**400), (0.1, Fraction(1, 10)), ("72", 72), (" $1,000 ", 1000), ("a\n#### 3", 3), ("b\nA: 4", 4),
    ("1/2", Fraction(1, 2)),
])  # fmt: skip
def test_expected_answers(value: Any, number: Any) -> None:
    assert expected_answer(value) == number


@pytest.mark.parametrize("value", [None, "", "many", "####", True, float("nan"), float("inf"), [1], "7+5", "the answer is 7"])
def test_an_expected_answer_without_a_number_is_an_error(value: Any) -> None:
    with pytest.raises(RewardError, match="has no number"):
        verify("gsm8k", "#### 5", value)


MODULE = """\
import json, os, sys
import numpy
number = 5
def two(prompt, response): return 1.0
def four(prompt, response, fields, scale): return scale
def named(prompt, response, *, row): return 1.0
async def later(prompt, response, fields): return 1.0
def each(prompt, response, fields): yield 1.0
class Judge:
    def __call__(self, prompt, response, fields): return 1.0
def nothing(prompt, response, fields): response.strip()
def text(prompt, response, fields): return "0.5"
def several(prompt, response, fields): return [0.5, 0.5]
def array(prompt, response, fields): return numpy.array([0.5])
def nan(prompt, response, fields): return float("nan")
def lookup(prompt, response, fields):
    return fields["answer"]
def library(prompt, response, fields):
    return json.loads(response)
def silent(prompt, response, fields):
    raise ValueError
def leaves(prompt, response, fields): os._exit(1)
def leaves_well(prompt, response, fields): os._exit(0)
def exits(prompt, response, fields): sys.exit(3)
def stops(prompt, response, fields): sys.exit("no judge")
def forks(prompt, response, fields):
    child = os.fork()
    if not child:
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
judge = Judge()
def infinite(prompt, response, fields): return float("inf")
def huge(prompt, response, fields): return 10**400
def numpy_scalar(prompt, response, fields): return numpy.float32(0.5 + len(fields.pop("answer", [])) * 0)
class Lengths:
    @staticmethod
    def count(prompt, response, fields, scale=1.0): return len(response) * scale
"""

BEFORE: dict[str, tuple[str, dict[str, Any], str]] = {
    "too few parameters": ("mine:two", {}, r"takes \(prompt, response\) \(line 4\), but is called with .*define it as `def two"),
    "a parameter too many": ("mine:four", {}, r"missing a required argument: 'scale'; define it as .*or correct options"),
    "an option of another name": ("mine:two", {"x": 1}, "and options x: .*define it as"),
    "another keyword": ("mine:named", {}, r"takes \(prompt, response, \*, row\).*too many positional"),
    "async": ("mine:later", {}, "is async, and a call of it gives no number; define it as `def later"),
    "a generator": ("mine:each", {}, "is a generator, and a call of it gives no number"),
    "a class": ("mine:Judge", {}, "is a class, and to call it gives no number; name a function"),
    "a number": ("mine:number", {}, "is of type int, not a function of"),
    "a name near another": ("mine:lokup", {}, "has no 'lokup'; did you mean 'lookup'"),
    "a file without its ending": ("sub.mine2:f", {}, r"name the file: `sub/mine2\.py:f`"),
    "a file that is not there": ("sub/absent.py:f", {}, r"sub/absent\.py does not exist \(looked from .*correct the path"),
    "a syntax error": ("wrong.py:f", {}, r"IndentationError: expected .*wrong\.py:2\); correct it"),
    "an import that is not there": ("lacking.py:f", {}, r"No module named 'torchmetricz' at .*lacking\.py:1 in .*install what"),
    "an exit on import": ("leaving.py:f", {}, r"sys\.exit: 2 at .*leaving\.py:2 .*importing it must do nothing but define"),
    "an error on import": ("failing.py:f", {}, r"ZeroDivisionError: division by zero at .*failing\.py:1 .*correct it"),
    "no module at all": ("nowhere.at_all:f", {}, "install it, put its folder on PYTHONPATH, or name a file"),
    "no function": ("mine", {}, r"must be `package.module:function` or `folder/file\.py:function`"),
    "a path with a function but no ending": ("sub/mine2:f", {}, r"must be `package.module:function`"),
}  # fmt: skip

WITHIN: dict[str, str] = {
    "nothing": "gave None .NoneType., not a number; give one finite float: without `return`",
    "text": "gave '0.5' .str., not a number",
    "several": r"gave \[0.5, 0.5\] .list., not a number; .*called once for each response",
    "array": r"gave array\(\[0.5\]\) .ndarray., not a number; .*`.item\(\)` makes one",
    "nan": "gave nan; a reward must be finite: correct the function", "infinite": "gave inf; a reward must be finite",
    "huge": "gave inf; a reward must be finite",
    "lookup": r"failed: KeyError: 'answer' at \S*mine\.py:17 in lookup; it must give a number for every response",
    "library": r"failed: JSONDecodeError: .* at \S*mine\.py:19 in library",
    "silent": r"failed: ValueError at \S*mine\.py:21 in silent",
    "leaves": r"it asked to end the process \(ProcessExit: os\._exit\(1\) at \S*mine\.py:22 in leaves\)",
    "leaves_well": r"it asked to end the process \(ProcessExit: os\._exit\(0\) at \S*mine\.py:23",
    "exits": r"it asked to end the process \(sys\.exit: 3 at \S*mine\.py:24 in exits\); return a number, or raise",
    "stops": r"it asked to end the process \(sys\.exit: no judge at",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    here, modules = tmp_path / "here", tmp_path / "modules"
    (here / "sub").mkdir(parents=True)
    modules.mkdir()
    (modules / "mine.py").write_text(MODULE)
    for name, text in {
        "mine.py": MODULE, "sub/mine2.py": "def f(prompt, response, fields): return 1.0\n", "failing.py": "1 / 0\n",
        "wrong.py": "def f(prompt, response, fields):\nreturn 1.0\n", "lacking.py": "import torchmetricz\n",
        "leaving.py": "import sys\nsys.exit(2)\n",
    }.items():  # fmt: skip
        (here / name).write_text(text)
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(modules)
    for name in ("mine", "sub", "sub.mine2"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return here


@pytest.mark.parametrize("mistake", BEFORE)
def test_a_mistake_is_found_before_the_run(folder: Path, mistake: str) -> None:
    entry_point, options, says = BEFORE[mistake]
    with pytest.raises(ConfigError, match=f"(?s){says}"):
        build_reward_functions([python(entry_point, options=options)])


@pytest.mark.parametrize("name", WITHIN)
def test_a_mistake_within_a_call_names_row_function_and_line(folder: Path, name: str) -> None:
    rewards = build_reward_functions([python(f"mine:{name}")])
    with pytest.raises(RewardError, match=WITHIN[name]) as caught:
        rewards.evaluate("p", "not json", {"id": 1}, None, 3, "rows.jsonl:17")
    assert str(caught.value).startswith(f"sequence 3 (of rows.jsonl:17): reward part 'mine:{name}'")
    assert "\n" not in str(caught.value) and os._exit.__module__ == "posix"
    assert name != "lookup" or isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("entry_point", ["sub/mine2.py:f", "./sub/mine2.py:f", "sub.mine2:f", "mine:judge"])
def test_functions_of_files_and_modules(folder: Path, monkeypatch: pytest.MonkeyPatch, entry_point: str) -> None:
    if entry_point.startswith("sub."):
        monkeypatch.syspath_prepend(folder)
    assert build_reward_functions([python(entry_point)]).score("", "", {}, None, 0) == 1.0
    assert build_reward_functions([python("mine:forks")]).score("", "", {}, None, 0) == 7.0, "it may end what it starts"


def test_an_isolated_function_is_told_of_likewise(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"takes \(prompt, response\).*define it as"):
        build_reward_functions([python("mine:two", isolate=True)])
    rewards = build_reward_functions([python("mine.py:lookup", isolate=True)])
    with pytest.raises(RewardError, match=r"sequence 3 \(of a:1\).*KeyError: 'answer' at \S*mine\.py:17 in lookup"):
        rewards.evaluate("", "", {}, None, 3, "a:1")
    rewards.close()


def test_what_a_process_had_called_as_it_ended_is_left_for_its_parent(tmp_path: Path) -> None:
    with noted(1, "nothing", {}), noted(2, "a function", {FOLDER: str(tmp_path)}):
        assert ended_within(tmp_path) == {2: "a function"}
    assert ended_within(tmp_path) == {}
    crash = (
        "import ctypes\nfrom oppo_megatron.cluster.liveness.failures import noted\n"
        "with noted(3, 'the reward function f'):\n    ctypes.string_at(0)\n"
    )
    code = subprocess.run([sys.executable, "-c", crash], env={**os.environ, FOLDER: str(tmp_path)}).returncode
    assert code < 0 and ended_within(tmp_path) == {3: "the reward function f"}

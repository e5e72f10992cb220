"""Rules in processes of their own: mathematics by math-verify, and programs against tests."""

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oppo_megatron.clock import ByTime
from oppo_megatron.config.rewards import RewardPart
from oppo_megatron.data.prompts import PromptSet
from oppo_megatron.data.rows import Quarantine
from oppo_megatron.errors import ConfigError, DataError, RewardError
from oppo_megatron.records import Prompt
from oppo_megatron.rewards import rule_parts
from oppo_megatron.rewards.functions import RewardSum, Summand, build_reward_functions
from oppo_megatron.rewards.isolation import Unanswered
from oppo_megatron.rewards.protocol import ScoreItem
from oppo_megatron.rewards.rule_parts import IsolatedRule, Trial
from oppo_megatron.rewards.rules.code_tests import program_of, read_tests
from oppo_megatron.rewards.rules.math_answers import ENTRY_POINT, expected_text, may_take_long
from oppo_megatron.train.inputs import Inputs, try_answers, without_refused
from tests.support.configs import least_config
from tests.support.processes import runs, wait_for
from tests.support.tokenizers import CharacterTokenizer

ASSERTS = ["assert double(1) == 2", "assert double(2) == 4", "assert double(-3) == -6", "assert double('a') == 'aa'"]
PAIRS = [{"input": "3\n4\n", "output": "7"}, {"input": "1\n-1\n", "output": "0\n"}]
SUM = "print(int(input()) + int(input()))"


def code(wall_s: float = 30.0, **settings: Any) -> RewardSum:
    part = RewardPart(kind="verifier", name="code", answer="tests", isolate=512, timeout_s=wall_s, **settings)
    return build_reward_functions([part])


def mathematics(wall_s: float) -> RewardSum:
    return build_reward_functions([RewardPart(kind="verifier", name="math", isolate=2048, timeout_s=wall_s)])


@pytest.fixture(scope="module")
def math() -> Iterator[RewardSum]:
    with closing(mathematics(wall_s=60.0)) as rewards:  # the first comparison imports sympy
        yield rewards


@pytest.fixture(scope="module")
def every() -> Iterator[RewardSum]:
    with closing(code()) as rewards:
        yield rewards


@pytest.fixture(scope="module")
def share() -> Iterator[RewardSum]:
    with closing(code(lenient=True)) as rewards:
        yield rewards


def scored(rewards: RewardSum, program: str, tests: Any) -> float:
    return rewards.score("", f"So:\n```python\n{program}\n```\nThat is it.", {"tests": tests}, None, 0)


@pytest.mark.parametrize(("response", "expected", "score"), [
    (r"so \boxed{\frac{2}{4}}", "0.5", 1.0), (r"\boxed{x^2+2x}", "x^2+2x+1", 0.0), (r"\boxed{1,234}", 1234, 1.0),
    ("The answer is 12.", 12, 1.0), ("The answer is 13.", 12.0, 0.0),
    (r"\boxed{\text{east}}", r"So he goes \boxed{\text{east}}.", 1.0), (r"\boxed{10^{30}}", 10**30, 1.0), ("no answer", "1", 0.0),
])  # fmt: skip
def test_mathematical_equality(math: RewardSum, response: str, expected: Any, score: float) -> None:
    assert math.score("", response, {"answer": expected}, None, 0) == score


@pytest.mark.long
def test_a_hanging_comparison_costs_a_row_its_time_and_not_the_run() -> None:
    impatient, began = mathematics(wall_s=15.0), time.monotonic()
    assert impatient.score("", r"\boxed{10^{10^{10}}}", {"answer": "12"}, None, 0) == 0.0
    assert 14.0 < time.monotonic() - began < 60.0, "it ran into the limit, or the case no longer tests it"
    assert impatient.score("", r"\boxed{12}", {"answer": "12"}, None, 1) == 1.0
    impatient.close()


def stuck_rule() -> tuple[list[tuple[str, str]], IsolatedRule]:
    """A rule whose process is stuck over expected answers and responses that have `^^`, and what it was asked."""
    asked: list[tuple[str, str]] = []

    def score(prompt: str, response: str, fields: dict[str, Any]) -> float:
        asked.append((response, fields["answer"]))
        if "^^" in response + fields["answer"]:
            raise Unanswered("no score within 5 s")
        return float(response == fields["answer"])

    trial = Trial("probe", lambda fields: not fields["answer"].isdigit(), lambda fields: "^" in fields["answer"])
    return asked, IsolatedRule(lambda: mock.Mock(side_effect=score), lambda fields: {"answer": fields["answer"]}, 1, trial=trial)


def ask(rule: IsolatedRule, response: str, answer: str) -> float:
    rule.request([ScoreItem(1, "", response, {"answer": answer})])
    return rule.result(1)


def test_every_answer_that_cannot_be_compared_is_found_and_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule_parts, "ByTime", partial(ByTime, every_s=0.0))
    (asked, rule), told = stuck_rule(), list[str]()
    rows = [{"answer": answer} for answer in ("1", "x", "2^^9", "x", "2^^9", "3")]
    found = rule.unusable(rows, told.append, every=True)
    assert sorted(found) == [2, 4] and "the expected answer 2^^9 cannot be compared: no score within 5 s" in found[2]
    assert asked == [("probe", "x"), *[("probe", "2^^9")] * 2], "numbers need no trial, and what fails has a second one"
    assert told == ["trying expected answers: 1 of 2, 0s", "trying expected answers: 2 of 2, 0s"]
    assert ask(rule, "7", "2^^9") == 0.0 == ask(rule, "7^^7", "x") and len(asked) == 4, "the row was tried: no more time"
    rule.close()
    asked, rule = stuck_rule()
    assert rule.unusable(rows, told.append, every=False) == found and asked == [("probe", "2^^9")] * 2, "a run tries the doubtful"
    rule.close()


@pytest.mark.parametrize(("answer", "long"), [
    (r"2x^2+\frac{3\sqrt{5}}{7}", False), (r"(-\infty, -2] \cup (3, \infty)", False), (r"x \ge 2", False), ("2^{99}", False),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", False), (r"(a+b)^3", False), ("12345", False), (r"\text{Monday}", False),
    (r"10^{10^{10}}", True), ("9^9^9", True), ("((9^9)^9)^9", True), ("2^{100}", True), ("100000!", True), (r"\sin^2 x", True),
    (r"(a+b+c+d+f)^{12}", True), (r"x^5 + x < 3", True), (r"\int_0^1 x dx", True), (r"\sqrt2+\sqrt3+\sqrt5", True),
    ("x+" * 31 + "1", True), ("1234567890123456x", True), (r"\foo{2}x", True), ("|x|", True), (r"(a, b) \cup (c, d)", True),
])  # fmt: skip
def test_answers_that_are_surely_compared_at_once_are_told_by_their_form(answer: str, long: bool) -> None:
    assert may_take_long({"answer": expected_text(answer)}) == long


def test_at_run_time_a_row_that_cannot_be_compared_is_named_once_and_scores_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    asked, rule = stuck_rule()
    assert ask(rule, "5^^5", "x") == 0.0 == ask(rule, "6^^6", "x") and ask(rule, "x", "x") == 1.0
    assert capfd.readouterr().err == "", "the responses are wrong, not the row"
    assert [ask(rule, text, "2^^9") for text in ("7", "8", "7")] == [0.0, 0.0, 0.0]
    assert asked[-2:] == [("7", "2^^9"), ("probe", "2^^9")]
    assert capfd.readouterr().err.count("2^^9 cannot be compared: no score within 5 s; every response to its row") == 1
    assert ask(rule, "3", "3") == 1.0
    rule.close()


@pytest.mark.parametrize("bad_rows", ["error", "quarantine"])
def test_every_row_that_cannot_be_compared_is_named(bad_rows: str) -> None:
    answers = ["2^^9", "1", "2^^9", "x"]
    rows = [Prompt(-1, i, "?", (1,), {"answer": answer}, f"rows.jsonl:{i + 1}") for i, answer in enumerate(answers)]
    rewards, quarantine = RewardSum([Summand("math", 1.0, stuck_rule()[1])]), Quarantine()
    held = [replace(row, fields={"answer": "4^^4"}, place="held.jsonl:7") for row in rows[:1]] + rows[1:2]
    judges = RewardSum([Summand("math", 1.0, stuck_rule()[1])])
    cut = frozenset([0, 3])
    inputs = Inputs(CharacterTokenizer(), rewards, PromptSet(rows, cut), PromptSet(held), judges, quarantine, None, [])
    data = {"path": "rows.jsonl", "bad_rows": bad_rows}
    settings = least_config(Path("run"), data=data, evaluation={"data": data, "metrics": [{"kind": "verifier", "name": "gsm8k"}]})
    if bad_rows == "error":
        with pytest.raises(DataError, match=r"2 rows cannot be used.*\n  rows.jsonl:1: reward part 'math': .*2\^\^9.*\n.*:3: "):
            try_answers(inputs, settings)
        return
    left = try_answers(inputs, settings)
    places = [f"{entry['file']}:{entry['line']}" for entry in quarantine.entries]
    assert places == ["rows.jsonl:1", "rows.jsonl:3", "held.jsonl:7"]
    assert [row.row for row in left.prompts.rows] == [1, 3] and left.heldout is not None and left.heldout.rows == held[1:]
    assert left.counts()["data"] == {"prompts": 2, "quarantined": 2, "duplicates": 1, "truncated": 1}
    with pytest.raises(DataError, match=r"all 4 rows were set aside"):
        without_refused(inputs, settings, [dict.fromkeys(range(4), "why"), {}])
    with pytest.raises(ConfigError, match="critic_warmup_steps is 1, but 1 x 2 prompts are 1 steps"):
        without_refused(inputs, settings.with_values({"ppo.critic_warmup_steps": 1}), [{0: "why", 1: "why"}, {}])


@pytest.mark.long
def test_a_hostile_answer_is_found_in_bounded_time() -> None:
    rewards, began = mathematics(wall_s=10.0), time.monotonic()
    answers = (r"\$3", r"x^{10^{10^{10}}}+10^{10^{10}}", r"\frac{1}{2}", "Monday", r"\frac{1}{", "10^9")
    rows = [{"answer": answer} for answer in answers]
    told = list[str]()
    assert list(rewards.unusable(rows, told.append)) == [1]
    assert told[-1].startswith("1 expected answers are not understood") and r"\frac{1}{" in told[-1].replace("\\\\", "\\")
    assert time.monotonic() - began < 60.0 and rewards.score("", r"\boxed{0.5}", rows[2], None, 0) == 1.0
    rewards.close()


@pytest.mark.parametrize("response", [
    "{" * 30_000 + "}" * 30_000, r"\boxed{" + "(" * 3000, r"\boxed{" + "(" * 900 + "1" + ")" * 900 + "}",
    r"\boxed{" + r"\frac{1}{" * 300 + "2" + "}" * 301,
])  # fmt: skip
def test_no_nesting_ends_a_rule(math: RewardSum, response: str) -> None:
    assert math.score("", response, {"answer": "x+1"}, None, 0) == 0.0
    for name, answer in (("gsm8k", "1"), ("multiple_choice", "B"), ("arithmetic", "1")):
        rule = build_reward_functions([RewardPart(kind="verifier", name=name)])
        assert rule.score("", response, {"answer": answer}, None, 0) == 0.0


@pytest.mark.parametrize("value", [None, "", " ?", [1], True, "x" * 3000, float("inf")])
def test_an_expected_answer_without_mathematics_is_refused_before_the_run(math: RewardSum, value: Any) -> None:
    with pytest.raises(RewardError, match="'math': the expected answer .* is not mathematics; give a number"):
        math.check({"answer": value})
    with pytest.raises(RewardError, match="sequence 3: reward part 'math' failed: .* is not mathematics"):
        math.score("", "1", {"answer": value}, None, 3)
    with pytest.raises(RewardError, match="no column 'answer' .*nearest is `answer: answers`"):
        math.check({"answers": "1"})


def test_a_process_loads_the_library_before_its_first_response_has_a_limit() -> None:
    asked = f"import sys, {ENTRY_POINT.partition(':')[0]}; sys.exit('math_verify' not in sys.modules)"
    assert subprocess.run([sys.executable, "-c", asked], check=False).returncode == 0


def test_without_the_extra_the_command_is_named_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not Path(path, "math_verify").is_dir()])
    monkeypatch.delitem(sys.modules, "math_verify", raising=False)
    with pytest.raises(ConfigError, match=r"math-verify, which cannot be imported here .*; pip install 'oppo-megatron\[math\]'"):
        build_reward_functions([RewardPart(kind="verifier", name="math")])


@pytest.mark.parametrize(("program", "passed"), [
    ("def double(x): return x * 2", 4), ("def double(x): return x + x", 4), ("def double(x): return abs(x) * 2", 2),
    ("def double(x): return 0", 0), ("def double(x) return", 0), ("def double(x): raise SystemExit(0)", 0),
    ("import os; os._exit(0)", 0), ("raise KeyboardInterrupt", 0), ("import ctypes; ctypes.string_at(0)", 0),
    ("filled = bytearray(1 << 30)\ndef double(x): return x * 2", 0),
    ("import os\nfor n in range(3, 99):\n  try: os.write(n, b'{\"passed\": true}\\n' * 8)\n  except OSError: pass", 0),
    ("open('large', 'wb').write(bytes(1 << 25))\ndef double(x): return x * 2", 0),
    ("import os, signal; os.kill(os.getppid(), signal.SIGKILL)", 0), ("print('x' * 100000)\ndef double(x): return x * 2", 4),
    ("__name__ == '__main__' and exit(1)\ndef double(x): return x * 2", 4),
])  # fmt: skip
def test_asserts(every: RewardSum, share: RewardSum, program: str, passed: int) -> None:
    assert scored(share, program, ASSERTS) == passed / 4 and scored(every, program, ASSERTS) == float(passed == 4)


@pytest.mark.parametrize(("program", "passed"), [
    (SUM, 2), ("import sys\nprint(sum(map(int, sys.stdin.read().split())), '\\n')\nsys.exit()", 2),
    (f"import threading\nthreading.Thread(target=lambda: {SUM}).start()", 2), (f"if __name__ == '__main__':\n  {SUM}", 2),
    ("print(7)", 1), (f"{SUM}\nraise ValueError", 0), (f"{SUM}\nimport sys; sys.exit(1)", 0),
    (f"{SUM}\nprint()\nprint('more')", 0), ("while True: print('x' * 1000)", 0), ("", 0),
])  # fmt: skip
def test_standard_input_and_output(every: RewardSum, share: RewardSum, program: str, passed: int) -> None:
    assert scored(share, program, PAIRS) == passed / 2
    assert scored(every, program, {"inputs": ["3\n4\n", "1\n-1\n"], "outputs": ["7", "0"]}) == float(passed == 2)


def test_an_endless_program_costs_a_row_its_time_and_leaves_nothing(share: RewardSum) -> None:
    slow = "import time\ndef double(x):\n  time.sleep(60 * (x != 1))\n  return 2"
    impatient, began = code(wall_s=4.0, lenient=True), time.monotonic()
    assert scored(impatient, slow, ASSERTS) == 0.25 and 3.5 < time.monotonic() - began < 60.0
    impatient.close()
    away = f"60.0{os.getpid()}"
    leave = f"import subprocess\nsubprocess.Popen('setsid sleep {away} & sleep {away}', shell=True)\n"
    assert scored(share, f"{leave}{SUM}", PAIRS) == 1.0
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", away]]


def test_a_killed_run_leaves_no_program(tmp_path: Path) -> None:
    program = f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)"
    ask = f"""
        from tests.unit.test_rewards_rule_processes import PAIRS, code, scored
        scored(code(wall_s=50), {program!r}, PAIRS)
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(ask)], env=environment) as run:
        wait_for(lambda: (tmp_path / "pid").is_file() and (tmp_path / "pid").read_text())
        run.kill()
    wait_for(lambda: not runs(int((tmp_path / "pid").read_text())))


def test_a_sequence_of_which_another_part_failed_is_asked_for_anew() -> None:
    """Names of sequences come again in a service."""
    parts = [RewardPart(kind="verifier", name="gsm8k"), RewardPart(kind="verifier", name="code", answer="tests")]
    block = "```\nprint({})\n```\n#### 1"
    with closing(build_reward_functions(parts)) as rewards:
        with pytest.raises(RewardError, match="no column 'answer'"):
            rewards.score("", block.format(8), {"tests": PAIRS[:1]}, None, 5)
        assert not rewards.requested(5)
        assert rewards.score("", block.format(7), {"tests": PAIRS[:1], "answer": 1}, None, 5) == 2.0


def test_programs_make_no_socket_and_see_neither_the_runs_folder_nor_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TOKEN", "secret")
    network = "import socket\ntry: socket.socket(); print('open')\nexcept PermissionError: print('cut')"
    alone = "import os\nprint(os.environ.get('REWARD_TOKEN'), os.listdir())"
    with closing(code()) as rewards:
        assert rewards.describe() == ["reward code: the programs reach no network"]
        assert scored(rewards, network, [{"input": "", "output": "cut"}]) == 1.0
        assert scored(rewards, alone, [{"input": "", "output": "None []"}]) == 1.0


def test_several_processes_check_at_once_and_each_response_has_its_own_score(tmp_path: Path) -> None:
    """Each of three programs waits for the two others."""
    others = set(psutil.Process().children(recursive=True))
    rewards = code(wall_s=30)
    meet = "import os, time\nopen({0!r}, 'w').close()\nwhile len(os.listdir({1!r})) < 3: time.sleep(0.01)\nprint(7)"
    programs = [meet.format(f"{tmp_path}/{number}", str(tmp_path)) for number in range(3)] + ["print(7)", "print(8)"]
    items = [ScoreItem(i, "", f"```\n{program}\n```", {"tests": PAIRS[:1]}) for i, program in enumerate(programs)]
    assert rewards.asks_services
    rewards.request(items)
    assert all(rewards.requested(item.seq_id) for item in items)
    found = [rewards.score(item.prompt, item.response, item.fields, None, item.seq_id) for item in items]
    assert found == [1.0, 1.0, 1.0, 1.0, 0.0] and not rewards.requested(0)
    rewards.request([ScoreItem(9, "", "```\nwhile True: pass\n```", {"tests": PAIRS})])
    time.sleep(0.3)
    began = time.monotonic()
    rewards.close()
    assert time.monotonic() - began < 20.0, "what is under way is not waited for"
    assert set(psutil.Process().children(recursive=True)) <= others


@pytest.mark.parametrize(("response", "program"), [
    ("```python\na\n```", "a\n"), ("```\na\nb\n```", "a\nb\n"), ("```py\na\n```\n```python3\nb\n```", "b\n"),
    ("```python\na\n```\nrun:\n```bash\nls\n```", "a\n"), ("~~~Python\na\n~~~", "a\n"), ("```python\n```", "\n"),
    ("````python\n```\na\n````", "```\na\n"), ("```python\na\n```\n```python\nb", "a\n"), ("  ```python\na\n  ```", "a\n"),
    ("no code", None), ("```python\na", None), ("```bash\nls\n```", None), ("print(7)", None), ("`a`", None), ("", None),
])  # fmt: skip
def test_the_last_block_of_python_is_the_program(response: str, program: str | None) -> None:
    assert program_of(response) == program


@given(before=st.text(alphabet="ab`\n ~", max_size=30), program=st.text(alphabet="xy =1\n", min_size=1, max_size=20))
def test_a_block_behind_any_text_is_the_program_unless_that_text_opens_one(before: str, program: str) -> None:
    found = program_of(f"{before}\n```python\n{program}\n```")
    assert found == f"{program}\n".replace("\r", "") or "```" in before or "~~~" in before


def test_the_forms_of_tests() -> None:
    code, pairs = [{"code": "assert f() == 1"}], [{"stdin": "1", "stdout": "2"}]
    assert read_tests("assert f() == 1") == read_tests(["assert f() == 1"]) == read_tests('["assert f() == 1"]') == code
    lists = {"inputs": ["1"], "outputs": ["2"]}
    assert read_tests([{"input": "1", "output": "2"}]) == read_tests(lists) == read_tests(json.dumps(lists)) == pairs


@pytest.mark.parametrize(("value", "reason"), [
    ([], "are not tests"), ("[]", "are not tests"), (None, "are not tests"), (3, "are not tests"), ("", "neither code nor"),
    ({"inputs": ["1"], "outputs": []}, "as many `inputs`"), ({"inputs": 3}, "as many `inputs`"),
    ({"fn_name": "f", "inputs": [], "outputs": []}, "by `fn_name`, which is not supported"),
    (["assert f( == 1"], "is not Python"), (["assert " + "not " * 3000 + "f()"], "is not Python"),
    ([3], "neither code nor"), ([{"input": "1"}], "neither code nor"), ([{"input": [1], "output": "1"}], "neither code nor"),
])  # fmt: skip
def test_tests_that_are_none_are_refused_before_the_run(share: RewardSum, value: Any, reason: str) -> None:
    with pytest.raises(RewardError, match=f"'code': .*{reason}.*; give a list of asserts, or of"):
        share.check({"tests": value})
    with pytest.raises(RewardError, match="'code': the row has no column 'tests'"):
        share.check({"answer": "1"})

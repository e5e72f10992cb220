"""Mistakes with reward functions: found before the run where they can be, else told with the user's line and the row."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.cluster.liveness.failures import FOLDER, ended_within, noted
from oppo_megatron.config.rewards import RewardPart
from oppo_megatron.errors import ConfigError, RewardError
from oppo_megatron.rewards.functions import build_reward_functions

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
"""

BEFORE: dict[str, tuple[str, dict[str, Any], str]] = {
    "too few parameters": ("mine:two", {}, r"takes \(prompt, response\) \(line 4\), but is called with .*define it as `def two"),
    "a parameter too many": ("mine:four", {}, r"missing a required argument: 'scale'; define it as .*or correct options"),
    "an option of another name": ("mine:two", {"x": 1}, "and options x: .*define it as"),
    "another keyword": ("mine:named", {}, r"takes \(prompt, response, \*, row\).*too many positional"),
    "async": ("mine:later", {}, "is async, and a call of it gives no number; define it as `def later"),
    "a generator": ("mine:each", {}, "is a generator, and a call of it gives no number"),
    "a class": ("mine:Judge", {}, "is a class, and to call it gives no number; name a function"),
    "a number": ("mine:number", {}, "is a int, not a function of"),
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
    "nan": "gave nan; a reward must be finite: correct the function",
    "infinite": "gave inf; a reward must be finite",
    "huge": "gave inf; a reward must be finite",
    "lookup": r"failed: KeyError: 'answer' at \S*mine\.py:17 in lookup; it must give a number for every response",
    "library": r"failed: JSONDecodeError: .* at \S*mine\.py:19 in library",
    "silent": r"failed: ValueError at \S*mine\.py:21 in silent",
    "leaves": r"it asked to end the process \(ProcessExit: os\._exit\(1\) at \S*mine\.py:22 in leaves\)",
    "leaves_well": r"it asked to end the process \(ProcessExit: os\._exit\(0\) at \S*mine\.py:23",
    "exits": r"it asked to end the process \(sys\.exit: 3 at \S*mine\.py:24 in exits\); return a number, or raise",
    "stops": r"it asked to end the process \(sys\.exit: no judge at",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    here, modules = tmp_path / "here", tmp_path / "modules"
    (here / "sub").mkdir(parents=True)
    modules.mkdir()
    (modules / "mine.py").write_text(MODULE)
    files = {
        "mine.py": MODULE,
        "sub/mine2.py": "def f(prompt, response, fields): return 1.0\n",
        "wrong.py": "def f(prompt, response, fields):\nreturn 1.0\n",
        "lacking.py": "import torchmetricz\n",
        "leaving.py": "import sys\nsys.exit(2)\n",
        "failing.py": "1 / 0\n",
    }
    for name, text in files.items():
        (here / name).write_text(text)
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(modules)
    for name in ("mine", "sub", "sub.mine2"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return here


def part(entry_point: str, **settings: Any) -> RewardPart:
    return RewardPart(kind="python", entry_point=entry_point, **settings)


@pytest.mark.parametrize("mistake", BEFORE)
def test_a_mistake_is_found_before_the_run(folder: Path, mistake: str) -> None:
    entry_point, options, says = BEFORE[mistake]
    with pytest.raises(ConfigError, match=f"(?s){says}"):
        build_reward_functions([part(entry_point, options=options)])


@pytest.mark.parametrize("name", WITHIN)
def test_a_mistake_within_a_call_names_row_function_and_line(folder: Path, name: str) -> None:
    rewards = build_reward_functions([part(f"mine:{name}")])
    with pytest.raises(RewardError, match=WITHIN[name]) as caught:
        rewards.evaluate("p", "not json", {"id": 1}, None, 3, "rows.jsonl:17")
    assert str(caught.value).startswith(f"sequence 3 (of rows.jsonl:17): reward part 'mine:{name}'")
    assert "\n" not in str(caught.value) and os._exit.__module__ == "posix"
    assert name != "lookup" or isinstance(caught.value.__cause__, KeyError)


def test_a_function_may_end_the_processes_that_it_starts(folder: Path) -> None:
    assert build_reward_functions([part("mine:forks")]).score("", "", {}, None, 0) == 7.0


@pytest.mark.parametrize("entry_point", ["sub/mine2.py:f", "./sub/mine2.py:f", "sub.mine2:f", "mine:judge"])
def test_functions_of_files_and_modules(folder: Path, monkeypatch: pytest.MonkeyPatch, entry_point: str) -> None:
    if entry_point.startswith("sub."):
        monkeypatch.syspath_prepend(folder)
    assert build_reward_functions([part(entry_point)]).score("", "", {}, None, 0) == 1.0


def test_an_isolated_function_is_told_of_likewise(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"takes \(prompt, response\).*define it as"):
        build_reward_functions([part("mine:two", isolate=True)])
    rewards = build_reward_functions([part("mine.py:lookup", isolate=True)])
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

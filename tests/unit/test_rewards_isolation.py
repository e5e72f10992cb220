"""A user's function in a process with limits: whatever it does, a score of its own or an error that names it."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.config.rewards import Limits, RewardPart
from oppo_megatron.errors import ConfigError, RewardError
from oppo_megatron.rewards.functions import RewardSum, build_reward_functions
from oppo_megatron.rewards.isolation import SHOWN_BYTES, IsolatedFunction, Unanswered
from tests.support.processes import runs, wait_for

MODULE = '''
import ctypes, json, math, os, resource, signal, subprocess, sys, time

def behave(prompt, response, fields, factor=1.0):
    """What `response` asks for."""
    if response == "echo":
        print("not an answer"); sys.stdout.flush()
        return factor * fields["value"]
    if response == "chatty":
        for number in range(3000):
            print("line", number, "x" * 100)
            print("y" * 100, file=sys.stderr)
    if response == "raise": raise KeyError("nothing here")
    if response == "text": return "1.0"
    if response == "nan": return math.nan
    if response == "huge": return 10 ** 400
    if response == "exit": sys.exit(3)
    if response == "segfault": ctypes.string_at(0)
    if response == "sleep": time.sleep(60)
    if response == "memory": return float(len(bytearray(1 << 40)))
    while response == "spin": pass
    if response in ("garbage", "forge"):
        for number in range(3, 4096):
            try: os.write(number, b"\\xff{]\\n" if response == "garbage" else b'{"value": 99.0}\\n')
            except OSError: pass
        time.sleep(60)
    if response == "copy":
        copy = os.fork()
        time.sleep(0.0 if copy == 0 else 0.2)
        return 3.0 if copy == 0 else 4.0
    if response == "flood":
        for number in range(3, 4096):
            try:
                while True: os.write(number, b"x" * 4096)
            except OSError: pass
    if response == "child":
        open(fields["file"], "w").write(str(subprocess.Popen(["sleep", "60"]).pid))
        time.sleep(60)
    if response in ("session", "session, and exit"):
        away = [{"start_new_session": True}, {"preexec_fn": os.setpgrp}]
        own = [subprocess.Popen(["sleep", "60"], **how) for how in away]
        orphan = subprocess.run("setsid sleep 60 > /dev/null & echo $!", shell=True, stdout=subprocess.PIPE, text=True).stdout
        open(fields["file"], "w").write(f"{own[0].pid} {own[1].pid} {orphan}")
        time.sleep(60) if response == "session" else os.abort()
    if response == "limits":
        return float(resource.getrlimit(resource.RLIMIT_CORE) == (0, 0))
    if response == "environment":
        return float("THE_TOKEN" in os.environ) + 2.0 * ("OTHER" in os.environ)
    return float(os.getpid())
'''


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("user")
    (folder / "isolated_rewards.py").write_text(MODULE)
    (folder / "isolated_broken.py").write_text("raise ValueError('cannot be loaded')")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield "isolated_rewards"


def isolated(module: str, wall_s: float = 30.0, **settings: Any) -> closing[IsolatedFunction]:
    limits = Limits(wall_s=wall_s, memory_mb=1024)
    return closing(IsolatedFunction(f"{module}:behave", {"factor": 2.0}, limits, os.environ, **settings))


@pytest.fixture(scope="module")
def function(module: str) -> Iterator[IsolatedFunction]:
    with isolated(module) as found:  # with time enough on a busy machine
        yield found


@pytest.fixture(scope="module")
def impatient(module: str) -> Iterator[IsolatedFunction]:
    with isolated(module, 2.5) as found:
        yield found


def test_one_process_serves_all_calls_and_gets_the_whole_call(function: IsolatedFunction) -> None:
    assert function("", "who", {}) == function("", "who", {}) != float(os.getpid())
    assert function("", "echo", {"value": 1.25, "text": "é" * 100_000}) == 2.5 and function("", "limits", {}) == 1.0
    with ThreadPoolExecutor(1) as other, pytest.raises(AssertionError, match="from the thread that started it"):
        other.submit(function, "", "who", {}).result()


def test_what_it_prints_is_shown_up_to_a_bound(module: str, capfd: pytest.CaptureFixture[str]) -> None:
    with isolated(module) as function:
        for _ in range(3):
            function("", "chatty", {})
    shown = capfd.readouterr().err
    assert "line 0 x" in shown and len(shown) < SHOWN_BYTES + 1000 and shown.count("further output is dropped") == 1


@pytest.mark.parametrize(("response", "reason"), [
    ("raise", "KeyError: 'nothing here'"), ("text", r"gave 1.0 \(str\), not a number"), ("huge", "OverflowError"),
    ("memory", "MemoryError"), ("exit", "ended with exit code 3"), ("segfault", "killed by SIGSEGV"),
    ("garbage", "which does not answer"), ("forge", "which does not answer"), ("flood", "more than an answer"),
])  # fmt: skip
def test_a_misbehaving_function_is_an_error_and_the_next_served(function: IsolatedFunction, response: str, reason: str) -> None:
    with pytest.raises(RewardError, match=f"isolated_rewards:behave.*{reason}"):
        function("", response, {})
    assert function("", "echo", {"value": 3.0}) == 6.0


def test_a_call_that_does_not_end_is_an_error_and_processor_time_is_by_call(impatient: IsolatedFunction, module: str) -> None:
    with pytest.raises(RewardError, match="isolated_rewards:behave.*no score within timeout_s 2.5 s"):
        impatient("", "sleep", {})
    assert impatient("", "echo", {"value": 3.0}) == 6.0
    started = time.monotonic()
    with isolated(module, 100.0, cpu_s=1) as function, pytest.raises(RewardError, match="timeout_s 1 s"):
        function("", "spin", {})
    assert time.monotonic() - started < 90, "its wall_s is 100"


@pytest.mark.parametrize(("response", "num"), [("child", 1), ("session", 3), ("session, and exit", 3)])
def test_what_it_has_started_ends_with_it(impatient: IsolatedFunction, tmp_path: Path, response: str, num: int) -> None:
    """Even what has left its session; nobody may have asked for its exit code yet."""
    with pytest.raises(RewardError, match="killed by SIGABRT" if "exit" in response else "timeout_s"):
        impatient("", response, {"file": str(tmp_path / "pids")})
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == num
    wait_for(lambda: not any(runs(int(pid)) for pid in pids))


def test_a_copy_of_the_process_answers_nothing(function: IsolatedFunction) -> None:
    assert [function("", "copy", {}), function("", "echo", {"value": 1})] == [4.0, 2.0]


def test_it_ends_with_a_run_that_is_killed_and_so_does_what_it_has_started(module: str, tmp_path: Path) -> None:
    def started() -> list[str]:
        return (tmp_path / "pids").read_text().split() if (tmp_path / "pids").exists() else []

    code = f"""if True:
        import os
        from oppo_megatron.config.rewards import Limits
        from oppo_megatron.rewards.isolation import IsolatedFunction
        function = IsolatedFunction("{module}:behave", {{}}, Limits(), os.environ)
        print(int(function("", "who", {{}})), flush=True)
        function("", "session", {{"file": {str(tmp_path / "pids")!r}}})
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as run:
        assert run.stdout is not None
        child = int(run.stdout.readline())
        assert Path(f"/proc/{child}").exists()
        wait_for(lambda: len(started()) == 3)
        run.kill()
    wait_for(lambda: not any(runs(int(pid)) for pid in (child, *started())))


def part(entry_point: str, **settings: Any) -> RewardPart:
    return RewardPart(kind="python", entry_point=entry_point, isolate=True, **settings)


def test_a_process_that_cannot_start_is_no_call_without_an_answer(tmp_path: Path) -> None:
    """A rule takes a call without an answer for a wrong response; this one says nothing of a response."""
    (tmp_path / "ends.py").write_text("import os\nos._exit(3)\n")
    ending = IsolatedFunction(f"{tmp_path}/ends.py:f", {}, Limits(), os.environ)
    with pytest.raises(RewardError, match="ends.py:f: its process ended with exit code 3") as caught:
        ending("", "", {})
    assert not isinstance(caught.value, Unanswered)


def test_as_a_part_of_the_reward_and_what_cannot_be_loaded_is_refused_before_the_run(module: str) -> None:
    environment = os.environ | {"THE_TOKEN": "x" * 20, "OTHER": "1"}
    service = RewardPart(kind="http", url="http://127.0.0.1:1/", token_env="THE_TOKEN")
    rewards = build_reward_functions([part(f"{module}:behave", weight=0.5), service], environment)
    own = RewardSum(rewards.summands[:1])
    assert own.score("", "echo", {"value": 4}, None, 0) == 2.0
    assert own.score("", "environment", {}, None, 0) == 1.0, "the token of a service is not passed on"
    with pytest.raises(RewardError, match=f"sequence 7: reward part '{module}:behave' gave nan"):
        own.score("", "nan", {}, None, 7)
    with pytest.raises(RewardError, match=f"{module}:behave.*cannot be sent"):
        own.check({"value": {1, 2}})
    rewards.close()
    with pytest.raises(ConfigError) as caught:
        build_reward_functions([part("isolated_broken:f"), part(f"{module}:absent")])
    assert len(caught.value.problems) == 2
    assert "cannot be loaded" in caught.value.problems[0] and "no 'absent'" in caught.value.problems[1]

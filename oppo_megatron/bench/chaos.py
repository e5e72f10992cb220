"""Compares a run whose ranks are killed again and again with the same run undisturbed.

    undisturbed    oppo train chaos.yaml                                          its steps and its pace are the measure
    disturbed      oppo train chaos.yaml --resume --max-restarts KILLS            a random rank gets SIGKILL at a random moment

Some kills hit ranks that are still starting.  The others come within a step's time after steps that were drawn beforehand, in
the order of the steps: so they spread over the run, and hit decoding, scoring, updates and saving in proportion to their
time.  Right before its end a rank is asked for its stack, which tells its phase (`stacks_on_request`).
"""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from oppo_megatron.bench.chaos_check import differences
from oppo_megatron.bench.peaks import describe_machine
from oppo_megatron.cluster.rank_processes import rank_processes
from oppo_megatron.config.load import dump_config
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import OppoError
from oppo_megatron.layout.placements import role_placements, world_size
from oppo_megatron.processes import started
from oppo_megatron.rundir.directory import RunDirectory, write_json
from oppo_megatron.rundir.metrics_log import read_metrics

STARTING_SHARE = 0.2
POLL_S = 0.01
ANSWER_S = 1.0
SPREAD = 1.5  # how far behind a step's end a kill may come, in steps
LAST_SHARE = 0.85  # of the steps: behind them comes no kill, so that the run is not over before the last
STARTING_S = 0.6  # of what a run takes beside its steps: for start-up, the rest is for its end
FRAME = re.compile(r'File "[^"]*/oppo_megatron/([\w/]+\.py)", line (\d+) in (\w+)')
PHASES = (
    ("waiting for the critic", r"train/run_state\.py in settle"),
    ("restoring", r"saving/(saver\.py in restore|resuming\.py)|resum"),
    ("saving", r"train/saving/(saver\.py in (save|conclude)|writing\.py)"),
    ("update", r"train/(updates?|actor|critic)\.py"),
    ("scores", r"train/score_exchange\.py|in _(gather_scores|finish_scoring)$"),
    ("evaluation", r"train/evaluate\.py"),
    ("decode", r"engine/(rounds|executor|generation|scoring|stream)\.py"),
    ("ending", r"in _finish$"),
    ("a step", r"train/(loop|rollouts)\.py"),
)
COLUMNS = {
    "kill": "number", "rank": "rank", "roles": "roles", "after step": "step", "was at": "phase", "in": "where",
    "back after s": "back_s",
}  # fmt: skip


class ChaosError(OppoError, RuntimeError):
    """A run that should have come to its end did not, or could not be disturbed as asked."""


@dataclass
class Kill:
    """One rank's end.  `step`: steps done; `back_s`: until all ranks had met again, None where the next kill came before."""

    number: int
    rank: int
    roles: str
    step: int
    phase: str
    where: str
    at_s: float
    back_s: float | None = None


@dataclass
class Chaos:
    """Below `out`: both runs, their messages and `chaos.json`.  `kills` and `seed` say how often and, drawn from it, when.

    `train` is the command that trains by a configuration file, overrides and options.
    """

    config: TrainConfig
    train: Sequence[str]
    out: Path
    kills: int
    seed: int
    say: Callable[[str], None] = lambda text: print(text, flush=True)

    def run(self) -> dict[str, Any]:
        """Both runs.  Returns what `chaos.json` has; `differences` is empty where nothing differs.  Raises ChaosError."""
        self.out.mkdir(parents=True, exist_ok=True)
        plain, disturbed = (RunDirectory(self.out / name) for name in ("undisturbed", "disturbed"))
        for run in (plain, disturbed):
            run.require_unfinished()
            run.require_no_checkpoints()
        dump_config(self.config, self.out / "chaos.yaml")
        plain_s = self._undisturbed(plain)
        pace_s = _pace(plain)
        self.say(f"undisturbed: {plain_s:.1f} s, {pace_s:.2f} s a step")
        kills, seconds = self._disturbed(disturbed, plain_s, pace_s)
        found = differences(plain, disturbed)
        if len(kills) < self.kills:
            found.append(
                f"only {len(kills)} of {self.kills} kills: the run was over before the last; give it more steps (steps=)"
            )
        result = {
            "kills": [asdict(kill) for kill in kills],
            "seed": self.seed,
            "differences": found,
            "undisturbed_s": plain_s,
            "disturbed_s": seconds,
            "machine": describe_machine(),
            "config": self.config.model_dump(mode="json"),
        }
        write_json(self.out / "chaos.json", result)
        return result

    def _undisturbed(self, run: RunDirectory) -> float:
        begun = time.time()
        with self._start(run) as process:
            code = process.wait()
        if code:
            raise ChaosError(f"the undisturbed run ended with exit code {code}; its messages are in {self._log(run)}")
        return time.time() - begun

    def _disturbed(self, run: RunDirectory, plain_s: float, pace_s: float) -> tuple[list[Kill], float]:
        begun = time.time()
        with self._start(run, "--resume", "--max-restarts", str(self.kills)) as process:
            victims = Victims(process.pid, run, self._log(run), world_size(self.config))
            try:
                kills = self._kill(process, victims, begun, plain_s - pace_s * _num_steps(self.config), pace_s)
                code = process.wait()
            finally:
                victims.end()
        if code:
            raise ChaosError(
                f"after {len(kills)} kills the run ended with exit code {code}; its messages are in {self._log(run)}"
            )
        return kills, time.time() - begun

    def _kill(
        self, process: subprocess.Popen[bytes], victims: Victims, begun: float, start_s: float, pace_s: float
    ) -> list[Kill]:
        """Kill until all requested kills are made or the run is over; `start_s` is the run's time outside its steps."""
        rng = random.Random(self.seed)  # noqa: S311  (to be drawn again, not to be secret)
        latest = int(LAST_SHARE * _num_steps(self.config))
        steps = sorted(rng.randrange(max(1, latest)) for _ in range(self.kills))
        kills: list[Kill] = []
        for number, step in enumerate(steps, start=1):
            starting = rng.random() < STARTING_SHARE
            wait_s = rng.uniform(0, STARTING_S * start_s if starting else SPREAD * pace_s)
            seconds = victims.await_start(process, step, starting)
            if kills and not starting and process.poll() is None:
                kills[-1].back_s = round(seconds, 2)
            if process.poll() is not None or victims.sleep(process, wait_s):
                break
            kill = victims.kill(rng, number, time.time() - begun, self._roles)
            if kill is not None:
                kills.append(kill)
                self.say(
                    f"kill {number}: rank {kill.rank} ({kill.roles}) after step {kill.step}, at {kill.phase} in {kill.where}"
                )
        if kills and kills[-1].back_s is None:
            seconds = victims.await_start(process, 0, starting=False)
            kills[-1].back_s = round(seconds, 2) if process.poll() is None else None
        return kills

    def _roles(self, rank: int) -> str:
        return "+".join(name for name, placement in role_placements(self.config).items() if rank in placement.ranks)

    def _start(self, run: RunDirectory, *options: str) -> AbstractContextManager[subprocess.Popen[bytes]]:
        return started([*self.train, str(self.out / "chaos.yaml"), f"run_dir={run.path}", *options], self._log(run))

    def _log(self, run: RunDirectory) -> Path:
        return self.out / f"{run.path.name}.log"


class Victims:
    """The ranks that a process has started, in the order of their numbers, and how to end one."""

    def __init__(self, launcher: int, run: RunDirectory, log: Path, world: int):
        self._launcher, self._run, self._log, self._world = psutil.Process(launcher), run, log, world
        self._gone: set[int] = set()
        self._now: list[psutil.Process] = []
        self._killed_s = time.time()

    def await_start(self, process: subprocess.Popen[bytes], step: int, starting: bool) -> float:
        """Until new ranks are there (`starting`), or have met and have done `step` steps; seconds since the last kill to
        the moment when they had met.  Returns, too, when the run is over."""
        met_s: float | None = None
        while process.poll() is None:
            self._now = self._ranks()
            if len(self._now) == self._world:
                if starting:
                    break
                if met_s is None and self._have_met():
                    met_s = time.time() - self._killed_s
                if met_s is not None and self.steps_done() >= step:
                    break
            time.sleep(POLL_S)
        return time.time() - self._killed_s if met_s is None else met_s

    def sleep(self, process: subprocess.Popen[bytes], seconds: float) -> bool:
        """Whether the run was over before."""
        until = time.time() + seconds
        while process.poll() is None and time.time() < until:
            time.sleep(min(POLL_S, max(0.0, until - time.time())))
        return process.poll() is not None

    def kill(self, rng: random.Random, number: int, at_s: float, roles: Callable[[int], str]) -> Kill | None:
        """End one of the ranks; None where it has ended before."""
        rank = rng.randrange(self._world)
        victim, step = self._now[rank], self.steps_done()
        try:
            phase, where = self._what(victim)
            victim.kill()
        except psutil.NoSuchProcess:
            return None
        self._gone |= {process.pid for process in self._now}
        self._killed_s = time.time()
        return Kill(number, rank, roles(rank), step, phase, where, round(at_s, 3))

    def end(self) -> None:
        """Where this process is interrupted, nothing of the run is left."""
        with suppress(psutil.NoSuchProcess):
            for process in [*self._launcher.children(recursive=True), self._launcher]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()

    def steps_done(self) -> int:
        """By the rollouts that were written."""
        try:
            last = self._run.rollouts.read_bytes().rstrip(b"\n").rpartition(b"\n")[2]
            return int(json.loads(last)["step"]) if last else 0
        except (OSError, ValueError):  # not there yet, or being written
            return 0

    def _ranks(self) -> list[psutil.Process]:
        try:
            found = [rank for rank in rank_processes(self._launcher) if rank.pid not in self._gone]
            return sorted(found, key=lambda child: (child.create_time(), child.pid))
        except psutil.NoSuchProcess:
            return []

    def _have_met(self) -> bool:
        try:
            hosts = json.loads(self._run.hosts.read_text(encoding="utf-8"))["ranks"]
        except (OSError, ValueError):
            return False
        return [host["pid"] for host in hosts] == [process.pid for process in self._now]

    def _what(self, victim: psutil.Process) -> tuple[str, str]:
        """Phase and place, by the stack that the rank writes of itself where it can already."""
        if not _hears(victim.pid, signal.SIGUSR2):
            return "start-up", "imports"
        begin = self._log.stat().st_size
        victim.send_signal(signal.SIGUSR2)
        until = time.time() + ANSWER_S
        text = ""
        while time.time() < until and "run_rank" not in text:
            text = self._log.read_bytes()[begin:].decode("utf-8", errors="replace")
        return phase_of(text)


def phase_of(stacks: str) -> tuple[str, str]:
    """What a rank was at, and in which function, by the stacks of its threads (`faulthandler`'s form, innermost first)."""
    main = next((part for part in stacks.split("\n\n") if "in run_rank" in part), stacks)
    frames = [f"{file} in {function}" for file, _, function in FRAME.findall(main)]
    if not frames:
        return "unknown", ""
    outer = [frame for frame in frames if not frame.startswith(("cli/", "train/entry.py"))]
    ours = next((frame for frame in outer), frames[0])
    for phase, pattern in PHASES:
        if any(re.search(pattern, frame) for frame in outer):
            return phase, ours
    return "start-up", ours


def _hears(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal, which would else end it.  False where the system does not tell."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def _pace(run: RunDirectory) -> float:
    """Seconds a step, checkpoints included."""
    times = [line["time_s"] for line in read_metrics(run.metrics)]
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else times[0]


def _num_steps(config: TrainConfig) -> int:
    assert config.steps is not None, "checked before"
    return config.steps


def phases(result: dict[str, Any]) -> dict[str, int]:
    """How many kills hit which phase, the most frequent first."""
    counts: dict[str, int] = {}
    for kill in result["kills"]:
        counts[kill["phase"]] = counts.get(kill["phase"], 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))

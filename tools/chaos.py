"""Kills ranks of a run at random moments, and compares it with the same run undisturbed: does it survive on this machine?

    python -m tools.chaos CONFIG.yaml [a.b=c ...] --kills 30 --seed 1 --out runs/chaos

    undisturbed    oppo train chaos.yaml                                  gives the steps and the pace
    disturbed      oppo train chaos.yaml --resume --max-restarts KILLS    a random rank gets SIGKILL at a random moment

Some kills hit ranks that are still starting.  The others come within 1.5 steps after steps drawn beforehand, in order, so that
they hit decoding, scoring, updates and saving in proportion to their time.  Right before its end a rank is asked for its stack,
which shows its phase.  Weights must be equal to the bit, each prompt and step be there once; differences are exit code 1.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import run_script
from oppo_megatron.bench.figures import describe_machine
from oppo_megatron.cli.launch import refuse_given_ranks
from oppo_megatron.cli.load import load_train
from oppo_megatron.cli.parser import add_config_arguments, count
from oppo_megatron.cluster.rank_processes import rank_processes
from oppo_megatron.config.load import dump_config
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.data.generated import write_random_prompts
from oppo_megatron.errors import ConfigError, OppoError
from oppo_megatron.layout.placements import role_placements, world_size
from oppo_megatron.processes import started
from oppo_megatron.report.comparison import format_table
from oppo_megatron.rundir.directory import RunDirectory, write_json
from oppo_megatron.rundir.metrics_log import read_metrics

STARTING_SHARE = 0.2
POLL_S = 0.01
ANSWER_S = 1.0
SPREAD = 1.5  # the most steps between the end of a step and a kill
LAST_SHARE = 0.85  # of the steps; no kill comes later, so that the run is not over before the last kill
STARTING_S = 0.6  # the share of start-up in the seconds outside the steps
FRAME = re.compile(r'File "[^"]*/oppo_megatron/([\w/]+\.py)", line (\d+) in (\w+)')
PHASES = (
    ("waiting for the critic", r"train/loop\.py in finish_step"),
    ("restoring", r"train/loop\.py in (_?restore|load_state)|in (find_checkpoint|_damage)$|resum"),
    ("saving", r"train/saving/(saver\.py in (save|conclude)|writing\.py)"),
    ("update", r"train/(updates?|actor|critic)\.py"),
    ("scores", r"train/score_exchange\.py|in _gather_scores$"),
    ("evaluation", r"train/evaluate\.py"),
    ("decode", r"engine/(rounds|executor|generation|scoring|stream)\.py"),
    ("ending", r"in _finish$"),
    ("a step", r"train/(loop|rollouts)\.py"),
)
SHOWN = 5
FREE = ("_s", "_bytes", "_mb", "bubble_share")  # endings of metrics that are times or sizes, which differ between any two runs
COLUMNS = {
    "kill": "number", "rank": "rank", "roles": "roles", "after step": "step", "was at": "phase", "in": "where",
    "back after s": "back_s",
}  # fmt: skip


class ChaosError(OppoError, RuntimeError):
    """A run failed that should have finished."""


@dataclass
class Kill:
    """The end of one rank.  `step`: steps done; `back_s`: until all ranks had met again, None if the next kill came first."""

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
    """Makes both runs below `out`, with their messages and `chaos.json`; `train` is the command that trains."""

    config: TrainConfig
    train: Sequence[str]
    out: Path
    kills: int
    seed: int
    say: Callable[[str], None] = lambda text: print(text, flush=True)

    def run(self) -> dict[str, Any]:
        """Make both runs; return the content of `chaos.json`; its `differences` may be empty.  Raises ChaosError."""
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
        """Kill until all kills are made or the run is over; `start_s`: seconds of the run outside its steps."""
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
            if process.poll() is not None or victims.sleep(process, wait_s, step + ceil(SPREAD)):
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
    """The ranks that a process has started, in order."""

    def __init__(self, launcher: int, run: RunDirectory, log: Path, world: int):
        self._launcher, self._run, self._log, self._world = psutil.Process(launcher), run, log, world
        self._gone: set[int] = set()
        self._now: list[psutil.Process] = []
        self._killed_s = time.time()

    def await_start(self, process: subprocess.Popen[bytes], step: int, starting: bool) -> float:
        """Wait until new ranks exist (`starting`), or have met and done `step` steps, or the run is over.

        Returns the seconds from the last kill to their meeting.
        """
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

    def sleep(self, process: subprocess.Popen[bytes], seconds: float, steps: int) -> bool:
        """Sleep until `steps` are done at most: the machine may be faster than in the undisturbed run.  True if the run ended."""
        until = time.time() + seconds
        while process.poll() is None and time.time() < until and self.steps_done() < steps:
            time.sleep(min(POLL_S, max(0.0, until - time.time())))
        return process.poll() is not None

    def kill(self, rng: random.Random, number: int, at_s: float, roles: Callable[[int], str]) -> Kill | None:
        """Kill one of the ranks; return None if it has already ended."""
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
        """End all processes of the run."""
        with suppress(psutil.NoSuchProcess):
            for process in [*self._launcher.children(recursive=True), self._launcher]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()

    def steps_done(self) -> int:
        """Return the steps done, by the written rollouts."""
        try:
            last = self._run.rollouts.read_bytes().rstrip(b"\n").rpartition(b"\n")[2]
            return int(json.loads(last)["step"]) if last else 0
        except (OSError, ValueError):  # not yet written, or being written
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
        """Return phase and place from the stack that the rank writes, if it can already."""
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
    """Return a rank's phase and function from the stacks of its threads (`faulthandler`'s form, innermost first)."""
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
    """True if a process has a handler for a signal, which would otherwise end it; False if the system does not say."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def _pace(run: RunDirectory) -> float:
    """Return the seconds per step, checkpoints included."""
    times = [line["time_s"] for line in read_metrics(run.metrics)]
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else times[0]


def _num_steps(config: TrainConfig) -> int:
    assert config.steps is not None, "checked before"
    return config.steps


def phases(result: dict[str, Any]) -> dict[str, int]:
    """Return the kills per phase, the most frequent first."""
    counts: dict[str, int] = {}
    for kill in result["kills"]:
        counts[kill["phase"]] = counts.get(kill["phase"], 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def differences(plain: RunDirectory, disturbed: RunDirectory) -> list[str]:
    """Return the differences as sentences; none if the disturbed run equals the undisturbed one."""
    return [*_weights(plain, disturbed), *_rollouts(plain, disturbed), *_metrics(plain, disturbed), *_left(disturbed)]


def _weights(plain: RunDirectory, disturbed: RunDirectory) -> list[str]:
    names = sorted(path.relative_to(plain.weights).as_posix() for path in plain.weights.rglob("*") if path.is_file())
    if not any(name.endswith(".safetensors") for name in names):
        return [f"{plain.weights} has no weights to compare"]
    unequal = [name for name in names if _bytes(plain.weights / name) != _bytes(disturbed.weights / name)]
    return [f"final weights differ: {', '.join(unequal[:SHOWN])}"] if unequal else []


def _rollouts(plain: RunDirectory, disturbed: RunDirectory) -> list[str]:
    due, got = _lines(plain.rollouts), _lines(disturbed.rollouts)
    trained = Counter(line["seq_id"] for line in got)
    found = []
    if missing := sorted({line["seq_id"] for line in due} - trained.keys()):
        found.append(f"{len(missing)} prompts were never trained: {missing[:SHOWN]}")
    if again := sorted(seq_id for seq_id, count in trained.items() if count > 1):
        found.append(f"{len(again)} prompts were trained more than once: {again[:SHOWN]}")
    if not found and got != due:
        number = next((i for i, (a, b) in enumerate(zip(got, due, strict=False), start=1) if a != b), min(len(got), len(due)) + 1)
        found.append(f"rollouts differ from line {number} on ({len(got)} lines, undisturbed {len(due)})")
    return found


def _metrics(plain: RunDirectory, disturbed: RunDirectory) -> list[str]:
    due, got = read_metrics(plain.metrics), read_metrics(disturbed.metrics)
    steps = [line["step"] for line in got]
    if steps != [line["step"] for line in due]:
        return [f"steps of metrics.jsonl are {steps}, each should be there once up to {len(due)}"]
    unequal = sorted(
        {name for a, b in zip(due, got, strict=True) for name in a if not name.endswith(FREE) and a[name] != b.get(name)}
    )
    return [f"metrics differ: {', '.join(unequal[:SHOWN])}"] if unequal else []


def _left(disturbed: RunDirectory) -> list[str]:
    """Return what killed writers left."""
    strange = sorted(path.name for path in disturbed.checkpoints.iterdir() if not path.name.startswith("step-"))
    return [f"left in {disturbed.checkpoints}: {', '.join(strange[:SHOWN])}"] if strange else []


def _lines(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:  # a response may hold U+2028, which ends no line
        return [json.loads(line) for line in file]


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, help="a configuration of `oppo train`, with `steps`")
    parser.add_argument("--kills", type=count, default=30, metavar="N", help="default %(default)s")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="of ranks and moments; default %(default)s")
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"), metavar="DIR", help="default %(default)s")
    parser.add_argument(
        "--prompt-tokens", type=count, metavar="N", help="prompts of N random tokens, in place of the configuration's data"
    )


def measure(args: argparse.Namespace) -> int:
    refuse_given_ranks("`tools.chaos` starts the ranks of each run itself; call it without torchrun or srun")
    overrides = [*args.overrides, f"run_dir={args.out / 'disturbed'}"]
    overrides += ["logging.rollouts=true", "logging.trace=false", "logging.console=off"]
    if args.prompt_tokens is not None:
        tokenizer, prompts = write_random_prompts(args.out / "inputs", args.prompt_tokens)
        overrides += [f"tokenizer.path={tokenizer}", f"data.path={prompts}"]
        overrides.append(f"data.max_prompt_tokens={args.prompt_tokens}")
    config = load_train(args.config, overrides)
    if not config.checkpoint.every_steps:
        config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"every_steps": 1})})
    if config.steps is None:
        raise ConfigError("steps is not set, but kills are spread over a known number of steps; give steps=N")
    result = Chaos(config, [sys.executable, "-m", "oppo_megatron", "train"], args.out, args.kills, args.seed).run()
    print(format_table(COLUMNS, result["kills"]))
    hit = ", ".join(f"{phase} {times}" for phase, times in phases(result).items())
    seconds = f"{result['disturbed_s']:.0f} s (undisturbed {result['undisturbed_s']:.0f} s)"
    equal = ["final weights, rollouts and metrics equal the undisturbed run's"]
    print(f"\n{len(result['kills'])} kills in {seconds}: {hit}", *(result["differences"] or equal), sep="\n")
    return 1 if result["differences"] else 0


def main(arguments: Sequence[str] | None = None) -> int:
    return run_script("tools.chaos", __doc__, add_arguments, measure, arguments)


if __name__ == "__main__":
    sys.exit(main())

"""Jobs that save and restore checkpoints under faults, in processes of their own or on the ranks of the pool."""

import contextlib
import errno
import hashlib
import importlib
import io
import json
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from oppo_megatron import clock
from oppo_megatron.cluster.world import World, open_world
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.data.prompts import PromptStream
from oppo_megatron.errors import OppoError
from oppo_megatron.mcore.weights import checkpoint
from oppo_megatron.rundir.directory import RunDirectory
from oppo_megatron.rundir.disk import clear_when_full
from oppo_megatron.train.entry import run_ppo
from oppo_megatron.train.guard import RollBack, Rollbacks
from oppo_megatron.train.inputs import Inputs, read_inputs
from oppo_megatron.train.logs.console import Progress
from oppo_megatron.train.loop import TrainingLoop
from oppo_megatron.train.saving import saver, state, writing
from oppo_megatron.train.saving.preemption import Preemption
from oppo_megatron.train.saving.state import Found, find_checkpoint, frozen_models, rollout_lines
from oppo_megatron.train.saving.writing import ROLLOUTS, CheckpointWriting
from oppo_megatron.train.setup import build_loop, ppo_saver
from tests.e2e.jobs import around, train
from tests.support.checkpoint_mutations import mutate, time_limit
from tests.support.configs import run_of

CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir"}
CACHE_FILE, COMMON_FILE = "rank-00000.safetensors", "common.pt"  # opened by libraries that tell Python nothing
FILES = ("__0_0.distcp", ".metadata.tmp", COMMON_FILE, "state.json", "rollouts.jsonl", CACHE_FILE, "manifest.json")


@dataclass(frozen=True)
class AtEvent:
    """SIGKILL before the `number`-th change of names or opening for writing below the folder."""

    number: int


@dataclass(frozen=True)
class AtByte:
    """The kernel's end for a process (SIGXFSZ) that writes beyond byte `offset` of the file called `name`."""

    name: str
    offset: int


Fault = AtEvent | AtByte


def count_events(folder: Path, on_event: Callable[[str], None]) -> None:
    """Call `on_event` before each change below `folder`, for good: an audit hook cannot be taken out again."""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        writing = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        if event in CHANGES or writing:
            path = str(args[0])
            if event in ("os.remove", "os.rmdir") and args[1] != -1:  # relative to a folder that is open
                path = os.path.join(os.readlink(f"/proc/self/fd/{args[1]}"), path)
            if str(folder) in path:
                on_event(path)

    sys.addaudithook(hook)


def arm(fault: Fault, folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if isinstance(fault, AtByte):
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
        count_events(folder, lambda path: limit_files(fault.offset) if Path(path).name == fault.name else None)
        return
    seen = [0]

    def maybe_die(path: str) -> None:
        if seen[0] == fault.number:
            os.kill(os.getpid(), signal.SIGKILL)
        seen[0] += 1

    count_events(folder, maybe_die)


def limit_files(num_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


SECONDS = 10.0


def resume_to_the_end(config: dict[str, Any]) -> str:
    """A whole run, or what is left of it, in this process: a digest of the final weights."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    checked = run_of(config)
    with open_world(checked.runtime) as world:
        assert run_ppo(checked, world, read_inputs(checked), Preemption(checked.preempt_deadline_s))
    return weights_digest(Path(config["run_dir"]))


def weights_digest(run: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted((run / "weights").rglob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def die_while_saving(config: dict[str, Any], fault: Fault) -> None:
    """Continue from the checkpoint, and save anew: at once, in its place.  `fault` strikes in it."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    checked = run_of(config)
    inputs = read_inputs(checked)
    with open_world(checked.runtime) as world, libraries_armed(fault):
        found = find_checkpoint(checked, world)
        assert found is not None
        saver = ppo_saver(checked, world, inputs.prompts, Preemption(checked.preempt_deadline_s))
        loop = build_loop(checked, world, inputs, saver, _no_rollbacks(checked, inputs), found.ahead(frozenset()))
        loop.restore(found)
        arm(fault, RunDirectory(checked.run_dir).checkpoints)
        loop.saver.save(loop)


@contextlib.contextmanager
def libraries_armed(fault: Fault) -> Iterator[None]:
    """Files that are opened by libraries which do not tell Python: the limit holds from the call on."""

    def armed(work: Callable[..., None], name: str) -> Callable[..., None]:
        def call(*args: Any) -> None:
            if isinstance(fault, AtByte) and fault.name == name:
                limit_files(fault.offset)
            work(*args)

        return call

    with (
        mock.patch.object(writing, "write_caches", armed(writing.write_caches, CACHE_FILE)),
        mock.patch.object(checkpoint, "write_common", armed(checkpoint.write_common, COMMON_FILE)),
    ):
        yield


def run_with_small_files(config: dict[str, Any], num_bytes: int, within: str) -> tuple[str, str]:
    """Run with a limit on file sizes in the function `within` (`module:name`, or empty); return kind and text of its error."""
    module, _, name = within.partition(":")
    try:
        with clear_when_full(Path(config["run_dir"])), _limited(module, name, num_bytes) if within else contextlib.nullcontext():
            train(config)
    except OppoError as error:
        return type(error).__name__, str(error)
    return "", ""


def end_without_space_for_a_checkpoint(config: dict[str, Any]) -> tuple[str, str]:
    said, place = io.StringIO(), "oppo_megatron.train.saving.writing:CheckpointWriting.run"
    with contextlib.redirect_stdout(said):
        _, message = run_with_small_files(config, 9_000, place)
    return message, said.getvalue()


def resume_noting_syncs(config: dict[str, Any]) -> list[tuple[float, str, int]]:
    """(monotonic seconds, path, mtime in ns) of what was brought to the disk; for a folder renamed by this rank, mtime is -1."""
    noted: list[tuple[float, str, int]] = []
    sync, rename = os.fsync, Path.rename

    def fsync(handle: int) -> None:
        changed = os.fstat(handle).st_mtime_ns
        sync(handle)
        noted.append((time.monotonic(), os.readlink(f"/proc/self/fd/{handle}"), changed))

    def renamed(path: Path, target: Path) -> Path:
        noted.append((time.monotonic(), str(target), -1))
        return rename(path, target)

    with mock.patch.object(os, "fsync", fsync), mock.patch.object(Path, "rename", renamed):
        train(config)
    return noted


def run_with_a_slow_disk(config: dict[str, Any], late_s: float | None, full_on: int | None = None) -> tuple[str, list[int]]:
    """The error, and the steps at which writings began and ended: `late_s` after the snapshot, or, None, a step later."""
    steps: list[int] = []
    write, running = CheckpointWriting.run, list[TrainingLoop]()

    def slow(self: CheckpointWriting) -> tuple[int, float]:
        steps.append(running[0].done)
        until = time.monotonic() + (120.0 if late_s is None else late_s)
        while time.monotonic() < until and (late_s is not None or running[0].done == steps[-1]):
            time.sleep(0.01)
        if dist.get_rank() == full_on:
            full = OSError(errno.ENOSPC, "No space left")
            with mock.patch.object(writing, "write_caches", side_effect=full):
                return write(self)
        written = write(self)
        steps.append(running[0].done)
        return written

    with mock.patch.object(CheckpointWriting, "run", slow), around(TrainingLoop, "run", running.append):
        try:
            train(config)
        except (OppoError, RollBack) as error:
            return f"{type(error).__name__}: {error}", steps
    return "", steps


def train_with_slow_files(config: dict[str, Any]) -> list[str]:
    """The run's messages; writing, checking and loading a checkpoint's models end after two of them."""
    told = list[str]()

    def slow() -> None:
        enough, until = len(told) + 2, time.monotonic() + 60.0
        while len(told) < enough and time.monotonic() < until:
            time.sleep(0.01)

    with (
        mock.patch.object(clock, "TELL_S", 0.1), mock.patch.object(state, "to_stderr", told.append),
        around(Progress, "note", lambda _, line: told.append(line)), around(writing, "write_models", lambda *_: slow()),
        around(state, "find_damage", lambda *_: slow()), around(saver, "load_models", lambda *_: slow()),
    ):  # fmt: skip
        train(config)
    return told


def _limited(module: str, name: str, num_bytes: int) -> Any:
    *path, attribute = name.split(".")
    owner = importlib.import_module(module)
    for part in path:
        owner = getattr(owner, part)
    work = getattr(owner, attribute)

    def call(*args: Any, **options: Any) -> Any:
        limit_files(num_bytes)
        try:
            return work(*args, **options)
        finally:
            limit_files(-1)

    return mock.patch.object(owner, attribute, call)


def resume_mutants(config: dict[str, Any], pristine: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Return what each of `count` mutated checkpoints leads to; the first answer is of the unchanged one."""
    checked = run_of(config)
    subject = Subject(checked)
    checkpoints, answers = RunDirectory(checked.run_dir).checkpoints, []
    for number in range(-1, count):
        shutil.rmtree(checkpoints, ignore_errors=True)
        shutil.copytree(pristine, checkpoints)
        newest = sorted(checkpoints.glob("step-*"))[-1]
        mutation = "none" if number < 0 else mutate(newest, number, seed)
        started = time.monotonic()
        outcome = subject.resume()
        seconds = time.monotonic() - started
        answers.append({"mutation": mutation, "newest": newest.name, "seconds": seconds, **outcome})
    return answers


def _no_rollbacks(config: TrainConfig, inputs: Inputs) -> Rollbacks:
    return Rollbacks(RunDirectory(config.run_dir), PromptStream(inputs.prompts, config.seed))


class Subject:
    def __init__(self, config: TrainConfig):
        self.config, self.world = config, World(0, 1, torch.device("cpu"))
        inputs = read_inputs(config)
        saver = ppo_saver(config, self.world, inputs.prompts, Preemption(config.preempt_deadline_s))
        self.loop = build_loop(config, self.world, inputs, saver, _no_rollbacks(config, inputs))
        planner = self.loop.rounds.planner
        self._books = {"actor": planner.actor, **planner.scorers}
        self._empty = {name: book.state_dict() for name, book in self._books.items()}
        self._seen: set[str] = set()

    def resume(self) -> dict[str, Any]:
        """error: kind and message; or resumed: from which checkpoint, what was said, how the state differs from its file."""
        said = io.StringIO()
        with contextlib.redirect_stderr(said), time_limit(SECONDS):
            try:
                found = find_checkpoint(self.config, self.world)
                assert found is not None, "checkpoints were there"
                answer = {"resumed": found.folder.name, "said": said.getvalue()}
                if found.folder.name in self._seen:  # the one before, as it was written
                    return answer
                self._forget()
                self.loop.restore(found)
                if "damaged" in said.getvalue():
                    self._seen.add(found.folder.name)
                return answer | {"differs": _differences(self.loop, found), "weights": _digest(self.loop)}
            except OppoError as error:
                return {"error": f"{type(error).__name__}: {error}", "said": said.getvalue()}
            except Exception as error:
                return {"foreign": f"{type(error).__name__}: {error}"[:500], "said": said.getvalue()}

    def _forget(self) -> None:
        self.loop.phase = None
        for name, book in self._books.items():
            book.load_state_dict(self._empty[name])
        rounds = self.loop.rounds
        assert rounds.decode is not None
        for cache in (rounds.decode.cache, *(worker.cache for worker in rounds.scoring.values())):
            for seq_id in cache.seq_ids:
                cache.close(seq_id)
        for worker in rounds.scoring.values():
            worker.reset()


def _differences(loop: TrainingLoop, found: Found) -> list[str]:
    now = json.loads(json.dumps(loop.saver.state(loop)))
    names = ["done", "actor", "updates", "phase"]
    cached = found.state["layout"] == now["layout"]
    cached = cached and frozen_models(found.state["config"]) == frozen_models(loop.saver.settings)
    names += ["books"] if cached else []
    differing = [name for name in names if now[name] != found.state[name]]
    differing += [key for key in ("num_consumed", "due") if now["scheduler"][key] != found.state["scheduler"][key]]
    lines = [json.loads(line) for line in (found.folder / ROLLOUTS).read_text().splitlines()]
    if [json.loads(line) for line in rollout_lines(loop.buffer.rollouts)] != lines:
        differing.append("rollouts")
    return differing


def _digest(loop: TrainingLoop) -> str:
    digest = hashlib.sha256()
    for part in (loop.actor, loop.critic):
        assert part is not None
        for chunk in part.role.trained.chunks:
            for weight in chunk.parameters():
                digest.update(weight.detach().numpy().tobytes())
    return digest.hexdigest()


def call(job: Callable[..., Any], answers: Any, *args: Any) -> None:
    torch.set_num_threads(1)
    answers.send(job(*args))

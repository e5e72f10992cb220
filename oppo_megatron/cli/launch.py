"""Start the ranks of a run: as a rank of another launcher, in this process, or with torch's elastic agent.

Each rank calls `ENTRY` (kind, config) with torchrun's environment variables (RANK, WORLD_SIZE, ...).
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from oppo_megatron.cli.signals import SignalRelay, interrupts_from_here_alone
from oppo_megatron.clock import to_stderr, while_silent
from oppo_megatron.cluster import rank_processes
from oppo_megatron.cluster.liveness.failures import FOLDER, Failure, ended_silently, ended_well, ended_within, read_failures
from oppo_megatron.errors import EXIT_AGAIN, EXIT_INTERRUPTED, EXIT_REQUEUE, ConfigError, OppoError, StallError, WorldError
from oppo_megatron.processes import outlive_terminal, signals_held

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

ENTRY = "oppo_megatron.train.entry:run_rank"
EXIT_DEFECT = 1
GOOD_ENDS = (0, EXIT_REQUEUE, EXIT_AGAIN)
ISOLATE = "correct the function; with `isolate: true` it runs in a process of its own, whose end is an error and not the run's"
MONITOR_S = 0.1  # the agent's polling interval; it reports the first rank that has ended
ORPHANED = 255
"""Exit code of a `multiprocessing` process whose fork server was killed."""
ORPHANS = "the process that ranks are forked from was killed, and they end with it; --resume continues from the last checkpoint"
LINGER_S = 5 * MONITOR_S
LOST_S = 10.0
"""Seconds from a rank's failure to its end, and the most if a peer was killed: the agent must find that one first."""
NUMBERS = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT",
    "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NNODES", "SLURM_NODEID", "SLURM_JOB_ID",
)  # fmt: skip
"""Launcher variables that hold a number."""


class RankError(OppoError, RuntimeError):
    """A rank failed; the message is that rank's own."""


class RankKilled(RankError):
    """A rank was ended by a signal."""


class RankStalled(RankError):
    """No progress, or ranks lost contact; the message names the stalled ranks, if known."""


def launch(kind: str, config: Any, world_size: int, entry: str = ENTRY, *, in_process: bool = True) -> int:
    """Return the exit code. A single rank runs in this process if `in_process`. Raises RankError if a rank met invalid input."""
    quiet_torch()
    ranks = external_ranks(os.environ)
    if ranks is not None:
        with _environment(ranks):
            code = _run_entry(entry, kind, config)
            return EXIT_REQUEUE if code == EXIT_AGAIN else code
    if world_size == 1 and in_process:
        with _environment(_local_ranks()):
            return _run_entry(entry, kind, config)
    forks = rank_processes.start_method(config) == "forkserver"
    with importing():  # import what starts ranks, here and in a fork server at the same time
        if forks:
            rank_processes.begin_fork_server()
        importlib.import_module("torch.distributed.launcher.api")
        if forks:
            try:
                rank_processes.await_fork_server()
            except (EOFError, ConnectionError) as error:
                raise RankKilled(ORPHANS) from error
        surroundings = rank_processes.Surroundings(dict(os.environ))
    return _launch_local(entry, kind, config, world_size, surroundings)


def quiet_torch() -> None:
    """Set torch's variables before it is loaded: less C++ log, and no spinning threads (docs/performance.md)."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def check_world_size(expected: int) -> None:
    ranks = external_ranks(os.environ)
    if ranks is not None and int(ranks["WORLD_SIZE"]) != expected:
        raise ConfigError(
            f"the launcher started {ranks['WORLD_SIZE']} ranks, but the configuration places its roles on {expected}; "
            f"start {expected}, or change the placement (tp x pp)"
        )


def refuse_given_ranks(why: str) -> None:
    """Raise ConfigError if a launcher has started ranks; `why` they cannot be used, and the remedy."""
    ranks = external_ranks(os.environ)
    if ranks is not None:
        raise ConfigError(f"the launcher has started {ranks['WORLD_SIZE']} ranks, but {why}")


def external_ranks(environment: Mapping[str, str]) -> dict[str, str] | None:
    """RANK and related variables from torchrun or srun; None without a launcher."""
    wrong = {name: environment[name] for name in NUMBERS if not environment.get(name, "0").isdigit()}
    if wrong:
        raise ConfigError(
            f"{' and '.join(wrong)} is not a number here ({', '.join(map(repr, wrong.values()))}), but counts ranks, nodes or "
            "ports; set it as torchrun or srun does (RANK and WORLD_SIZE, or neither), or unset it"
        )
    if "RANK" in environment or "WORLD_SIZE" in environment:
        ranks = {"RANK": environment.get("RANK", ""), "WORLD_SIZE": environment.get("WORLD_SIZE", "")}
        if missing := [name for name, value in ranks.items() if not value]:
            raise ConfigError(f"{' and '.join(missing)} is not a number here; set RANK and WORLD_SIZE, or neither")
        ranks["LOCAL_RANK"] = environment.get("LOCAL_RANK", ranks["RANK"])
        ranks["LOCAL_WORLD_SIZE"] = environment.get("LOCAL_WORLD_SIZE", ranks["WORLD_SIZE"])
    elif "SLURM_PROCID" in environment and int(environment.get("SLURM_NTASKS", "1")) > 1:
        ranks = {
            "RANK": environment["SLURM_PROCID"],
            "WORLD_SIZE": environment["SLURM_NTASKS"],
            "LOCAL_RANK": environment.get("SLURM_LOCALID", environment["SLURM_PROCID"]),
            "LOCAL_WORLD_SIZE": _slurm_local_size(environment),
        }
    else:
        return None
    if int(ranks["RANK"]) >= int(ranks["WORLD_SIZE"]):
        raise ConfigError(f"rank {ranks['RANK']} of {ranks['WORLD_SIZE']}: ranks count from 0; correct the environment")
    if "MASTER_ADDR" not in environment and int(environment.get("SLURM_NNODES", "1")) > 1:
        raise ConfigError(
            "MASTER_ADDR is not set, but ranks on several nodes must know where to meet; "
            'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
        )
    ranks["MASTER_ADDR"] = environment.get("MASTER_ADDR", "127.0.0.1")
    port = 20000 + int(environment.get("SLURM_JOB_ID", "9500")) % 20000  # the same on all ranks
    ranks["MASTER_PORT"] = environment.get("MASTER_PORT", str(port))
    return ranks


def speaks_for_all(environment: Mapping[str, str]) -> bool:
    """True if this process prints the lines that appear once."""
    ranks = external_ranks(environment)
    return ranks is None or ranks["RANK"] == "0"


def _slurm_local_size(environment: Mapping[str, str]) -> str:
    """Tasks on this node; Slurm lists them as `8(x2),4`."""
    tasks: list[str] = []
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", environment["SLURM_NTASKS"]).split(","):
        count, _, times = part.partition("(x")
        tasks += [count] * int(times.rstrip(")") or 1)
    node = int(environment.get("SLURM_NODEID", "0"))
    return tasks[node] if node < len(tasks) else tasks[0]


def _local_ranks() -> dict[str, str]:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return alone | {"MASTER_PORT": str(probe.getsockname()[1])}


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ[name] for name in values if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)
        os.environ.update(before)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Hold signals, and report every few seconds: on a busy machine, imports take a minute."""
    with signals_held(), while_silent(lambda: "importing libraries", to_stderr):
        yield


def _run_entry(entry: str, kind: str, config: Any) -> int:
    module, _, function = entry.partition(":")
    with importing():
        run = getattr(importlib.import_module(module), function)
    return int(run(kind, config) or 0)


def _launch_local(entry: str, kind: str, config: Any, world_size: int, surroundings: rank_processes.Surroundings) -> int:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from oppo_megatron.cluster.liveness.supervisor import Limits, Supervisor
    from oppo_megatron.cluster.rendezvous import LocalMeeting

    # The agent logs each failed or ended rank at length; the ranks' own messages follow below.
    for noisy in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    meeting = LocalMeeting(str(os.getpid()))
    relay = SignalRelay(saves=getattr(config, "preempt_deadline_s", None) != 0)
    with tempfile.TemporaryDirectory(prefix="oppo-") as failures:
        agent = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=world_size,
            **meeting.settings(),
            max_restarts=0,
            monitor_interval=MONITOR_S,
            start_method=rank_processes.start_method(config),
            local_addr="127.0.0.1",
            logs_specs=DefaultLogsSpecs(log_dir=f"{failures}/agent"),  # the default is a folder in /tmp that is never removed
        )
        if hasattr(agent, "signals_to_handle"):  # an older agent ends its ranks by SIGTERM and leaves them 30 s to save
            agent.signals_to_handle = "SIGQUIT"  # the relay handles SIGTERM, SIGINT and SIGHUP
        supervisor = Supervisor(Path(failures), meeting.point(world_size), Limits.of(config), relay.asked_s)
        try:
            with relay.listening(), supervisor.guarding(), interrupts_from_here_alone():
                elastic_launch(agent, _local_rank)(surroundings, entry, kind, config, failures)
        except ChildFailedError as error:
            if any(failed.exitcode == EXIT_REQUEUE for failed in error.failures.values()):
                return EXIT_REQUEUE
            if any(failed.exitcode == EXIT_AGAIN for failed in error.failures.values()):
                return relay.code or EXIT_AGAIN
            if relay.code == EXIT_INTERRUPTED:
                raise KeyboardInterrupt("nothing new was saved") from error
            return relay.code or _report(Path(failures), error, supervisor.last_words())
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from error
            return 128 + int(error.sigval)
    return 0


def _local_rank(surroundings: rank_processes.Surroundings, entry: str, kind: str, config: Any, failures: str) -> None:
    """Run one rank in its own process; on failure write a `Failure`. Unpickling `surroundings` applies them."""
    rank_processes.end_with_launcher()
    outlive_terminal()
    rank, folder = int(os.environ["RANK"]), Path(failures)
    os.environ[FOLDER] = failures
    (folder / f"{rank}.pid").write_text(str(os.getpid()), encoding="utf-8")
    try:
        code = _run_entry(entry, kind, config)
    except Exception as error:
        # An OSError with a file name (disk full, no permission) is for the user to correct; a lost connection names none.
        expected = isinstance(error, OppoError) or (isinstance(error, OSError) and error.filename is not None)
        what: Literal["input", "defect", "symptom"] = "input" if expected else "defect"
        what = "symptom" if isinstance(error, (StallError, WorldError)) else what
        message = traceback.format_exc() if what == "defect" else str(error)
        Failure(rank, time.time(), what, message).leave(folder)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the agent sends it once it has found another one
        time.sleep(LINGER_S)
        if ended_silently(folder):
            time.sleep(LOST_S)
        leave(EXIT_DEFECT)
    if code in GOOD_ENDS:
        ended_well(rank, folder)
    if code:
        leave(code)


def is_among_peers() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_initialized() and distributed.get_world_size() > 1


def leave(code: int) -> NoReturn:
    """End a failed process, without Python's cleanup if it has peers: freeing tensors of an open group may abort it."""
    if is_among_peers():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _report(failures: Path, error: ChildFailedError, last_words: Mapping[int, str]) -> int:
    """Report the first failure: a stall, a signal, wrong input (RankError), or a defect's traceback."""
    within = ended_within(failures)
    written = sorted(read_failures(failures), key=lambda failure: failure.time_s)
    effects = {-signal.SIGTERM}
    for failure in written:  # NCCL aborts a rank whose peer has gone; a peer that failed by itself gives the cause
        lost_peer = any(word in failure.message for word in ("/gloo/", "NCCL", "DistBackendError"))
        if failure.kind == "input" or (failure.kind == "defect" and not lost_peer):
            effects.add(-signal.SIGABRT)
    if not written and not within and all(failed.exitcode == ORPHANED for failed in error.failures.values()):
        raise RankKilled(ORPHANS)
    killed = [failed for failed in error.failures.values() if failed.exitcode < 0 and failed.exitcode not in effects]
    if stalls := [failure.message for failure in written if failure.kind == "stall"]:
        raise RankStalled(stalls[0])
    if killed:
        raise RankKilled(_killed(killed[0].local_rank, -killed[0].exitcode, written, last_words, within))
    silent = [first for first in error.failures.values() if first.local_rank in within]
    if silent and silent[0].local_rank not in {failure.rank for failure in written}:
        rank, code = silent[0].local_rank, silent[0].exitcode
        raise RankError(f"rank {rank} ended with exit code {code} in {within[rank]}; {ISOLATE}")
    if not written:
        first = error.get_first_failure()[1]
        print(f"rank {first.local_rank} ended with exit code {first.exitcode} and no message", file=sys.stderr)
        return EXIT_DEFECT
    # A rank with wrong input or a defect knows the cause; its peers only saw it end, perhaps before it could write.
    causes = ("input", "defect", "symptom")
    failure = min(written, key=lambda failure: causes.index(failure.kind))
    if failure.kind == "defect":
        print(f"rank {failure.rank} failed:\n{failure.message}", file=sys.stderr)
        return EXIT_DEFECT
    raise (RankStalled if failure.kind == "symptom" else RankError)(f"rank {failure.rank}: {failure.message}")


def _killed(rank: int, number: int, written: Sequence[Failure], last_words: Mapping[int, str], within: Mapping[int, str]) -> str:
    """Say which signal ended which rank, and the calls in progress on the others."""
    messages = {failure.rank: failure.message for failure in written if failure.kind in ("symptom", "input")}
    for failure in written:  # it may have met the loss of its peer in code that does not expect it
        if failure.kind == "defect":
            messages.setdefault(failure.rank, failure.message.rstrip().rpartition("\n")[2])
    at = f"; it was last heard of in: {last_words[rank]}" if rank in last_words else ""
    remedy = "SIGKILL mostly means that memory ran out (lower runtime.micro_batch_tokens or rollout.batch_size)"
    if number == signal.SIGABRT:
        remedy = "on GPUs, NCCL ends a rank this way if a peer has died or is late by runtime.timeout_s; its message is above"
    if rank in within:
        at, remedy = f" in {within[rank]}", ISOLATE
    lines = [f"rank {rank} was ended by {signal.Signals(number).name}{at}; {remedy}"]
    for other in sorted({*messages, *last_words} - {rank}):
        lines.append(f"rank {other}: {messages[other] if other in messages else 'last heard of in: ' + last_words[other]}")
    return "\n".join(lines)

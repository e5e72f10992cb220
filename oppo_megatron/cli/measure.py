"""Resolve `placement.mode: auto`: run each placement that fits for some steps, and choose the fastest.

Measuring runs are `oppo train` under `placement/` in the run directory; `placement.json` keeps the result.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from oppo_megatron.cli.launch import external_ranks, refuse_given_ranks
from oppo_megatron.cli.signals import ending_by_signal
from oppo_megatron.config.load import dump_config
from oppo_megatron.config.model import RuntimeConfig
from oppo_megatron.config.run import TrainConfig, TrainSettings
from oppo_megatron.config.supervised import SupervisedConfig
from oppo_megatron.cores import asked_threads, has_cuda, usable_cores
from oppo_megatron.errors import ConfigError, PlacementError
from oppo_megatron.layout import candidates as placing
from oppo_megatron.layout.candidates import Candidate, Machine, Options, find_candidates
from oppo_megatron.nesting import read_json
from oppo_megatron.processes import started
from oppo_megatron.rundir.directory import RunDirectory, write_json
from oppo_megatron.rundir.metrics_log import read_metrics
from oppo_megatron.train.inputs import read_inputs, try_answers

Tell = Callable[[str], None]
START = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from oppo_megatron.cli.main import main; sys.exit(main())"
"""`oppo` with this process's import path, so that it finds the same reward functions."""
AUTO = [
    "placement.mode=auto", "placement.actor={tp: 1, pp: 1, dp: 1}", "placement.scorer=null",
    "placement.reference=scorer",
]  # fmt: skip
"""Overrides that replace a configuration's placement by `auto`."""
ONE_MACHINE = (
    "{}, and placements of other numbers of ranks cannot be measured with these; measure on one machine, without the launcher, "
    "with `oppo plan measure CONFIG`, then write the placement that it prints into the configuration"
)
LAST_ERROR = re.compile(r"^[\w.]*(?:Error|Exception)\b.*$", re.MULTILINE)


def resolve_placement(settings: TrainSettings | SupervisedConfig, *, measure: bool) -> TrainConfig | SupervisedConfig | None:
    """Return the configuration with its placement; None if it needs measuring and `measure` is false.

    Raises ConfigError if a launcher has started ranks or the run has finished, PlacementError if no placement can run.
    """
    if not isinstance(settings, TrainSettings):
        return settings
    if (config := settings.resolved()) is not None:
        return config
    refuse_given_ranks(ONE_MACHINE.format("placement.mode is auto"))
    run = RunDirectory(settings.run_dir)

    def tell(line: str) -> None:
        if settings.logging.console != "off":
            print(f"placement: {line}", file=sys.stderr, flush=True)

    options = find_candidates(settings, this_machine(settings.runtime))
    chosen = read_choice(run.placement, placing.fingerprint(settings, options.machine))
    if chosen is not None:
        tell(f"{chosen.name}, as measured before ({run.placement})")
    elif not measure:
        return None
    else:
        run.require_unfinished()
        record = measure_placements(settings, options, tell)
        tell(f"{record['reason']} ({run.placement})")
        chosen = Candidate.of_record(record)
    return settings.with_placement(chosen.placement)


def measure_placements(
    settings: TrainSettings, options: Options, tell: Tell, tell_runs: Tell = lambda line: None
) -> dict[str, Any]:
    """Write `placement.json` and return its content. Raises PlacementError, and errors of rows and rewards."""
    # Raise errors that every run would meet (a bad row, a reward setting) once, before the runs.
    try_answers(read_inputs(settings), settings, every=False)
    run = RunDirectory(settings.run_dir)
    if run.placement_runs.exists():
        shutil.rmtree(run.placement_runs)
    run.placement_runs.mkdir(parents=True)
    tried: list[placing.Trial] = []
    load = os.getloadavg()[0]
    if len(options.candidates) > 1:
        tell(describe_work(settings, options))
        if load > usable_cores():
            tell(f"this machine is busy (load average {load:.1f} on {usable_cores()} cores): measure again when it is idle")
        tried = placing.measure_all(options.candidates, partial(_probe, settings, run.placement_runs, tell_runs))
    record = placing.to_record(placing.fingerprint(settings, options.machine), options, tried, placing.choose(options, tried))
    record["load_average_1min"] = round(load, 2)
    write_json(run.placement, record)
    return record


def _probe(settings: TrainSettings, folder: Path, tell: Tell, candidate: Candidate, turn: int) -> placing.Run:
    """Run a placement in `folder/<name>-<turn>/`, with its configuration and log. Raises PlacementError."""
    name = f"{re.sub('[^a-z0-9]+', '-', candidate.name).strip('-')}-{turn}"
    file, log = folder / f"{name}.yaml", folder / f"{name}.log"
    dump_config(placing.probe_config(settings, candidate.placement, folder / name), file)
    code = run_logged([sys.executable, "-c", START, json.dumps(sys.path), "train", str(file)], log)
    if code:
        reason = f"{failure(code, log.read_text(encoding='utf-8', errors='replace'))} (log: {log})"
        tell(f"{candidate.name}, run {turn}: {reason}")
        raise PlacementError(reason)
    run = placing.read_run(read_metrics(RunDirectory(folder / name).metrics))
    tell(f"{candidate.name}, run {turn}: {run.seconds / run.steps:.3g} s per step")
    return run


def run_logged(command: Sequence[str], log: Path) -> int:
    """Run to the end, all output in `log`; return the exit code. Ends with this process."""
    # Its own session: an interrupt from the terminal reaches it once, from this process.
    with ending_by_signal(), started(command, log, own_session=True) as process:
        return process.wait()


def failure(code: int, output: str) -> str:
    """Why `oppo train` ended: its message, a signal, or the last exception."""
    _, found, message = output.rpartition("oppo train: ")
    if found:
        return " ".join(message.split())
    if code < 0:
        name = signal.Signals(-code).name
        return f"ended by {name}" + (", which mostly means that memory ran out" if name == "SIGKILL" else "")
    errors = LAST_ERROR.findall(output)
    return str(errors[-1]) if errors else f"ended with exit code {code}"


def this_machine(runtime: RuntimeConfig) -> Machine:
    check_devices(runtime.device, 1)
    devices = 0 if runtime.device == "cpu" else cuda_devices()
    return Machine("cuda", devices) if devices else Machine("cpu", usable_cores())


def cuda_devices() -> int:
    """Count devices without creating a CUDA context, which would occupy device memory."""
    import torch

    return torch.cuda.device_count()


def on_cpu(device: str) -> bool:
    """True if `runtime.device` means the CPU. Does not load torch."""
    return device == "cpu" or (device == "auto" and not has_cuda())


def check_devices(device: str, ranks: int, alone: str = "", without: str = "runtime.device=cpu") -> None:
    """Raise ConfigError if CUDA devices are lacking; `alone`: overrides for a single rank."""
    if on_cpu(device):
        return
    devices = cuda_devices()
    if device == "cuda" and not devices:
        raise ConfigError("runtime.device is 'cuda', but torch finds no CUDA device here; set runtime.device=cpu or auto")
    if 0 < devices < ranks and external_ranks(os.environ) is None:
        has = "one CUDA device" if devices == 1 else f"{devices} CUDA devices"
        fewer = alone if devices == 1 else f"a placement of at most {devices} ranks (on one: {alone})"
        raise ConfigError(
            f"{ranks} ranks would be started, but this host has {has}, and NCCL wants one for each rank; set {fewer}, "
            f"or {without} to compute without them"
        )


def read_choice(path: Path, key: str) -> Candidate | None:
    """The choice measured earlier for the same configuration, or None. Raises ConfigError."""
    if not path.exists():
        return None
    try:
        record = read_json(path.read_text(encoding="utf-8"))
        return Candidate.of_record(record) if record["key"] == key else None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not what `oppo` wrote ({error}); remove it to measure again") from error


def describe_work(settings: TrainSettings, options: Options) -> str:
    """Name the placements to measure, and those whose configured threads leave cores idle."""
    names = ", ".join(candidate.name for candidate in options.candidates)
    work = f"measuring {names} on {options.machine}, {placing.MEASURED_STEPS} steps each"
    threads, machine = asked_threads(), options.machine
    idle = [each.name for each in options.candidates if 0 < each.num_ranks * threads < machine.units]
    if machine.device == "cuda" or not idle:
        return work
    return (
        f"{work}; OMP_NUM_THREADS={threads} leaves cores idle in {', '.join(idle)}: unset it to have all cores "
        "divided among the ranks of each placement"
    )


def describe_options(settings: TrainSettings | SupervisedConfig) -> list[str]:
    """Lines to print if `resolve_placement` returned None."""
    assert isinstance(settings, TrainSettings), "the placement of others is written down"
    options = find_candidates(settings, this_machine(settings.runtime))
    head = (
        f"placement.mode auto: `oppo train` would first measure these on {options.machine}, {placing.MEASURED_STEPS} steps each, "
        "and take the fastest:"
    )
    if len(options.candidates) == 1:
        head = f"placement.mode auto: on {options.machine} this is the only placement to choose from, nothing is measured:"
    rows = [(candidate.name, f"{candidate.num_ranks} rank{'s' * (candidate.num_ranks > 1)}") for candidate in options.candidates]
    width = max(len(name) for name, _ in rows)
    left_out = [f"  {option.name}: {option.reason}" for option in options.left_out]
    return [head, *(f"  {name:{width}}  {ranks}" for name, ranks in rows), *(["left out:", *left_out] if left_out else [])]

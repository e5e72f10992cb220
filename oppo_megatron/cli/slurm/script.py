"""The sbatch script of a job: the ready script of launch/slurm with its #SBATCH lines filled in, and job.sh put into it.

`files/` leads to launch/slurm, so that there is one text of each; an installed package has them as files.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from importlib.resources import files

from oppo_megatron.cli.slurm.request import Job, Part

MARK = "#SBATCH "
NEXT_PART = f"{MARK}hetjob"
BODY = "# sbatch runs a copy"
"""Where the ready scripts begin to look for job.sh."""
FOR_SHELLCHECK = "# shellcheck "
"""These lines, not indented, hold for a whole file and stand at its head."""


def packaged(name: str) -> str:
    """The text of a file of launch/slurm."""
    return (files(__package__) / "files" / name).read_text(encoding="utf-8")


def write_script(job: Job, command: str) -> str:
    """The whole script; `command` is what wrote it."""
    ready = packaged("train-hetero.sbatch" if len(job.parts) > 1 else "train.sbatch")
    head = ready[ready.index(MARK) : ready.index(BODY)]
    body = packaged("job.sh").splitlines()
    lines = [
        "#!/usr/bin/env bash",
        *(line for line in body if line.startswith(FOR_SHELLCHECK)),
        f"# Written by: {' '.join(command.splitlines())}",
        *_directives(head.rstrip().splitlines(), job),
        "",
        *_settings(job),
        "",
        *(line for line in body if not line.startswith(FOR_SHELLCHECK)),
    ]
    return "\n".join(lines) + "\n"


def _directives(lines: list[str], job: Job) -> Iterator[str]:
    """The ready script's lines with the job's values; options that it has beyond them at the end of each component."""
    parts = iter(job.parts)
    values = _values(job, next(parts), leader=True)
    for line in lines:
        if line == NEXT_PART:
            yield from _rest(values)
            yield line
            values = _values(job, next(parts), leader=False)
            continue
        name, given, _ = line.removeprefix(f"{MARK}--").partition("=")
        if not (line.startswith(MARK) and given and name in values):
            yield line
        elif (value := values.pop(name)) is not None:
            yield f"{MARK}--{name}={value}"
    yield from _rest(values)


def _rest(values: Mapping[str, str | None]) -> Iterator[str]:
    for name, value in values.items():
        if value is not None:
            yield f"{MARK}--{name}={value}"


def _values(job: Job, part: Part, *, leader: bool) -> dict[str, str | None]:
    """Options of a component; None: not asked for."""
    options = job.options
    values: dict[str, str | None] = {
        "job-name": job.name if leader else f"{job.name}-{part.name}",
        "nodes": str(part.num_nodes),
        "ntasks-per-node": str(part.ranks_per_node),
        "gpus-per-node": str(part.gpus_per_node) if part.gpus_per_node else None,
        "time": options.time,
        "partition": part.partition,
        "constraint": part.constraint,
        "account": options.account,
        "qos": options.qos,
    }
    if leader:
        values |= {"signal": f"B:USR1@{options.signal_s}", "chdir": options.working_directory}
    return values


def _settings(job: Job) -> Iterator[str]:
    options = job.options
    yield "# What this job was written with; it wins over cluster.env."
    yield f"OPPO_RUN_DIR={shlex.quote(job.run_dir)}"
    chosen = {
        "OPPO_CLUSTER_ENV": options.cluster_env,
        "OPPO_CONTAINER_IMAGE": options.container_image,
        "OPPO_CONTAINER_MOUNTS": options.container_mounts,
        "OPPO_MAX_RESTARTS": None if options.max_restarts is None else str(options.max_restarts),
    }
    yield from (f"{name}={shlex.quote(value)}" for name, value in chosen.items() if value is not None)
    yield f'set -- {shlex.join([options.config_path, *options.overrides])} "$@"'

"""The sbatch script of a job: `job.sbatch.j2` with the job's values, and job.sh put into it.

`files/` leads to launch/slurm, so that there is one text of each; an installed package has them as files.
"""

from __future__ import annotations

import shlex
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined

from oppo_megatron.cli.slurm.request import Job

TEMPLATE = "job.sbatch.j2"


def packaged(name: str) -> str:
    """Return the text of a file of launch/slurm."""
    return (files(__package__) / "files" / name).read_text(encoding="utf-8")


def write_script(job: Job, command: str) -> str:
    """Return the whole script; `command` is the command line that wrote it."""
    environment = Environment(  # noqa: S701  (a shell's script: values are quoted by shlex, or checked by `plan_job`)
        loader=PackageLoader(__package__, ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    return environment.get_template(TEMPLATE).render(
        job=job,
        options=job.options,
        command=" ".join(command.splitlines()),
        arguments=shlex.join([job.options.config_path, *job.options.overrides]),
        job_sh=packaged("job.sh").splitlines(),
    )

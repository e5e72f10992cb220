"""`oppo launch slurm`: write a configuration's sbatch script, and show the requested resources."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from oppo_megatron.cli.load import load_train
from oppo_megatron.cli.parser import add_config_arguments, add_debug_argument, at_least, count
from oppo_megatron.cli.slurm.request import Job, plan_job
from oppo_megatron.errors import ConfigError

ABOUT = """Writes the sbatch script of `oppo train CONFIG.yaml --resume`: nodes and ranks follow from the configuration, settings
of the cluster are in cluster.env.  The script goes to stdout or --out, a description of what it requests to stderr.
docs/slurm.md says what happens when it runs."""
TEMPLATE = "job.sbatch.j2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    systems = parser.add_subparsers(dest="system", metavar="SYSTEM", required=True)
    slurm = systems.add_parser(
        "slurm", help="an sbatch script", description=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_debug_argument(slurm)
    add_config_arguments(slurm)
    slurm.add_argument("--out", type=Path, metavar="FILE", help="write the script here instead of to stdout")
    _add_part_arguments(slurm, "", "of each node")
    for name, about in (
        ("account", "who pays"), ("qos", "quality of service"), ("job-name", "default: oppo- and the name of run_dir"),
    ):  # fmt: skip
        slurm.add_argument(f"--{name}", help=about)
    slurm.add_argument("--time", default="04:00:00", metavar="D-HH:MM:SS", help="limit of each attempt; default %(default)s")
    slurm.add_argument(
        "--signal-s", type=int, default=600, metavar="S", help="seconds before it to save and be requeued; default 600"
    )
    slurm.add_argument("--max-restarts", type=at_least(0), metavar="N", help="most requeues; default: cluster.env's")
    slurm.add_argument("--container-image", metavar="IMAGE", help="run the ranks in it (pyxis/enroot)")
    slurm.add_argument("--container-mounts", metavar="A:B,...", help="in addition to the working directory and the logs")
    slurm.add_argument(
        "--cluster-env", type=Path, metavar="FILE", help="settings local to the cluster; a missing file is made from the template"
    )
    slurm.add_argument("--hetero", action="store_true", help="a heterogeneous job: nodes for the actor, others for scorers")
    _add_part_arguments(slurm, "scorer-", "of each of the scorers' nodes (--hetero); default: as the actor's")


def _add_part_arguments(parser: argparse.ArgumentParser, prefix: str, whose: str) -> None:
    for what, default in (("gpus", "8"), ("ranks", "GPUs")):
        about = f"{what.replace('gpu', 'GPU')} {whose}" + ("" if prefix else f"; default: {default}")
        parser.add_argument(f"--{prefix}{what}-per-node", type=count, metavar="N", help=about)
    parser.add_argument(f"--{prefix}partition", help=f"partition {whose}")
    parser.add_argument(f"--{prefix}constraint", help=f"features {whose}")


def run(args: argparse.Namespace) -> int:
    if args.cluster_env is not None and args.cluster_env.is_dir():
        raise ConfigError(f"--cluster-env is {args.cluster_env}, a folder; name a file, as in --cluster-env cluster.env")
    for name, what in (("config", "the configuration"), ("cluster_env", "cluster.env")):
        path = getattr(args, name)
        if None not in (path, args.out) and os.path.realpath(path) == os.path.realpath(args.out):
            raise ConfigError(f"--out is {args.out}, {what} itself; name another file, as in --out job.sbatch")
    job = plan_job(load_train(args.config, args.overrides), args)
    words = ["oppo", "launch", "slurm", str(args.config), *args.overrides]
    for name, value in vars(args).items():
        if name not in ("command", "system", "config", "overrides", "debug", "run") and value not in (None, False):
            words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    script = _script(job, shlex.join(words))
    if args.cluster_env is not None and not args.cluster_env.exists():
        args.cluster_env.write_text(packaged("cluster.env"), encoding="utf-8")
        print(f"made {args.cluster_env} from the template: edit it before you submit", file=sys.stderr)
    if args.out is None:
        sys.stdout.write(script)
    else:
        args.out.write_text(script, encoding="utf-8")
        args.out.chmod(0o755)
    name = "SCRIPT" if args.out is None else shlex.quote(str(args.out))
    print(*job.describe(), f"submit it with: sbatch {name}", sep="\n", file=sys.stderr)
    return 0


def packaged(name: str) -> str:
    """Text of a file of launch/slurm, to which `files/` links."""
    return (files(__package__) / "files" / name).read_text(encoding="utf-8")


def _script(job: Job, command: str) -> str:
    """The template with the job's values and job.sh; `command` wrote it."""
    environment = Environment(  # noqa: S701  (a shell's script: values are quoted by shlex, or checked by `plan_job`)
        loader=PackageLoader(__package__, ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    options = job.options
    return environment.get_template(TEMPLATE).render(
        job=job,
        options=options,
        working_directory=os.getcwd(),
        command=" ".join(command.splitlines()),
        arguments=shlex.join([os.path.abspath(options.config), *options.overrides]),
        cluster_env=None if options.cluster_env is None else os.path.abspath(options.cluster_env),
        job_sh=packaged("job.sh").splitlines(),
    )

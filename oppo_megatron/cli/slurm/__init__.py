"""`oppo launch slurm`: writes the sbatch script of a configuration, and shows the requested resources."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from dataclasses import fields
from pathlib import Path

from oppo_megatron.cli.load import load_train
from oppo_megatron.cli.parser import add_config_arguments, add_debug_argument
from oppo_megatron.cli.slurm.request import JobOptions, PartOptions, plan_job
from oppo_megatron.cli.slurm.script import packaged, write_script
from oppo_megatron.errors import ConfigError

ABOUT = """Writes the sbatch script of `oppo train CONFIG.yaml --resume`: nodes and ranks follow from the configuration, all that
is local to a cluster stands in cluster.env.  The script goes to stdout or --out; what it will ask for is told on stderr.
docs/slurm.md says what happens when it runs."""
OPTIONS = {
    *(f"{prefix}{field.name}" for prefix in ("", "scorer_") for field in fields(PartOptions)),
    *(field.name for field in fields(JobOptions) if field.name != "overrides"), "out",
}  # fmt: skip
"""Options to repeat in the command line; overrides are added unchanged."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    systems = parser.add_subparsers(dest="system", metavar="SYSTEM", required=True)
    slurm = systems.add_parser(
        "slurm",
        help="an sbatch script",
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_debug_argument(slurm)
    add_config_arguments(slurm)
    slurm.add_argument("--out", type=Path, metavar="FILE", help="write the script here instead of to stdout")
    _add_part_arguments(slurm, "", "of each node")
    for name, about in (
        ("account", "who pays"), ("qos", "quality of service"), ("job-name", "default: oppo- and the name of run_dir"),
    ):  # fmt: skip
        slurm.add_argument(f"--{name}", help=about)
    slurm.add_argument(
        "--time", default="04:00:00", metavar="D-HH:MM:SS", help="limit of each attempt; default %(default)s"
    )
    slurm.add_argument(
        "--signal-s", type=int, default=600, metavar="S", help="seconds before it to save and be requeued; default 600"
    )
    slurm.add_argument("--max-restarts", type=int, metavar="N", help="requeue so many times; default: cluster.env's")
    slurm.add_argument("--container-image", metavar="IMAGE", help="run the ranks in it (pyxis/enroot)")
    slurm.add_argument("--container-mounts", metavar="A:B,...", help="beside the working directory and the logs")
    slurm.add_argument(
        "--cluster-env",
        type=Path,
        metavar="FILE",
        help="settings local to the cluster; a missing file is made from the template",
    )
    slurm.add_argument(
        "--hetero", action="store_true", help="a heterogeneous job: nodes for the actor, others for scorers"
    )
    _add_part_arguments(slurm, "scorer-", "of each of the scorers' nodes (--hetero); default: as the actor's")


def _add_part_arguments(parser: argparse.ArgumentParser, prefix: str, whose: str) -> None:
    parser.add_argument(
        f"--{prefix}gpus-per-node", type=int, metavar="N", help=f"GPUs {whose}" + ("" if prefix else "; 8")
    )
    parser.add_argument(
        f"--{prefix}ranks-per-node",
        type=int,
        metavar="N",
        help=f"ranks {whose}" + ("" if prefix else "; default: GPUs"),
    )
    parser.add_argument(f"--{prefix}partition", help=f"partition {whose}")
    parser.add_argument(f"--{prefix}constraint", help=f"features {whose}")


def run(args: argparse.Namespace) -> int:
    _check_files(args)
    job = plan_job(load_train(args.config, args.overrides), _options(args))
    script = write_script(job, _command(args))
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


def _check_files(args: argparse.Namespace) -> None:
    """Raise ConfigError if the script would overwrite its sources, or cluster.env cannot be a file."""
    if args.cluster_env is not None and args.cluster_env.is_dir():
        raise ConfigError(
            f"--cluster-env is {args.cluster_env}, a folder; name a file, as in --cluster-env cluster.env"
        )
    for name in ("config", "cluster_env"):
        path = getattr(args, name)
        if None not in (path, args.out) and os.path.realpath(path) == os.path.realpath(args.out):
            what = "the configuration" if name == "config" else "cluster.env"
            raise ConfigError(f"--out is {args.out}, {what} itself; name another file, as in --out job.sbatch")


def _command(args: argparse.Namespace) -> str:
    """Return the command that writes the same script again."""
    words = ["oppo", "launch", "slurm", str(args.config), *args.overrides]
    for name, value in vars(args).items():
        if name in OPTIONS and value not in (None, False):
            words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return shlex.join(words)


def _options(args: argparse.Namespace) -> JobOptions:
    def part(prefix: str) -> PartOptions:
        names = ("gpus_per_node", "ranks_per_node", "partition", "constraint")
        return PartOptions(*(getattr(args, prefix + name) for name in names))

    return JobOptions(
        config_path=os.path.abspath(args.config),
        overrides=tuple(args.overrides),
        working_directory=os.getcwd(),
        part=part(""),
        scorer=part("scorer_"),
        hetero=args.hetero,
        time=args.time,
        signal_s=args.signal_s,
        max_restarts=args.max_restarts,
        account=args.account,
        qos=args.qos,
        job_name=args.job_name,
        container_image=args.container_image,
        container_mounts=args.container_mounts,
        cluster_env=None if args.cluster_env is None else os.path.abspath(args.cluster_env),
    )

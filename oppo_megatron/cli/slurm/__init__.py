"""`oppo launch slurm`: write a configuration's sbatch script, and show the requested resources."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from oppo_megatron.cli.load import load_train
from oppo_megatron.cli.parser import add_config_arguments, add_debug_argument, at_least, count
from oppo_megatron.config.model import format_ranks
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.placements import RolePlacement, role_placements, training_placements, world_size

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


GPUS_PER_NODE = 8
LONGEST_SIGNAL_S = 65535  # the largest time that sbatch accepts after the @ of --signal
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_PLAIN = re.compile(r"[^\s'\"\\`$]+")
"""Text that needs no quotes in an #SBATCH line."""


class PartOptions(NamedTuple):
    gpus_per_node: int | None = None
    ranks_per_node: int | None = None
    partition: str | None = None
    constraint: str | None = None

    @classmethod
    def of(cls, options: argparse.Namespace, prefix: str) -> PartOptions:
        return cls(*(getattr(options, prefix + name) for name in cls._fields))


@dataclass(frozen=True)
class Part:
    """Nodes of one kind. `gpus_per_node` is 0 for a run on CPUs."""

    name: str
    num_ranks: int
    num_nodes: int
    gpus_per_node: int
    partition: str | None
    constraint: str | None

    @property
    def ranks_per_node(self) -> int:
        return self.num_ranks // self.num_nodes


@dataclass(frozen=True)
class Job:
    """`parts`: one component, or one each for actor and scorers."""

    options: argparse.Namespace
    name: str
    run_dir: str
    parts: tuple[Part, ...]
    notes: tuple[str, ...]

    def describe(self) -> list[str]:
        options = self.options
        where = f"in {options.container_image}" if options.container_image else "without a container"
        if options.cluster_env and not options.container_image:
            where += ", unless cluster.env names an image"
        limit = f"{options.time} minutes" if options.time.isdigit() else options.time
        restarts = "as cluster.env says" if options.max_restarts is None else f"up to {options.max_restarts} times"
        first, parts = 0, []
        for part in self.parts:
            gpus = f", {part.gpus_per_node} GPUs each" if part.gpus_per_node else ", no GPUs"
            queue = f", partition {part.partition}" if part.partition else ""
            nodes = f"{part.num_nodes} exclusive node{'s' if part.num_nodes > 1 else ''}"
            ranks = f"rank {first}" if part.num_ranks == 1 else f"ranks {first}-{first + part.num_ranks - 1}"
            of = f" ({part.name})" if part.name else ""
            each = f"{part.ranks_per_node} rank{'s' if part.ranks_per_node > 1 else ''}"
            parts.append(f"  {nodes} x {each}{gpus}{queue}: {ranks}{of}")
            first += part.num_ranks
        return [
            f"job {self.name}: {sum(part.num_ranks for part in self.parts)} ranks, {where}",
            *parts,
            f"  time limit {limit} for each attempt; {options.signal_s} s before, the run is saved and the job requeued "
            f"({restarts})",
            *(f"  note: {note}" for note in self.notes),
        ]


def plan_job(config: TrainConfig, options: argparse.Namespace) -> Job:
    """Raises ConfigError with all problems if configuration and nodes do not fit."""
    problems = [*_option_problems(config, options)]
    parts: list[Part] = []
    for name, num_ranks, wanted in _split(config, options, problems):
        if isinstance(part := _part(name, num_ranks, wanted, config.runtime.device), Part):
            parts.append(part)
        else:
            problems.append(part)
    if problems:
        raise ConfigError(problems)
    placements = [*role_placements(config).items(), *training_placements(config).items()]
    return Job(
        options=options,
        name=options.job_name or "oppo-" + re.sub(r"[^\w.-]", "-", config.run_dir.name or "run"),
        run_dir=os.path.abspath(config.run_dir),
        parts=tuple(parts),
        notes=tuple(_notes(config, parts, placements)),
    )


def time_limit_s(text: str) -> int | None:
    """Seconds of a Slurm time limit (M, M:S, H:M:S, D-H, D-H:M, D-H:M:S), or None if invalid."""
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    days, *fields = (int(number) if number else None for number in match.groups())
    given = [number for number in fields if number is not None]
    units = (3600, 60, 1) if days is not None or len(given) == 3 else (60, 1)
    return (days or 0) * 86400 + sum(number * unit for number, unit in zip(given, units, strict=False))


def _option_problems(config: TrainConfig, options: argparse.Namespace) -> Iterator[str]:
    texts = ("account", "qos", "job_name", "partition", "constraint", "scorer_partition", "scorer_constraint")
    named = [("--" + name.replace("_", "-"), getattr(options, name)) for name in texts]
    for name, value in [("the working directory", os.getcwd()), *named]:
        if value is not None and not _PLAIN.fullmatch(value):
            yield f"{name} is {value!r}; an #SBATCH line takes no spaces, quotes, backslashes or $ here"
    if "/" in (options.job_name or ""):
        yield f"--job-name is {options.job_name!r}; logs are named after it, so it takes no /"
    if options.container_image == "":
        yield "--container-image is empty; name an image, or leave it out: cluster.env's is taken, or none"
    elif options.container_mounts and not options.container_image:
        yield "--container-mounts is given without --container-image; name the image, or leave the mounts to cluster.env"
    if PartOptions.of(options, "scorer_") != PartOptions() and not options.hetero:
        yield "--scorer-... describes nodes of a second kind; add --hetero, or leave it out"
    limit_s = time_limit_s(options.time)
    if limit_s is None:
        yield f"--time is {options.time!r}; Slurm reads minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S, as in 1-12:00:00"
    elif limit_s <= options.signal_s:
        yield f"--time {options.time} is {limit_s} s, and --signal-s {options.signal_s} comes before it; leave time to train"
    if not config.preempt_deadline_s:
        yield "preempt_deadline_s is 0: a job that is asked to stop would not be saved; set it to 120, say"
    elif options.signal_s > LONGEST_SIGNAL_S:
        yield f"--signal-s is {options.signal_s}; sbatch takes at most {LONGEST_SIGNAL_S}"
    elif options.signal_s <= config.preempt_deadline_s:
        yield (
            f"--signal-s is {options.signal_s}, and the run may take preempt_deadline_s={config.preempt_deadline_s:g} s to "
            "be saved; raise --signal-s, or lower the deadline"
        )


def _split(config: TrainConfig, options: argparse.Namespace, problems: list[str]) -> list[tuple[str, int, PartOptions]]:
    """Name, number of ranks and options of each component; adds errors to `problems`."""
    own, theirs = PartOptions.of(options, ""), PartOptions.of(options, "scorer_")
    if not options.hetero:
        return [("", world_size(config), own)]
    placements = role_placements(config)
    actor = sorted(placements["actor"].ranks)
    shared = [name for name, placement in placements.items() if name != "actor" and set(placement.ranks) & set(actor)]
    if shared or actor != list(range(len(actor))):
        sharing = f", where {' and '.join(shared)} run, too" if shared else ""
        problems.append(
            f"--hetero parts the actor's nodes from the scorers', but the actor has ranks {format_ranks(actor)}{sharing}; "
            "use placement.mode=disaggregated with the actor on ranks 0 and up, or leave out --hetero"
        )
        return []
    scorer = PartOptions(
        theirs.gpus_per_node or own.gpus_per_node,
        theirs.ranks_per_node or (None if theirs.gpus_per_node else own.ranks_per_node),
        theirs.partition or own.partition,
        theirs.constraint or own.constraint,
    )
    return [("actor", len(actor), own), ("scorers", world_size(config) - len(actor), scorer)]


def _part(name: str, num_ranks: int, wanted: PartOptions, device: str) -> Part | str:
    """The component, or the problem as text."""
    of = f" of the {name}" if name else ""
    prefix = "scorer-" if name == "scorers" else ""
    gpus = 0 if device == "cpu" else (wanted.gpus_per_node or GPUS_PER_NODE)
    if device == "cpu" and wanted.gpus_per_node:
        return f"--{prefix}gpus-per-node is given, but runtime.device is cpu and would leave them idle; leave it out"
    if gpus and (wanted.ranks_per_node or 0) > gpus:
        remedy = f"--{prefix}ranks-per-node {gpus}"
        return f"{wanted.ranks_per_node} ranks on nodes{of} with {gpus} GPUs; each rank needs one: {remedy}"
    most = wanted.ranks_per_node or gpus or num_ranks
    on_node = min(most, num_ranks)
    if num_ranks % on_node:
        fitting = [size for size in range(1, most + 1) if num_ranks % size == 0]
        return (
            f"{num_ranks} ranks{of} do not fill nodes of {most}, and every node must have as many; give --"
            f"{prefix}ranks-per-node {fitting[-1]} ({num_ranks // fitting[-1]} nodes), or "
            "change the placement"
        )
    return Part(name, num_ranks, num_ranks // on_node, gpus, wanted.partition, wanted.constraint)


def _notes(config: TrainConfig, parts: Sequence[Part], placements: Sequence[tuple[str, RolePlacement]]) -> Iterator[str]:
    if not config.checkpoint.every_steps:
        yield "checkpoint.every_steps is 0: a run whose rank is killed starts again from the beginning or from its last stop"
    for part in parts:
        if part.gpus_per_node > part.ranks_per_node:
            of = f" of the {part.name}" if part.name else ""
            yield f"{part.gpus_per_node - part.ranks_per_node} of {part.gpus_per_node} GPUs on each node{of} stay idle"
    node_of = [(part.name, rank // part.ranks_per_node) for part in parts for rank in range(part.num_ranks)]
    wide = {
        name
        for name, placement in placements
        for copy, stage in product(range(placement.copies), range(placement.pp))
        if len({node_of[rank] for rank in placement.stage_ranks(copy, stage)}) > 1
    }
    for name in sorted(wide):
        yield f"tensor-parallel ranks of {name} are on different nodes, which is slow: lower tp, or take more ranks per node"

"""`oppo bench machine`: the processors at hand as a cluster of the planner."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oppo_megatron.cli.bench.machine_runs import fit_runs
from oppo_megatron.cli.parser import add_config_arguments

if TYPE_CHECKING:
    from oppo_megatron.bench.machine import Core
    from oppo_megatron.sim.laws.points import CollectivePoint, LayerPoint

HELP = "this machine's cores, measured, as a cluster.yaml for `oppo plan` and `oppo plan simulate`"
ABOUT = """Measures one core with the layers of a configuration's actor, what further cores bring a rank, and messages between
ranks; fits the planner's laws to them. Then it makes two short runs of the configuration on one rank, with one core and with
all, which say what the engine takes beyond the laws of kernels. Writes layers.csv, collectives.csv, measured.json and
cluster.yaml. Takes some minutes; other work on the machine spoils it. For GPUs there is `oppo bench laws`."""
NAME = "cpu"
MOST_RANKS = 64
MEASURED = "measured.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument(
        "--steps", type=int, default=4, metavar="N", help="of each run; 0: no runs (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the files, and for the runs")
    parser.set_defaults(measure=_machine)


def _machine(args: argparse.Namespace) -> int:
    from oppo_megatron.bench import machine
    from oppo_megatron.config.load import load_config
    from oppo_megatron.config.run import TrainConfig
    from oppo_megatron.cores import usable_cores
    from oppo_megatron.errors import ConfigError
    from oppo_megatron.modeldir.headers import read_hf_config

    if args.steps < 0 or args.steps == 1:
        raise ConfigError(f"--steps {args.steps}: the first step of a run warms up; give 2 or more, or 0 for no runs")
    actor, cores = load_config(TrainConfig, args.config, args.overrides).actor, usable_cores()
    shape = read_hf_config(actor)
    args.out.mkdir(parents=True, exist_ok=True)
    print(f"measuring one to {cores} cores ...", flush=True)
    core = machine.measure_core(shape, actor.dtype, cores)
    layers = list(machine.measure_layers(NAME, shape, actor.dtype))
    ranks = min(cores, MOST_RANKS)
    if ranks > 1:
        print(f"measuring messages of {ranks} ranks ...", flush=True)
    messages = _messages(ranks) if ranks > 1 else []
    print(f"a core: {core.flops / 1e9:.1f} GFLOP/s, {core.read_bytes / 1e9:.1f} GB/s")
    print(", ".join(f"{count} cores: {times:.2f} times a core" for count, times in core.threads.items()))
    tree = _fitted(args.out, core, layers, messages)
    if args.steps:
        fit_runs(args.config, args.overrides, args.out, args.steps, tree)
    print(f"written: {args.out / 'cluster.yaml'}")
    return 0


def _fitted(
    folder: Path, core: Core, layers: Sequence[LayerPoint], messages: Sequence[CollectivePoint]
) -> dict[str, Any]:
    """Fit the laws, show their errors, and write the four files; what measured.json holds."""
    import yaml

    from oppo_megatron.bench.figures import format_table
    from oppo_megatron.bench.machine import cluster_tree, processor
    from oppo_megatron.rundir.directory import write_json, write_text
    from oppo_megatron.sim.clusters.links import INSIDE
    from oppo_megatron.sim.laws import comparing
    from oppo_megatron.sim.laws.fitting import fit_layers
    from oppo_megatron.sim.laws.points import write_collectives, write_layers

    gpu = processor(core, len(core.threads))
    fit, lines = fit_layers(gpu, layers), comparing.fit_lines(messages)
    rows = [*comparing.compare_layers(gpu, layers, fit), *comparing.compare_collectives(INSIDE[NAME], messages, lines)]
    print(format_table(comparing.COLUMNS, rows))
    write_layers(folder / "layers.csv", layers)
    write_collectives(folder / "collectives.csv", messages)
    measured = comparing.measured_tree(
        f"`oppo bench machine`, {len(layers)} layers, {len(messages)} messages", fit, lines
    )
    measured["threads"] = {str(count): times for count, times in core.threads.items()}
    write_json(folder / MEASURED, measured)
    text = yaml.safe_dump(cluster_tree(gpu, len(core.threads), MEASURED), sort_keys=False)
    write_text(folder / "cluster.yaml", text)
    return measured


def _messages(ranks: int) -> list[CollectivePoint]:
    import multiprocessing

    from oppo_megatron.bench.machine import exchange_messages
    from oppo_megatron.errors import WorldError

    context = multiprocessing.get_context("spawn")
    found: Any = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as meeting:
        arguments = (ranks, f"{meeting}/ranks", NAME, found)
        processes = [context.Process(target=exchange_messages, args=(rank, *arguments)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    ended = [process.exitcode for process in processes]
    if any(ended):
        raise WorldError(f"ranks that exchange messages ended with exit codes {ended}; their errors are above")
    points: list[CollectivePoint] = found.get()
    return points

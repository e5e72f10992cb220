"""`oppo bench machine`: the processors at hand as a cluster of the planner."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oppo_megatron.bench.machine import Core
    from oppo_megatron.sim.clusters.gpus import Gpu
    from oppo_megatron.sim.laws.points import CollectivePoint, LayerPoint

HELP = "this machine's cores, measured, as a cluster.yaml for `oppo plan` and `oppo simulate`"
ABOUT = """Measures one core with the layers of a configuration's actor, what further cores bring a rank, and messages between
ranks; fits the planner's laws to them, and writes layers.csv, collectives.csv, measured.json and cluster.yaml. Takes a minute;
other work on the machine spoils it. For GPUs there is `oppo bench laws`."""
NAME = "cpu"
MOST_RANKS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG.yaml")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="a.b=c", help="settings that replace those of the file"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the four files")
    parser.set_defaults(measure=_machine)


def _machine(args: argparse.Namespace) -> int:
    from oppo_megatron.bench import machine
    from oppo_megatron.config.load import load_config
    from oppo_megatron.config.run import TrainConfig
    from oppo_megatron.cores import usable_cores
    from oppo_megatron.modeldir.headers import read_hf_config

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
    _fit(args.out, core, machine.processor(core, cores), layers, messages)
    return 0


def _fit(folder: Path, core: Core, gpu: Gpu, layers: Sequence[LayerPoint], messages: Sequence[CollectivePoint]) -> None:
    """Fit the laws, show their errors, and write the four files."""
    import yaml

    from oppo_megatron.bench.figures import format_table
    from oppo_megatron.bench.machine import cluster_tree
    from oppo_megatron.rundir.directory import write_json, write_text
    from oppo_megatron.sim.clusters.links import INSIDE
    from oppo_megatron.sim.laws import comparing
    from oppo_megatron.sim.laws.fitting import fit_layers
    from oppo_megatron.sim.laws.points import write_collectives, write_layers

    fit, lines = fit_layers(gpu, layers), comparing.fit_lines(messages)
    rows = [*comparing.compare_layers(gpu, layers, fit), *comparing.compare_collectives(INSIDE[NAME], messages, lines)]
    print(format_table(comparing.COLUMNS, rows))
    write_layers(folder / "layers.csv", layers)
    write_collectives(folder / "collectives.csv", messages)
    measured = comparing.measured_tree(
        f"`oppo bench machine`, {len(layers)} layers, {len(messages)} messages", fit, lines
    )
    threads = {str(count): times for count, times in core.threads.items()}
    write_json(folder / "measured.json", measured | {"threads": threads})
    tree = cluster_tree(gpu, len(core.threads), "measured.json")
    write_text(folder / "cluster.yaml", yaml.safe_dump(tree, sort_keys=False))
    print(f"written: {folder / 'cluster.yaml'}")


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

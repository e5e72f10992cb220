"""`oppo bench laws`: the planner's cost laws beside measurements, published or yours, and their constants fitted to yours."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oppo_megatron.sim.laws.points import CollectivePoint, LayerPoint

HELP = "the planner's cost laws beside measurements; fits them to your own"
ABOUT = """Without files: the constants of the laws with their sources, and published speeds of serving and training, to which
nothing was fitted, beside the laws. With --layers or --collectives (CSV files of measurements): the error of the laws on
them, and constants fitted to them. --out writes these for `measured` of a cluster.yaml."""
GPUS = ("a100-80", "h100", "h200", "cpu")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", choices=GPUS, default="h100", help="whose peaks and laws; default %(default)s")
    parser.add_argument(
        "--layers", type=Path, metavar="FILE.csv", help="measured layers; docs/planner.md has the columns"
    )
    parser.add_argument("--collectives", type=Path, metavar="FILE.csv", help="measured collectives and messages")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the constants fitted to these files there")
    parser.set_defaults(measure=_laws)


def _laws(args: argparse.Namespace) -> int:
    from oppo_megatron.errors import ConfigError

    if args.layers is None and args.collectives is None:
        if args.out is not None:
            raise ConfigError(
                f"--out {args.out} is for fitted constants, but there is nothing to fit; give --layers, too"
            )
        return _published(args.gpu)
    return _fit(args)


def _published(name: str) -> int:
    from oppo_megatron.bench.figures import format_table
    from oppo_megatron.sim.clusters.cluster import Cluster
    from oppo_megatron.sim.clusters.gpus import GPUS as KNOWN
    from oppo_megatron.sim.clusters.links import INSIDE
    from oppo_megatron.sim.published import points

    gpu = KNOWN[name]
    print(f"{name}: {gpu.flops / 1e12:g} TFLOP/s, {gpu.bytes_per_s / 1e9:g} GB/s, {gpu.memory_bytes / 1e9:g} GB")
    constants = {"constant": "name", "value": "value"}
    print(format_table(constants, [{"name": key, "value": value} for key, value in vars(gpu.efficiencies).items()]))
    for constant, source in Cluster(1, 8, gpu, INSIDE[name]).sources():
        print(f"{constant}: {source}")
    print("\npublished speeds, to which nothing was fitted:")
    columns = {"gpu": "gpu", "what": "what", "measured": "measured", "by law": "law", "measured / law": "ratio"}
    print(format_table(columns, list(points.beside_laws())))
    return 0


def _fit(args: argparse.Namespace) -> int:
    from oppo_megatron.bench.figures import format_table
    from oppo_megatron.rundir.directory import write_json
    from oppo_megatron.sim.clusters.gpus import GPUS as KNOWN
    from oppo_megatron.sim.clusters.links import INSIDE
    from oppo_megatron.sim.laws import comparing
    from oppo_megatron.sim.laws.fitting import fit_layers

    gpu, layers, collectives = KNOWN[args.gpu], *_points(args)
    fit = fit_layers(gpu, layers) if layers else None
    lines = comparing.fit_lines(collectives)
    rows = list(comparing.compare_layers(gpu, layers, fit)) if fit else []
    rows += comparing.compare_collectives(INSIDE[args.gpu], collectives, lines)
    print(format_table(comparing.COLUMNS, rows))
    source = ", ".join(f"{path.name}, {len(found)} points" for path, found in _files(args, layers, collectives))
    tree = comparing.measured_tree(source, fit, lines)
    if fit:
        print(", ".join(f"{name} {value:.3g}" for name, value in tree["efficiencies"].items()))
    for line in lines:
        rate, alpha = line.line.bytes_per_s / 1e9, 1e6 * line.line.alpha_s
        print(f"{line.operation} of {line.ranks}: {alpha:.1f} us and {rate:.1f} GB/s")
    if args.out is not None:
        write_json(args.out, tree)
        print(f"written to {args.out}; name it as `measured` in cluster.yaml")
    return 0


def _points(args: argparse.Namespace) -> tuple[list[LayerPoint], list[CollectivePoint]]:
    """Those of the GPU that is asked for.  Raises ConfigError where a file has none of it."""
    from oppo_megatron.sim.laws.points import read_collectives, read_layers

    layers = read_layers(args.layers) if args.layers is not None else []
    collectives = read_collectives(args.collectives) if args.collectives is not None else []
    return _of_gpu(args.gpu, args.layers, layers), _of_gpu(args.gpu, args.collectives, collectives)


def _of_gpu(name: str, path: Path | None, points: list[Any]) -> list[Any]:
    from oppo_megatron.errors import ConfigError

    chosen = [point for point in points if point.gpu == name]
    if points and not chosen:
        there = ", ".join(sorted({point.gpu for point in points}))
        raise ConfigError(
            f"--gpu is {name}, but {path} has no row of it, only of {there}; name one of these with --gpu"
        )
    return chosen


def _files(args: argparse.Namespace, *found: list[Any]) -> list[tuple[Path, list[Any]]]:
    return [
        (path, points) for path, points in zip((args.layers, args.collectives), found, strict=True) if path is not None
    ]

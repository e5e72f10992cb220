"""Measures the constants of the planner's cost laws: this machine's cores, or measurements of your GPUs.

    python -m benchmarks.machine CONFIG.yaml --out machine
    python -m benchmarks.machine --gpu h100 --layers layers.csv --collectives collectives.csv --out machine

With CONFIG: one core with the layers of the configuration's actor, the gain of further cores, and messages between ranks; then
two short runs of the configuration on one rank, with one core and with all, to find the engine's time beyond kernels.  Writes
layers.csv, collectives.csv, measured.json and cluster.yaml for `oppo plan`.  Takes some minutes; other work on the machine spoils
it.  Kernels count by the best of several tries, messages by the mean.

With --layers or --collectives (docs/planner.md has the columns): prints the error of the laws on these measurements, fits the
constants, and writes measured.json, which `measured` of a cluster.yaml names.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import yaml
from torch import Tensor
from torch.nn import functional as F

from benchmarks.common import run_script
from benchmarks.fitting import comparing
from benchmarks.fitting.engine import PARAMETERS, Observed, fit_engine
from benchmarks.fitting.laws import fit_layers
from benchmarks.fitting.points import CollectivePoint, LayerPoint, read_collectives, read_layers, write_collectives, write_layers
from benchmarks.peaks import DTYPES, Products, best_s, measure_peaks, threads_of
from oppo_megatron.cli.launch import launch
from oppo_megatron.cli.load import load_train
from oppo_megatron.cli.parser import add_config_arguments
from oppo_megatron.config.derived import batch_rows
from oppo_megatron.config.load import load_config
from oppo_megatron.config.ppo import ForcedLimits
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.cores import usable_cores
from oppo_megatron.data.generated import write_random_prompts
from oppo_megatron.data.length_trace import forced_quantile
from oppo_megatron.errors import ConfigError, WorldError
from oppo_megatron.layout.shape import Shape, head_dim, layer_linears, num_kv_heads
from oppo_megatron.modeldir.headers import read_hf_config
from oppo_megatron.processes import end_with_parent
from oppo_megatron.report.comparison import format_table
from oppo_megatron.rundir.directory import RunDirectory, write_json, write_text
from oppo_megatron.rundir.metrics_log import read_metrics
from oppo_megatron.sim.clusters.cluster import GPUS, INSIDE, Gpu
from oppo_megatron.sim.clusters.cluster import measured as measured_by
from oppo_megatron.sim.clusters.reading import read_cluster
from oppo_megatron.sim.pricing.model import Decoding

NAME = "cpu"
MOST_RANKS = 64
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
GAIN_TOKENS = (16, 64, 256, 1024)
"""The gain of further threads is a mean ratio over these."""
PAYLOADS = tuple(2**power for power in range(10, 25, 2))
CALLS, RUNS = 20, 15
ALONE = [
    "placement={mode: single}", "overlap.intra=false", "overlap.inter=false", "runtime.device=cpu", "logging.console=off",
    "evaluation=null", "checkpoint.every_minutes=0", "checkpoint.final=nothing",
]  # fmt: skip
SIGMA = 1.0
"""Spread of the log-normal lengths if the configuration forces none; their median is a quarter of the longest."""


@dataclass(frozen=True)
class Core:
    """Peaks of one core; `threads`: the speed of a layer on that many cores, over one core."""

    flops: float
    read_bytes: float
    threads: Mapping[int, float]


def measure_core(shape: Shape, dtype: str, cores: int) -> Core:
    """Measure the peaks of one core, and the gain of each further core for a model of this shape."""
    peaks = measure_peaks(shape, dtype, [max(TOKENS)], [1])
    rates = {count: _layer_rates(shape, dtype, count) for count in range(1, cores + 1)}
    gains = {
        count: prod(rate / alone for rate, alone in zip(own, rates[1], strict=True)) ** (1 / len(own))
        for count, own in rates.items()
    }
    return Core(peaks.flops_at(1), peaks.read_at(1), gains)


def measure_layers(name: str, shape: Shape, dtype: str) -> Iterator[LayerPoint]:
    """Yield a layer on one core for each number of tokens; `name`: of the processor."""
    with threads_of(1):
        products = Products(layer_linears(shape), DTYPES[dtype])
        for tokens in TOKENS:
            between = _Between(shape, tokens, DTYPES[dtype])
            yield LayerPoint(
                name, str(shape["model_type"]), shape, 1, tokens,
                products_us=1e6 * 2 * tokens * products.size / products.rate(tokens),
                elementwise_us=1e6 * best_s(between.all),
                add_us=1e6 * best_s(between.add),
            )  # fmt: skip


def exchange_messages(rank: int, ranks: int, meeting: str, name: str, found: Any) -> None:
    """Run one of `ranks` processes that meet at the file `meeting`: all-reduces, and messages between the first two.

    The first process puts the points into the queue `found`.
    """
    end_with_parent()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    points = list(_exchange(rank, ranks, name))
    if rank == 0:
        found.put(points)
    dist.destroy_process_group()


def _exchange(rank: int, ranks: int, name: str) -> Iterator[CollectivePoint]:
    for payload in PAYLOADS:
        values = torch.ones(payload // 4)
        reduced_s = _each_s(partial(dist.all_reduce, values))
        sent_s = _each_s(partial(_there_and_back, rank, values)) / 2
        yield CollectivePoint(name, "all_reduce", ranks, ranks, payload, 1e6 * reduced_s)
        yield CollectivePoint(name, "send_recv", 2, 2, payload, 1e6 * sent_s)


def processor(core: Core, cores: int) -> Gpu:
    """Return one core with its share of the memory, and unmeasured constants."""
    return replace(GPUS["cpu"], flops=core.flops, bytes_per_s=core.read_bytes, memory_bytes=psutil.virtual_memory().total / cores)


def cluster_tree(gpu: Gpu, cores: int, measured: str) -> dict[str, Any]:
    """Return the machine's cluster.yaml; `measured`: the file of constants in the same folder."""
    numbers = {
        "memory_gb": gpu.memory_bytes / 1e9, "tflops": gpu.flops / 1e12, "gb_per_s": gpu.bytes_per_s / 1e9, "like": "cpu",
    }  # fmt: skip
    line = INSIDE["cpu"].send
    links = {"alpha_us": 1e6 * line.alpha_s, "gb_per_s": line.peak / 1e9}  # replaced by `measured`
    return {"nodes": 1, "gpus_per_node": cores, "gpu": numbers, "inside": links, "measured": measured}


class _Between:
    """The kernels of a layer other than products and attention, for `tokens` tokens."""

    def __init__(self, shape: Shape, tokens: int, dtype: torch.dtype):
        heads, keys, width = shape["num_attention_heads"], num_kv_heads(shape), head_dim(shape)
        self.hidden, self.residual = (torch.randn(tokens, shape["hidden_size"], dtype=dtype) for _ in range(2))
        self.gate, self.up = (torch.randn(tokens, shape["intermediate_size"], dtype=dtype) for _ in range(2))
        self.rotated = [torch.randn(tokens, count, width, dtype=dtype) for count in (heads, keys)]
        self.cos, self.sin = (torch.randn(tokens, 1, width, dtype=dtype) for _ in range(2))

    def add(self) -> Tensor:
        return self.hidden + self.residual

    def all(self) -> None:
        """Compute two norms, rotations, activation, one sum."""
        for _ in range(2):
            F.rms_norm(self.hidden, self.hidden.shape[-1:])
        for values in self.rotated:
            first, second = values.chunk(2, dim=-1)
            torch.cat((-second, first), dim=-1).mul_(self.sin).add_(values * self.cos)
        F.silu(self.gate).mul_(self.up)
        self.add()


def _layer_rates(shape: Shape, dtype: str, threads: int) -> Sequence[float]:
    with threads_of(threads):
        products = Products(layer_linears(shape), DTYPES[dtype])
        return [products.rate(tokens) for tokens in GAIN_TOKENS]


def _there_and_back(rank: int, values: Tensor) -> None:
    for sender in (0, 1):
        if rank == sender:
            dist.send(values, 1 - sender)
        elif rank == 1 - sender:
            dist.recv(values, sender)


def _each_s(call: Callable[[], object]) -> float:
    """Return the mean seconds of a call that all ranks make together, over several runs begun together.

    The best run would be three times as fast if threads must be woken, but training takes the average.
    """
    seconds = 0.0
    for _ in range(RUNS):
        dist.barrier()
        started = time.perf_counter()
        for _ in range(CALLS):
            call()
        seconds += time.perf_counter() - started
    return seconds / (RUNS * CALLS)


def exchange(ranks: int) -> list[CollectivePoint]:
    """Measure messages between `ranks` processes of this machine."""
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


def fit(gpu: Gpu, name: str, layers: Sequence[LayerPoint], collectives: Sequence[CollectivePoint], source: str) -> dict[str, Any]:
    """Fit the laws to measurements, print their errors, and return the content of measured.json."""
    found = fit_layers(gpu, layers) if layers else None
    lines = comparing.fit_lines(collectives)
    rows = list(comparing.compare_layers(gpu, layers, found)) if found else []
    rows += comparing.compare_collectives(INSIDE[name], collectives, lines)
    print(format_table(comparing.COLUMNS, rows))
    for line in lines:
        rate, alpha = line.line.bytes_per_s / 1e9, 1e6 * line.line.alpha_s
        print(f"{line.operation} of {line.ranks}: {alpha:.1f} us and {rate:.1f} GB/s")
    return comparing.measured_tree(source, found, lines)


def fit_files(args: argparse.Namespace) -> int:
    """Fit the laws to CSV files.  Raises ConfigError if a file has no row of the GPU."""
    points: list[list[Any]] = []
    for path, read in ((args.layers, read_layers), (args.collectives, read_collectives)):
        found: list[Any] = [] if path is None else list(read(path))
        points.append([point for point in found if point.gpu == args.gpu])
        if found and not points[-1]:
            there = ", ".join(sorted({point.gpu for point in found}))
            raise ConfigError(f"--gpu is {args.gpu}, but {path} has rows of {there} only; name one of these with --gpu")
    layers, collectives = points
    source = f"{len(layers)} layers, {len(collectives)} collectives"
    tree = fit(GPUS[args.gpu], args.gpu, layers, collectives, source)
    args.out.mkdir(parents=True, exist_ok=True)
    write_json(args.out / "measured.json", tree)
    print(f"written: {args.out / 'measured.json'}; name it as `measured` in cluster.yaml")
    return 0


def measure_machine(args: argparse.Namespace) -> int:
    if args.steps < 0 or args.steps == 1:
        raise ConfigError(f"--steps {args.steps}: the first step of a run warms up; give 2 or more, or 0 for no runs")
    actor, cores = load_config(TrainConfig, args.config, args.overrides).actor, usable_cores()
    shape = read_hf_config(actor)
    args.out.mkdir(parents=True, exist_ok=True)
    print(f"measuring one to {cores} cores ...", flush=True)
    core = measure_core(shape, actor.dtype, cores)
    layers = list(measure_layers(NAME, shape, actor.dtype))
    ranks = min(cores, MOST_RANKS)
    messages = exchange(ranks) if ranks > 1 else []
    print(f"a core: {core.flops / 1e9:.1f} GFLOP/s, {core.read_bytes / 1e9:.1f} GB/s")
    print(", ".join(f"{count} cores: {times:.2f} times a core" for count, times in core.threads.items()))
    gpu = processor(core, cores)
    source = f"benchmarks/machine.py, {len(layers)} layers, {len(messages)} messages"
    tree = fit(gpu, NAME, layers, messages, source)
    tree["threads"] = {str(count): times for count, times in core.threads.items()}
    write_layers(args.out / "layers.csv", layers)
    write_collectives(args.out / "collectives.csv", messages)
    write_json(args.out / "measured.json", tree)
    cluster = yaml.safe_dump(cluster_tree(gpu, cores, "measured.json"), sort_keys=False)
    write_text(args.out / "cluster.yaml", cluster)
    if args.steps:
        write_json(args.out / "measured.json", {**tree, "engine": fit_runs(args)})
    print(f"written: {args.out / 'cluster.yaml'}")
    return 0


def fit_runs(args: argparse.Namespace) -> dict[str, float]:
    """Run the configuration on one rank with one core and with all; return the engine's constants fitted to the steps."""
    cluster = read_cluster(args.out / "cluster.yaml")
    observed: list[Observed] = []
    for cores in sorted({1, cluster.gpus_per_node}):
        print(f"{args.steps} steps on one rank with {cores} of {cluster.gpus_per_node} cores ...", flush=True)
        config = alone(args, cores)
        if code := launch("train", config, 1, in_process=False):
            raise WorldError(f"the run in {config.run_dir} ended with exit code {code}; its error is above")
        observed += steps_of(config)
    found = fit_engine(cluster, observed, measured_by("runs of benchmarks/machine.py"))
    constants = {name: getattr(found.engine, name) for name in PARAMETERS}
    print("engine: " + ", ".join(f"{name} {value:.3g}" for name, value in constants.items()))
    print("mean errors: " + ", ".join(f"{phase} {100 * error:.1f} %" for phase, error in found.errors.items()))
    return constants


def alone(args: argparse.Namespace, cores: int) -> TrainConfig:
    """Return the configuration on one rank with `cores` threads, random prompts and forced lengths, without overlaps."""
    given = load_train(args.config, [*args.overrides, *ALONE], inputs=False)
    inputs = args.out / "inputs"
    inputs.mkdir(parents=True, exist_ok=True)
    tokenizer, prompts = write_random_prompts(inputs, given.data.max_prompt_tokens)
    own = [f"steps={args.steps}", f"run_dir={args.out / f'{cores}-cores'}"]
    own += [f"tokenizer.path={tokenizer}", f"data.path={prompts}"]
    if given.rollout.lengths is None:
        own.append(f"rollout.forced_lengths=[{max(1, given.rollout.max_response_tokens // 4)},{SIGMA}]")
    config = load_train(args.config, [*args.overrides, *ALONE, *own])
    return config.model_copy(update={"runtime": config.runtime.with_threads(cores)})


def steps_of(config: TrainConfig) -> Iterator[Observed]:
    """Yield the steps of a run after the first, which warms up."""
    forced, most, rows = config.rollout.lengths, config.rollout.max_response_tokens, batch_rows(config)
    assert forced is not None
    limit_of = ForcedLimits.of(forced, most, config.seed, forced_quantile(forced, most))
    for step, line in enumerate(read_metrics(RunDirectory(config.run_dir).metrics)[1:], start=1):
        lengths = tuple(limit_of(seq_id) for seq_id in range(step * rows, (step + 1) * rows))
        seconds = {
            "decode": line["decode_s"], "score": line["score_busy_s"], "update": line["train_s"],
            "critic update": line.get("critic_update_s"),
        }  # fmt: skip
        decoding = Decoding(config.data.max_prompt_tokens, lengths)
        yield Observed(config, decoding, {name: value for name, value in seconds.items() if value})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, nargs="?")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="per run; 0: no runs (default %(default)s)")
    parser.add_argument("--gpu", choices=GPUS, default="h100", help="the GPU of the files; default %(default)s")
    parser.add_argument("--layers", type=Path, metavar="FILE.csv", help="measured layers")
    parser.add_argument("--collectives", type=Path, metavar="FILE.csv", help="measured collectives and messages")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the results")


def measure(args: argparse.Namespace) -> int:
    files = args.layers is not None or args.collectives is not None
    if files == (args.config is not None):
        raise ConfigError("give CONFIG.yaml to measure this machine, or --layers and --collectives to fit your files")
    return fit_files(args) if files else measure_machine(args)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_script("benchmarks.machine", __doc__, add_arguments, measure, arguments)


if __name__ == "__main__":
    sys.exit(main())

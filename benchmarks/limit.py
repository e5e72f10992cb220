"""The least time that the work of finished runs can take on this machine: operations and bytes over measured peaks.

    oppo bench overlap CONFIG.yaml logging.rollouts=true --out runs/bench/overlap
    python -m benchmarks.limit runs/bench/overlap/pair/sequential-1 runs/bench/overlap/pair/full-1

The counts cover the trained prompts and responses, and the number of sequences decoded at once.  Phases follow each other,
each on all cores of the run; within a decode step reading and computing overlap fully.  A schedule that reads for one phase while
it computes another could be below the sum, by at most the smaller of the two.

Not counted: norms, activations, sampling, the optimizer, messages, loading of inputs, and what a run computes more than once
(stale caches of carried rollouts, recomputed activations).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.common import run_script
from benchmarks.peaks import Peaks, measure_peaks
from oppo_megatron.config.derived import most_sequences
from oppo_megatron.config.load import load_config
from oppo_megatron.config.model import Dtype, ParallelConfig
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.cores import threads_of_rank, usable_cores
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.placements import named_roles, world_size
from oppo_megatron.layout.shape import Shape, causal_pairs, head_dim, head_linear, kv_bytes_per_token, layer_weights, weight_bytes
from oppo_megatron.modeldir.headers import read_hf_config
from oppo_megatron.report.comparison import format_table
from oppo_megatron.rundir.directory import RunDirectory
from oppo_megatron.rundir.metrics_log import read_metrics
from oppo_megatron.train.inputs import read_inputs
from oppo_megatron.train.setup import prompt_stream

COLUMNS = {
    "run": "run", "threads": "threads", "decode": "decode_s", "scoring": "score_s", "training": "train_s",
    "least s/step": "least_s", "measured": "measured_s", "x least": "over_least", "decode at GEMM rates": "decode_gemm_s",
}  # fmt: skip


@dataclass(frozen=True)
class Response:
    """A trained response; it was decoded from clock `finish_clock - tokens` on, one token per clock."""

    prompt_tokens: int
    tokens: int
    finish_clock: int


def limits(paths: Sequence[Path]) -> tuple[list[dict[str, Any]], list[Peaks]]:
    """Return a row for each run, and the peaks for each shape of actor.  Raises ConfigError for a run without rollouts.jsonl."""
    runs = [RunDirectory(path) for path in paths]
    if lacking := [str(run.path) for run in runs if not run.rollouts.exists()]:
        raise ConfigError(f"{', '.join(lacking)}: no rollouts.jsonl; make the run with logging.rollouts=true")
    configs = [load_config(TrainConfig, run.config) for run in runs]
    cores = usable_cores()
    threads = sorted({1, cores, *(threads_used(config, cores) for config in configs)})
    groups: dict[str, list[TrainConfig]] = {}
    for config in configs:
        groups.setdefault(_actor_key(config), []).append(config)
    peaks = {
        key: measure_peaks(
            read_hf_config(same[0].actor), same[0].actor.dtype, decode_batches(max(map(most_sequences, same))), threads
        )
        for key, same in groups.items()
    }
    rows = []
    for run, config in zip(runs, configs, strict=True):
        lines, used = read_metrics(run.metrics), threads_used(config, cores)
        least = least_seconds(config, read_responses(config, run), peaks[_actor_key(config)], used)
        row = {key: seconds / len(lines) for key, seconds in least.items()}
        measured = fmean(line["step_s"] for line in lines)
        rows.append(
            {"run": str(run.path), "threads": used, **row, "measured_s": measured, "over_least": measured / row["least_s"]}
        )
    return rows, list(peaks.values())


def _actor_key(config: TrainConfig) -> str:
    return json.dumps([read_hf_config(config.actor), config.actor.dtype], sort_keys=True)


def threads_used(config: TrainConfig, cores: int) -> int:
    """Return the cores that the run can keep busy."""
    ranks = world_size(config)
    return min(cores, ranks * threads_of_rank(config.runtime.threads_per_rank, ranks))


def decode_batches(most: int) -> list[int]:
    """Return powers of two up to `most`, and `most`."""
    return sorted({2**power for power in range(most.bit_length())} | {most})


def read_responses(config: TrainConfig, run: RunDirectory) -> list[Response]:
    """Read what the run trained from its rollouts.jsonl and its prompts."""
    inputs = read_inputs(config)
    lengths = {prompt.seq_id: len(prompt.tokens) for prompt in prompt_stream(config, inputs.prompts)}
    with run.rollouts.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return [Response(lengths[row["seq_id"]], len(row["tokens"]), row["finish_clock"]) for row in rows]


def least_seconds(config: TrainConfig, responses: Sequence[Response], peaks: Peaks, threads: int) -> dict[str, float]:
    """Return the least seconds of all the work, by phase.

    Decode: prefill of the prompts by its operations, then for each decode step the larger of its operations over the peak and
    its bytes (all weights once, the keys and values of all running sequences) over the peak of reading.  Scoring: one forward of
    each scorer over every sequence.  Training: three forwards of actor and critic per epoch.
    """
    rate = peaks.flops_at(threads)
    shapes = {name: read_hf_config(role) for name, role in named_roles(config).items()}
    actor = shapes["actor"]
    prefill = sum(
        forward_flops(actor, r.prompt_tokens - 1, causal_pairs(0, r.prompt_tokens - 1), 0, scalar=False) for r in responses
    )
    steps_s, steps_gemm_s = decode_seconds(actor, config.actor.dtype, responses, peaks, threads)
    decode_s, gemm_s = prefill / rate + steps_s, prefill / rate + steps_gemm_s
    score_s = sum(_scoring_flops(shapes, r) for r in responses) / rate
    train_s = sum(_training_flops(config, shapes, r) for r in responses) / rate
    return {
        "decode_s": decode_s,
        "decode_gemm_s": gemm_s,
        "score_s": score_s,
        "train_s": train_s,
        "least_s": decode_s + score_s + train_s,
    }


def decode_seconds(
    shape: Mapping[str, Any], dtype: Dtype, responses: Sequence[Response], peaks: Peaks, threads: int
) -> tuple[float, float]:
    """Return least seconds of all decode steps: by operations and bytes at the peaks; by operations at decoding's rates."""
    sequences, keys = decode_steps(responses)
    flops = [forward_flops(shape, n, k, n, scalar=False) for n, k in zip(sequences, keys, strict=True)]
    weights = weight_bytes(shape, dtype, scalar=False)
    kv = kv_bytes_per_token(shape, ParallelConfig(), dtype)
    rate, read = peaks.flops_at(threads), peaks.read_at(threads)
    steps_s = sum(max(f / rate, (weights + kv * k) / read) for f, k in zip(flops, keys, strict=True))
    return steps_s, sum(f / peaks.decode_at(threads, n) for f, n in zip(flops, sequences, strict=True))


def decode_steps(responses: Sequence[Response]) -> tuple[list[int], list[int]]:
    """Return, for each decode step with a running sequence, the sequences and the positions that new tokens attend to."""
    end = max(r.finish_clock for r in responses)
    sequences, keys = np.zeros(end, dtype=np.int64), np.zeros(end, dtype=np.int64)
    for r in responses:
        start = r.finish_clock - r.tokens
        sequences[start : r.finish_clock] += 1
        # Token t (from 0) is sampled from the output of position P + t - 1, which attends to P + t positions.
        keys[start : r.finish_clock] += r.prompt_tokens + np.arange(r.tokens)
    running = sequences > 0
    return sequences[running].tolist(), keys[running].tolist()


def _scoring_flops(shapes: Mapping[str, Mapping[str, Any]], response: Response) -> int:
    """Reference and critic read all but the last token and give an output per response token; the reward model reads all and
    gives one."""
    whole = response.prompt_tokens + response.tokens
    short, total = whole - 1, 0
    for name in ("reference", "critic"):
        if name in shapes:
            counts = (short, causal_pairs(0, short), response.tokens)
            total += forward_flops(shapes[name], *counts, scalar=name == "critic")
    if "reward" in shapes:
        total += forward_flops(shapes["reward"], whole, causal_pairs(0, whole), 1, scalar=True)
    return total


def forward_flops(shape: Shape, tokens: int, pairs: int, rows: int, *, scalar: bool) -> int:
    """Operations of a forward over `tokens`, `rows` of them with outputs; `pairs`: see `causal_pairs`.

    2 tokens (h (q + 2 g) + q h + 3 h f) + 4 q pairs per layer, and 2 rows h V (scalar head: 2 rows h), with h hidden,
    q = heads x head size, g = key/value heads x head size, f FFN, V vocabulary.
    """
    query = int(shape["num_attention_heads"]) * head_dim(shape)
    products = 2 * tokens * layer_weights(shape)
    layers = int(shape["num_hidden_layers"])
    return layers * (products + 4 * query * pairs) + 2 * rows * head_linear(shape, scalar=scalar).size


def training_flops(shape: Shape, tokens: int, pairs: int, rows: int, *, scalar: bool) -> int:
    """Three forwards: each product again for its input's gradient and its weight's."""
    return 3 * forward_flops(shape, tokens, pairs, rows, scalar=scalar)


def _training_flops(config: TrainConfig, shapes: Mapping[str, Mapping[str, Any]], response: Response) -> int:
    short = response.prompt_tokens + response.tokens - 1
    counts = (short, causal_pairs(0, short), response.tokens)
    total = config.ppo.epochs * sum(training_flops(shapes[name], *counts, scalar=name == "critic") for name in config.trained)
    if config.ppo.staleness == "decoupled":  # computes the actor's log-probs once more
        total += forward_flops(shapes["actor"], *counts, scalar=False)
    return total


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run directories with rollouts.jsonl")


def measure(args: argparse.Namespace) -> int:
    rows, peaks = limits(args.runs)
    print(format_table(COLUMNS, rows))
    print(*(line for each in peaks for line in each.lines()), sep="\n")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    return run_script("benchmarks.limit", __doc__, add_arguments, measure, arguments)


if __name__ == "__main__":
    sys.exit(main())

"""The least time that a run's work can take on this machine: its operations and bytes over the measured peaks.

The counts cover the trained prompts and responses, and the number of sequences decoded at once.  Phases follow each other,
each on all cores of the run; within a decode step reading and computing overlap fully.  So a schedule that reads for one
phase while it computes another could be below the sum, by at most the smaller of the two.

Not counted: norms, activations, sampling, the optimizer, messages, loading inputs, and what a run computes more than once
(stale caches of carried rollouts, recomputed activations).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from oppo_megatron.bench.figures import format_table
from oppo_megatron.bench.peaks import Peaks, measure_peaks
from oppo_megatron.bench.suite import Run, Runs, Suite
from oppo_megatron.config.derived import most_sequences
from oppo_megatron.config.model import Dtype, ParallelConfig
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.cores import threads_of_rank
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.flops import causal_pairs, forward_flops, training_flops, weight_bytes
from oppo_megatron.layout.placements import named_roles, world_size
from oppo_megatron.layout.shape import kv_bytes_per_token
from oppo_megatron.modeldir.headers import read_hf_config
from oppo_megatron.rundir.directory import RunDirectory
from oppo_megatron.train.inputs import read_inputs
from oppo_megatron.train.setup import prompt_stream

COLUMNS = {
    "run": "run", "threads": "threads", "decode": "decode_s", "scoring": "score_s",
    "training": "train_s", "least s/step": "least_s", "measured": "measured_s", "x least": "over_least",
    "decode at GEMM rates": "decode_gemm_s",
}  # fmt: skip


@dataclass(frozen=True)
class Response:
    """What was trained of one prompt; it was decoded from `finish_clock - tokens` on, a token a clock."""

    prompt_tokens: int
    tokens: int
    finish_clock: int


def observed(config: TrainConfig) -> TrainConfig:
    """The configuration with what the limit is computed from written down.  Raises ConfigError on a GPU."""
    if config.runtime.device != "cpu" and _has_gpu():
        raise ConfigError(
            "--limit measures the processor's peaks, but the ranks would compute on GPUs; set runtime.device=cpu, or leave "
            "--limit out"
        )
    return config.model_copy(update={"logging": config.logging.model_copy(update={"rollouts": True})})


def run_with_limits(suite: Suite, configs: Mapping[str, TrainConfig], cores: int | None) -> tuple[Runs, dict[str, Any]]:
    """Make the runs.  `cores` (None: no limits wanted): how many there are to use; then `limit_figures` come beside them."""
    if cores is None:
        return suite.run(configs), {}
    configs = {name: observed(config) for name, config in configs.items()}
    runs = suite.run(configs)
    return runs, limit_figures(configs, runs, cores)


def limit_figures(configs: Mapping[str, TrainConfig], runs: Runs, cores: int) -> dict[str, Any]:
    """`peaks` of each size of actor and, for each run by name, `limits`: least seconds a step, by phase, beside those
    measured."""
    used = {name: threads_used(config, cores) for name, config in configs.items()}
    threads = sorted({1, cores, *used.values()})
    alike: dict[str, list[TrainConfig]] = {}
    for config in configs.values():
        alike.setdefault(_model_key(config), []).append(config)
    peaks = {key: _peaks_of(same, threads) for key, same in alike.items()}
    rows = []
    for name, turns in runs.items():
        of_model = peaks[_model_key(configs[name])]
        least = [_per_step(configs[name], run, of_model, used[name]) for run in turns]
        row = {key: fmean(each[key] for each in least) for key in least[0]}
        measured = fmean(line["step_s"] for run in turns for line in run.lines)
        what: dict[str, Any] = {"run": name, "threads": used[name]}
        rows.append({**what, **row, "measured_s": measured, "over_least": measured / row["least_s"]})
    return {"peaks": [each.tree() for each in peaks.values()], "limits": rows}


def _model_key(config: TrainConfig) -> str:
    return json.dumps([read_hf_config(config.actor), config.actor.dtype], sort_keys=True)


def _peaks_of(configs: Sequence[TrainConfig], threads: Sequence[int]) -> Peaks:
    """For configurations of the same actor."""
    batches = decode_batches(max(map(most_sequences, configs)))
    return measure_peaks(read_hf_config(configs[0].actor), configs[0].actor.dtype, batches, threads)


def _per_step(config: TrainConfig, run: Run, peaks: Peaks, threads: int) -> dict[str, float]:
    least = least_seconds(config, read_responses(config, run), peaks, threads)
    return {key: seconds / len(run.lines) for key, seconds in least.items()}


def threads_used(config: TrainConfig, cores: int) -> int:
    """Cores that the run can keep busy."""
    ranks = world_size(config)
    return min(cores, ranks * threads_of_rank(config.runtime.threads_per_rank, ranks))


def decode_batches(most: int) -> list[int]:
    """Powers of two up to `most`, and `most`."""
    return sorted({2**power for power in range(most.bit_length())} | {most})


def read_responses(config: TrainConfig, run: Run) -> list[Response]:
    """What the run trained, from its rollouts.jsonl and its prompts."""
    inputs = read_inputs(config)
    lengths = {prompt.seq_id: len(prompt.tokens) for prompt in prompt_stream(config, inputs.prompts)}
    with RunDirectory(run.path).rollouts.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return [Response(lengths[row["seq_id"]], len(row["tokens"]), row["finish_clock"]) for row in rows]


def least_seconds(config: TrainConfig, responses: Sequence[Response], peaks: Peaks, threads: int) -> dict[str, float]:
    """Least seconds of all the work, by phase.

    Decode: prefill of the prompts by its operations, then for each decode step the larger of its operations over the peak
    and its bytes (all weights once, the keys and values of all running sequences) over the peak of reading.  Scoring: a
    forward of each scorer over every sequence.  Training: three forwards of actor and critic an epoch.
    """
    rate = peaks.flops_at(threads)
    shapes = {name: read_hf_config(role) for name, role in named_roles(config).items()}
    actor = shapes["actor"]
    prefill = sum(
        forward_flops(actor, r.prompt_tokens - 1, causal_pairs(0, r.prompt_tokens - 1), 0, scalar=False)
        for r in responses
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
    """Least seconds of all decode steps: by operations and bytes at the peaks, and by operations at the rates of decoding."""
    sequences, keys = decode_steps(responses)
    flops = [forward_flops(shape, n, k, n, scalar=False) for n, k in zip(sequences, keys, strict=True)]
    weights = weight_bytes(shape, dtype, scalar=False)
    kv = kv_bytes_per_token(shape, ParallelConfig(), dtype)
    rate, read = peaks.flops_at(threads), peaks.read_at(threads)
    steps_s = sum(max(f / rate, (weights + kv * k) / read) for f, k in zip(flops, keys, strict=True))
    return steps_s, sum(f / peaks.decode_at(threads, n) for f, n in zip(flops, sequences, strict=True))


def decode_steps(responses: Sequence[Response]) -> tuple[list[int], list[int]]:
    """For each decode step at which anything runs: sequences, and the positions that their new tokens attend to."""
    end = max(r.finish_clock for r in responses)
    sequences, keys = np.zeros(end, dtype=np.int64), np.zeros(end, dtype=np.int64)
    for r in responses:
        start = r.finish_clock - r.tokens
        sequences[start : r.finish_clock] += 1
        # Token t (from 0) is drawn from the output of position P + t - 1, which attends to P + t positions.
        keys[start : r.finish_clock] += r.prompt_tokens + np.arange(r.tokens)
    running = sequences > 0
    return sequences[running].tolist(), keys[running].tolist()


def _scoring_flops(shapes: Mapping[str, Mapping[str, Any]], response: Response) -> int:
    """Of the scorers that there are: reference and critic read all but the last token and give an output for each response
    token; the reward model reads all and gives one."""
    whole = response.prompt_tokens + response.tokens
    short, total = whole - 1, 0
    for name in ("reference", "critic"):
        if name in shapes:
            counts = (short, causal_pairs(0, short), response.tokens)
            total += forward_flops(shapes[name], *counts, scalar=name == "critic")
    if "reward" in shapes:
        total += forward_flops(shapes["reward"], whole, causal_pairs(0, whole), 1, scalar=True)
    return total


def _training_flops(config: TrainConfig, shapes: Mapping[str, Mapping[str, Any]], response: Response) -> int:
    short = response.prompt_tokens + response.tokens - 1
    counts = (short, causal_pairs(0, short), response.tokens)
    total = config.ppo.epochs * sum(
        training_flops(shapes[name], *counts, scalar=name == "critic") for name in config.trained
    )
    if config.ppo.staleness == "decoupled":  # the actor's log-probs are computed once more
        total += forward_flops(shapes["actor"], *counts, scalar=False)
    return total


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def limit_lines(result: Mapping[str, Any]) -> list[str]:
    """The table of `limit_figures` and what was measured, in words; nothing where no limits were wanted."""
    if "limits" not in result:
        return []
    head = ["", "least seconds a step by operations, bytes and measured peaks", format_table(COLUMNS, result["limits"])]
    return [*head, *(line for peaks in result["peaks"] for line in peak_lines(peaks))]


def peak_lines(peaks: Mapping[str, Any]) -> list[str]:
    """What was measured, in words."""
    read, gemm = peaks["read_gbytes"], peaks["gemm_gflops"]
    return [
        f"{threads} thread(s), {peaks['dtype']}: GEMM {gemm[threads]:.0f} GFLOP/s, read {read[threads]:.1f} GB/s, GEMM over "
        + ", ".join(f"{size} tokens {rate:.0f}" for size, rate in peaks["decode_gemm_gflops"][threads].items())
        for threads in gemm
    ]

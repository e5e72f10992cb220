"""What planning, checking and bookkeeping of a step cost one rank, by ranks and sequences, in seconds of its processor.

No models, no torch, no processes: one rank's part of the pure half of the loop (`dry_run.py`), with a chunk made up for each
round.  The step that this is a share of is the least that it can take at the peaks given (`least_step_s`), so that the share
is an upper bound.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from oppo_megatron.bench.dry_run import DryRound, DryRun
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.flops import causal_pairs, forward_flops, training_flops, weight_bytes
from oppo_megatron.layout.placements import world_size
from oppo_megatron.modeldir.headers import read_hf_config
from oppo_megatron.records import Prompt
from oppo_megatron.schedule.checking.transport import NCCL, Transport

MODEL_70B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8192, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": False,
}  # fmt: skip
"""The shape of Llama's 70B, with an untied head."""


COLUMNS = {
    "mode": "mode", "ranks": "ranks", "B": "sequences", "of rank": "rank", "rounds": "rounds", "shapes": "shapes",
    "plan s": "planning", "check s": "checking", "books s": "bookkeeping", "sum s": "total", "first step s": "first",
    "stream s": "stream", "step s at least": "step_s", "share %": "percent",
}  # fmt: skip
"""Medians of the steps after the first; `first` is the sum of that one.  `shapes` are those that were made anew."""


@dataclass(frozen=True)
class Cluster:
    """What the runs have in common: layout, lengths in tokens, and the peaks of a device (by default an H100's).

    `lengths` are the median of log-normal responses and the standard deviation of their logarithm; `delta` is a share of the
    batch.
    """

    tp: int = 8
    pp: int = 8
    prompt_tokens: int = 512
    response_tokens: int = 2048
    chunk: int = 128
    lengths: tuple[float, float] = (500.0, 1.0)
    delta: float = 0.125
    steps: int = 4
    transport: Transport = NCCL
    flops: float = 989e12
    bytes_per_s: float = 3.35e12

    def config(self, mode: str, ranks: int, sequences: int) -> TrainConfig:
        """The run of `ranks` ranks that trains `sequences` rollouts a step.  Raises ConfigError where they do not fit."""
        own = self.tp * self.pp * (2 if mode == "disaggregated" else 1)
        if ranks % own:
            raise ConfigError(
                f"--ranks {ranks}: {mode} replicas of tp {self.tp} x pp {self.pp} need a multiple of {own}; give one, or "
                "another --tp and --pp"
            )
        layout = {"tp": self.tp, "pp": self.pp, "dp": ranks // own}
        pools = {"actor": layout} | ({"scorer": layout} if mode == "disaggregated" else {})
        role = {"init": MODEL_70B}
        delta = {"rule": "fixed", "initial": int(self.delta * sequences), "max": int(self.delta * sequences)}
        tree = {
            "run_dir": "none", "steps": self.steps, "placement": {"mode": mode, **pools},
            "tokenizer": {"path": "none"}, "data": {"path": "none", "max_prompt_tokens": self.prompt_tokens},
            "actor": role, "critic": role, "reward": role, "rewards": [{"kind": "model"}],
            "rollout": {"batch_size": sequences, "max_response_tokens": self.response_tokens},
            "overlap": {"chunk": {"tokens": self.chunk, "adaptive": False}, "delta": delta},
            "runtime": {"micro_batch_tokens": 8192}, "debug": {"forced_lengths": list(self.lengths)},
        }  # fmt: skip
        return TrainConfig.model_validate(tree)


def bench_planning(
    cluster: Cluster, modes: Sequence[str], ranks: Sequence[int], sequences: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """A row for rank 0 and one for the last rank of each combination.  Raises ConfigError before the first, too."""
    cases = [(m, n, batch, cluster.config(m, n, batch)) for m in modes for n in ranks for batch in sequences]
    for mode, number, batch, config in cases:
        for rank in (0, number - 1):
            yield {"mode": mode, "ranks": number, "sequences": batch, "rank": rank, **measure(config, cluster, rank)}


def measure(config: TrainConfig, cluster: Cluster, rank: int) -> dict[str, Any]:
    """Processor seconds of a step on `rank`."""
    run = _Measured(config, cluster, rank)
    run.run()
    later = run.rows[1:] or run.rows
    row: dict[str, Any] = {key: median(each[key] for each in later) for key in later[0]}
    least_s = least_step_s(config, cluster, run.scheduler.buffer.clock / len(run.rows), run.mean_response())
    return row | {"first": run.rows[0]["total"], "step_s": least_s, "percent": 100 * row["total"] / least_s}


def least_step_s(config: TrainConfig, cluster: Cluster, decode_steps: float, response_tokens: float) -> float:
    """Seconds that a step takes at least: the weights are read once for each decode step, by all stages one behind the other,
    and what four roles read and two train is computed at the peak of all devices.
    """
    model, length = read_hf_config(config.actor), round(response_tokens) + cluster.prompt_tokens
    work = length, causal_pairs(0, length), length
    forwards = 4 * forward_flops(model, *work, scalar=True) + 2 * training_flops(model, *work, scalar=True)
    reading_s = weight_bytes(model, "bfloat16", scalar=True) / cluster.tp / cluster.bytes_per_s
    devices = world_size(config) * cluster.flops
    return decode_steps * reading_s + config.rollout.batch_size * forwards / devices


class _Measured(DryRun):
    """A dry run that keeps apart what is checked, and a row a step."""

    def __init__(self, config: TrainConfig, cluster: Cluster, rank: int):
        super().__init__(config, cluster.prompt_tokens, rank, time.process_time, transport=cluster.transport)
        self.rows: list[dict[str, float]] = []
        self._checking_s, self._shapes = 0.0, 0
        require = self.planner.require

        def timed(*args: Any) -> None:
            started = self.clock()
            require(*args)
            self._checking_s += self.clock() - started
            self._shapes += 1

        self.planner.require = timed

    def _prompts(self, count: int, num_tokens: int | Sequence[int]) -> Iterator[Prompt]:
        """Made before anything is timed: in a run the data makes them."""
        return iter(list(super()._prompts(count, num_tokens)))

    def mean_response(self) -> float:
        """Tokens of all prompts' responses, on average."""
        return sum(map(self.limit, range(self.scheduler.num_consumed))) / self.scheduler.num_consumed

    def _step(self, step: int) -> Iterator[DryRound]:
        checking_s, shapes, rounds = self._checking_s, self._shapes, self.num_rounds
        yield from super()._step(step)
        spent, checking_s = self.watch.seconds, self._checking_s - checking_s
        row = {
            "planning": spent["planner and checker"] - checking_s,
            "checking": checking_s,
            "bookkeeping": spent["scheduler and buffer"] + spent["controllers"],
        }
        whole = {"rounds": self.num_rounds - rounds, "shapes": self._shapes - shapes, "stream": spent["stream"]}
        self.rows.append({**row, "total": sum(row.values()), **whole})

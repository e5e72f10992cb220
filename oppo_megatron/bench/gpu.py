"""What one GPU does with this engine, unattended and within a time: decoding, scoring beside it, and PPO steps.

Each part runs in a process of its own with a share of the time, so that one which fails, hangs or finds too little memory leaves
the others alone; what has been measured is written at once.  The parts that load models are in `gpu_parts.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from oppo_megatron.bench.overlap import MODES
from oppo_megatron.config.holdings import train_holdings
from oppo_megatron.config.load import dump_config
from oppo_megatron.config.model import Dtype
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.data.random_prompts import write_random_prompts
from oppo_megatron.errors import ConfigError
from oppo_megatron.train.logs.metrics_log import read_metrics
from oppo_megatron.train.machine import describe_machine
from oppo_megatron.train.run_dir import RunDirectory, write_json

Shape = Mapping[str, Any]
"""A `config.json`."""


def _qwen(hidden: int, layers: int, heads: int, ffn: int) -> Shape:
    return {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "intermediate_size": ffn,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    }


SIZES: dict[str, Shape] = {
    "0.5B": _qwen(896, 24, 14, 4864),
    "1.5B": _qwen(1536, 28, 12, 8960),
    "3B": _qwen(2048, 36, 16, 11008),
}
"""Those of Qwen2.5."""

COLUMNS = {
    "size": "size", "part": "part", "variant": "variant", "tokens/s": "tokens_per_s", "ms/step": "ms_per_step",
    "% of bandwidth": "share_percent", "hidden %": "hidden_percent", "s/step": "step_s", "why not": "why_not",
}  # fmt: skip

PPO_MODES = ("sequential", "full")
DECODE_SHARE, OVERLAP_SHARE = 0.45, 0.25
"""Of the time that a size has left when the part begins."""

LEAST_S = 10.0
"""With less time left a part is not begun: models take as long to load."""


@dataclass(frozen=True)
class GpuWork:
    """What is measured.  Response lengths are log-normal."""

    batch: int = 112
    prompt_tokens: int = 256
    response_tokens: int = 2048
    median: float = 256.0
    sigma: float = 1.0
    chunk_tokens: int = 64
    steady_steps: int = 128
    delta: int = 16
    ppo_steps: int = 3
    micro_batch_tokens: int = 8192
    dtype: Dtype = "bfloat16"
    device: str = "cuda"


@dataclass
class GpuBench:
    """Measures `sizes` one after the other, each with an equal share of what is left of `seconds`."""

    out: Path
    work: GpuWork
    seconds: float
    memory_bytes: float | None  # of the device; None: not asked
    say: Callable[[str], None] = lambda text: print(text, flush=True)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def run(self, sizes: Mapping[str, Shape]) -> dict[str, Any]:
        """Writes `out/gpu.json` after every row.  Returns what is in it."""
        self.out.mkdir(parents=True, exist_ok=True)
        tokenizer, prompts = write_random_prompts(self.out / "inputs", self.work.prompt_tokens)
        end = time.monotonic() + self.seconds
        for number, (size, shape) in enumerate(sizes.items()):
            now = time.monotonic()
            self._size(size, shape, now + (end - now) / (len(sizes) - number), tokenizer, prompts)
        return self._figures()

    def _size(self, size: str, shape: Shape, end: float, tokenizer: Path, prompts: Path) -> None:
        directory = self.out / size
        directory.mkdir(parents=True, exist_ok=True)
        checkpoint = directory / "checkpoint"
        for part, share in (("decode", DECODE_SHARE), ("overlap", OVERLAP_SHARE)):
            self._part(size, part, share * (end - time.monotonic()), {"shape": shape, "checkpoint": checkpoint})
        for number, mode in enumerate(PPO_MODES):
            share = 1 / (len(PPO_MODES) - number)
            config = self.ppo_run(directory / mode, mode, checkpoint, tokenizer, prompts)
            self._train(size, mode, config, share * (end - time.monotonic()))

    def _part(self, size: str, part: str, seconds: float, models: Mapping[str, Any]) -> None:
        """A part of `gpu_parts.py`, whose rows come as lines of a file."""
        lines, order = self.out / size / f"{part}.jsonl", self.out / size / f"{part}.json"
        lines.unlink(missing_ok=True)
        write_json(order, {"part": part, "work": asdict(self.work), "rows": lines, **models})
        command = [sys.executable, "-m", "oppo_megatron.bench.gpu_parts", str(order)]
        taken = 0
        for why_not in self._process(size, part, command, seconds):
            new = _rows(lines)[taken:]
            taken += len(new)
            self._add({"size": size, "part": part, **row} for row in new)
            if why_not is not None:
                self._add([{"size": size, "part": part, "why_not": why_not}])

    def _train(self, size: str, mode: str, config: TrainConfig, seconds: float) -> None:
        """A PPO run; of one that ran out of time or failed, the steps that it made."""
        row: dict[str, Any] = {"size": size, "part": "ppo", "variant": mode}
        if (lacking := self.lacking(config)) is not None:
            self._add([{**row, "why_not": lacking}])
            return
        path = config.run_dir.with_suffix(".yaml")
        dump_config(config, path)
        outcome = list(self._process(size, mode, [sys.executable, "-m", "oppo_megatron", "train", str(path)], seconds))
        metrics = RunDirectory(config.run_dir).metrics
        lines = read_metrics(metrics) if metrics.exists() else []
        steady = lines[1:] or lines
        if lines:
            row |= {name: median(line[name] for line in steady) for name in ("step_s", "decode_s", "train_s")}
            row |= {"steps": lines, "tokens_per_s": sum(x["tokens"] for x in steady) / sum(x["step_s"] for x in steady)}
        self._add([row | ({} if outcome[-1] is None else {"why_not": outcome[-1]})])

    def _process(self, size: str, part: str, command: Sequence[str], seconds: float) -> Iterator[str | None]:
        """Runs a process, and yields None each second; at its end why it has not done all, where it has not."""
        self.say(f"--- {size}: {part}, at most {max(0.0, seconds):.0f} s")
        if seconds < LEAST_S:
            yield f"{seconds:.0f} s left, fewer than {LEAST_S:.0f}"
            return
        log = self.out / size / f"{part}.log"
        with log.open("w", encoding="utf-8") as file:
            # S603: this package's own command, and no shell.
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)  # noqa: S603
            try:
                end = time.monotonic() + seconds
                while process.poll() is None and time.monotonic() < end:
                    yield None
                    time.sleep(min(1.0, max(0.0, end - time.monotonic())))
                ended = process.poll()
            finally:
                process.kill()
                process.wait()
        if ended is None:
            yield f"its {seconds:.0f} s were over"
        elif ended:
            yield f"exit code {ended}, {_last_line(log)} ({log})"
        else:
            yield None

    def ppo_run(self, run_dir: Path, mode: str, checkpoint: Path, tokenizer: Path, prompts: Path) -> TrainConfig:
        """All roles of one shape in one process."""
        work = self.work
        role = {"checkpoint": checkpoint, "dtype": work.dtype}
        scalar = {**role, "fresh_head": True}
        return TrainConfig.model_validate(
            {
                "run_dir": run_dir,
                "steps": work.ppo_steps,
                "placement": {"mode": "single"},
                "tokenizer": {"path": tokenizer},
                "data": {"path": prompts, "max_prompt_tokens": work.prompt_tokens},
                "actor": {**role, "optimizer": {"lr": 1e-6}},
                "critic": {**scalar, "init_seed": 2, "optimizer": {"lr": 1e-6}},
                "reward": {**scalar, "init_seed": 3},
                "rewards": [{"kind": "model"}],
                "rollout": {
                    "batch_size": work.batch,
                    "max_response_tokens": work.response_tokens,
                    "forced_lengths": {"median": work.median, "sigma": work.sigma},
                },
                # Random weights in low precision say nothing about training.
                "ppo": {"logprob_gap_limit": None},
                "overlap": {
                    **MODES[mode],
                    "chunk": {"tokens": work.chunk_tokens, "adaptive": False},
                    "delta": {"rule": "fixed", "initial": work.delta, "max": work.delta},
                },
                "runtime": {"device": work.device, "micro_batch_tokens": work.micro_batch_tokens},
                "logging": {"console": "plain"},
                "save_weights": False,
            }
        )

    def lacking(self, config: TrainConfig) -> str | None:
        """Why the device's memory is too small for the run, where it is."""
        if self.memory_bytes is None or not (Path(str(config.actor.checkpoint)) / "config.json").exists():
            return None
        needed = sum(holding.memory.total for holding in train_holdings(config, on_cpu=False))
        if needed <= self.memory_bytes:
            return None
        return f"needs about {needed / 2**30:.0f} GiB, the device has {self.memory_bytes / 2**30:.0f}"

    def _add(self, rows: Iterator[dict[str, Any]] | Sequence[dict[str, Any]]) -> None:
        before = len(self.rows)
        self.rows += rows
        if len(self.rows) > before:
            self._figures()

    def _figures(self) -> dict[str, Any]:
        figures = {"bench": "gpu", "machine": describe_machine(), "work": asdict(self.work), "results": self.rows}
        write_json(self.out / "gpu.json", figures)
        return figures


def require_gpu() -> float:
    """Bytes of memory of the device.  Raises ConfigError where there is none."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            f"oppo bench gpu measures a CUDA device, but torch {torch.__version__} finds none; run it on a machine with an "
            "NVIDIA GPU of 40 GiB or more (the 0.5B size; all need about 140) and a torch built for CUDA, or measure this "
            "processor with oppo bench decode and oppo bench overlap"
        )
    return float(torch.cuda.get_device_properties(0).total_memory)


def _rows(path: Path) -> list[dict[str, Any]]:
    """The whole lines that a part has written so far."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "without a word"

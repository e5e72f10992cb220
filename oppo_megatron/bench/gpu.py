"""Benchmark one GPU within a time limit: decoding, scoring during it, and PPO steps against TRL's, each in own processes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from oppo_megatron.bench.figures import describe_machine
from oppo_megatron.config.derived import switches
from oppo_megatron.config.load import dump_config
from oppo_megatron.config.model import Dtype
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.data.generated import write_random_prompts
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.role_memory import train_holdings
from oppo_megatron.layout.shape import weight_bytes
from oppo_megatron.processes import started
from oppo_megatron.rundir.directory import RunDirectory, write_json
from oppo_megatron.rundir.metrics_log import read_metrics

Shape = Mapping[str, Any]
"""A `config.json`."""


def _qwen(hidden: int, layers: int, heads: int, ffn: int) -> Shape:
    return {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": 2, "intermediate_size": ffn, "vocab_size": 151936,
        "max_position_embeddings": 32768, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    }  # fmt: skip


SIZES: dict[str, Shape] = {"0.5B": _qwen(896, 24, 14, 4864), "1.5B": _qwen(1536, 28, 12, 8960), "3B": _qwen(2048, 36, 16, 11008)}

COLUMNS = {
    "size": "size", "part": "part", "variant": "variant", "tokens/s": "tokens_per_s", "ms/step": "ms_per_step",
    "% of bandwidth": "share_percent", "hidden %": "hidden_percent", "rows": "rows", "s/step": "step_s",
    "x sequential": "times_sequential", "x TRL": "times_trl", "why not": "why_not",
}  # fmt: skip

PPO_MODES = ("sequential", "full")

SHARES = {"decode": 0.17, "overlap": 0.10, "sequential": 0.18, "full": 0.18, "trl": 0.27}
"""Largest share per part of the time of all that can be measured."""

LEAST_S = 10.0
"""A part with less time left is skipped: loading models takes as long."""

FINDS_TRL = "import importlib.util, sys; sys.exit(importlib.util.find_spec('trl') is None)"
TRL_MICRO_BATCH = 4
TRL_LOGIT_BYTES = 14
"""Bytes per logit in TRL's micro-batch: bfloat16 with gradient, float32 softmax and log-softmax, entropy."""


def agenda(sizes: Sequence[str]) -> list[tuple[str, str]]:
    first, *others = sizes
    plan = [(first, part) for part in SHARES]
    for parts in (("decode", "overlap"), (*PPO_MODES, "trl")):
        plan += [(size, part) for size in others for part in parts]
    return plan


@dataclass(frozen=True)
class GpuWork:
    """The work, with log-normal response lengths."""

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
    """`trl`: the script for TRL's trainer, and a Python with TRL."""

    out: Path
    work: GpuWork
    seconds: float
    memory_bytes: float | None  # of the device; None: unlimited
    trl: tuple[Path, Path] | None = None
    say: Callable[[str], None] = lambda text: print(text, flush=True)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def run(self, sizes: Mapping[str, Shape]) -> dict[str, Any]:
        """Write `out/gpu.json` after every row; return its content. Raises ConfigError if it exists."""
        if (self.out / "gpu.json").exists():
            raise ConfigError(f"{self.out} holds an earlier measurement, which is not overwritten; name another with --out")
        end = time.monotonic() + self.seconds
        inputs = write_random_prompts(self.out / "inputs", self.work.prompt_tokens)
        given = self.seconds if self._trl_absent is None else self.seconds / (1 - SHARES["trl"])  # its time goes to the others
        for size, part in agenda(list(sizes)):
            seconds = min(SHARES[part] * given, end - time.monotonic())
            try:
                self._measure(size, part, sizes[size], inputs, seconds)
            except Exception as error:  # unattended: it becomes a row, and the parts after it still run
                self._add([{"size": size, "part": part, "why_not": f"{type(error).__name__}: {error}"}])
        return self._figures()

    def _measure(self, size: str, part: str, shape: Shape, inputs: tuple[Path, Path], seconds: float) -> None:
        (self.out / size).mkdir(parents=True, exist_ok=True)
        if part in PPO_MODES:
            self._train(size, part, self.ppo_run(self.out / size, part, *inputs), seconds)
        elif part == "trl":
            self._trl(size, shape, inputs, seconds)
        else:
            self._part(size, part, shape, seconds)

    def _part(self, size: str, part: str, shape: Shape, seconds: float) -> None:
        lines, order = self.out / size / f"{part}.jsonl", self.out / size / f"{part}.json"
        models = {"shape": shape, "checkpoint": self.out / size / "checkpoint"}
        write_json(order, {"part": part, "work": asdict(self.work), "rows": lines, **models})
        command = [sys.executable, "-m", "oppo_megatron.bench.gpu_parts", str(order)]
        taken = 0
        for why_not in self._process(size, part, command, seconds):
            new = read_lines(lines)[taken:]
            taken += len(new)
            found = [{"size": size, "part": part, **row} for row in new]
            if why_not is not None:
                found.append({"size": size, "part": part, "why_not": why_not})
            if found:
                self._add(found)

    def _train(self, size: str, mode: str, config: TrainConfig, seconds: float) -> None:
        """Finished steps count even if the run fails."""
        row: dict[str, Any] = {"size": size, "part": "ppo", "variant": mode, "rows": config.rollout.batch_size}
        if (lacking := self.lacking(config)) is not None:
            self._add([{**row, "why_not": lacking}])
            return
        path = config.run_dir.with_suffix(".yaml")
        dump_config(config, path)
        *_, why_not = self._process(size, mode, [sys.executable, "-m", "oppo_megatron", "train", str(path)], seconds)
        metrics = RunDirectory(config.run_dir).metrics
        lines = read_metrics(metrics) if metrics.exists() else []
        self._add_steps(row, lines, ("step_s", "decode_s", "train_s"), why_not)

    def _trl(self, size: str, shape: Shape, inputs: tuple[Path, Path], seconds: float) -> None:
        out = self.out / size / "trl"
        row: dict[str, Any] = {"size": size, "part": "ppo", "variant": "TRL"}
        if self.trl is None or self._trl_absent is not None:
            self._add([{**row, "why_not": self._trl_absent}])
            return
        rows = trl_rows(shape, self.work, self.memory_bytes)
        if not rows:
            self._add([{**row, "why_not": f"TRL has no memory for {TRL_MICRO_BATCH} rows: see docs/benchmarks.md"}])
            return
        config = self.ppo_run(self.out / size, "sequential", *inputs)
        path = self.out / size / "trl.yaml"
        dump_config(config, path)
        script, python = self.trl
        command = [sys.executable, str(script), str(path), f"rollout.batch_size={rows}", "--steps", "2", "--trl-only"]
        command += ["--trl-micro-batch", str(TRL_MICRO_BATCH), "--peer-python", str(python), "--out", str(out)]
        *_, why_not = self._process(size, "trl", command, seconds)
        steps = [line | {"tokens": sum(line["response_tokens"])} for line in read_lines(out / "trl.jsonl")]
        self._add_steps(row | {"rows": rows}, steps, ("step_s", "generate_s", "score_s", "train_s"), why_not)
        shutil.rmtree(out / "models", ignore_errors=True)  # gigabytes

    @cached_property
    def _trl_absent(self) -> str | None:
        if self.trl is None or not self.trl[0].is_file():
            where = "benchmarks/peers/compare.py" if self.trl is None else self.trl[0]
            return f"there is no {where}: run it from the repository's root"
        python = self.trl[1]
        command = [str(python), "-c", FINDS_TRL]
        found = python.is_file() and subprocess.run(command, check=False, timeout=60).returncode == 0  # noqa: S603  (our own words)
        return None if found else f"{python} has no TRL: `make bench-trl` installs it"

    def _add_steps(
        self, row: dict[str, Any], lines: Sequence[Mapping[str, Any]], seconds: Sequence[str], why_not: str | None
    ) -> None:
        if steady := lines[1:] or lines:
            row |= {name: median(line[name] for line in steady) for name in seconds}
            row |= {"steps": lines, "tokens_per_s": sum(x["tokens"] for x in steady) / sum(x["step_s"] for x in steady)}
        self._add([row | ({} if why_not is None else {"why_not": why_not})])

    def _process(self, size: str, part: str, command: Sequence[str], seconds: float) -> Iterator[str | None]:
        self.say(f"--- {size}: {part}, at most {max(0.0, seconds):.0f} s")
        if seconds < LEAST_S:
            yield f"{max(0.0, seconds):.0f} s left, fewer than {LEAST_S:.0f}"
            return
        yield from run_within(command, seconds, self.out / size / f"{part}.log")

    def ppo_run(self, directory: Path, mode: str, tokenizer: Path, prompts: Path) -> TrainConfig:
        work, checkpoint = self.work, directory / "checkpoint"
        role = {"checkpoint": checkpoint, "dtype": work.dtype}
        return TrainConfig.model_validate(
            {
                "run_dir": directory / mode,
                "steps": work.ppo_steps,
                "placement": {"mode": "single"},
                "tokenizer": {"path": tokenizer},
                "data": {"path": prompts, "max_prompt_tokens": work.prompt_tokens},
                "actor": {**role, "optimizer": {"lr": 1e-6}},
                "critic": {**role, "optimizer": {"lr": 1e-6}},
                "reward": {"init": checkpoint / "config.json", "dtype": work.dtype},
                "rewards": [{"kind": "model"}],
                "rollout": {
                    "batch_size": work.batch,
                    "max_response_tokens": work.response_tokens,
                    "forced_lengths": [work.median, work.sigma],
                },
                # Random weights in low precision have a large gap.
                "guards": {"logprob_gap": None},
                "overlap": {
                    **switches(mode),
                    "chunk": work.chunk_tokens,
                    "delta": {"rule": "fixed", "initial": work.delta, "max": work.delta},
                },
                "runtime": {"device": work.device, "micro_batch_tokens": work.micro_batch_tokens},
                "logging": {"console": "plain"},
                "checkpoint": {"every_minutes": 0, "final": "nothing"},
            }
        )

    def lacking(self, config: TrainConfig) -> str | None:
        if self.memory_bytes is None or not (Path(str(config.actor.checkpoint)) / "config.json").exists():
            return None
        found = [holding.memory for holding in train_holdings(config, on_cpu=False)]
        # Roles train one at a time and reuse the memory of activations.
        needed = sum(memory.total - memory.activations for memory in found) + max(m.activations for m in found)
        if needed <= self.memory_bytes:
            return None
        return f"needs about {needed / 2**30:.0f} GiB, the device has {self.memory_bytes / 2**30:.0f}"

    def _add(self, rows: Sequence[dict[str, Any]]) -> None:
        self.rows += rows
        for row in rows:
            found = {name: row[key] for name, key in COLUMNS.items() if row.get(key) is not None}
            self.say("    " + ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in found.items()))
        set_side_by_side(self.rows)
        self._figures()

    def _figures(self) -> dict[str, Any]:
        figures = {"bench": "gpu", "machine": describe_machine(), "work": asdict(self.work), "results": self.rows}
        write_json(self.out / "gpu.json", figures)
        return figures


def require_gpu() -> float:
    """Memory in bytes. Raises ConfigError without a GPU."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            f"oppo bench gpu measures a CUDA device, but torch {torch.__version__} finds none; run it on a machine with an "
            "NVIDIA GPU of 40 GiB or more (the 0.5B size; all need about 140) and a torch built for CUDA, or measure this "
            "processor with oppo bench decode and oppo bench overlap"
        )
    return float(torch.cuda.get_device_properties(0).total_memory)


def trl_rows(shape: Shape, work: GpuWork, memory_bytes: float | None) -> int:
    """Most rows per step that fit in memory with TRL's trainer, a multiple of its micro-batch.

    It holds four models, two gradients and Adam's state in float32, full-vocabulary scores of sampled tokens in float32 twice,
    and a micro-batch's logits.
    """
    if memory_bytes is None:
        return work.batch
    models = 10 * weight_bytes(shape, "float32", scalar=False)
    row = 2 * 4 * work.response_tokens * shape["vocab_size"]
    trained = TRL_LOGIT_BYTES * TRL_MICRO_BATCH * (work.prompt_tokens + work.response_tokens) * shape["vocab_size"]
    rows = min(work.batch, int(max(0.0, 0.9 * memory_bytes - models - trained) // row))
    return rows // TRL_MICRO_BATCH * TRL_MICRO_BATCH


def set_side_by_side(rows: Sequence[dict[str, Any]]) -> None:
    rates = {(row["size"], row["variant"]): row["tokens_per_s"] for row in rows if row["part"] == "ppo" and "steps" in row}
    for row in rows:
        if row["part"] == "ppo" and "steps" in row:
            for peer, name in (("sequential", "times_sequential"), ("TRL", "times_trl")):
                if (size_peer := (row["size"], peer)) in rates:
                    row[name] = row["tokens_per_s"] / rates[size_peer]


def read_lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def run_within(command: Sequence[str], seconds: float, log: Path) -> Generator[str | None, None, None]:
    """Run a command; yield None each second and finally why it did not finish. Its descendants end with it."""
    with started(command, log, end=_end) as process:
        end = time.monotonic() + seconds
        while process.poll() is None and time.monotonic() < end:
            yield None
            time.sleep(min(1.0, max(0.0, end - time.monotonic())))
        ended = process.poll()
    if ended is None:
        yield f"its {seconds:.0f} s ran out"
    elif ended:
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        yield f"exit code {ended}, {lines[-1] if lines else 'without a word'} ({log})"
    else:
        yield None


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family, timeout=10)
    process.wait()

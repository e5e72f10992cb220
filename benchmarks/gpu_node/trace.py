"""Decode steps, a chunk that is decoded while another is scored, and one update at 0.5B, profiled: `trace.py DEVICE OUT`.

Writes OUT/figures.json (what took how long, and how busy the device was) and OUT/traces.tar.gz (chrome traces) as soon as each
part is done.  On a CPU with a tiny shape: a dry run.
"""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from oppo_megatron.bench.decode import decode_round
from oppo_megatron.bench.gpu import SIZES, GpuWork
from oppo_megatron.bench.gpu_parts import Bench, new_rounds, overlapping
from oppo_megatron.cluster.world import choose_device, open_world
from oppo_megatron.config.model import LearningModelConfig, OptimizerConfig, RuntimeConfig
from oppo_megatron.engine.stopping import Stopping
from oppo_megatron.integrations.huggingface import write_random_checkpoint
from oppo_megatron.layout.shape import weight_bytes
from oppo_megatron.mcore.batch import pack_responses
from oppo_megatron.mcore.groups import build_groups
from oppo_megatron.mcore.model import DTYPES
from oppo_megatron.mcore.roles import load_role
from oppo_megatron.mcore.training import TrainedModel
from oppo_megatron.mcore.vocab import OutputRows

DEVICE, OUT = sys.argv[1], Path(sys.argv[2])
ON_GPU = DEVICE == "cuda"
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 512}
SHAPE = SIZES["0.5B"] if ON_GPU else {**SIZES["0.5B"], **TINY}
WORK = (
    GpuWork(batch=64, prompt_tokens=256, response_tokens=1024) if ON_GPU
    else GpuWork(
        batch=4, prompt_tokens=6, response_tokens=96, dtype="float32", device="cpu", micro_batch_tokens=64, chunk_tokens=8
    )
)  # fmt: skip
PEAK = 989e12
CALLS = (
    "cudaGraphLaunch",
    "cudaLaunchKernel",
    "cudaStreamSynchronize",
    "cudaMemcpyAsync",
    "cudaMalloc",
    "cudaFree",
    "cudaHostAlloc",
)
FIGURES: dict[str, Any] = {}
FOLDER = Path(tempfile.mkdtemp())


def write(**figures: Any) -> None:
    path = OUT / "figures.json"
    FIGURES.update(json.loads(path.read_text()) if path.exists() else {})
    FIGURES.update(figures)
    path.write_text(json.dumps(FIGURES, indent=1))


def wait() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def timed(call: Any) -> float:
    wait()
    began = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - began


def profiled(name: str, call: Any) -> dict[str, Any]:
    """Wall time under the profiler, the device's busy time (kernels of several streams may add up to more) and what took it."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ON_GPU else [])]
    with profile(activities=activities, record_shapes=False, with_stack=False) as prof:
        wall = timed(call)
    key = "self_device_time_total" if ON_GPU else "self_cpu_time_total"
    events = [e for e in prof.key_averages() if getattr(e, key, 0) > 0]
    kernels = [e for e in events if not ON_GPU or str(e.device_type).endswith("CUDA")]
    busy = sum(getattr(e, key) for e in kernels) / 1e6
    top = sorted(kernels, key=lambda e: -getattr(e, key))[:14]
    print(f"--- {name}: {wall * 1e3:.1f} ms under the profiler, {DEVICE} busy {busy * 1e3:.1f} ms ({100 * busy / wall:.0f} %)")
    for e in top:
        print(f"{getattr(e, key) / 1e3:9.2f} ms {e.count:6d} x  {e.key[:110]}")
    calls = {e.key: e.count for e in prof.key_averages() if e.key in CALLS}
    print("    calls:", calls)
    try:
        prof.export_chrome_trace(str(FOLDER / f"{name}.json"))
    except Exception as error:  # figures are worth more
        print(f"no trace of {name}: {error}")
    rows = [{"ms": round(getattr(e, key) / 1e3, 3), "count": e.count, "name": e.key[:160]} for e in top]
    return {"wall_ms": wall * 1e3, "busy_ms": busy * 1e3, "busy_percent": 100 * busy / wall, "calls": calls, "top": rows}


def decode(bench: Bench) -> None:
    model = bench.model()
    rounds = new_rounds(bench, model, None, "auto", Stopping((), bench.work.response_tokens))
    rollouts, steps = bench.rollouts(), 32 if ON_GPU else 4
    first = timed(lambda: decode_round(rounds, rollouts, 48 if ON_GPU else 4))
    plain = timed(lambda: decode_round(rounds, rollouts, steps))
    captured = rounds.decode.captured if rounds.decode is not None else None
    found: dict[str, Any] = {"rows": len(rollouts), "first_48_s": first, "ms_per_step": 1e3 * plain / steps}
    found["graphs"] = None if captured is None else captured.num_graphs
    found["cache"] = type(rounds.decode.cache).__name__ if rounds.decode is not None else None
    if ON_GPU:
        found["weights_only_ms"] = 1e3 * weight_bytes(SHAPE, bench.work.dtype, scalar=False) / bench.bandwidth()
    write(decode=found)
    found["profile"] = profiled("decode", lambda: decode_round(rounds, rollouts, 16 if ON_GPU else 4))
    write(decode=found)
    print({k: v for k, v in found.items() if k != "profile"})


def overlap(bench: Bench) -> None:
    rounds, rollouts, chunk = overlapping(bench), bench.rollouts(), bench.work.chunk_tokens
    for score in ([], rollouts, rollouts):
        decode_round(rounds, rollouts, chunk, score)
    write(overlap={"profile": profiled("overlap", lambda: decode_round(rounds, rollouts, chunk, rollouts))})


def update(bench: Bench) -> None:
    work = bench.work
    config = LearningModelConfig(checkpoint=bench.checkpoint, dtype=work.dtype)
    model = load_role(config, bench.groups, head="lm", max_length=bench.max_length, device=bench.device)
    trained = TrainedModel(model, OptimizerConfig(lr=1e-6), 10)
    generator = torch.Generator().manual_seed(0)
    lengths = [min(work.response_tokens - 1, int(20 + 30 * (1.06**i))) for i in range(min(32, work.batch))]
    responses = [torch.randint(SHAPE["vocab_size"], (n,), generator=generator).tolist() for n in lengths]
    prompts = [list(r.prompt.tokens) for r in bench.rollouts()][: len(responses)]
    batches = pack_responses(prompts, responses, work.micro_batch_tokens, bench.device)
    tokens = sum(len(b.tokens_T) for b in batches)

    def loss(micro: Any, output: OutputRows) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        logp, entropy, _ = output.figures(micro.targets_R)
        return -logp.sum() / tokens - 0.01 * entropy.sum() / tokens, {"logp": logp.detach().sum()}

    model.begin_weight_update()
    first = timed(lambda: trained.step(batches, loss))
    seconds = min(timed(lambda: trained.step(batches, loss)) for _ in range(2))
    parameters = weight_bytes(SHAPE, "float32", scalar=False) / 4
    found: dict[str, Any] = {"tokens": tokens, "micro_batches": len(batches), "first_s": first, "step_s": seconds}
    found |= {"tokens_per_s": tokens / seconds, "model_flops_percent": 100 * 6 * parameters * tokens / seconds / PEAK}
    if ON_GPU:
        found["peak_GiB"] = torch.cuda.max_memory_allocated() / 2**30
    write(update=found)
    found["profile"] = profiled("update", lambda: trained.step(batches, loss))
    write(update=found)
    print({k: v for k, v in found.items() if k != "profile"})


def main() -> int:
    runtime, failed = RuntimeConfig(device=DEVICE), 0
    choose_device(runtime)
    with open_world(runtime, {}) as world:
        groups = build_groups([0], 1, 1, "bench")
        assert groups is not None
        checkpoint = FOLDER / "checkpoint"
        write_random_checkpoint(SHAPE, checkpoint, DTYPES[WORK.dtype], world.device)
        bench = Bench(WORK, SHAPE, checkpoint, FOLDER / "rows.jsonl", groups, world.device)
        for name, part in (("decode", decode), ("overlap", overlap), ("update", update)):
            try:
                part(bench)
            except Exception as error:  # other parts are still to come
                import traceback

                traceback.print_exc()
                write(**{f"{name}_error": f"{type(error).__name__}: {error}"[:600]})
                failed = 1
    traces = sorted(FOLDER.glob("*.json"))
    for kept in (traces, traces[:1]):
        with tarfile.open(OUT / "traces.tar.gz", "w:gz") as tar:
            for path in kept:
                tar.add(path, path.name)
        if (OUT / "traces.tar.gz").stat().st_size < 14_000_000:
            break
    else:
        (OUT / "traces.tar.gz").unlink()
        print("traces are over 14 MB and left out")
    shutil.rmtree(FOLDER)
    return failed


if __name__ == "__main__":
    sys.exit(main())

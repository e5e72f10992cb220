"""Parts of `oppo bench gpu` that load models, each a process: `python -m oppo_megatron.bench.gpu_parts ORDER.json`.

Legend: B sequences, P prompt tokens, V vocabulary.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from oppo_megatron.bench.decode import HuggingFace, Unending, decode_round, now
from oppo_megatron.bench.gpu import GpuWork
from oppo_megatron.cluster.world import choose_device, open_world
from oppo_megatron.config.model import KVLayout, ModelConfig, ParallelConfig, RuntimeConfig
from oppo_megatron.config.ppo import ForcedLengths, ForcedLimits, log_normal
from oppo_megatron.engine.device_decode import SYNC_STEPS
from oppo_megatron.engine.executor import Executor, Links, RoleWorker
from oppo_megatron.engine.generation import DecodeWorker
from oppo_megatron.engine.round_runner import Decoding, RoundRunner, decoder
from oppo_megatron.engine.sampler import Sampling
from oppo_megatron.engine.scoring import ScorerRole, ScoringWorker
from oppo_megatron.engine.stopping import Stopping
from oppo_megatron.integrations.huggingface import write_random_checkpoint
from oppo_megatron.layout.hf_layout import Head
from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.layout.shape import kv_bytes_per_token, weight_bytes
from oppo_megatron.mcore.groups import RoleGroups, build_groups
from oppo_megatron.mcore.kv.paged import PagedKVCache
from oppo_megatron.mcore.model import DTYPES, RoleModel
from oppo_megatron.mcore.roles import load_role
from oppo_megatron.records import Prompt, Rollout
from oppo_megatron.schedule.planning.actor_book import ActorBook
from oppo_megatron.schedule.planning.planner import RoundPlanner
from oppo_megatron.schedule.planning.scoring_book import ScoringBook
from oppo_megatron.schedule.rounds import Site

VARIANTS: dict[str, tuple[int | None, KVLayout]] = {
    "as trained": (None, "auto"),
    "dense cache": (None, "dense"),
    "each token read": (1, "dense"),
}
"""Decode steps between two reads, by default the device's, and `runtime.kv_layout`."""

SCORERS: dict[ScorerRole, Head] = {"reference": "lm", "critic": "scalar", "reward": "scalar"}
REPEATS = 3
WARM_STEPS = 48
READ_BYTES = {"cuda": 2**31, "cpu": 2**26}


@dataclass
class Bench:
    work: GpuWork
    shape: Mapping[str, Any]
    checkpoint: Path
    rows: Path
    groups: RoleGroups
    device: torch.device

    def write(self, row: Mapping[str, Any]) -> None:
        with self.rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    @property
    def max_length(self) -> int:
        return self.work.prompt_tokens + self.work.response_tokens

    def model(self, head: Head = "lm") -> RoleModel:
        config = ModelConfig(checkpoint=self.checkpoint, dtype=self.work.dtype)
        model = load_role(config, self.groups, head=head, role="model", max_length=self.max_length, device=self.device)
        return model.requires_grad_(False)

    def rollouts(self, start: int = 0) -> list[Rollout]:
        work, generator = self.work, torch.Generator().manual_seed(start)
        prompts = torch.randint(self.shape["vocab_size"], (work.batch, work.prompt_tokens), generator=generator)
        return [Rollout(Prompt(start + i, i, "", tuple(row)), i) for i, row in enumerate(prompts.tolist())]

    def seconds(self, call: Callable[[], object]) -> float:
        started = now(self.device)
        call()
        return now(self.device) - started

    def bandwidth(self) -> float:
        """Bytes/s of the best of several copies, reads and writes."""
        source = torch.zeros(READ_BYTES[self.device.type], dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.numel() / min(self.seconds(lambda: target.copy_(source)) for _ in range(10))

    def against_limit(self, row: dict[str, Any], responses: Sequence[tuple[int, int]], bandwidth: float) -> dict[str, Any]:
        """Add the rate allowed by reads of weights, keys and values; `responses`: (context, decoded tokens)."""
        tokens, steps = sum(count for _, count in responses), max(count for _, count in responses)
        positions = sum(count * context + count * (count - 1) // 2 for context, count in responses)
        kv = kv_bytes_per_token(self.shape, ParallelConfig(), self.work.dtype)
        read = steps * weight_bytes(self.shape, self.work.dtype, scalar=False) + kv * positions
        row |= {"tokens": tokens, "steps": steps, "tokens_per_s": tokens / row["seconds"]}
        row |= {"limit_tokens_per_s": tokens * bandwidth / read, "ms_per_step": 1e3 * row["seconds"] / steps}
        return row | {"share_percent": 100 * row["tokens_per_s"] / row["limit_tokens_per_s"]}


def measure_decode(bench: Bench) -> None:
    bandwidth = bench.bandwidth()
    bench.write({"variant": "bandwidth", "read_write_gbytes": bandwidth / 1e9})
    model = bench.model()
    bench.write({"variant": "as trained", "long_tail": True, **_long_tail(bench, model, bandwidth)})
    paged = True
    for name, (sync_steps, layout) in VARIANTS.items():
        if (sync_steps, layout) == (None, "dense") and not paged:
            continue  # training uses it
        row = _steady(bench, model, sync_steps, layout, bandwidth)
        paged = row["paged"]
        bench.write({"variant": name, **row})
    del model
    peer, steps = HuggingFace(bench.checkpoint, bench.work.dtype), bench.work.steady_steps
    peer.model.to(bench.device)
    prompts_BP = torch.tensor([r.prompt.tokens for r in bench.rollouts()], device=bench.device)
    peer.decode(prompts_BP, 2)
    seconds, _ = peer.decode(prompts_BP, steps)
    responses = [(bench.work.prompt_tokens + 1, steps)] * len(prompts_BP)
    row = bench.against_limit({"seconds": seconds}, responses, bandwidth)
    bench.write({"variant": "transformers generate", **row})


def new_rounds(bench: Bench, model: RoleModel, sync_steps: int | None, layout: KVLayout, stopping: Stopping) -> RoundRunner:
    return decoder(
        model,
        model.new_cache(bench.work.batch, layout=layout),
        sampling=Sampling(seed=1),
        stopping=stopping,
        micro_batch_tokens=bench.work.micro_batch_tokens,
        timeout_s=RuntimeConfig().timeout_s,
        sync_steps=sync_steps or SYNC_STEPS[bench.device.type],
    )


def _steady(bench: Bench, model: RoleModel, sync_steps: int | None, layout: KVLayout, bandwidth: float) -> dict[str, Any]:
    """Steps without a finished sequence, after warm-up and graph capture."""
    rounds = new_rounds(bench, model, sync_steps, layout, Stopping((), bench.work.response_tokens))
    assert rounds.decode is not None
    rollouts, steps = bench.rollouts(), bench.work.steady_steps
    warm = min(WARM_STEPS, bench.work.response_tokens - 1 - steps)
    decode_round(rounds, rollouts, warm)
    seconds = bench.seconds(lambda: decode_round(rounds, rollouts, steps))
    responses = [(bench.work.prompt_tokens + warm, steps)] * len(rollouts)
    row = {"seconds": seconds, "paged": isinstance(rounds.decode.cache, PagedKVCache)}
    return bench.against_limit(row, responses, bandwidth)


def _long_tail(bench: Bench, model: RoleModel, bandwidth: float) -> dict[str, Any]:
    """Rounds to the last sequence's end; the first pass, with graph capture, is separate."""
    work, most = bench.work, bench.work.response_tokens
    lengths = log_normal(ForcedLengths(median=work.median, sigma=work.sigma))
    rounds = new_rounds(bench, model, None, "auto", Stopping((), most, ForcedLimits(lengths, most, seed=1)))
    assert rounds.decode is not None

    def to_the_ends(rollouts: Sequence[Rollout]) -> None:
        while running := [r for r in rollouts if not r.finished]:
            decode_round(rounds, running, work.chunk_tokens)

    first_s = bench.seconds(lambda: to_the_ends(bench.rollouts()))
    rollouts = bench.rollouts(work.batch)
    row: dict[str, Any] = {"seconds": bench.seconds(lambda: to_the_ends(rollouts)), "first_seconds": first_s}
    captured = rounds.decode.captured
    row["graphs"] = 0 if captured is None else captured.num_graphs
    responses = [(len(r.prompt.tokens), len(r.tokens)) for r in rollouts]
    return bench.against_limit(row, responses, bandwidth)


def measure_overlap(bench: Bench) -> None:
    bench.write({"variant": "second stream", **_hidden(bench, overlapping(bench))})


def overlapping(bench: Bench) -> RoundRunner:
    """Return rounds of an actor and three scorers on one device."""
    work, placement = bench.work, RolePlacement((0,))
    site = Site({name: placement for name in ("actor", *SCORERS)})
    stopping = Stopping((), work.response_tokens)
    actor = bench.model()
    cache = actor.new_cache(work.batch, layout="auto")
    decode = DecodeWorker(actor, cache, sampling=Sampling(seed=1), stopping=stopping, sync_steps=SYNC_STEPS[bench.device.type])
    scoring: dict[str, ScoringWorker] = {}
    for name, head in SCORERS.items():
        model = bench.model(head)
        scoring[name] = ScoringWorker(name, model, model.new_cache(work.batch, layout="auto"), temperature=1.0)
    books = {name: ScoringBook(name, 1, work.batch) for name in scoring}
    book = ActorBook(1, work.batch, stopping.limit)
    planner = RoundPlanner(site, "woven", ("auto", "auto"), work.micro_batch_tokens, bench.max_length, book, books)
    workers: dict[str, RoleWorker] = {"actor": decode, **scoring}
    executor = Executor(0, workers, Links({}), RuntimeConfig().timeout_s, bench.device, lambda *_: None)
    return RoundRunner(planner, executor, dict.fromkeys(workers, 0), decode, None, scoring)


def _hidden(bench: Bench, rounds: RoundRunner) -> dict[str, Any]:
    """Medians of several turns; `hidden_percent`: share of the scoring time that decoding hides."""
    decoded = 1 + 3 * (1 + REPEATS)  # all these chunks have to be within the limit
    chunk = max(1, min(bench.work.chunk_tokens, (bench.work.response_tokens - 1) // decoded))
    rollouts = bench.rollouts()
    times: dict[str, list[float]] = {"both_s": [], "decode_s": [], "score_s": []}

    def decode() -> None:
        decode_round(rounds, rollouts, chunk)

    def score() -> None:
        rounds.run([], rollouts, chunk, Decoding(0, 0, Unending))

    decode()
    for _ in range(1 + REPEATS):
        times["both_s"].append(bench.seconds(lambda: decode_round(rounds, rollouts, chunk, rollouts)))
        score()  # the chunk just decoded
        times["decode_s"].append(bench.seconds(decode))
        times["score_s"].append(bench.seconds(score))
        decode()
    found = {name: median(seconds[1:]) for name, seconds in times.items()}
    hidden = 1 - (found["both_s"] - found["decode_s"]) / found["score_s"]
    return found | {"chunk_tokens": chunk, "hidden_percent": 100 * hidden}


PARTS: dict[str, Callable[[Bench], None]] = {"decode": measure_decode, "overlap": measure_overlap}


def main(path: str) -> None:
    order = json.loads(Path(path).read_text(encoding="utf-8"))
    work, checkpoint = GpuWork(**order["work"]), Path(order["checkpoint"])
    runtime = RuntimeConfig(device=work.device)
    choose_device(runtime)
    with open_world(runtime, {}) as world:
        groups = build_groups([0], 1, 1, "bench")
        assert groups is not None
        if not (checkpoint / "config.json").exists():
            partial = checkpoint.with_suffix(".partial")
            write_random_checkpoint(order["shape"], partial, DTYPES[work.dtype], world.device)
            partial.rename(checkpoint)  # a process that is ended leaves no half of one
        PARTS[order["part"]](Bench(work, order["shape"], checkpoint, Path(order["rows"]), groups, world.device))


if __name__ == "__main__":
    main(sys.argv[1])

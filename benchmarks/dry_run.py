"""The pure half of the loop without models: scheduler, buffer, planner and its checker, stream, controllers, each timed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from oppo_megatron.chunks import Chunk
from oppo_megatron.columns import Ints
from oppo_megatron.config.derived import batch_rows
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.control.chunk_tuner import StepCost
from oppo_megatron.control.delta_controllers import KLController
from oppo_megatron.data.length_trace import forced_quantile
from oppo_megatron.engine.stopping import Stopping
from oppo_megatron.engine.stream import ChunkDecoder, ChunkEncoder
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.placements import role_placements
from oppo_megatron.records import Decision, Prompt, Rollout
from oppo_megatron.schedule.links import NCCL, Transport
from oppo_megatron.schedule.plan import new_planner, round_generator
from oppo_megatron.schedule.planning.planner import PlannedRound
from oppo_megatron.schedule.rounds import Site
from oppo_megatron.schedule.weaving.costs import Costs, Linear, Lines, at_stage
from oppo_megatron.sim.runs.loop import PureLoop, Recorded, StepEnd, made_up_prompts

DRIFT = 0.02
"""The largest relative difference of measured seconds from the cost model, drawn in each step."""

PARTS = ("scheduler and buffer", "planner and checker", "stream", "controllers")

MODEL_70B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8192, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": False,
}  # fmt: skip
"""The shape of Llama's 70B, with an untied head."""


@dataclass(frozen=True)
class Cluster:
    """Layout, lengths in tokens, and the peaks of a device (an H100's by default).

    `lengths`: median and sigma of log-normal responses; `delta`: a share of the batch.
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
        """Return the run of `ranks` ranks with `sequences` rollouts per step.  Raises ConfigError if they do not fit."""
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
            "rollout": {"batch_size": sequences, "max_response_tokens": self.response_tokens,
                "forced_lengths": list(self.lengths),
            },
            "overlap": {"chunk": self.chunk, "delta": delta},
            "runtime": {"micro_batch_tokens": 8192},
        }  # fmt: skip
        return TrainConfig.model_validate(tree)


@dataclass
class Stopwatch:
    """Seconds of `clock` by part."""

    clock: Callable[[], float] = time.perf_counter
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time the block."""
        started = self.clock()
        try:
            yield
        finally:
            self.seconds[name] += self.clock() - started


class DryRun(PureLoop):
    """The work of one rank other than its actions, and the codec of a listener.

    `prompt_tokens`: of all prompts, or of each.  `rank`: the actor's output rank by default.  `responses(seq_id)`: tokens of a
    response, its limit by default.  `codec`: encode and decode chunks.  `transport`: the rules to plan by.
    """

    def __init__(
        self,
        config: TrainConfig,
        prompt_tokens: int | Sequence[int],
        rank: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        *,
        responses: Callable[[int], int] | None = None,
        codec: bool = True,
        transport: Transport = NCCL,
    ):
        self.clock, self.watch = clock, Stopwatch(clock)
        self.site = Site(role_placements(config))
        self.codec = codec and bool(self.site.listeners)
        trace = forced_quantile(config.rollout.lengths, config.rollout.max_response_tokens)
        stopping = Stopping.of(config.rollout, (), config.seed, trace, forced=config.rollout.lengths)
        self.limit: Callable[[int], int] = stopping.limit
        self._limits: dict[int, int] = {}
        generator = round_generator(config.overlap, self.site)
        rank = self.site.source if rank is None else rank
        assert config.steps is not None
        super().__init__(
            config,
            self._prompts(config.steps * batch_rows(config), prompt_tokens),
            responses or self.limit,
            new_planner(config, self.site, generator, self._limits.__getitem__, rank=rank, transport=transport),
        )
        self.kl = KLController(config.ppo.kl)
        self.encoder, self.decoder = ChunkEncoder(), ChunkDecoder()
        self._started = 0.0

    def _prompts(self, count: int, num_tokens: int | Sequence[int]) -> Iterator[Prompt]:
        return made_up_prompts(num_tokens, count)

    def run(self) -> list[dict[str, float]]:
        """Return the seconds of each step by part, to the end of the prompts."""
        steps: list[dict[str, float]] = []
        for rounds in self._steps():
            self.watch = Stopwatch(self.clock)
            for _ in rounds:
                pass
            steps.append(self.watch.seconds)
        return steps

    def rounds(self) -> Iterator[Recorded]:
        """Yield the rounds of all steps after they are recorded."""
        for rounds in self._steps():
            yield from rounds

    def _part(self, name: str) -> AbstractContextManager[None]:
        return self.watch.part(name)

    def _step(self, step: int) -> Iterator[Recorded]:
        self._started = self.clock()
        yield from super()._step(step)

    def _cost(self, end: StepEnd) -> StepCost:
        tokens = int(end.batch.response_tokens.sum())
        return StepCost(self.clock() - self._started, end.occupancy.num_steps, tokens)

    def _decided(self, end: StepEnd, delta: Decision, chunk: Decision | None) -> None:
        with self.watch.part("controllers"):
            self.kl.observe(0.0)
            if self.planner.generator == "woven":  # a run has new measured costs, and plans again
                self.planner.learn(measured_costs(self.site, end.step))

    def _plan(
        self, active: Sequence[Rollout], score: Sequence[Rollout], chunk: int, readable: Ints | None = None
    ) -> PlannedRound:
        return self.planner.plan(self.num_rounds, active, score, chunk, self._order, readable)

    def _order(self, seq_ids: Sequence[int]) -> list[int]:
        """Return open sequences in the order of opening, because no cache gives them slots."""
        return list(seq_ids)

    def _body(self, counts: Ints) -> Ints:
        numbers = np.full((2, counts.sum()), -1.0)
        return np.concatenate([np.ones_like(numbers[:1], dtype=np.int64), numbers.view(np.int64)])

    def _open(self, admitted: Sequence[Rollout]) -> None:
        for rollout in admitted:
            self._limits[rollout.seq_id] = self.limit(rollout.seq_id)  # not timed: a run has one limit for all
        super()._open(admitted)
        if self.codec:
            with self.watch.part("stream"):
                for rollout in admitted:
                    self.encoder.open(rollout.seq_id, rollout.prompt.tokens)
                    self.decoder.open(rollout.seq_id, rollout.prompt.tokens)

    def _send(self, chunk: Chunk) -> None:
        """Encode and decode: the time covers the actor's rank and a listener together."""
        if self.codec:
            with self.watch.part("stream"):
                self.decoder.decode(*self.encoder.encode(chunk))

    def _close(self, batch: Sequence[Rollout]) -> None:
        if self.codec:
            with self.watch.part("stream"):
                for rollout in batch:
                    self.encoder.close(rollout.seq_id)
                    self.decoder.close(rollout.seq_id)


def measured_costs(site: Site, step: int) -> Costs:
    """Return the cost model's lines with a small random change for each stage, in place of measured costs."""
    draw, model = random.Random(step), Costs()  # noqa: S311  (reproducible, not secret)

    def off(line: Linear) -> Linear:
        by = 1 + DRIFT * draw.uniform(-1, 1)
        return Linear(by * line.fixed_s, by * line.per_token_s)

    def stages(role: str, lines: Lines) -> tuple[Linear, ...]:
        return tuple(off(at_stage(lines, stage)) for stage in range(site.placements[role].pp))

    prefill = {role: stages(role, model.prefill_of(role)) for role in site.placements}
    decode = stages("actor", model.decode)
    return replace(model, decode=decode, sample=off(model.sample), prefill=prefill, score=off(model.score))

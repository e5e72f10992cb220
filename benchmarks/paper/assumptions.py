"""Assumptions of the simulation that OPPO's paper does not state: one plausible set, not changed to match its figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from benchmarks.paper.printed import BATCH, GPUS_SCORING, GPUS_TRAINING
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.shape import Shape
from oppo_megatron.sim.clusters.cluster import Cluster
from oppo_megatron.sim.clusters.reading import ClusterConfig, build_cluster

QWEN: Mapping[str, Any] = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}  # fmt: skip
QWEN_7B: Shape = {
    **QWEN, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip
QWEN_3B: Shape = {
    **QWEN, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
    "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
"""The `config.json` of Qwen2.5 in both sizes."""
GH200 = {"memory_gb": 96, "tflops": 989, "gb_per_s": 4000, "like": "h100"}
"""NVIDIA's data sheet: an H100's processor with 96 GB of HBM3."""
DELTA, CHUNK, ROUND_S, EPOCHS, MICRO_BATCH_TOKENS, CAPTURED = 8, 256, 0.02, 4, 8192, False


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompts and of log-normal responses, cut at a limit; `sigma` is of the logarithm."""

    prompt: int
    median: int
    sigma: float
    limit: int


LONG, SHORT = Lengths(256, 512, 1.0, 4096), Lengths(128, 256, 0.5, 1024)


@dataclass(frozen=True)
class Sampled:
    """Lengths of the first `batches` batches of `batch` responses; `length(seq_id)` in tokens."""

    length: Callable[[int], int]
    batch: int
    batches: int = 16

    def middle(self) -> list[int]:
        """Return a typical batch: of all lengths in order, the middle of each of `batch` equal parts; longest last."""
        ordered = sorted(map(self.length, range(self.batch * self.batches)))
        return ordered[self.batches // 2 :: self.batches]

    def longest(self) -> float:
        """Return the mean tokens of a batch's longest response."""
        firsts = range(0, self.batch * self.batches, self.batch)
        return fmean(max(map(self.length, range(first, first + self.batch))) for first in firsts)


@dataclass(frozen=True)
class Setting:
    """A setup of the paper with its assumptions; `training` GPUs generate and train, the others score."""

    name: str
    actor: Shape
    gpu: str | Mapping[str, Any]
    lengths: Lengths
    training: int = GPUS_TRAINING
    batch: int = BATCH
    reward_model: bool = True

    def cluster(self) -> Cluster:
        inside = None if isinstance(self.gpu, str) else {"gb_per_s": 300}
        gpus = self.training + GPUS_SCORING
        return build_cluster(ClusterConfig.model_validate({"gpus_per_node": gpus, "gpu": self.gpu, "inside": inside}))

    def config(self, seed: int) -> TrainConfig:
        """Return a run with both overlaps, without a critic: the paper's value head is on the actor and costs next to nothing."""
        actor, reward = {"init": self.actor}, {"reward": {"init": QWEN_7B}, "rewards": [{"kind": "model"}]}
        rules = {"rewards": [{"kind": "verifier", "name": "gsm8k"}]}
        return TrainConfig.model_validate(
            {
                "run_dir": "none", "seed": seed, "tokenizer": {"path": "none"},
                "data": {"path": "none", "max_prompt_tokens": self.lengths.prompt},
                "algorithm": {"preset": "reinforce_pp"}, "ppo": {"epochs": EPOCHS},
                "placement": {"actor": {"dp": self.training}, "scorer": {"dp": GPUS_SCORING}, "reference": "actor"},
                "actor": {**actor, "train": {"recompute": "full"}}, "reference": actor,
                **(reward if self.reward_model else rules),
                "rollout": {
                    "batch_size": self.batch, "max_response_tokens": self.lengths.limit,
                    "forced_lengths": [self.lengths.median, self.lengths.sigma],
                },
                "overlap": {
                    "chunk": CHUNK,
                    "delta": {"rule": "fixed", "initial": DELTA, "max": DELTA},
                },
                "runtime": {"micro_batch_tokens": MICRO_BATCH_TOKENS, "dtype": "bfloat16"},
            }
        )  # fmt: skip


SETTINGS: Mapping[str, Setting] = {
    each.name: each
    for each in (
        Setting("se7b", QWEN_7B, "h200", LONG),
        Setting("se3b", QWEN_3B, "a100-80", LONG),
        Setting("code3b", QWEN_3B, "a100-80", LONG),
        Setting("gsm8k7b", QWEN_7B, GH200, SHORT, training=3),
        Setting("gsm8k7b (rule-based reward)", QWEN_7B, GH200, SHORT, training=3, reward_model=False),
    )
}
ABLATED = ("se7b", "se3b")
LONG_TEXT = f"{LONG.prompt} tokens; log-normal, median {LONG.median}, sigma {LONG.sigma:g}, at most {LONG.limit}"
SHORT_TEXT = f"{SHORT.prompt} tokens; median {SHORT.median}, sigma {SHORT.sigma:g}, at most {SHORT.limit}"
UPDATE_TEXT = f"{EPOCHS} epochs of one minibatch, layers recomputed, {MICRO_BATCH_TOKENS} tokens a micro-batch"
ASSUMED: Sequence[tuple[str, str, str]] = (
    ("prompts, responses", LONG_TEXT, "usual for answers to questions; chunks of 3000 tokens were tried, so some are longer"),
    ("of GSM8K", SHORT_TEXT, "its worked solutions are short and similar"),
    ("delta", f"fixed at {DELTA}", "the largest fixed one of figure 7a; table 2's has its own rows"),
    ("chunk", f"{CHUNK} tokens", "the middle one of section 3.1's candidates"),
    ("GPUs", "7 generate and train, 1 scores (stated for 8); GSM8K's 4 as 3 and 1", "the least that can score"),
    ("reference", "on the GPUs that generate; scores the complete batch", "TRL keeps it with the policy"),
    ("reward model", "Qwen2.5-7B in all settings (stated), of one output", "the 3B settings name no other"),
    ("value head", "on the actor (stated): its seconds are left out", "one vector"),
    (
        "decode steps",
        "launched by the host, not captured",
        "TRL's PPO generates with transformers, which by default captures none",
    ),
    ("update", UPDATE_TEXT, "TRL's default epochs"),
    (
        "between rounds",
        f"{1e3 * ROUND_S:g} ms of the host",
        "planning, synchronising, caches handed over; never measured on a GPU",
    ),
    ("rewards of figure 7a", "straight through the points in the text, spread 1 per response", "the curve is not printed"),
    ("steps to a reward", "the same with every overlap", "figure 4 says so: minutes are in proportion to seconds per step"),
)
"""Assumption, value, reason."""

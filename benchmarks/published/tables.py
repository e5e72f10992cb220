"""Tables 1 to 6 of ReaL's appendix (Mei et al., MLSys 2025): models, plans, seconds of calls and of steps.

As printed, except that Table 6 repeats its row with CUDA graphs in the row without them, for 70B + 7B, which contradicts its own
end-to-end seconds; generation without graphs is therefore the difference of those (`no_graph_s`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Literal

from oppo_megatron.layout.shape import Shape, head_linear, layer_linears

Kind = Literal["generate", "infer", "train"]
GPUS_A_NODE = 8
PROMPT_TOKENS, CONTEXT_TOKENS, MINIBATCHES = 1024, 2048, 8
"""Every call: all prompts and responses have full length."""
GENERATION, SCORING = "ActorGen", ("RewInf", "RefInf", "CriticInf")

VOCABULARY = 128256


def llama_shape(hidden: int, ffn: int, layers: int, heads: int, keys: int, vocab: int) -> Shape:
    """Return the sizes of a Llama `config.json`; `keys`: key/value heads."""
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "vocab_size": vocab,
    }


SHAPES: Mapping[str, Shape] = {
    "7B": llama_shape(4096, 14336, 32, 32, 8, VOCABULARY),
    "13B": llama_shape(5120, 13824, 40, 40, 40, VOCABULARY),
    "34B": llama_shape(8192, 22016, 48, 64, 8, VOCABULARY),
    "70B": llama_shape(8192, 28672, 80, 64, 8, VOCABULARY),
}


@dataclass(frozen=True)
class PublishedCall:
    """A row of tables 2 to 5: a call of `model` on whole nodes; `micro_batches` is the printed "#Micro-Batches"."""

    name: str
    model: str
    nodes: tuple[int, ...]
    tp: int
    pp: int
    dp: int
    micro_batches: int
    seconds: float

    @property
    def kind(self) -> Kind:
        return "train" if self.name.endswith("Train") else "generate" if self.name == GENERATION else "infer"

    @property
    def scalar(self) -> bool:
        """True if the model has a scalar head."""
        return self.name.startswith(("Rew", "Critic"))

    @property
    def parents(self) -> tuple[str, ...]:
        return {"generate": (), "infer": (GENERATION,), "train": SCORING}[self.kind]


@dataclass(frozen=True)
class PublishedPlan:
    """A plan: seconds of its calls, of generation without CUDA graphs, and of a step with and without graphs."""

    name: str
    title: str
    batch: int
    calls: tuple[PublishedCall, ...]
    wall_s: float
    no_graph_s: float
    no_graph_wall_s: float

    def call(self, name: str) -> PublishedCall:
        return next(call for call in self.calls if call.name == name)


BOTH, FIRST, SECOND, ALL = (1, 2), (1,), (2,), tuple(range(1, 17))
PLANS: tuple[PublishedPlan, ...] = (
    PublishedPlan(
        "70b-searched", "70B + 7B, searched (Table 2)", 4096,
        (
            PublishedCall("ActorGen", "70B", ALL, 2, 4, 16, 4, 185.1),
            PublishedCall("RewInf", "7B", ALL, 1, 8, 16, 4, 5.6),
            PublishedCall("RefInf", "70B", ALL, 1, 8, 16, 16, 35.6),
            PublishedCall("CriticInf", "7B", ALL, 1, 8, 16, 16, 5.6),
            PublishedCall("CriticTrain", "7B", ALL, 8, 4, 4, 2, 20.8),
            PublishedCall("ActorTrain", "70B", ALL, 2, 16, 4, 2, 108.0),
        ),
        383.1, 349.4, 547.4,
    ),
    PublishedPlan(
        "70b-heuristic", "70B + 7B, heuristic (Table 3)", 4096,
        (
            PublishedCall("ActorGen", "70B", ALL, 8, 4, 4, 8, 241.8),
            PublishedCall("RewInf", "7B", ALL, 8, 4, 4, 8, 12.6),
            PublishedCall("RefInf", "70B", ALL, 8, 4, 4, 8, 63.5),
            PublishedCall("CriticInf", "7B", ALL, 8, 4, 4, 8, 12.5),
            PublishedCall("CriticTrain", "7B", ALL, 8, 4, 4, 8, 35.7),
            PublishedCall("ActorTrain", "70B", ALL, 8, 4, 4, 8, 163.4),
        ),
        546.8, 607.3, 912.3,
    ),
    PublishedPlan(
        "7b-searched", "7B + 7B, searched (Table 4)", 512,
        (
            PublishedCall("ActorGen", "7B", BOTH, 2, 2, 4, 1, 16.3),
            PublishedCall("RewInf", "7B", FIRST, 2, 1, 4, 16, 6.0),
            PublishedCall("RefInf", "7B", SECOND, 1, 2, 4, 16, 8.0),
            PublishedCall("CriticInf", "7B", BOTH, 1, 2, 8, 8, 4.7),
            PublishedCall("CriticTrain", "7B", SECOND, 4, 2, 1, 2, 28.1),
            PublishedCall("ActorTrain", "7B", FIRST, 2, 4, 1, 2, 26.6),
        ),
        64.0, 34.5, 82.2,
    ),
    PublishedPlan(
        "7b-heuristic", "7B + 7B, heuristic (Table 5)", 512,
        (
            PublishedCall("ActorGen", "7B", BOTH, 8, 1, 2, 4, 44.2),
            PublishedCall("RewInf", "7B", BOTH, 8, 1, 2, 4, 7.3),
            PublishedCall("RefInf", "7B", BOTH, 8, 1, 2, 4, 7.6),
            PublishedCall("CriticInf", "7B", BOTH, 8, 1, 2, 4, 6.8),
            PublishedCall("CriticTrain", "7B", BOTH, 8, 1, 2, 4, 24.3),
            PublishedCall("ActorTrain", "7B", BOTH, 8, 1, 2, 4, 24.7),
        ),
        122.6, 104.6, 183.0,
    ),
)  # fmt: skip
PAIRS = (("70b-heuristic", "70b-searched"), ("7b-heuristic", "7b-searched"))
"""Pairs of plans whose speed-up ReaL states: the second over the first."""


def plan_named(name: str) -> PublishedPlan:
    return next(plan for plan in PLANS if plan.name == name)


@dataclass(frozen=True)
class Stage:
    """The work of a pipeline stage; the embedding only looks up rows."""

    layers: int
    has_head: bool


def cut_stages(shape: Shape, pp: int, *, scalar: bool) -> tuple[Stage, ...]:
    """Cut a model as ReaL does (`partition_pipeline_layers`): embedding, layers and head into contiguous stages whose largest
    number of parameters is least.  A critic's first stage has fewer layers, the others more than their share."""
    layers, layer = shape["num_hidden_layers"], sum(linear.size for linear in layer_linears(shape))
    embedding = head_linear(shape, scalar=False).size
    head = head_linear(shape, scalar=scalar).size
    cuts = least_largest((embedding, *[layer] * layers, head), pp)
    return tuple(
        Stage(min(end, layers + 1) - max(begin, 1), end == layers + 2) for begin, end in zip(cuts, cuts[1:], strict=False)
    )


@cache
def least_largest(sizes: tuple[int, ...], parts: int) -> tuple[int, ...]:
    """Return the `parts` + 1 positions that cut `sizes` into contiguous, non-empty parts whose largest sum is least.

    If there are several ways, return the one whose last parts begin earliest.
    """
    count, sums = len(sizes), [0, *accumulate(sizes)]
    least = [[0 if i == 0 else sums[-1] + 1 for i in range(count + 1)]]
    cut: list[list[int]] = [[0] * (count + 1)]
    for part in range(1, parts + 1):
        least.append([sums[-1] + 1] * (count + 1))
        cut.append([0] * (count + 1))
        for end in range(part, count + 1):
            for begin in range(part - 1, end):
                largest = max(least[part - 1][begin], sums[end] - sums[begin])
                if largest < least[part][end]:
                    least[part][end], cut[part][end] = largest, begin
    ends = [count]
    for part in range(parts, 0, -1):
        ends.append(cut[part][ends[-1]])
    return tuple(reversed(ends))

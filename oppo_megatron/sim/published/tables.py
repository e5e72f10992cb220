"""Tables 1 to 6 of ReaL's appendix (Mei et al., MLSys 2025): models, plans, seconds of calls and of steps.

As printed, but for one figure: Table 6 repeats the row with CUDA graphs in the one without, for 70B + 7B.  That contradicts its
own end to end; the seconds of generation without graphs are therefore taken from the difference of those (`no_graph_s`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from oppo_megatron.layout.flops import Shape
from oppo_megatron.sim.published.shapes import llama_shape

Kind = Literal["generate", "infer", "train"]
GPUS_A_NODE = 8
PROMPT_TOKENS, CONTEXT_TOKENS, MINIBATCHES = 1024, 2048, 8
"""Of every call; prompts and responses are of full length."""
GENERATION, SCORING = "ActorGen", ("RewInf", "RefInf", "CriticInf")


VOCABULARY = 128256
SHAPES: Mapping[str, Shape] = {
    "7B": llama_shape(4096, 14336, 32, 32, 8, VOCABULARY),
    "13B": llama_shape(5120, 13824, 40, 40, 40, VOCABULARY),
    "34B": llama_shape(8192, 22016, 48, 64, 8, VOCABULARY),
    "70B": llama_shape(8192, 28672, 80, 64, 8, VOCABULARY),
}


@dataclass(frozen=True)
class PublishedCall:
    """A row of tables 2 to 5: a call of `model` on whole `nodes`.  `micro_batches` is printed as "#Micro-Batches"."""

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
        """Whether the model has a scalar head."""
        return self.name.startswith(("Rew", "Critic"))

    @property
    def parents(self) -> tuple[str, ...]:
        return {"generate": (), "infer": (GENERATION,), "train": SCORING}[self.kind]


@dataclass(frozen=True)
class PublishedPlan:
    """A plan with the seconds of its calls, of generation without CUDA graphs, and of a step end to end with and without."""

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
"""Of which ReaL states the speed-up: the first over the second."""


def plan_named(name: str) -> PublishedPlan:
    return next(plan for plan in PLANS if plan.name == name)

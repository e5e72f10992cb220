"""An algorithm as calls of models that are linked by their inputs and outputs (ReaL, MLSys 2025, figure 18)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any, Literal

from pydantic import Field, field_validator

from oppo_megatron.config.base import Section
from oppo_megatron.config.model import ModelConfig
from oppo_megatron.layout.shape import check_use, is_classifier
from oppo_megatron.modeldir.headers import read_hf_config

DERIVED = (
    "actor", "critic", "reference", "reward", "placement", "rollout", "overlap", "data.max_prompt_tokens", "ppo.minibatches",
)  # fmt: skip
"""Settings of `oppo train` that follow from a dataflow."""
MOVE = "weights for "
"""Beginning of the name of a move."""
ROLES = (
    "It has one policy that answers the prompts (in ReMax once more, greedily), at most one reference, reward model and critic, "
    "which read prompts and responses once for the policy's update, and updates of policy and critic; all of one size"
)


class FlowModel(ModelConfig):
    """A model: its folder, or its shape."""

    scalar: bool = Field(False, description="a scalar head, as critics and reward models have; a classifier's checkpoint has one")

    @property
    def has_scalar_head(self) -> bool:
        return self.scalar or is_classifier(read_hf_config(self))


class Call(Section):
    """A call of a model, over all sequences of a step."""

    name: str = Field(..., min_length=1)
    model: str
    kind: Literal["generate", "inference", "train"]
    inputs: list[str] = Field(..., description="columns of `data`, and outputs of other calls, for which it waits")
    outputs: list[str] = Field([], description="what it makes; a train call makes weights only")
    prompt_tokens: int | None = Field(None, ge=1, description="tokens of a sequence that are given; null: the dataflow's")
    response_tokens: int | None = Field(None, ge=1, description="its further tokens; null: the dataflow's")
    samples: int = Field(1, ge=1, description="generate: responses to each prompt")
    greedy: bool = Field(False, description="generate: without sampling")
    minibatches: int = Field(1, ge=1, description="train: optimizer steps")


class Dataflow(Section):
    """`oppo plan flow`: models, calls, and the sizes of a step."""

    batch: int = Field(..., ge=1, le=2**20, description="sequences per step")
    prompt_tokens: int = Field(..., ge=1, description="tokens of every prompt")
    response_tokens: int = Field(..., ge=1, description="most tokens of a response")
    data: list[str] = Field(["prompts"], description="columns that are given")
    models: dict[str, FlowModel]
    calls: list[Call] = Field(..., min_length=1)
    run: dict[str, Any] = Field({}, description="settings of `oppo train` that do not follow from the dataflow")

    @field_validator("models", mode="before")
    @classmethod
    def _by_path(cls, value: Any) -> Any:
        """A path alone is a shape's (`.json`) or a folder's."""
        given = value.items() if isinstance(value, Mapping) else ()
        paths = {
            name: {"init" if each.endswith(".json") else "checkpoint": each} for name, each in given if isinstance(each, str)
        }
        return {**value, **paths} if paths else value

    @property
    def parents(self) -> dict[str, list[str]]:
        """Calls that each call waits for. A train call also waits for the model's others, which use the step's weights."""
        makers, found = {output: call.name for call in self.calls for output in call.outputs}, {}
        for call in self.calls:
            readers = [each.name for each in self.calls_of(call.model) if call.kind == "train" != each.kind]
            found[call.name] = [*(makers[each] for each in call.inputs if each in makers), *readers]
        return found

    @property
    def trainers(self) -> dict[str, Call]:
        """The train call of each trained model."""
        return {call.model: call for call in self.calls if call.kind == "train"}

    def calls_of(self, model: str) -> list[Call]:
        return [call for call in self.calls if call.model == model]

    def tokens(self, call: Call) -> tuple[int, int]:
        """Return the given and the further tokens of each of a call's sequences."""
        return call.prompt_tokens or self.prompt_tokens, call.response_tokens or self.response_tokens

    def problems(self) -> list[str]:
        """Return everything that is wrong with models, calls and their links."""
        if found := list(self._rules()):
            return found
        longest = {name: max((sum(self.tokens(call)) for call in self.calls_of(name)), default=1) for name in self.models}
        each = [check_use(f"models.{name}", read_hf_config(model), longest[name], None) for name, model in self.models.items()]
        return [problem for problems in each for problem in problems]

    def _rules(self) -> Iterator[str]:
        inner = [f"{key}.{each}" for key, own in self.run.items() if isinstance(own, Mapping) for each in own]
        if taken := [key for key in DERIVED if key in (*self.run, *inner)]:
            yield f"run has {', '.join(taken)}, but these settings follow from the dataflow; remove them"
        for name, model in self.models.items():
            yield from model.rules(f"models.{name}")
            if sum(call.kind == "train" for call in self.calls_of(name)) > 1:
                yield f"models.{name}: several calls train it; make them one, with the inputs of all"
        names, made = [call.name for call in self.calls], [output for call in self.calls for output in call.outputs]
        for what, given in (("call", names), ("output", [*self.data, *made])):
            for twice in sorted({each for each in given if given.count(each) > 1}):
                yield f"{what} `{twice}` is given twice; rename one of them"
        for call in self.calls:
            where = f"call `{call.name}` ({call.kind})"
            if call.model not in self.models:
                yield f"{where}: model `{call.model}` is not known; the models are {', '.join(self.models)}"
            elif call.kind == "generate" and self.models[call.model].scalar:
                yield f"{where}: model `{call.model}` has a scalar head; name a language model"
            if not call.inputs:
                yield f"{where} has no {'prompts' if call.kind == 'generate' else 'sequences'}; name some: columns or outputs"
            for each in sorted(set(call.inputs) - {*self.data, *made}):
                yield f"{where}: input `{each}` is not known; there are {', '.join([*self.data, *made])}"
            if bool(call.outputs) == (call.kind == "train"):
                yield f"{where} makes {'weights only; remove its outputs' if call.outputs else 'nothing; name its outputs'}"
            if call.name.startswith(MOVE):
                yield f"{where}: a name that begins with `{MOVE}` belongs to a move; rename it"
            for key, kind in (("samples", "generate"), ("greedy", "generate"), ("minibatches", "train")):
                value = getattr(call, key)
                if call.kind != kind and value != Call.model_fields[key].default:
                    yield f"{where} has {key}, which only a {kind} call may have; remove it"
                elif self.batch % (value or 1):
                    yield f"{where}: {key} {value} does not divide a batch of {self.batch}; change one of them"
        try:
            TopologicalSorter(self.parents).prepare()
        except CycleError as error:
            yield f"calls wait for each other in a circle: {' > '.join(error.args[1])}; take one of these inputs out"

    def roles(self) -> tuple[str, dict[str, str]] | str:
        """Return the preset of `oppo train` that does the same, and the role of each call; or the reason why none does."""
        generates, found, seen = [call for call in self.calls if call.kind == "generate"], dict[str, str](), dict[object, str]()
        policy, made = generates[0].model if generates else "", {output for call in generates for output in call.outputs}
        update = self.trainers.get(policy)
        for call in self.calls:
            trained, inputs, others = call.model in self.trainers, set(call.inputs), set(call.inputs) - made - set(self.data)
            scorer = ("critic" if trained else "reward") if self.models[call.model].has_scalar_head else "reference"
            role = found[call.name] = "actor" if call.model == policy else scorer
            reads = {
                "generate": role == "actor" and inputs <= set(self.data) and call.greedy <= (len(generates) == 2),
                "inference": role != "actor" and not others and update is not None and set(call.outputs) & set(update.inputs),
                "train": role in ("actor", "critic") and update is not None and call.minibatches == update.minibatches,
            }[call.kind] and (call.kind == "generate" or inputs & made)  # fmt: skip
            fits = reads and update is not None and not (call.prompt_tokens or call.response_tokens)
            key = (role, call.kind, call.greedy, frozenset(inputs & made) if role == "reward" else None)
            if not fits or seen.setdefault(key, call.name) != call.name or seen.setdefault(role, call.model) != call.model:
                return f"call `{call.name}` is none of a run's. {ROLES}"
        if any(role == "critic" and (role, "inference", False, None) not in seen for role in found.values()):
            return f"nothing reads the values of the critic. {ROLES}"
        if "reward" not in found.values() and "rewards" not in self.run:
            return "no frozen model with a scalar head scores the responses; for other rewards, give run.rewards"
        group = "remax" if len(generates) == 2 else "grpo" if generates[0].samples > 1 else "reinforce_pp"
        return "ppo" if "critic" in found.values() else group, found

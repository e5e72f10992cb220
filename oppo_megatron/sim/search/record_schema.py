"""What of `plan.json` is printed again: its fields and their types, against files that were cut or edited."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, TypeAdapter
from typing_extensions import NotRequired, TypedDict


class _Cluster(TypedDict):
    nodes: int
    gpus_per_node: int
    gpu: str
    memory_gb: float
    margin: float


class _Work(TypedDict):
    responses: int
    mean_tokens: float
    longest: int
    prompt_tokens: int
    overlapped: bool


class _Search(TypedDict):
    kind: str
    seconds: float
    ended: bool
    places: int
    bound_s: float
    gap: float
    micro_batch_tokens: list[int]


class _Contest(TypedDict):
    plans: int
    steps: int
    finalists: int
    finalist_steps: int
    least_ratio: float
    most_ratio: float
    ended: bool
    least_s: float
    gap: float
    others_s: float | None


class _Role(TypedDict):
    ranks: str
    layout: str
    serving_s: float
    training: NotRequired[str]
    recompute: NotRequired[str]
    update_s: NotRequired[float]
    weights_s: NotRequired[float]


def _with_actor(roles: dict[str, _Role]) -> dict[str, _Role]:
    if "training" not in roles.get("actor", {}):
        raise ValueError("there must be an actor, which is trained")
    return roles


class _Plan(TypedDict):
    name: str
    step_s: Annotated[float, Field(gt=0)]
    decode_s: float
    scoring_s: float
    update_s: float
    critic_s: float
    weights_s: float
    idle_s: float
    fullest_gb: float
    margin_gb: float
    bounded_by: str
    played: bool
    micro_batch_tokens: int
    chunk: int
    delta: int
    roles: Annotated[dict[str, _Role], AfterValidator(_with_actor)]


class _Told(TypedDict):
    told: str


class PrintedRecord(TypedDict):
    """The printed part of a record; other fields may stand beside it."""

    cluster: _Cluster
    work: _Work
    search: _Search
    contest: _Contest | None
    reason: str
    plans: Annotated[list[_Plan], Field(min_length=1)]
    constants: dict[str, str]
    beyond_fits: list[str]
    as_configured: NotRequired[_Told]


PRINTED = TypeAdapter(PrintedRecord)

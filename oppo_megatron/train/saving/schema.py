"""Schemas of `state.json` and `rollouts.jsonl`: types, ranges and consistency.

The manifest proves that files are as written; the schema proves, before any state is touched, that a run can continue.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from oppo_megatron.chunks import FinishReason
from oppo_megatron.config.explain import first_problem
from oppo_megatron.errors import CheckpointError
from oppo_megatron.nesting import read_json
from oppo_megatron.records import StepSignals
from oppo_megatron.train.logs.journal import LATER_FACTS, StepFacts

Count = Annotated[int, Field(ge=0, lt=2**53)]
Clock = Annotated[int, Field(ge=-1, lt=2**53)]
Amount = Annotated[float, Field(ge=0)]
Pair = tuple[Count, Count]
Measured = tuple[Count, float]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


def record(**fields: Any) -> Any:
    types: dict[str, Any] = {name: hint if isinstance(hint, tuple) else (hint, ...) for name, hint in fields.items()}
    return create_model("record", __base__=_Strict, **types)


def record_of(dataclass: type, without: Sequence[str] = ()) -> Any:
    """Return a model with a dataclass's fields; integers must not be negative."""
    counts: dict[Any, Any] = {int: Count, int | None: Count | None}
    hints = {name: counts.get(hint, hint) for name, hint in get_type_hints(dataclass).items()}
    return record(**{name: hint for name, hint in hints.items() if name not in without})


def optional(hint: Any) -> tuple[Any, None]:
    return hint | None, None


def by_role(hint: Any) -> Any:
    return dict[str, hint]


def list_of(hint: Any) -> Any:
    return list[hint]


CEILING = record(delta=Count, signal=str, level=float | None)
DELTA = record(  # the optional fields depend on the rule (`make_delta_controller`)
    rule=str, value=Count, rewards=optional(list[float]), steps=optional(list_of(record_of(StepSignals))),
    age=optional(Count), broken=optional(bool), grown=optional(bool), ceiling=optional(CEILING),
    memory=optional(dict[str, Any]),
)  # fmt: skip
BUFFER = record(clock=Count, num_admitted=Count, delta=Count, closed=bool, pending=(Count, 0))
SCHEDULER = record(num_consumed=Count, position=Count, due=Count, delta=DELTA, buffer=BUFFER)
FILTER = record(  # scores by sequence and part; null is a score that is not finite
    labels=list[str], scores=list[tuple[Count, list[float | None]]], kept=Count, dropped=Count
)
CHUNK = record(value=Annotated[int, Field(ge=1, lt=2**53)], steps_to_search=Annotated[int, Field(gt=-(2**53), lt=2**53)])
GUARD = record(in_a_row=Count, num_written=Count, rollbacks=Count)
ACTOR = record(version=Count, ess=Annotated[float, Field(allow_inf_nan=True)])
HISTORY = record(count=Count, total=float, squares=Amount, warmed=Count)
OCCUPANCY = record(clock=Count, steps=Count, tokens=Count, width=Count)
PHASE = record(facts=record_of(StepFacts, without=LATER_FACTS), occupancy=OCCUPANCY, begun=Count, spent_s=Amount)
QUEUED = record(clock=Count, seq_ids=list[Count], phase=PHASE, figures=dict[str, float | None])
HELDOUT = list[tuple[Count, dict[str, dict[str, float | None]]]]
JOURNAL = record(elapsed_s=float, heldout=HELDOUT)
EARLY_STOP = record(best=Measured | None, worse=Count, last=Measured | None)
PLACE = record(ranks=list[Count], tp=Count, pp=Count, dp=Count, slots=Count)
BOOK = record(replicas=list[Pair], cached=list[list[Pair]], outputs=optional(list[Pair]), outlived=optional(list[Pair]))
DATA = record(  # groups and greedy responses exist in PPO only
    seed=int, shuffle=bool, rows=Count, fingerprint=str, weights=(list_of(Measured), []), group_size=(Count, 1),
    greedy=(bool, False),
)  # fmt: skip
ADAPTERS = record(rank=Count, alpha=float, targets=list[str])

COMMON: dict[str, Any] = {
    "done": Count,
    "updates": Count,
    "saved_at": float,
    "data": DATA,
    "adapters": by_role(ADAPTERS),
    "best": tuple[float, tuple[Count, Clock]] | None,
    "best_metric": str | None,
    "early_stop": EARLY_STOP | None,
    "config": dict[str, Any],
}
SUPERVISED_STATE = record(**COMMON, kind=str, rows=Count, elapsed_s=float, heldout=HELDOUT, reference=str | None)
PPO_STATE = record(
    **COMMON, scheduler=SCHEDULER, chunk=CHUNK, kl=record(value=Amount), guard=GUARD, actor=ACTOR, history=HISTORY,
    phase=PHASE | None, queue=(list_of(QUEUED), []), halted=(bool, False), journal=JOURNAL, layout=by_role(PLACE),
    books=by_role(BOOK), sources=dict[str, str], filter=FILTER | None,
)  # fmt: skip
ROLLOUT = record(
    seq_id=Count, admission=Count, tokens=list[Count], logprobs=list[float], sampling_logprobs=list[float],
    versions=list[Count], deferrals=Count, finish_clock=Count | None, finish_reason=FinishReason | None,
    routes=(list[str], []),
)  # fmt: skip


def read_state(path: Path, kind: Any) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        state = kind.model_validate_json(text)
        if kind is PPO_STATE:
            _check_state(state)
        return dict(read_json(text))
    except (OSError, ValueError) as error:
        raise _unusable(path, error) from error


def read_lines(path: Path, state: dict[str, Any], vocab_size: int) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    try:
        for text in path.read_text(encoding="utf-8").splitlines():
            line = ROLLOUT.model_validate_json(text)
            _check_rollout(line, state, vocab_size)
            lines.append(line.model_dump())
        order = [(line["admission"], line["seq_id"]) for line in lines]
        if len({seq_id for _, seq_id in order}) < len(order) or order != sorted(order):
            raise ValueError("rollouts are not in the order of their admission, each once")
    except (OSError, ValueError) as error:
        raise _unusable(path, error, f" line {len(lines) + 1}:") from error
    return lines


def _check_state(state: Any) -> None:
    scheduler, buffer, phase = state.scheduler, state.scheduler.buffer, state.phase
    if state.books.keys() != state.layout.keys() or "actor" not in state.books:
        raise ValueError(f"books of {sorted(state.books)}, places of {sorted(state.layout)}")
    if scheduler.num_consumed != buffer.num_admitted:
        raise ValueError(f"{scheduler.num_consumed} prompts consumed, but {buffer.num_admitted} rollouts admitted")
    passed_over = scheduler.position - scheduler.num_consumed
    if passed_over < 0 or (passed_over and not state.guard.rollbacks):
        raise ValueError(f"{scheduler.num_consumed} prompts consumed of the first {scheduler.position}")
    if scheduler.delta.value != buffer.delta:
        raise ValueError(f"delta is {scheduler.delta.value} in the controller, {buffer.delta} in the buffer")
    if phase is not None and (phase.facts.step != state.done + 1 + len(state.queue) or phase.begun > buffer.clock):
        raise ValueError(f"step {phase.facts.step} is under way since clock {phase.begun}")


def _check_rollout(line: Any, state: dict[str, Any], vocab_size: int) -> None:
    scheduler = state["scheduler"]
    columns = line.tokens, line.logprobs, line.sampling_logprobs, line.versions, line.routes or line.tokens
    if len(lengths := set(map(len, columns))) > 1:
        raise ValueError(f"tokens, logprobs, sampling_logprobs, versions and routes have lengths {sorted(lengths)}")
    if line.seq_id >= scheduler["position"] or line.admission >= scheduler["num_consumed"]:
        raise ValueError(f"the prompt of sequence {line.seq_id} (admission {line.admission}) was not admitted yet")
    if max(line.tokens, default=0) >= vocab_size:
        raise ValueError(f"token {max(line.tokens)}, but the vocabulary has {vocab_size}")
    if max(line.versions, default=0) > state["actor"]["version"]:
        raise ValueError(f"a token of policy version {max(line.versions)}, later than {state['actor']['version']}")
    if (line.finish_clock is None) != (line.finish_reason is None):
        raise ValueError("finish_clock and finish_reason go together")
    if line.finish_clock is not None and not (line.tokens and line.finish_clock <= scheduler["buffer"]["clock"]):
        raise ValueError(f"finished at clock {line.finish_clock} with {len(line.tokens)} tokens")


def _unusable(path: Path, error: Exception, where: str = "") -> CheckpointError:
    reason = first_problem(error) if isinstance(error, ValidationError) else str(error)
    return CheckpointError(
        f"{path}:{where} not the state of a run ({reason:.300}); resume from another checkpoint, with the version of this "
        "program that wrote it, or remove it"
    )

"""The wire format of a reward service (docs/rewards.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr, StrictFloat, StrictInt, StrictStr, ValidationError

from oppo_megatron.config.explain import first_problem
from oppo_megatron.errors import ConfigError, RewardError
from oppo_megatron.nesting import read_strict_json

MIN_TOKEN_CHARACTERS = 16


@dataclass(frozen=True, slots=True)
class ScoreItem:
    """A finished response. `tokens`: ids of prompt and response, if known."""

    seq_id: int
    prompt: str
    response: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    tokens: Sequence[int] | None = None


class _Message(BaseModel):
    """Other keys are allowed: a service may say more."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class Score(_Message):
    id: StrictInt
    score: StrictFloat


class Answer(_Message):
    scores: list[Score]


class Item(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    id: StrictInt
    prompt: StrictStr
    response: StrictStr
    fields: dict[str, Any] = {}
    tokens: list[Annotated[int, Field(ge=0)]] | None = None


class Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    items: list[Item] = Field(..., min_length=1)


def encode_request(items: Sequence[ScoreItem]) -> bytes:
    rows = []
    for item in items:
        check_fields(item.fields)
        row = {"id": item.seq_id, "prompt": item.prompt, "response": item.response, "fields": dict(item.fields)}
        rows.append(row | ({"tokens": list(item.tokens)} if item.tokens is not None else {}))
    return json.dumps({"items": rows}, allow_nan=False).encode()


def check_fields(fields: Mapping[str, Any]) -> None:
    """Raise `RewardError` if columns cannot be sent to a service."""
    try:
        json.dumps(dict(fields), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"the row's columns cannot be sent to a reward service ({error}); leave only text, finite numbers, lists and "
            "mappings of these"
        ) from error


def read_answer(body: bytes, ids: Sequence[int]) -> dict[int, float]:
    """Return the finite score of each of `ids`. Raises RewardError."""
    try:
        answer = Answer.model_validate(read_strict_json(body.decode("utf-8")))
    except ValidationError as error:
        raise RewardError(f"the answer is not of the form of a score list: {first_problem(error)}") from None
    except (ValueError, OverflowError) as error:
        raise RewardError(f"the answer is not JSON ({str(error)[:100]})") from None
    scores = {row.id: row.score for row in answer.scores}
    if len(scores) != len(answer.scores):
        raise RewardError("the answer scores a response twice")
    if scores.keys() != set(ids):
        missing, strange = sorted(set(ids) - scores.keys()), sorted(scores.keys() - set(ids))
        what = f"no score for sequence {missing[0]}" if missing else f"a score for {str(strange[0])[:20]}, not asked for"
        raise RewardError(f"the answer has {what}; {len(scores)} scores came for {len(ids)}")
    return scores


def read_token(variable: str, environment: Mapping[str, str]) -> SecretStr:
    """Read a bearer token. Raises ConfigError, which never shows it."""
    token = environment.get(variable)
    if not token:
        raise ConfigError(f"the environment variable {variable} is not set, but is to hold a token; export it on this host")
    if len(token) < MIN_TOKEN_CHARACTERS or not all("!" <= character <= "~" for character in token):
        raise ConfigError(
            f"the environment variable {variable} holds no usable token: it must have at least {MIN_TOKEN_CHARACTERS} "
            "characters, all of them visible ASCII; make one with `openssl rand -hex 32`"
        )
    return SecretStr(token)

"""The HTTP side of `oppo serve` for streamed sequences.  The wire format is in `rewards/streaming.py`.

POST /extend    200 the known length of each sequence, and the scores of whole ones; else as `serving/app.py`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, SecretStr, StrictBool, StrictInt, StrictStr

from oppo_megatron.serving.app import LIMITS, Gate, Refusal, RequestLimits, new_app, read_message

TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class Piece(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    id: StrictInt
    offset: Annotated[int, Field(ge=0)]
    tokens: list[TokenId]
    checksum: StrictInt
    final: StrictBool


class Extension(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    session: Annotated[StrictStr, Field(min_length=1, max_length=64)]
    rows: list[Piece] = Field(..., min_length=1)


class Known(BaseModel):
    """How many tokens of a sequence the service has; its score, once it is whole."""

    id: int
    known: int
    score: float | None = None


Extend = Callable[[str, Sequence[Piece]], list[Known]]


def build_stream_app(extend: Extend, token: SecretStr | None, limits: RequestLimits = LIMITS) -> FastAPI:
    """The service.  `extend` is called from one thread only; it may raise RewardError."""
    app = new_app()
    gate = Gate(partial(_read_extension, limits), lambda asked: extend(asked.session, asked.rows), limits, token)

    @app.post("/extend")
    async def grow(request: Request) -> JSONResponse:
        _, rows = await gate.answer(request)
        return JSONResponse({"rows": [row.model_dump() for row in rows]})

    return app


def _read_extension(limits: RequestLimits, body: bytes) -> Extension:
    asked = read_message(Extension, body, "streamed scores")
    if len(asked.rows) > limits.max_items:
        raise Refusal(413, f"{len(asked.rows)} rows are more than {limits.max_items}")
    if len({row.id for row in asked.rows}) < len(asked.rows):
        raise Refusal(422, "an id stands twice")
    return asked

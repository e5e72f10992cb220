"""The HTTP side of a service: authorisation, limits and answers (docs/rewards.md lists the status codes)."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Generic, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, SecretStr, StrictBool, StrictInt, StrictStr, ValidationError
from starlette.requests import ClientDisconnect

from oppo_megatron.config.explain import first_problem
from oppo_megatron.errors import RewardError
from oppo_megatron.nesting import read_strict_json
from oppo_megatron.rewards import protocol

Scorer = Callable[[Sequence[protocol.Item]], list[float]]
Asked = TypeVar("Asked")
Found = TypeVar("Found")
Message = TypeVar("Message", bound=BaseModel)

REST_BYTES = 64 << 20
"""Bytes of a refused body that are read and dropped before answering: clients send before they read."""


@dataclass(frozen=True)
class RequestLimits:
    """More than `max_waiting` requests in scoring or `max_coming` arriving bodies get 429."""

    max_bytes: int = 32 << 20
    max_items: int = 256
    max_characters: int = 200_000
    max_waiting: int = 16
    max_coming: int = 128
    read_s: float = 30.0


LIMITS = RequestLimits()


class Refusal(Exception):
    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status = status


class Piece(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    id: StrictInt
    offset: Annotated[int, Field(ge=0)]
    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]]
    checksum: StrictInt
    final: StrictBool


class Extension(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    session: Annotated[StrictStr, Field(min_length=1, max_length=64)]
    rows: Annotated[list[Piece], Field(min_length=1)]


class Known(BaseModel):
    """Known tokens of a sequence, and its score once complete."""

    id: int
    known: int
    score: float | None = None


Extend = Callable[[str, Sequence[Piece]], list[Known]]


class Gate(Generic[Asked, Found]):
    """Checks requests and calls `score`, maybe not thread-safe, in one thread; `read` may raise Refusal."""

    def __init__(
        self, read: Callable[[bytes], Asked], score: Callable[[Asked], Found], limits: RequestLimits, token: SecretStr | None
    ):
        self._read, self._score, self._limits = read, score, limits
        self._expected = None if token is None else f"Bearer {token.get_secret_value()}".encode()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="scorer")
        self._waiting = self._coming = self._refusing = 0

    async def answer(self, request: Request) -> tuple[Asked, Found]:
        refusal = self._refused(request)
        try:
            body = await asyncio.wait_for(self._body(request, refusal), self._limits.read_s)
        except asyncio.TimeoutError:
            raise refusal or Refusal(408, f"the body did not come within {self._limits.read_s:g} s") from None
        except ClientDisconnect:
            raise Refusal(400, "the body ended early") from None
        asked = self._read(body)
        if self._waiting >= self._limits.max_waiting:
            raise Refusal(429, f"{self._waiting} requests are waiting")
        self._waiting += 1
        try:
            return asked, await asyncio.get_running_loop().run_in_executor(self._worker, self._score, asked)
        except RewardError as error:
            raise Refusal(422, str(error)) from error
        finally:
            self._waiting -= 1

    def _refused(self, request: Request) -> Refusal | None:
        given = request.headers.get("authorization", "").encode("latin-1", errors="replace")
        if self._expected is not None and not hmac.compare_digest(given, self._expected):
            return Refusal(401, "the Authorization header does not carry this service's token")
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return Refusal(415, "the body must be application/json")
        if self._waiting >= self._limits.max_waiting:
            return Refusal(429, f"{self._waiting} requests are waiting")
        if self._coming >= self._limits.max_coming:
            return Refusal(429, f"{self._coming} bodies are on their way")
        return None

    async def _body(self, request: Request, refusal: Refusal | None) -> bytes:
        """Read a body, dropping a refused or too large one.  Raises Refusal."""
        content, num_bytes, kept = bytearray(), 0, refusal is None
        if refusal is not None and self._refusing >= self._limits.max_coming:
            raise refusal
        self._coming += kept
        self._refusing += not kept
        try:
            async for piece in request.stream():
                num_bytes += len(piece)
                if refusal is None and num_bytes > self._limits.max_bytes:
                    refusal = Refusal(413, f"the body has more than {self._limits.max_bytes} bytes")
                if refusal is None:
                    content += piece
                elif num_bytes > REST_BYTES:
                    break
        finally:
            self._coming -= kept
            self._refusing -= not kept
        if refusal is not None:
            raise refusal
        return bytes(content)


def read_message(kind: type[Message], body: bytes, what: str) -> Message:
    """Parse a body.  Raises Refusal, which does not repeat it."""
    try:
        return kind.model_validate(read_strict_json(body.decode("utf-8")))
    except ValidationError as error:
        raise Refusal(422, f"not a request for {what}: {first_problem(error)}") from None
    except ValueError as error:
        raise Refusal(422, f"not JSON: {str(error)[:100]}") from None


def _require_fitting(ids: Sequence[int], limits: RequestLimits, what: str) -> None:
    if len(ids) > limits.max_items:
        raise Refusal(413, f"{len(ids)} {what} are more than {limits.max_items}")
    if len(set(ids)) < len(ids):
        raise Refusal(422, "an id occurs twice")


def new_app() -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.exception_handler(Refusal)
    async def refuse(request: Request, refusal: Exception) -> JSONResponse:
        assert isinstance(refusal, Refusal)
        # An unread rest of a body would be taken for the connection's next request.
        headers = {"Connection": "close"} | ({"Retry-After": "1"} if refusal.status == 429 else {})
        return JSONResponse({"error": str(refusal)}, refusal.status, headers)

    return app


def build_app(score: Scorer, token: SecretStr | None, limits: RequestLimits = LIMITS) -> FastAPI:
    """Return the service; `score`, called from one thread, returns a number per item or raises RewardError."""

    def read(body: bytes) -> list[protocol.Item]:
        items = read_message(protocol.Request, body, "scores").items
        _require_fitting([item.id for item in items], limits, "items")
        longest = max(max(len(item.prompt), len(item.response)) for item in items)
        if longest > limits.max_characters:
            raise Refusal(413, f"a text has {longest} characters, more than {limits.max_characters}")
        return items

    app, gate = new_app(), Gate(read, score, limits, token)

    @app.post("/score")
    async def scores(request: Request) -> JSONResponse:
        items, found = await gate.answer(request)
        rows = [protocol.Score(id=item.id, score=score) for item, score in zip(items, found, strict=True)]
        return JSONResponse({"scores": [row.model_dump() for row in rows]})

    return app


def build_stream_app(extend: Extend, token: SecretStr | None, limits: RequestLimits = LIMITS) -> FastAPI:
    """Return the streaming service; `extend`, called from one thread, may raise RewardError."""

    def read(body: bytes) -> Extension:
        asked = read_message(Extension, body, "streamed scores")
        _require_fitting([row.id for row in asked.rows], limits, "rows")
        return asked

    app, gate = new_app(), Gate(read, lambda asked: extend(asked.session, asked.rows), limits, token)

    @app.post("/extend")
    async def grow(request: Request) -> JSONResponse:
        _, rows = await gate.answer(request)
        return JSONResponse({"rows": [row.model_dump() for row in rows]})

    return app

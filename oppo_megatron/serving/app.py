"""The HTTP side: authorisation, limits and answers.  The wire format is in `rewards/protocol.py`.

GET  /health    200 {"status": "ok"}
POST /score     200 scores; 401 token; 408 too slow; 413 too large; 415 not JSON; 422 not of the form, or cannot be
                scored (the message says why); 429 busy, with Retry-After
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Generic, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, SecretStr, ValidationError

from oppo_megatron.config.explain import first_problem
from oppo_megatron.errors import RewardError
from oppo_megatron.rewards import protocol
from oppo_megatron.serving.bodies import LIMITS, Bodies, Refusal, RequestLimits

Scorer = Callable[[Sequence[protocol.Item]], list[float]]
Asked = TypeVar("Asked")
Found = TypeVar("Found")
Message = TypeVar("Message", bound=BaseModel)


class Gate(Generic[Asked, Found]):
    """Takes one request after the other through all checks, cheapest first, then to the scorer.

    `read` makes of a body what `score` is asked, or raises Refusal.  Scoring runs on one thread of its own: user code need
    not be thread-safe, and requests are read meanwhile.
    """

    def __init__(
        self,
        read: Callable[[bytes], Asked],
        score: Callable[[Asked], Found],
        limits: RequestLimits,
        token: SecretStr | None,
    ):
        self._read, self._score, self._limits = read, score, limits
        self._expected = None if token is None else f"Bearer {token.get_secret_value()}".encode()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="scorer")
        self._bodies, self._waiting = Bodies(limits), 0

    async def answer(self, request: Request) -> tuple[Asked, Found]:
        """Return the request and the scorer's result.  Raises Refusal."""
        self._authorise(request)
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Refusal(415, "the body must be application/json")
        self._require_room()
        asked = self._read(await self._bodies.read(request))
        self._require_room()
        self._waiting += 1
        try:
            return asked, await asyncio.get_running_loop().run_in_executor(self._worker, self._score, asked)
        except RewardError as error:
            raise Refusal(422, str(error)) from error
        finally:
            self._waiting -= 1

    def _require_room(self) -> None:
        """Raises Refusal.  A request whose body is still to come takes no place from others."""
        if self._waiting >= self._limits.max_waiting:
            raise Refusal(429, f"{self._waiting} requests are waiting", **{"Retry-After": "1"})

    def _authorise(self, request: Request) -> None:
        given = request.headers.get("authorization", "").encode("latin-1", errors="replace")
        if self._expected is not None and not hmac.compare_digest(given, self._expected):
            raise Refusal(401, "the Authorization header does not carry this service's token")


def read_message(kind: type[Message], body: bytes, what: str) -> Message:
    """The body as a message of this kind.  Raises Refusal, which does not repeat what was sent."""
    try:
        return kind.model_validate(protocol.parse_json(body))
    except ValidationError as error:
        raise Refusal(422, f"not a request for {what}: {first_problem(error)}") from None
    except ValueError as error:
        raise Refusal(422, f"not JSON: {str(error)[:100]}") from None


def _read_items(limits: RequestLimits, body: bytes) -> list[protocol.Item]:
    items = read_message(protocol.Request, body, "scores").items
    if len(items) > limits.max_items:
        raise Refusal(413, f"{len(items)} items are more than {limits.max_items}")
    longest = max(max(len(item.prompt), len(item.response)) for item in items)
    if longest > limits.max_characters:
        raise Refusal(413, f"a text has {longest} characters, more than {limits.max_characters}")
    if len({item.id for item in items}) < len(items):
        raise Refusal(422, "an id stands twice")
    return items


def new_app() -> FastAPI:
    """A service that answers refused requests with a reason, and has a health check."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.exception_handler(Refusal)
    async def refuse(request: Request, refusal: Exception) -> JSONResponse:
        assert isinstance(refusal, Refusal)
        # The rest of a body that is not read would be taken for the next request of the connection.
        headers = {"Connection": "close", **refusal.headers}
        return JSONResponse({"error": str(refusal)}, refusal.status, headers)

    return app


def build_app(score: Scorer, token: SecretStr | None, limits: RequestLimits = LIMITS) -> FastAPI:
    """The service.  `score` gives a number for each item, or raises RewardError; it is called from one thread only."""
    app = new_app()
    gate = Gate(partial(_read_items, limits), score, limits, token)

    @app.post("/score")
    async def scores(request: Request) -> JSONResponse:
        items, found = await gate.answer(request)
        rows = [protocol.Score(id=item.id, score=score) for item, score in zip(items, found, strict=True)]
        return JSONResponse({"scores": [row.model_dump() for row in rows]})

    return app

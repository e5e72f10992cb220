"""Scores from a service over HTTP. A failed request is repeated for `give_up_s`; then `request` and `result` raise."""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

from pydantic import SecretStr

from oppo_megatron.config.rewards import TIMEOUT_S
from oppo_megatron.errors import RewardError
from oppo_megatron.rewards.parts import Fields, Part
from oppo_megatron.rewards.protocol import ScoreItem, check_fields, encode_request, read_answer

if TYPE_CHECKING:
    import httpx

TRANSIENT_STATUS = {408, 425, 429}
MAX_IN_FLIGHT = 4
"""Requests at once; all other responses wait here."""
MAX_BATCH = 32
"""Responses in one request."""
ANSWER_BYTES, ANSWER_BYTES_PER_ITEM = 1 << 16, 1 << 12
SHOWN_CHARACTERS = 200
REDIRECTED = "redirects are not followed: write the address that it leads to as url"
REMEDIES = {
    **dict.fromkeys((301, 302, 303, 307, 308), REDIRECTED),
    401: "check the token in the variable that token_env names",
    403: "check the token in the variable that token_env names",
    404: "correct the url",
    405: "correct the url",
    413: "let the service take larger requests, or shorten the responses",
}
_log = logging.getLogger(__name__)


class _Failure(Exception):
    """`transient`: the same request may succeed later."""

    def __init__(self, reason: str, *, transient: bool = True, retry_after_s: float = 0.0):
        super().__init__(reason)
        self.transient, self.retry_after_s = transient, retry_after_s


class RemoteReward(Part):
    waits = names_itself = True

    def __init__(
        self, label: str, url: str, token: SecretStr | None = None, *, timeout_s: float = TIMEOUT_S, give_up_s: float = 600.0,
        max_batch: int = MAX_BATCH, pauses_s: tuple[float, float] = (0.5, 30.0), clock: Callable[[], float] = time.monotonic,
    ):  # fmt: skip
        """`timeout_s`: of one request; `max_batch`: responses in it; `pauses_s`: the first pause, and the most it doubles to."""
        self.label, self.url = label, url
        self.timeout_s, self.give_up_s, self.max_batch = timeout_s, give_up_s, max_batch
        self._token, self._clock = token, clock
        self._first_pause_s, self._longest_pause_s = pauses_s
        self._chance = random.Random()  # noqa: S311  (spreads retries; not to be secret)
        self._scores: dict[int, Future[float]] = {}
        self._failure: Exception | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: asyncio.Queue[ScoreItem] = asyncio.Queue()
        self._stop: asyncio.Event | None = None

    def __repr__(self) -> str:
        return f"RemoteReward({self.url})"

    def check(self, fields: Fields) -> None:
        check_fields(fields)

    def score(self, item: ScoreItem, num_tokens: int | None) -> float:
        return self.result(item.seq_id)

    def requested(self, seq_id: int) -> bool:
        return seq_id in self._scores

    def request(self, items: Sequence[ScoreItem]) -> None:
        """Raises RewardError if the service has failed permanently."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            new = [item for item in items if item.seq_id not in self._scores]
            for item in new:
                self._scores[item.seq_id] = Future()
        if not new:
            return
        if self._loop is None:
            self._loop, self._stop = asyncio.new_event_loop(), asyncio.Event()
            self._thread = threading.Thread(target=self._run, args=(self._loop,), name="reward service", daemon=True)
            self._thread.start()
        self._loop.call_soon_threadsafe(self._enqueue, new)

    def _enqueue(self, items: Sequence[ScoreItem]) -> None:
        for item in items:
            self._waiting.put_nowait(item)

    def result(self, seq_id: int) -> float:
        score = self._scores[seq_id].result()
        del self._scores[seq_id]
        return score

    def forget(self, seq_id: int) -> None:
        score = self._scores.get(seq_id)
        if score is not None:
            score.add_done_callback(lambda _: self._scores.pop(seq_id, None))

    def close(self) -> None:
        if self._thread is None or self._loop is None:
            return
        if self._thread.is_alive() and self._stop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout=5.0)
        self._thread = None
        self._fail(RewardError(f"{self.label}: the client of {self.url} was closed"))

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(self._serve())
        except Exception as error:  # for the thread that waits for the scores
            self._fail(error)
        finally:
            self._fail(RewardError(f"{self.label}: the client of {self.url} has ended"))
            loop.run_until_complete(loop.shutdown_asyncgens())

    def _fail(self, error: Exception) -> None:
        with self._lock:
            if self._failure is None:
                self._failure = error
            for score in list(self._scores.values()):
                if not score.done():
                    score.set_exception(self._failure)

    async def _serve(self) -> None:
        import httpx

        assert self._stop is not None
        headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token.get_secret_value()}"
        secure = self.url.startswith("https:")  # plain http has no authorities to load, which takes time
        # No proxies or credentials from the environment, and no redirect: the token goes only to `url`.
        async with httpx.AsyncClient(
            headers=headers,
            timeout=self.timeout_s,
            # Shorter than servers keep idle connections (uvicorn: 5 s), so that none is reused while being closed.
            limits=httpx.Limits(max_connections=MAX_IN_FLIGHT, keepalive_expiry=2.0),
            verify=ssl.create_default_context() if secure else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
            trust_env=False,
            follow_redirects=False,
        ) as client:
            tasks = [asyncio.create_task(self._sender(client)) for _ in range(MAX_IN_FLIGHT)]
            stop = asyncio.create_task(self._stop.wait())
            done, pending = await asyncio.wait({*tasks, stop}, return_when=asyncio.FIRST_COMPLETED)
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            for task in done:
                task.result()

    async def _sender(self, client: httpx.AsyncClient) -> None:
        """Send requests in turn, each with everything waiting, up to a batch."""
        while True:
            batch = [await self._waiting.get()]
            while len(batch) < self.max_batch and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            scores = await self._deliver(client, batch)
            for item in batch:
                self._scores[item.seq_id].set_result(scores[item.seq_id])

    async def _deliver(self, client: httpx.AsyncClient, batch: Sequence[ScoreItem]) -> dict[int, float]:
        body, ids = encode_request(batch), [item.seq_id for item in batch]
        until, attempt, pause_s = self._clock() + self.give_up_s, 0, self._first_pause_s
        while True:
            attempt += 1
            try:
                return await self._attempt(client, body, ids)
            except _Failure as failure:
                left_s = until - self._clock()
                self._give_up_if_due(failure, ids, attempt, left_s)
                # Shorten pauses randomly, so that senders that failed together do not retry together.
                wait_s = max(pause_s * self._chance.uniform(0.5, 1.0), failure.retry_after_s)
            await asyncio.sleep(max(0.0, min(wait_s, left_s)))
            pause_s = min(2 * pause_s, self._longest_pause_s)

    def _give_up_if_due(self, failure: _Failure, ids: Sequence[int], attempt: int, left_s: float) -> None:
        what = f"{self.label}: {self.url} {failure}"
        where = f"sequence {ids[0]}" + (f" and {len(ids) - 1} more" if len(ids) > 1 else "")
        if not failure.transient:
            raise RewardError(f"{what}; {where} cannot be scored, and asking again would not help")
        if self.give_up_s == 0:
            raise RewardError(f"{what}; {where} cannot be scored, and give_up_s is 0: mend the service, or give it time")
        if left_s <= 0:
            raise RewardError(
                f"{what}; {where} had no score after {attempt} attempts in {self.give_up_s:g} s (give_up_s): "
                "mend the service, or raise the limit; nothing was scored in its place"
            )
        if attempt == 1:
            _log.warning("%s; %s: it is asked again for %.0f s more", what, where, left_s)

    async def _attempt(self, client: httpx.AsyncClient, body: bytes, ids: Sequence[int]) -> dict[int, float]:
        import httpx

        try:
            status, headers, answer = await asyncio.wait_for(self._post(client, body, len(ids)), self.timeout_s)
        except (asyncio.TimeoutError, httpx.TimeoutException):
            raise _Failure(f"did not answer within {self.timeout_s:g} s (timeout_s)") from None
        # ValueError: raised by the HTTP library's parsers (for headers that are not text) and not wrapped.
        except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL, OSError, ValueError) as error:
            raise _Failure(f"could not be asked ({type(error).__name__}: {self._shown(str(error))})") from None
        if status != 200:
            said = self._shown(answer.decode("utf-8", errors="replace"))
            remedy = f"; {REMEDIES[status]}" if status in REMEDIES else ""
            raise _Failure(
                f"answered {status}{f' ({said})' if said else ''}{remedy}",
                transient=status in TRANSIENT_STATUS or status >= 500,
                retry_after_s=retry_after_s(headers.get("retry-after")),
            )
        if (coding := headers.get("content-encoding", "identity").lower()) != "identity":
            raise _Failure(f"sent its answer encoded ({self._shown(coding)}), although asked for identity")
        try:
            return read_answer(answer, ids)
        except RewardError as error:
            raise _Failure(f"gave no usable answer: {self._shown(str(error))}") from None

    async def _post(self, client: httpx.AsyncClient, body: bytes, num_items: int) -> tuple[int, httpx.Headers, bytes]:
        limit = ANSWER_BYTES + ANSWER_BYTES_PER_ITEM * num_items
        async with client.stream("POST", self.url, content=body) as response:
            answer = bytearray()
            async for piece in response.aiter_raw():
                answer += piece
                if len(answer) > limit:
                    raise _Failure(f"sent more than {limit} bytes, longer than any answer to {num_items} responses")
            return response.status_code, response.headers, bytes(answer)

    def _shown(self, text: str) -> str:
        """One short line without the token, which a service may repeat."""
        if self._token is not None:
            text = text.replace(self._token.get_secret_value(), "***")
        text = "".join(character if character.isprintable() else " " for character in text)
        return " ".join(text.split())[:SHOWN_CHARACTERS]


def retry_after_s(value: str | None, now: datetime | None = None) -> float:
    """`Retry-After` (RFC 9110: seconds or a date); 0.0 if unreadable."""
    if value is None:
        return 0.0
    text = value.strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        date = parsedate_to_datetime(text)
        return max(0.0, (date - (now or datetime.now(timezone.utc))).total_seconds())
    except (TypeError, ValueError, OverflowError):
        return 0.0

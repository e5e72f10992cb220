"""Rewards from `oppo serve` for sequences sent while they grow (docs/nemo_aligner.md has the format)."""

from __future__ import annotations

import json
import math
import struct
import threading
import time
import uuid
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from oppo_megatron.config.aligner import StreamConfig
from oppo_megatron.errors import RewardError
from oppo_megatron.nesting import read_strict_json
from oppo_megatron.rewards.protocol import read_token

if TYPE_CHECKING:
    import httpx

REFUSED = {400, 401, 403, 404, 405, 413, 415, 422}
RETRY_S, RETRY_MAX_S = 0.1, 5.0
TIMEOUT_S, GIVE_UP_S = 60.0, 600.0
"""Limits for one request, and for repeated failures before the run ends."""

ROWS_A_REQUEST = 64
TOKENS_A_REQUEST = 500_000
"""Keeps a request of 64 long sequences, as for a restarted service, below its byte limit."""


def checksum(tokens: Sequence[int], start: int = 0) -> int:
    """CRC-32 of ids as little-endian int32; `start`: of the preceding ids."""
    return zlib.crc32(struct.pack(f"<{len(tokens)}i", *tokens), start)


@dataclass
class _Sequence:
    tokens: list[int] = field(default_factory=list)
    sent: int = 0
    final: bool = False
    waiting: bool = False
    score: Future[float] = field(default_factory=Future)


class ScorerStream:
    """`put` returns at once; a thread sends in order."""

    def __init__(self, settings: StreamConfig, token: SecretStr | None = None, give_up_s: float = GIVE_UP_S):
        import httpx

        headers = {} if token is None else {"authorization": f"Bearer {token.get_secret_value()}"}
        self._http = httpx.Client(headers=headers, timeout=TIMEOUT_S, trust_env=False)
        self._settings, self._give_up_s, self._session = settings, give_up_s, uuid.uuid4().hex
        self._sequences: dict[int, _Sequence] = {}
        self._changed = threading.Condition()
        self._failure: Exception | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def put(self, seq_id: int, tokens: Sequence[int], final: bool) -> bool:
        """Pass tokens so far; `final`: all. Returns False, changing nothing, if the sequence was complete and differs."""
        with self._changed:
            sequence = self._sequences.setdefault(seq_id, _Sequence())
            if sequence.final:
                return not final or sequence.tokens == list(tokens)
            if len(tokens) <= len(sequence.tokens) and not final:
                return True  # a carried sequence is gone through again from its start
            sequence.tokens, sequence.final, sequence.waiting = list(tokens), final, True
            if self._failure is not None:
                raise self._failure
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="scorer stream", daemon=True)
                self._thread.start()
            self._changed.notify()
            return True

    def result(self, seq_id: int) -> float:
        score = self._sequences[seq_id].score.result()
        with self._changed:
            del self._sequences[seq_id]
        return score

    def forget(self, seq_ids: Sequence[int]) -> None:
        with self._changed:
            for seq_id in seq_ids:
                self._sequences.pop(seq_id, None)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
        self._http.close()

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or any(s.waiting for s in self._sequences.values()))
                    if self._closed:
                        return
                    request = self._next_request()
                self._take(self._post(request))
        except Exception as error:  # handed to whoever waits for a score
            with self._changed:
                self._failure = error
                for sequence in self._sequences.values():
                    if not sequence.score.done():
                        sequence.score.set_exception(error)

    def _next_request(self) -> dict[str, Any]:
        rows: list[dict[str, Any]] = []
        num_tokens = 0
        for seq_id, sequence in self._sequences.items():
            num_tokens += len(sequence.tokens) - sequence.sent if sequence.waiting else 0
            full = len(rows) == ROWS_A_REQUEST or (num_tokens > TOKENS_A_REQUEST and rows)
            if sequence.waiting and not full:
                sequence.waiting = False
                piece = {"offset": sequence.sent, "tokens": sequence.tokens[sequence.sent :]}
                rows.append({"id": seq_id, **piece, "checksum": checksum(sequence.tokens), "final": sequence.final})
        return {"session": self._session, "rows": rows}

    def _take(self, rows: Sequence[Mapping[str, Any]]) -> None:
        with self._changed:
            for row in rows:
                sequence = self._sequences.get(row["id"])
                if sequence is None:
                    continue
                sequence.sent = row["known"]
                if row["score"] is not None:
                    sequence.score.set_result(float(row["score"]))
                elif sequence.final or sequence.sent < len(sequence.tokens):
                    sequence.waiting = True  # the service has forgotten a part: again, from what it knows

    def _post(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        import httpx

        body, headers, url = json.dumps(request), {"content-type": "application/json"}, self._settings.url
        until, pause_s = time.monotonic() + self._give_up_s, RETRY_S
        while True:
            try:
                answer = self._http.post(f"{url.rstrip('/')}/extend", content=body, headers=headers)
                if answer.status_code == 200:
                    return _read_rows(answer, request)
                failure = f"answered {answer.status_code}: {answer.text[:200]}"
                if answer.status_code in REFUSED:
                    raise RewardError(f"the scorer at {url} {failure}; correct its address, token or limits")
            except httpx.HTTPError as error:
                failure = f"cannot be asked ({error!r})"
            if self._closed or time.monotonic() + pause_s > until:
                raise RewardError(f"the scorer at {url} {failure}, for {self._give_up_s:g} s; start it")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_MAX_S)


def _read_rows(answer: httpx.Response, request: Mapping[str, Any]) -> list[dict[str, Any]]:
    try:
        rows = read_strict_json(answer.content.decode("utf-8"))["rows"]
        asked = {row["id"]: row for row in request["rows"]}
        for row in rows:
            known, sent = row["known"], asked.pop(row["id"])
            if type(known) is not int or not 0 <= known <= sent["offset"] + len(sent["tokens"]):
                raise ValueError(f"known {known!r:.20} is not a length of sequence {row['id']}")
            score = row["score"]
            if score is not None and not (sent["final"] and isinstance(score, float) and math.isfinite(score)):
                raise ValueError(f"{score!r:.20} is not a score of sequence {row['id']}")
        if asked:
            raise ValueError(f"no answer for sequence {min(asked)}")
    except (ValueError, KeyError, TypeError) as error:
        raise RewardError(f"the scorer's answer is not of the form ({error}); is the address `oppo serve`'s?") from error
    return list(rows)


def build_stream(settings: StreamConfig, environment: Mapping[str, str]) -> ScorerStream:
    return ScorerStream(settings, None if settings.token_env is None else read_token(settings.token_env, environment))

"""Rewards from a service: nothing lost, nothing invented, order kept, no token shown, however badly the service behaves."""

import json
import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import closing
from datetime import datetime, timezone
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_megatron.config.load import config_yaml
from oppo_megatron.config.rewards import RewardPart
from oppo_megatron.errors import ConfigError, OppoError, RewardError
from oppo_megatron.rewards.functions import build_reward_functions
from oppo_megatron.rewards.protocol import ScoreItem, read_answer, read_token
from oppo_megatron.rewards.remote import RemoteReward, retry_after_s
from tests.support.processes import held_port, wait_for
from tests.support.serving import Reply, Service, by_length, http, reward_service, scored

TOKEN = "s3cret-token-that-nobody-may-see"
QUICK = {"timeout_s": 30.0, "give_up_s": 120.0}
PAUSES_S = (0.005, 0.01)


def items(count: int) -> list[ScoreItem]:
    return [ScoreItem(i, f"prompt {i}", "x" * (i + 1), {"answer": i}) for i in range(count)]


def client(service: Service, clock: Callable[[], float] = time.monotonic, **changes: Any) -> closing[RemoteReward]:
    return closing(RemoteReward("reward part 'r'", service.url, None, pauses_s=PAUSES_S, clock=clock, **QUICK | changes))


def score_all(remote: RemoteReward, count: int) -> list[float]:
    remote.request(items(count))
    return [remote.result(i) for i in range(count)]


def late(request: dict[str, Any]) -> bytes:
    time.sleep(0.6)
    return by_length(request)


def saying(body: bytes, status: int = 200, *headers: str) -> Reply:
    return lambda request: http(status, body, *headers)


def with_scores(change: Callable[[list[dict[str, Any]]], Any]) -> Reply:
    def reply(request: dict[str, Any]) -> bytes:
        rows = [{"id": item["id"], "score": 1.0} for item in request["items"]]
        return http(200, json.dumps({"scores": change(rows)}).encode())

    return reply


BAD_DAYS: dict[str, Reply] = {
    "late": late, "closed": lambda request: b"", "half an answer": lambda request: by_length(request)[:-5],
    "no HTTP": lambda request: b"\x00\xffgarbage\r\n\r\n", "500": saying(b"down", 500), "503": saying(b"", 503, "Retry-After: 0"),
    "429": saying(b"{}", 429, "Retry-After: 0"), "429, strange Retry-After": saying(b"", 429, "Retry-After: soon"),
    "no JSON": saying(b"<html>"), "empty": saying(b""), "not UTF-8": saying(b'{"scores": "\xff"}'),
    "nested": saying(b"[" * 100_000), "NaN": lambda request: scored(request, lambda item: math.nan),
    "infinite": lambda request: scored(request, lambda item: math.inf),
    "beyond a float": saying(b'{"scores": [{"id": 0, "score": 1e999}]}'),
    "huge integer": with_scores(lambda rows: [{**row, "score": 10**400} for row in rows]),
    "boolean": lambda request: scored(request, lambda item: True), "text": lambda request: scored(request, lambda item: "1.0"),
    "null": lambda request: scored(request, lambda item: None), "too few": with_scores(lambda rows: rows[1:]),
    "too many": with_scores(lambda rows: [*rows, {"id": 999, "score": 1.0}]),
    "one twice": with_scores(lambda rows: [*rows, rows[0]]), "a key twice": saying(b'{"scores": [], "scores": []}'),
    "other ids": with_scores(lambda rows: [{**row, "id": row["id"] + 1000} for row in rows]), "endless": saying(b"x" * (1 << 20)),
    "compressed": saying(b"\x1f\x8b\x08garbage", 200, "Content-Encoding: gzip"),
    "wrong length": lambda request: b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n{}",
}  # fmt: skip


@pytest.mark.parametrize("day", BAD_DAYS)
def test_after_a_bad_day_every_score_is_right(day: str) -> None:
    changes = {"timeout_s": 0.3} if day == "late" else {}
    with reward_service(BAD_DAYS[day], BAD_DAYS[day]) as service, client(service, **changes) as remote:
        assert score_all(remote, 5) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert len(service.requests) >= 3


@pytest.mark.parametrize("day", [day for day in BAD_DAYS if day != "late"])
def test_who_gives_up_after_0_s_ends_at_the_first_failure(day: str) -> None:
    with reward_service(otherwise=BAD_DAYS[day]) as service, client(service, give_up_s=0) as remote:
        with pytest.raises(RewardError, match="reward part 'r'.*sequence 0 and 4 more cannot be scored.*give_up_s is 0"):
            score_all(remote, 5)
        with pytest.raises(RewardError, match="sequence 0"):
            remote.request(items(1))
    assert len(service.requests) == 1


def test_an_absent_service_ends_the_run_and_scores_nothing_nor_does_an_answer_that_is_not_unpacked() -> None:
    with reward_service(otherwise=saying(b"no", 500)) as service:
        with client(service, give_up_s=0.25, clock=lambda: 0.1 * len(service.requests)) as remote:
            remote.request(items(2))
            for seq_id in (0, 1):
                with pytest.raises(RewardError, match=r"answered 500 \(no\).*had no score after \d+ attempts.*give_up_s"):
                    remote.result(seq_id)
    assert len(service.requests) > 2
    answer = saying(b'{"scores": [{"id": 0, "score": 1.0}]}', 200, "Content-Encoding: gzip")
    with reward_service(otherwise=answer) as service, client(service, give_up_s=0) as remote:
        with pytest.raises(RewardError, match=r"sent its answer encoded \(gzip\), although asked for identity"):
            score_all(remote, 1)
    with held_port() as port, client(Service(f"http://127.0.0.1:{port}/score", [], by_length), give_up_s=0) as remote:
        with pytest.raises(RewardError, match="could not be asked.*Connect"):
            score_all(remote, 1)


@pytest.mark.parametrize(("status", "remedy"), [
    (400, ""), (401, "token_env"), (403, "token_env"), (404, "correct the url"), (413, "larger requests"), (204, ""),
    (302, "redirects are not followed: write the address"),
])  # fmt: skip
def test_a_refusal_ends_the_run_at_once(status: int, remedy: str) -> None:
    answer = saying(b"" if status == 204 else b"why\nnot", status, "Location: http://127.0.0.1:1/")
    with reward_service(otherwise=answer) as service, client(service) as remote:
        with pytest.raises(RewardError, match=f"answered {status}.*{remedy}.*asking again would not help"):
            score_all(remote, 1)
    assert len(service.requests) == 1


def test_requests_are_batched_in_order_bounded_and_never_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oppo_megatron.rewards.remote.MAX_IN_FLIGHT", 1)
    with reward_service() as service, client(service, max_batch=3) as remote:
        assert score_all(remote, 8) == [float(i + 1) for i in range(8)]
        remote.request(items(9))
        remote.request(items(9))
        assert remote.requested(8) and remote.result(8) == 9.0 and not remote.requested(8)
    sent = [[item["id"] for item in request["items"]] for request in service.requests]
    assert sent[:3] == [[0, 1, 2], [3, 4, 5], [6, 7]] and sum(map(len, sent)) == 17
    assert service.requests[0]["items"][1] == {"id": 1, "prompt": "prompt 1", "response": "xx", "fields": {"answer": 1}}


def test_no_more_requests_in_flight_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oppo_megatron.rewards.remote.MAX_IN_FLIGHT", 2)
    now, most, counting, meeting = 0, 0, threading.Lock(), threading.Barrier(2)

    def slow(request: dict[str, Any]) -> bytes:
        nonlocal now, most
        with counting:
            now += 1
            most = max(most, now)
        meeting.wait(20)  # for another that is in flight
        time.sleep(0.05)
        with counting:
            now -= 1
        return by_length(request)

    with reward_service(otherwise=slow) as service, client(service, max_batch=1) as remote:
        assert score_all(remote, 6) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert most == 2


def test_retry_after_is_waited_for_token_ids_are_sent_and_an_unsendable_column_is_an_error() -> None:
    with reward_service(saying(b"", 429, "Retry-After: 1")) as service, client(service) as remote:
        started = time.monotonic()
        remote.request([ScoreItem(0, "p", "r", {}, [4, 5, 6])])
        assert remote.result(0) == 1.0 and time.monotonic() - started >= 1.0
    assert [request["items"][0]["tokens"] for request in service.requests] == [[4, 5, 6]] * 2
    rewards = build_reward_functions([RewardPart(kind="http", url="http://127.0.0.1:1/score")])
    rewards.check({"answer": 3})
    for value in (math.nan, {1, 2}, b"bytes"):
        with pytest.raises(RewardError, match="127.0.0.1:1/score.*cannot be sent"):
            rewards.check({"answer": value})


def test_part_of_a_sum_early_or_late() -> None:
    with reward_service() as service:
        parts = [RewardPart(kind="http", url=service.url, weight=2.0), RewardPart(kind="verifier", name="gsm8k")]
        rewards = build_reward_functions(parts)
        assert rewards.asks_services and not rewards.requested(7)
        rewards.request([ScoreItem(7, "p", "#### 5", {"answer": 5})])
        assert rewards.requested(7)
        label = service.url.partition("://")[2]
        for seq_id in (7, 8):
            reward = rewards.evaluate("p", "#### 5", {"answer": 5}, None, seq_id)
            assert reward.parts == {label: 6.0, "gsm8k": 1.0} and reward.total == 13.0
        rewards.close()
    assert len(service.requests) == 2


def test_the_token_is_sent_and_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    echo: list[str] = []

    def repeat(status: int) -> Reply:
        return lambda request: http(status, echo[0].encode(), f"X-Echo: {echo[0]}")

    for status in (500, 400, 200):
        with reward_service(otherwise=repeat(status)) as service:
            echo[:] = [f"you said Authorization: Bearer {TOKEN}"]
            part = RewardPart(kind="http", url=service.url, token_env="REWARD_TOKEN", timeout_s=30, give_up_s=0.5)
            assert TOKEN not in config_yaml(part) and TOKEN not in repr(part)
            rewards = build_reward_functions([part], {"REWARD_TOKEN": TOKEN})
            function = rewards.summands[0].function
            with pytest.raises(RewardError) as caught:
                rewards.score("p", "r", {}, None, 0)
            rewards.close()
        assert service.headers[0]["authorization"] == f"Bearer {TOKEN}"
        shown = [str(caught.value), repr(caught.value), repr(function), repr(rewards.summands), str(vars(function))]
        assert not any(TOKEN in text for text in shown)
        assert status == 200 or "***" in str(caught.value)
    ours = [record for record in caplog.records if record.name.startswith("oppo_megatron")]
    assert ours and not any(TOKEN in record.getMessage() for record in ours)


@pytest.mark.parametrize("token", ["", "short", "with spaces in the middle", "line\nbreak-" + "x" * 20, "ünïcödé-" * 4])
def test_an_unusable_token_is_refused_before_anything_starts(token: str) -> None:
    part = RewardPart(kind="http", url="http://127.0.0.1:1/", token_env="REWARD_TOKEN")
    with pytest.raises(ConfigError, match="REWARD_TOKEN") as caught:
        build_reward_functions([part], {"REWARD_TOKEN": token})
    assert not token or token not in str(caught.value)
    with pytest.raises(ConfigError, match="REWARD_TOKEN is not set"):
        read_token("REWARD_TOKEN", {})


@pytest.mark.parametrize(("value", "seconds"), [
    (None, 0.0), ("7", 7.0), (" 7 ", 7.0), ("-7", 0.0), ("1e9", 0.0), ("nan", 0.0), ("٣", 0.0), ("soon", 0.0),
    ("9" * 5000, 999999999.0), ("Wed, 21 Oct 2015 07:28:10 GMT", 10.0), ("Wed, 21 Oct 2015 07:27:00 GMT", 0.0),
    ("Wed, 21 Oct 2015 07:28:10", 0.0),
])  # fmt: skip
def test_retry_after(value: str | None, seconds: float) -> None:
    assert retry_after_s(value, datetime(2015, 10, 21, 7, 28, tzinfo=timezone.utc)) == seconds


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["id", "score"]),
    lambda inner: (st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["scores", "id", "score", "x"]), inner,
        max_size=3)),
    max_leaves=8,
)  # fmt: skip
GOOD = json.dumps({"scores": [{"id": 3, "score": 0.25}, {"id": 4, "score": -1}]}).encode()


def read_or_error(body: bytes) -> dict[int, float] | None:
    try:
        return read_answer(body, [3, 4])
    except RewardError:
        return None


@given(JSON.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=200))
def test_no_answer_breaks_the_reader(body: bytes) -> None:
    assert read_or_error(body) is None


@given(st.integers(0, len(GOOD) - 1), st.binary(max_size=3), st.integers(0, 4))
def test_a_damaged_answer_has_other_digits_or_is_an_error(at: int, put: bytes, cut: int) -> None:
    assert read_or_error(GOOD) == {3: 0.25, 4: -1.0}
    scores = read_or_error(GOOD[:at] + put + GOOD[at + cut :])
    assert scores is None or (scores.keys() == {3, 4} and all(map(math.isfinite, scores.values())))


WHOLE = http(200, json.dumps({"scores": [{"id": 0, "score": 1}]}).encode())


def test_a_damaged_http_answer_is_our_error_or_the_score() -> None:
    """Cut, overwritten or doubled anywhere, headers too: with `stop` a RewardError, or a score that the bytes still say."""

    @settings(max_examples=60)
    @given(st.integers(0, len(WHOLE)), st.binary(max_size=4), st.integers(0, 8))
    def check(at: int, put: bytes, cut: int) -> None:
        service.otherwise = lambda request: WHOLE[:at] + put + WHOLE[at + cut :]
        with client(service, give_up_s=0, timeout_s=2.0) as remote:
            try:
                assert math.isfinite(score_all(remote, 1)[0])
            except OppoError as error:
                assert isinstance(error, RewardError) and "sequence 0" in str(error)

    with reward_service() as service:
        check()


def test_a_score_that_nobody_will_take_is_forgotten_when_it_comes() -> None:
    with reward_service(by_length) as service, client(service) as remote:
        remote.request(items(3))
        assert remote.result(0) == 1.0
        for seq_id in (0, 1, 2, 99):
            remote.forget(seq_id)
        wait_for(lambda: not remote.requested(1) and not remote.requested(2))
        assert score_all(remote, 3) == [1.0, 2.0, 3.0], "it may be asked for again"

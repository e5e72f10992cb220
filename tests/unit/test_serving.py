"""The reward service: who may ask, how much, and what comes back; and the command that starts it."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import SecretStr

pytest.importorskip("fastapi", reason="fastapi is not installed: it is of the extras `serve` and `test`")

from oppo_megatron.cli.main import main
from oppo_megatron.config.rewards import RewardPart
from oppo_megatron.config.serve import ServeConfig
from oppo_megatron.errors import ConfigError, RewardError
from oppo_megatron.rewards.protocol import Item, ScoreItem
from oppo_megatron.rewards.remote import RemoteReward
from oppo_megatron.serving.app import RequestLimits, Scorer, build_app
from oppo_megatron.serving.scorers import open_scorer
from oppo_megatron.serving.server import bound_socket
from tests.support.serving import HTTP, TOKEN, served_app

ITEM = {"id": 1, "prompt": "1+1=", "response": "#### 2", "fields": {"answer": 2}}


def lengths(items: Sequence[Item]) -> list[float]:
    return [float(len(item.response)) for item in items]


@contextmanager
def served(score: Scorer = lengths, token: str | None = None, **limits: Any) -> Iterator[str]:
    app = build_app(score, None if token is None else SecretStr(token), RequestLimits(**limits))
    with served_app(app) as address:
        yield address


def post(address: str, body: Any, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    return HTTP.post(f"{address}/score", content=content, headers=headers)


def test_scores_of_the_parts_in_the_order_asked_as_our_client_reads_them_and_none_without_the_token(tmp_path: Path) -> None:
    parts = [RewardPart(kind="verifier", name="gsm8k", weight=2.0)]
    with open_scorer(ServeConfig(rewards=parts), {}) as score, served(score) as address:
        answer = post(address, {"items": [ITEM | {"id": 7 - i, "response": f"#### {i}"} for i in range(4)]})
        assert answer.status_code == 200
        assert answer.json() == {"scores": [{"id": 7 - i, "score": 2.0 * (i == 2)} for i in range(4)]}
        assert HTTP.get(f"{address}/health").json() == {"status": "ok"}
        unscorable = post(address, {"items": [ITEM | {"fields": {}}]})
        assert unscorable.status_code == 422 and "no column 'answer'" in unscorable.json()["error"]
    with served(token=TOKEN) as address:
        remote = RemoteReward("r", f"{address}/score", SecretStr(TOKEN), max_batch=2, give_up_s=0)
        remote.request([ScoreItem(i, "p", "é" * i, {"answer": None}) for i in range(5)])
        assert [remote.result(i) for i in range(5)] == [0.0, 1.0, 2.0, 3.0, 4.0]
        remote.close()
        stranger = RemoteReward("r", f"{address}/score", SecretStr("x" + TOKEN))
        with pytest.raises(RewardError, match="answered 401.*token_env"):
            stranger.request([ScoreItem(0, "p", "r")])
            stranger.result(0)
        stranger.close()
    with served(token=TOKEN) as address:
        for header in (None, "", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "é"):
            headers = {} if header is None else {"authorization": header.encode("latin-1")}
            answer = HTTP.post(f"{address}/score", content=b"not even JSON", headers=headers)
            assert answer.status_code == 401 and TOKEN not in answer.text


def test_what_is_too_large_is_answered_with_413() -> None:
    with served(max_bytes=2000, max_items=3, max_characters=50) as address:
        assert post(address, {"items": [ITEM | {"id": i} for i in range(3)]}).status_code == 200
        for body, limit in [
            ({"items": [ITEM | {"id": i} for i in range(4)]}, "items are more than 3"),
            ({"items": [ITEM | {"response": "x" * 51}]}, "characters, more than 50"),
            ({"items": [ITEM | {"prompt": "x" * 51}]}, "characters, more than 50"), (b" " * 2001, "more than 2000 bytes"),
        ]:  # fmt: skip
            answer = post(address, body)
            assert answer.status_code == 413 and limit in answer.json()["error"]
        unannounced = iter([b" " * 1000] * 100)
        chunked = HTTP.post(f"{address}/score", content=unannounced, headers={"content-type": "application/json"})
        assert chunked.status_code == 413


REFUSED: dict[str, tuple[int, dict[str, str]]] = {
    "too large": (413, {}), "too large, unannounced": (413, {"transfer-encoding": "chunked"}),
    "without the token": (401, {"authorization": "Bearer another"}), "not JSON": (415, {"content-type": "text/plain"}),
    "busy": (429, {}),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_who_sends_a_body_before_reading_gets_the_answer(what: str) -> None:
    """The client writes 33 MiB and only then reads, as most do: it is neither reset nor kept waiting."""
    code, headers = REFUSED[what]
    body = b" " * (33 << 20)
    fields = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json", **headers}
    if "transfer-encoding" not in fields:
        fields["content-length"] = str(len(body))
    else:
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items()).encode()
    with served(token=TOKEN, **({"max_waiting": 0} if code == 429 else {})) as address:
        url = httpx.URL(address)
        with socket.create_connection((url.host, url.port), timeout=30) as connection:
            connection.sendall(b"POST /score HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n" + body)
            said = b"".join(iter(lambda: connection.recv(4096), b""))
        assert said.startswith(b"HTTP/1.1 %d" % code) and said.count(b"HTTP/1.1") == 1
        fields.pop("transfer-encoding", None)
        assert HTTP.post(f"{address}/score", content=b" " * (33 << 20), headers=fields).status_code == code


@pytest.mark.parametrize("body", [
    b"", b"{", b"\xff", b"[" * 1900, {}, {"items": []}, {"items": [ITEM], "more": 1}, {"items": [ITEM | {"id": "1"}]},
    {"items": [ITEM | {"response": None}]}, {"items": [ITEM | {"tokens": [-1]}]}, {"items": [ITEM, ITEM]},
    b'{"items": [], "items": []}', b'{"items": [{"id": 1, "prompt": "", "response": "", "fields": {"a": NaN}}]}',
], ids=lambda value: str(value)[:40])  # fmt: skip
def test_what_is_no_request_is_answered_with_a_reason(body: Any, address: str) -> None:
    answer = post(address, body)
    assert answer.status_code == 422 and answer.json()["error"]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served() as found:
        yield found


WHOLE = json.dumps({"items": [ITEM, ITEM | {"id": 2}]}).encode()


def test_no_damaged_request_is_a_defect_of_the_service(address: str) -> None:
    assert HTTP.get(f"{address}/score").status_code == 405 and HTTP.get(f"{address}/docs").status_code == 404
    assert post(address, {"items": [ITEM]}, content_type="text/plain").status_code == 415

    @settings(max_examples=60)
    @given(st.integers(0, len(WHOLE)), st.binary(max_size=3), st.integers(0, 6))
    def check(at: int, put: bytes, cut: int) -> None:
        headers = {"content-type": "application/json"}
        body = WHOLE[:at] + put + WHOLE[at + cut :]
        assert client.post(f"{address}/score", content=body, headers=headers).status_code in (200, 422)

    with httpx.Client(trust_env=False, verify=False) as client:
        check()


def test_a_defect_shows_nothing_and_a_failed_reward_says_why() -> None:
    failed = RewardError("sequence 1: my_function gave nan")
    for error, status, text in [(KeyError("inner workings"), 500, "Internal"), (failed, 422, "my_function gave nan")]:
        with served(mock.Mock(side_effect=error)) as address:
            answer = post(address, {"items": [ITEM]})
            assert answer.status_code == status and text in answer.text and "inner" not in answer.text


def test_busy_and_slow() -> None:
    entered, leave = threading.Event(), threading.Event()

    def waiting(items: Sequence[Item]) -> list[float]:
        entered.set()
        leave.wait(60)
        return lengths(items)

    with served(waiting, max_waiting=1, read_s=0.5) as address:
        first: list[int] = []
        thread = threading.Thread(target=lambda: first.append(post(address, {"items": [ITEM]}).status_code))
        thread.start()
        assert entered.wait(60)
        busy = post(address, {"items": [ITEM]})
        assert busy.status_code == 429 and busy.headers["retry-after"] == "1"
        leave.set()
        thread.join(60)
        assert first == [200]
        dripping = (time.sleep(pause_s) or b"{" for pause_s in (0.0, 1.0))
        slow = HTTP.post(f"{address}/score", content=dripping, headers={"content-type": "application/json"})
        assert slow.status_code == 408


SHAPE = {"model_type": "qwen2", "vocab_size": 64, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
REWARDS = {"rewards": [{"kind": "verifier", "name": "arithmetic"}]}
STREAMS = {"reward": {"init": SHAPE | {"num_attention_heads": 2}}}


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> Callable[..., str]:
    path = tmp_path / "serve.yaml"
    path.write_text(json.dumps(getattr(request, "param", REWARDS)))

    def run(*overrides: str) -> str:
        assert main(["serve", str(path), *overrides]) == 2
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize("refused", [REWARDS, STREAMS], indirect=True, ids=["rewards", "streams"])
def test_it_does_not_listen_elsewhere_without_a_long_token(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    for host in ("0.0.0.0", "'::'", "10.0.0.1", "somewhere.example", "''"):
        assert "which others can reach, but token_env is not set" in refused(f"host={host}")
    monkeypatch.delenv("SERVE_TOKEN", raising=False)
    assert "SERVE_TOKEN is not set" in refused("host=0.0.0.0", "token_env=SERVE_TOKEN")
    monkeypatch.setenv("SERVE_TOKEN", "short-one")
    said = refused("host=0.0.0.0", "token_env=SERVE_TOKEN")
    assert "at least 16" in said and "short-one" not in said


def test_what_cannot_be_served_is_said_at_once(refused: Callable[..., str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "cannot be listened on" in refused(f"port={taken.getsockname()[1]}")
    with pytest.raises(ConfigError, match="is 0.0.0.0 here, which others can reach, but token_env"):
        bound_socket("", 0, guarded=False)  # as a name may lead anywhere
    for host in ("no\0name", "\udc80"):
        with pytest.raises(ConfigError, match="cannot be listened on"):
            bound_socket(host, 0, guarded=True)
    assert "does not pass requests on" in refused("rewards=[{kind: http, url: 'http://h/'}]")
    assert "no `tokenizer` section" in refused("rewards=[{kind: model}]", "reward={init: {model_type: llama}}")
    assert "cannot be imported" in refused("rewards=[{kind: python, entry_point: 'no_such_module:f'}]")

"""Connections that do not send a whole request: closed in time, and never in the way of one that does."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from pydantic import SecretStr

pytest.importorskip("fastapi", reason="fastapi is not installed: it is of the extras `serve` and `test`")

from fastapi.responses import PlainTextResponse

from oppo_megatron.serving.app import RequestLimits, build_app, new_app
from oppo_megatron.serving.server import HEADER_S
from tests.support.processes import wait_for
from tests.support.serving import HTTP, TOKEN, served_app

BODY = json.dumps({"items": [{"id": 1, "prompt": "1+1=", "response": "#### 2", "fields": {"answer": "2"}}]}).encode()
HALF = b"POST /score HTTP/1.1\r\nhost: service\r\n"
WHOLE = HALF + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(BODY)
HEALTH = b"GET /health HTTP/1.1\r\nhost: service\r\n"
LATE_S = 30.0
"""After so long a connection is said not to be closed: a busy machine is slow."""


@contextmanager
def served(token: str | None = None, requests: RequestLimits | None = None, **limits: Any) -> Iterator[tuple[str, int]]:
    secret = None if token is None else SecretStr(token)
    app = build_app(lambda items: [1.0] * len(items), secret, requests or RequestLimits())
    with served_app(app, **limits) as address:
        url = httpx.URL(address)
        assert url.port is not None
        yield url.host, url.port


def connect(address: tuple[str, int], sent: bytes = b"") -> socket.socket:
    found = socket.create_connection(address, timeout=LATE_S)
    found.sendall(sent)
    return found


def until_closed(connection: socket.socket) -> bytes:
    """Text that the service still sends; a timeout where it leaves the connection open."""
    said = b""
    with connection, suppress(ConnectionResetError, BrokenPipeError):
        while piece := connection.recv(4096):
            said += piece
    return said


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False
    finally:
        connection.settimeout(LATE_S)
    return False


def drip(connection: socket.socket) -> bytes:
    """A byte every tenth of a second, for as long as the service takes them; what it said."""
    said, until = b"", time.monotonic() + LATE_S
    with connection, suppress(ConnectionResetError, BrokenPipeError):
        connection.settimeout(0.1)
        while time.monotonic() < until:
            with suppress(TimeoutError):
                connection.sendall(b"x")
                if not (piece := connection.recv(4096)):
                    return said
                said += piece
        raise TimeoutError("the service goes on listening")
    return said


def ask(address: tuple[str, int], token: str | None = None) -> int:
    headers = {"content-type": "application/json"} | ({} if token is None else {"authorization": f"Bearer {token}"})
    return HTTP.post(f"http://{address[0]}:{address[1]}/score", content=BODY, headers=headers).status_code


IN_VAIN: dict[str, tuple[bytes, Callable[[socket.socket], bytes], bytes]] = {
    "nothing": (b"", until_closed, b""), "half of the headers": (HALF, until_closed, b"HTTP/1.1 408 Request Timeout"),
    "headers byte by byte": (HALF + b"x-long: ", drip, b"HTTP/1.1 408 Request Timeout"),
    "a body after its answer": (HEALTH + b"content-length: 99999\r\n\r\n", drip, b"HTTP/1.1 200 OK"),
    "half of the next headers": (HEALTH + b"\r\n" + HEALTH, until_closed, b"HTTP/1.1 200 OK"),
}  # fmt: skip


@pytest.mark.parametrize("what", IN_VAIN)
def test_what_does_not_come_in_time_ends_the_connection(what: str) -> None:
    sent, end, said = IN_VAIN[what]
    with served(header_s=0.5) as address:
        begun = time.monotonic()
        assert end(connect(address, sent)).startswith(said)
        assert time.monotonic() - begun >= 0.4, "it had its time"


def test_a_client_that_reads_no_answer_is_cut() -> None:
    app = new_app()

    @app.get("/large")
    async def large() -> PlainTextResponse:
        return PlainTextResponse("x" * 16_000_000)

    with served_app(app, header_s=0.5) as address, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        url = httpx.URL(address)
        connection.connect((url.host, url.port))
        mine = connection.getsockname()[1]
        connection.sendall(b"GET /large HTTP/1.1\r\nhost: service\r\n\r\n")
        wait_for(lambda: connection.recv(1, socket.MSG_PEEK))
        wait_for(lambda: not any(each.raddr and each.raddr.port == mine for each in psutil.Process().net_connections("tcp")))


def test_each_request_of_a_connection_has_a_deadline_of_its_own_and_a_slow_body_comes_whole() -> None:
    with served(header_s=3.0) as address, httpx.Client(base_url=f"http://127.0.0.1:{address[1]}", trust_env=False) as client:
        begun, ports = time.monotonic(), set()
        while time.monotonic() - begun < 3.5:
            with client.stream("GET", "/health") as answer:
                assert answer.status_code == 200
                ports.add(answer.extensions["network_stream"].get_extra_info("client_addr"))
                answer.read()
            time.sleep(0.5)
    assert len(ports) == 1, "all by one connection"
    # Longer than the deadline of headers, shorter than its own
    with served(header_s=0.5) as address, connect(address, WHOLE) as connection:
        for start in range(0, len(BODY), 8):
            time.sleep(0.12)
            connection.sendall(BODY[start : start + 8])
        assert len(BODY) // 8 * 0.12 > 2 * 0.5
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 OK")


def test_whoever_has_waited_for_longest_makes_room() -> None:
    with served(TOKEN, most_waiting=4, header_s=60.0) as address, ExitStack() as stack:
        held = [stack.enter_context(connect(address, HALF)) for _ in range(4)]
        time.sleep(0.1)
        assert all(map(is_open, held))
        held.append(stack.enter_context(connect(address, HALF)))
        wait_for(lambda: not is_open(held[0]))
        assert all(map(is_open, held[1:]))
        assert ask(address, TOKEN) == 200, "it costs the second its place, while it waits"
        assert [is_open(each) for each in held] == [False, False, True, True, True]
        held[2].sendall(b"\r\n")
        assert held[2].recv(4096).startswith(b"HTTP/1.1 401"), "who has kept its place may still send the rest"


@pytest.mark.parametrize("token", [TOKEN, None])
@pytest.mark.parametrize("sent", [b"", b"2\r\n{}\r\n"], ids=["at once", "behind a part"])
def test_a_body_that_breaks_the_protocol_ends_its_connection(sent: bytes, token: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Logs one line, for whoever has no token may send many of them."""
    chunked = HALF + b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    with served(token) as address:
        with connect(address, chunked + sent) as connection:
            connection.sendall(b"no size of a chunk\r\n")
            assert until_closed(connection).startswith((b"HTTP/1.1 400", b"HTTP/1.1 401"))
        assert ask(address, token) == 200
    told = capfd.readouterr().err.splitlines()
    assert len(told) <= 1 and all("Invalid HTTP request received" in line for line in told), told


def test_bodies_that_do_not_come_take_no_place_and_more_than_may_come_at_once_are_to_come_again() -> None:
    for token, code in ((TOKEN, b"401"), (None, b"408")):
        with served(token, RequestLimits(max_waiting=2, read_s=1.0)) as address:
            held = [connect(address, WHOLE + BODY[:5]) for _ in range(20)]
            assert ask(address, token) == 200
            assert all(until_closed(each).startswith(b"HTTP/1.1 " + code) for each in held)
            assert ask(address, token) == 200
    with served(None, RequestLimits(max_coming=2, read_s=2.0)) as address, ExitStack() as stack:
        held = [stack.enter_context(connect(address, WHOLE)) for _ in range(2)]
        wait_for(lambda: ask(address) == 429)
        assert all(until_closed(each).startswith(b"HTTP/1.1 408") for each in held)
        assert ask(address) == 200


@pytest.fixture
def command(tmp_path: Path, token: str | None) -> Iterator[tuple[tuple[str, int], int]]:
    config = tmp_path / "serve.yaml"
    guarded = "" if token is None else "token_env: SERVE_TOKEN\n"
    config.write_text(f"rewards: [{{kind: verifier, name: gsm8k}}]\nport: 0\n{guarded}")
    arguments = [sys.executable, "-m", "oppo_megatron", "serve", str(config)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "SERVE_TOKEN": TOKEN}
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    line = process.stdout.readline()
    url = httpx.URL(line.split()[-1])
    assert url.port is not None, line
    yield (url.host, url.port), process.pid
    process.send_signal(signal.SIGTERM)
    process.wait(20)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("token", [TOKEN])
def test_hundreds_of_half_sent_requests_for_a_minute(command: tuple[tuple[str, int], int], token: str) -> None:
    """An honest client's address, no token: replaced as they are closed, and then left to the service."""
    address, pid = command
    assert ask(address, token) == 200
    process = psutil.Process(pid)
    before, memory = process.num_fds(), process.memory_info().rss
    kinds: Sequence[bytes] = (b"", HALF, WHOLE + BODY[:5])
    held: list[socket.socket] = []
    took: list[float] = []
    until, opened = time.monotonic() + 60, 0
    try:
        while time.monotonic() < until:
            for gone in [each for each in held if not is_open(each)]:
                gone.close()
                held.remove(gone)
            while len(held) < 300:
                held.append(connect(address, kinds[opened % len(kinds)]))
                opened += 1
            asked = time.monotonic()
            assert ask(address, token) == 200
            took.append(time.monotonic() - asked)
            time.sleep(0.25)
        assert opened > 600, "they were closed meanwhile, and came again"
        assert max(took) < 1.0, sorted(took)[-5:]
        deadline = time.monotonic() + max(RequestLimits().read_s, HEADER_S) + 5
        while process.num_fds() > before and time.monotonic() < deadline:
            time.sleep(0.2)
        assert process.num_fds() <= before, "the service has closed them all"
        assert process.memory_info().rss < memory + 30 * 2**20
    finally:
        for each in held:
            each.close()

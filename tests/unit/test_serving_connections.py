"""Connections that do not send a whole request: closed in time, and never in the way of one that does."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

pytest.importorskip("fastapi", reason="fastapi is not installed: it is of the extras `serve` and `test`")

from fastapi import FastAPI
from fastapi.responses import Response

from oppo_megatron.serving.app import build_app
from oppo_megatron.serving.bodies import RequestLimits
from oppo_megatron.serving.connections import CONNECTION_LIMITS, ConnectionLimits, network_of
from tests.support.processes import wait_for
from tests.support.serving import served_app

HTTP = httpx.Client(trust_env=False, verify=False, timeout=30.0, limits=httpx.Limits(max_keepalive_connections=0))
TOKEN = "a-token-of-enough-characters"
BODY = json.dumps({"items": [{"id": 1, "prompt": "1+1=", "response": "#### 2", "fields": {"answer": "2"}}]}).encode()
HALF = b"POST /score HTTP/1.1\r\nhost: service\r\n"
WHOLE = HALF + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(BODY)
HEALTH = b"GET /health HTTP/1.1\r\nhost: service\r\n"
LATE_S = 30.0
"""After so long a connection is said not to be closed: a busy machine is slow."""


@contextmanager
def served(token: str | None = None, requests: RequestLimits | None = None, **limits: Any) -> Iterator[tuple[str, int]]:
    """Host and port of a service that scores each item with 1."""
    secret = None if token is None else SecretStr(token)
    app = build_app(lambda items: [1.0] * len(items), secret, requests or RequestLimits())
    with served_app(app, ConnectionLimits(**limits)) as address:
        url = httpx.URL(address)
        assert url.port is not None
        yield url.host, url.port


def connect(address: tuple[str, int], sent: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
    """A connection from an address of the loopback that has sent so much."""
    found = socket.create_connection(address, timeout=LATE_S, source_address=(source, 0))
    found.sendall(sent)
    return found


def until_closed(connection: socket.socket) -> bytes:
    """What the service still says.  A timeout where it leaves the connection open."""
    said = b""
    with connection:
        try:
            while piece := connection.recv(4096):
                said += piece
        except (ConnectionResetError, BrokenPipeError):
            pass
    return said


def is_open(connection: socket.socket) -> bool:
    """Whether a connection is still there, and nothing was said on it."""
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


def held_by_server(connection: socket.socket) -> bool:
    """Whether the other end, which is on this machine, has not closed the connection, whatever has been read here."""
    ports = f":{connection.getpeername()[1]:04X}", f":{connection.getsockname()[1]:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    return any(row[1][-5:] == ports[0] and row[2][-5:] == ports[1] and row[3] == "01" for row in rows)  # established


def status(connection: socket.socket) -> int:
    """Of the whole answer to a request on this connection, which stays open."""
    connection.sendall(HEALTH + b"\r\n")
    said = b""
    while not said.endswith(b'{"status":"ok"}'):
        said += connection.recv(4096) or pytest.fail(f"closed after {said!r}")
    return int(said.split()[1])


def drip(connection: socket.socket) -> bytes:
    """A byte every tenth of a second, for as long as the service takes them; what it said."""
    said, until = b"", time.monotonic() + LATE_S
    with connection:
        connection.settimeout(0.1)
        while time.monotonic() < until:
            try:
                connection.sendall(b"x")
                piece = connection.recv(4096)
            except TimeoutError:
                continue
            except (ConnectionResetError, BrokenPipeError):
                return said
            if not piece:
                return said
            said += piece
    raise TimeoutError("the service goes on listening")


def ask(address: tuple[str, int], token: str | None = None) -> int:
    """The status that an honest client gets."""
    headers = {"content-type": "application/json"} | ({} if token is None else {"authorization": f"Bearer {token}"})
    return HTTP.post(f"http://{address[0]}:{address[1]}/score", content=BODY, headers=headers).status_code


@pytest.mark.parametrize(
    ("sent", "end", "said"),
    [
        (b"", until_closed, b""),
        (HALF, until_closed, b"HTTP/1.1 408 Request Timeout"),
        (HALF + b"x-long: ", drip, b"HTTP/1.1 408 Request Timeout"),
        (HEALTH + b"content-length: 99999\r\n\r\n", drip, b"HTTP/1.1 200 OK"),
        (HEALTH + b"\r\n" + HEALTH, until_closed, b"HTTP/1.1 200 OK"),
    ],
    ids=[
        "nothing",
        "half of the headers",
        "headers byte by byte",
        "a body after its answer",
        "half of the next headers",
    ],
)
def test_what_does_not_come_in_time_ends_the_connection(
    sent: bytes, end: Callable[[socket.socket], bytes], said: bytes
) -> None:
    with served(header_s=0.5) as address:
        begun = time.monotonic()
        assert end(connect(address, sent)).startswith(said)
        assert time.monotonic() - begun >= 0.4, "it had its time"


def test_each_request_of_a_connection_has_a_deadline_of_its_own() -> None:
    with (
        served(header_s=3.0) as address,
        httpx.Client(base_url=f"http://127.0.0.1:{address[1]}", trust_env=False) as client,
    ):
        begun, ports = time.monotonic(), set()
        while time.monotonic() - begun < 3.5:
            with client.stream("GET", "/health") as answer:
                assert answer.status_code == 200
                ports.add(answer.extensions["network_stream"].get_extra_info("client_addr"))
                answer.read()
            time.sleep(0.5)
    assert len(ports) == 1, "all by one connection"


def test_a_slow_body_comes_whole() -> None:
    """Longer than the deadline of headers, shorter than its own."""
    with served(header_s=0.5) as address, connect(address, WHOLE) as connection:
        for start in range(0, len(BODY), 8):
            time.sleep(0.12)
            connection.sendall(BODY[start : start + 8])
        assert len(BODY) // 8 * 0.12 > 2 * 0.5
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 OK")


def test_whoever_has_waited_for_longest_makes_room_and_each_peer_for_its_own() -> None:
    with served(TOKEN, waiting=8, waiting_of_peer=4, header_s=60.0, young_s=0.0) as address, ExitStack() as stack:

        def come(source: str) -> socket.socket:
            """The service takes connections in the order in which they have been made."""
            return stack.enter_context(connect(address, HALF, source))

        one, two = [come("127.0.0.1") for _ in range(4)], [come("127.0.0.2") for _ in range(2)]
        assert all(map(is_open, [*one, *two]))
        one.append(come("127.0.0.1"))
        wait_for(lambda: not is_open(one[0]))
        assert [is_open(each) for each in [*one, *two]] == [False, *[True] * 6], "the fifth of a peer costs its first"
        three = [come("127.0.0.3") for _ in range(3)]
        wait_for(lambda: not is_open(one[1]))
        assert [is_open(each) for each in [*one, *two, *three]] == [False, False, *[True] * 8], (
            "the largest peer gives way"
        )
        assert ask(address, TOKEN) == 200
        three[0].sendall(b"\r\n")
        assert three[0].recv(4096).startswith(b"HTTP/1.1 401"), "who has kept its place may still send the rest"


def test_those_that_have_been_answered_push_out_none_whose_headers_are_on_their_way() -> None:
    """Each answer makes its connection the latest to wait, however many of them were there before."""
    with served(TOKEN, waiting=8, waiting_of_peer=4, header_s=60.0, young_s=0.0) as address, ExitStack() as stack:
        honest = stack.enter_context(connect(address, HALF))
        others: list[socket.socket] = []
        for _ in range(8):
            others.append(stack.enter_context(connect(address)))
            assert status(others[-1]) == 200
        wait_for(lambda: not any(map(is_open, others[:4])))
        assert all(map(is_open, others[4:])), "of their kind the first make room"
        assert is_open(honest)
        honest.sendall(b"\r\n")
        assert honest.recv(4096).startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize("token", [TOKEN, None])
@pytest.mark.parametrize("sent", [b"", b"2\r\n{}\r\n"], ids=["at once", "behind a part"])
def test_a_body_that_breaks_the_protocol_ends_its_connection_alone(
    sent: bytes, token: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    """By one line in the log, for whoever has no token may send many of them."""
    chunked = HALF + b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    with served(token) as address:
        with connect(address, chunked + sent) as connection:
            connection.sendall(b"no size of a chunk\r\n")
            assert until_closed(connection).startswith((b"HTTP/1.1 400", b"HTTP/1.1 401"))
        assert ask(address, token) == 200
    told = capfd.readouterr().err.splitlines()
    assert len(told) <= 1 and all("Invalid HTTP request received" in line for line in told), told


def test_bodies_that_do_not_come_take_no_place_from_others() -> None:
    """Refused at once without the token; where there is none to give, until their time is up."""
    requests = RequestLimits(max_waiting=2, read_s=1.0)
    with served(TOKEN, requests) as address:
        held = [connect(address, WHOLE + BODY[:5]) for _ in range(20)]
        assert ask(address, TOKEN) == 200
        assert all(until_closed(each).startswith(b"HTTP/1.1 401") for each in held)
    with served(None, requests) as address:
        held = [connect(address, WHOLE + BODY[:5]) for _ in range(20)]
        assert ask(address) == 200
        assert all(until_closed(each).startswith(b"HTTP/1.1 408") for each in held)
        assert ask(address) == 200


@pytest.mark.parametrize("sources", [1, 40])
def test_the_oldest_of_too_many_bodies_makes_room_for_a_request(sources: int) -> None:
    """Without a token nobody can be told from an honest client but by sending at once."""
    with served(None, RequestLimits(max_coming=4, young_s=0.0), open=16) as address, ExitStack() as stack:
        held = [stack.enter_context(connect(address, WHOLE, f"127.0.0.{2 + i % sources}")) for i in range(40)]
        assert [ask(address) for _ in range(5)] == [200] * 5
        assert all(until_closed(each).startswith(b"HTTP/1.1 429") for each in held[:36])
        held[-1].sendall(BODY)
        assert held[-1].recv(4096).startswith(b"HTTP/1.1 200"), "who came last was left its place"


def test_bodies_that_have_just_begun_to_come_make_no_room() -> None:
    """However many there are at once, the rest of each is read first."""
    with served(None, RequestLimits(max_coming=2, young_s=60.0)) as address, ExitStack() as stack:
        held = [stack.enter_context(connect(address, WHOLE)) for _ in range(10)]
        assert ask(address) == 200
        for each in held:
            each.sendall(BODY)
        assert all(each.recv(4096).startswith(b"HTTP/1.1 200") for each in held)


def test_connections_that_have_just_come_make_no_room_unless_there_are_too_many_in_all() -> None:
    with (
        served(TOKEN, waiting=8, waiting_of_peer=4, open=12, header_s=60.0, young_s=60.0) as address,
        ExitStack() as stack,
    ):
        held = [stack.enter_context(connect(address, HALF)) for _ in range(12)]
        time.sleep(0.1)
        assert all(map(is_open, held))
        assert ask(address, TOKEN) == 200
        wait_for(lambda: not is_open(held[0]))


def test_who_has_been_answered_keeps_its_connection_beside_half_sent_requests() -> None:
    with served(TOKEN, waiting=8, waiting_of_peer=4, young_s=0.0) as address, ExitStack() as stack:
        honest = stack.enter_context(connect(address))
        assert status(honest) == 200
        held = [stack.enter_context(connect(address, HALF)) for _ in range(12)]
        wait_for(lambda: not any(map(is_open, held[:8])))
        assert all(map(is_open, held[8:]))
        assert status(honest) == 200


def test_who_has_been_answered_keeps_its_connection_while_many_are_refused_at_once() -> None:
    """Refused connections are about to close, and wait no more."""
    with (
        served(None, RequestLimits(max_bytes=len(BODY)), waiting=8, waiting_of_peer=1, young_s=0.0) as address,
        ExitStack() as stack,
    ):
        honest = stack.enter_context(connect(address))
        assert status(honest) == 200
        for _ in range(10):
            large = HALF + b"content-type: application/json\r\ncontent-length: 999999\r\n\r\n"
            assert until_closed(connect(address, large)).startswith(b"HTTP/1.1 413")
        assert status(honest) == 200


def test_bodies_on_their_way_are_held_to_the_memory_of_those_that_may_wait() -> None:
    requests = RequestLimits(max_waiting=2, max_bytes=1000)
    long = HALF + b"content-type: application/json\r\ncontent-length: 1000\r\n\r\n"
    with served(None, requests) as address, ExitStack() as stack:
        held = []
        for _ in range(4):
            held.append(stack.enter_context(connect(address, long + b" " * 900)))
            time.sleep(0.1)
        assert ask(address) == 200
        assert all(until_closed(each).startswith(b"HTTP/1.1 429") for each in held[:2])
        assert all(map(is_open, held[2:]))
        with connect(address, long + b" " * (1000 - len(BODY)) + BODY) as connection:
            assert connection.recv(4096).startswith(b"HTTP/1.1 200"), "the oldest body made room"


def test_a_client_that_does_not_read_its_answer_is_left() -> None:
    app = FastAPI()

    @app.get("/large")
    async def large() -> Response:
        return Response(bytes(20_000_000))

    with served_app(app, ConnectionLimits(header_s=0.5)) as address:
        url = httpx.URL(address)
        assert url.port is not None
        with connect((url.host, url.port), b"GET /large HTTP/1.1\r\nhost: service\r\n\r\n") as connection:
            wait_for(lambda: connection.recv(1, socket.MSG_PEEK) and not held_by_server(connection))
            assert len(until_closed(connection)) < 20_000_000
        assert len(HTTP.get(f"{address}/large").content) == 20_000_000, "whoever reads gets all"


@pytest.mark.parametrize(
    ("address", "peer"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("2001:db8:0:1::1", network_of("2001:db8:0:1:ffff::2")),
        ("fe80::1%eth0", network_of("fe80::2")),
    ],
)
def test_the_peer_behind_an_address(address: str, peer: str) -> None:
    assert network_of(address) == peer
    assert network_of("2001:db8:0:1::1") != network_of("2001:db8:0:2::1")


# --- the command


@pytest.fixture
def command(tmp_path: Path, token: str | None) -> Iterator[tuple[tuple[str, int], int]]:
    """`oppo serve`: its address and process."""
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


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def resident_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("token", "num_held", "seconds"), [(TOKEN, 300, 60), (None, 450, 20)], ids=["with a token", "without"]
)
def test_hundreds_of_half_sent_requests_for_a_minute(
    command: tuple[tuple[str, int], int], token: str | None, num_held: int, seconds: int
) -> None:
    """From the address of an honest client and without a token: replaced as they are closed, and then left to the service."""
    address, pid = command
    assert ask(address, token) == 200
    before, memory = descriptors(pid), resident_mib(pid)
    kinds: Sequence[bytes] = (b"", HALF, WHOLE + BODY[:5])
    held: list[socket.socket] = []
    took: list[float] = []
    until, opened = time.monotonic() + seconds, 0
    try:
        while time.monotonic() < until:
            for gone in [each for each in held if not is_open(each)]:
                gone.close()
                held.remove(gone)
            while len(held) < num_held:
                held.append(connect(address, kinds[opened % len(kinds)]))
                opened += 1
            asked = time.monotonic()
            assert ask(address, token) == 200
            took.append(time.monotonic() - asked)
            time.sleep(0.25)
        assert opened > 2 * num_held, "they were closed meanwhile, and came again"
        assert max(took) < 1.0, sorted(took)[-5:]
        deadline = time.monotonic() + (RequestLimits().read_s if token is None else CONNECTION_LIMITS.header_s) + 5
        while descriptors(pid) > before and time.monotonic() < deadline:
            time.sleep(0.2)
        assert descriptors(pid) <= before, "the service has closed them all"
        assert resident_mib(pid) < memory + 30
    finally:
        for each in held:
            each.close()

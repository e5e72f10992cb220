"""The process of a service: a socket, uvicorn on it, until it is asked to stop."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from fastapi import FastAPI
from pydantic import SecretStr

from oppo_megatron.config.serve import ServeConfig, is_loopback
from oppo_megatron.errors import ConfigError
from oppo_megatron.rewards.protocol import read_token
from oppo_megatron.serving.app import build_app
from oppo_megatron.serving.connections import Server, server_settings
from oppo_megatron.serving.scorers import open_scorer
from oppo_megatron.serving.stream_app import build_stream_app
from oppo_megatron.serving.stream_scorer import open_stream_scorer


def serve(
    config: ServeConfig, environment: Mapping[str, str], say: Callable[[str], None]
) -> None:
    """Serve until interrupted; calls `say` with the address once requests are taken.

    Raises ConfigError for a token that is missing or an address that cannot be had, before a model is loaded.
    """
    token = None if config.token_env is None else read_token(config.token_env, environment)
    with (
        bound_socket(config.host, config.port, guarded=token is not None) as listening,
        _open_app(config, environment, token) as app,
    ):
        host, port = listening.getsockname()[:2]
        listening.listen()
        what, path = ("streamed rewards", "") if config.streams else ("rewards", "/score")
        say(f"serving {what} at http://{f'[{host}]' if ':' in host else host}:{port}{path}")
        Server(server_settings(app)).run(sockets=[listening])


def _open_app(
    config: ServeConfig, environment: Mapping[str, str], token: SecretStr | None
) -> AbstractContextManager[FastAPI]:
    return _scorer_app(config, token) if config.streams else _reward_app(config, environment, token)


@contextmanager
def _reward_app(
    config: ServeConfig, environment: Mapping[str, str], token: SecretStr | None
) -> Iterator[FastAPI]:
    with open_scorer(config, environment) as score:
        yield build_app(score, token)


@contextmanager
def _scorer_app(config: ServeConfig, token: SecretStr | None) -> Iterator[FastAPI]:
    with open_stream_scorer(config) as scorer:
        yield build_stream_app(scorer.extend, token)


def bound_socket(host: str, port: int, *, guarded: bool) -> socket.socket:
    """Return a bound socket that does not listen yet; only loopback addresses if no token guards the service."""
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except (OSError, OverflowError, TypeError, ValueError) as error:  # the latter two for an invalid host name
        found.close()
        raise ConfigError(f"host {host!r}, port {port} cannot be listened on ({error}); name others") from error
    address = found.getsockname()[0]
    if not guarded and not is_loopback(address):  # a name is resolved by the hosts file or a name server
        found.close()
        raise ConfigError(f"host {host!r} is {address} here, which others can reach, but token_env is not set; set it")
    return found

"""Refuses secrets, which the run's `config.yaml` would show; they belong in the environment."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

SECRET_NAME = re.compile(
    r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|PRIVATE_KEY)S?(?:_|$)", re.IGNORECASE
)
SHORTEST = 8  # a shorter value may occur in a text by chance


def shown_secrets(settings: Any, environment: Mapping[str, str]) -> list[str]:
    """A sentence, without the value, for each setting that holds the value of a secret variable."""
    secrets = {
        name: value for name, value in environment.items() if SECRET_NAME.search(name) and len(value) >= SHORTEST
    }
    return [
        f"`{key}` holds the value of the environment variable {name}, by its name a secret, and the run's config.yaml would "
        "show it; leave it out: libraries read it from the environment themselves"
        for key, text in _texts(settings, "")
        for name, value in secrets.items()
        if value in text
    ]


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _texts(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _texts(item, f"{key}.{index}")

"""A setting that takes one of several words: every such setting lists them, and names the nearest, where it has another."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError

from oppo_megatron.config.base import Section
from oppo_megatron.config.explain import explain
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.config.supervised import RewardModelConfig, SFTConfig


def choices(annotation: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if get_origin(annotation) is Literal:
        yield from ((key, word) for word in get_args(annotation)[-1:] if isinstance(word, str))
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            yield from choices(field.annotation, f"{key}.{name}" if key else name)
    elif get_origin(annotation) in (Union, types.UnionType, typing.Annotated):
        for each in get_args(annotation):
            yield from choices(each, key)
    elif get_origin(annotation) in (list, tuple):
        yield from choices(get_args(annotation)[0], f"{key}.0")


CASES = [(kind, key, word) for kind in (TrainConfig, SFTConfig, RewardModelConfig) for key, word in choices(kind)]


@pytest.mark.parametrize(("kind", "key", "word"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_a_misspelt_word_is_answered_by_the_nearest(kind: type[Section], key: str, word: str) -> None:
    tree: Any = f"{word}x"
    for name in reversed(key.split(".")):
        tree = [tree] if name == "0" else {name: tree}
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(tree)
    sentences = [problem for problem in explain(kind, caught.value) if f"'{word}x'" in problem]
    head = tuple(f"`{name}` is '{word}x', but must be " for name in (key, key.removesuffix(".0")))
    assert len(sentences) == 1 and sentences[0].startswith(head)
    assert f"'{word}'" in sentences[0] and sentences[0].endswith(f"did you mean `{word}`?")


def test_there_are_settings_of_that_kind() -> None:
    assert len(CASES) > 60

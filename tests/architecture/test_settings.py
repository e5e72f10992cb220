"""Limits on the number of settings, in all and of each command."""

from __future__ import annotations

import pytest

from oppo_megatron.config.base import Section
from oppo_megatron.config.describe import COMMANDS, settings_in


def settings_with_a_default() -> dict[type[Section], list[str]]:
    """The optional settings of each section class, without those that it inherits."""
    found: dict[type[Section], list[str]] = {}
    pending = list(Section.__subclasses__())
    while pending:
        section = pending.pop()
        pending += section.__subclasses__()
        if section.__module__.startswith("oppo_megatron.config"):
            inherited = {name for base in section.__bases__ if issubclass(base, Section) for name in base.model_fields}
            found[section] = [
                name for name, field in section.model_fields.items() if name not in inherited and not field.is_required()
            ]
    return found


def test_there_are_no_more_settings_than_a_page_can_hold() -> None:
    assert sum(map(len, settings_with_a_default().values())) <= 179


MOST = {"train": 150, "sft": 65, "rm": 66, "dpo": 75, "serve": 41}


def optional_settings(command: str) -> set[tuple[type[Section], str]]:
    """The optional settings of a command's sections; a section used in several places counts once."""
    with_default, pending = settings_with_a_default(), [COMMANDS[command]]
    reached: set[tuple[type[Section], str]] = set()
    seen: set[type[Section]] = set()
    while pending:
        section = pending.pop()
        seen.add(section)
        pending += {each.section for each in settings_in(section) if each.section is not None} - seen
        reached |= {
            (owner, name)
            for owner in section.__mro__
            for name in with_default.get(owner, ())
            if not section.model_fields[name].is_required()
        }
    return reached


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_no_more_settings_than_it_reads(command: str) -> None:
    assert len(optional_settings(command)) <= MOST[command]

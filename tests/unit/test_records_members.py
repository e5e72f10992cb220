"""The responses to a prompt: which are trained, which one is greedy."""

from __future__ import annotations

import pytest

from oppo_megatron.records import ALONE, Members, Prompt, Rollout


def rollouts(count: int) -> list[Rollout]:
    return [Rollout(Prompt(i, i, "", (1,)), i) for i in range(count)]


@pytest.mark.parametrize("trained", [1, 2, 5])
def test_the_last_of_each_group_is_greedy(trained: int) -> None:
    members, size = Members(trained, greedy=True), trained + 1
    held = rollouts(3 * size)
    greedy = [each.seq_id for each in held if members.is_greedy(each.seq_id)]
    assert members.size == size and greedy == [trained, trained + size, trained + 2 * size]
    assert [each.seq_id for each in members.to_train(held)] == [i for i in range(3 * size) if i not in greedy]


def test_without_a_greedy_one_all_are_trained() -> None:
    held = rollouts(4)
    for members in (ALONE, Members(2), Members(4)):
        assert members.to_train(held) is held and not any(members.is_greedy(i) for i in range(4))


def test_groups_are_named_whole() -> None:
    """Greedy responses, which are not in a batch, go back with the others."""
    assert Members(2, greedy=True).of_groups([9, 10, 0, 1]) == [9, 10, 11, 0, 1, 2]
    assert Members(1, greedy=True).of_groups([4]) == [4, 5]
    assert Members(2).of_groups([4, 5]) == [4, 5] and ALONE.of_groups([3, 1]) == [3, 1]

"""Context parallelism without ranks: the tokens of each, and the ring's communicators."""

import random
from itertools import accumulate
from unittest import mock

import pytest
import torch

from oppo_megatron.mcore import context
from oppo_megatron.mcore.context import SequenceShare, connect_ring

CPU = torch.device("cpu")


def shares(lengths: list[int], rows: list[int], size: int, multiple: int) -> list[SequenceShare]:
    groups = (mock.Mock(**{"rank.return_value": rank, "size.return_value": size}) for rank in range(size))
    return [SequenceShare(lengths, rows, group, CPU, multiple) for group in groups]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_every_token_and_row_has_one_place_and_sees_what_comes_before_it(size: int) -> None:
    dice = random.Random(size)
    for _ in range(40):
        lengths = [dice.choice([1, 2, 3, dice.randrange(1, 40)]) for _ in range(dice.randrange(1, 6))]
        firsts = [0, *accumulate(lengths)]
        rows = dice.sample(range(firsts[-1]), dice.randrange(1, firsts[-1] + 1))
        found = shares(lengths, rows, size, multiple := dice.choice([1, 2, 4]))
        assert len({(share.own, share.size, len(share.rows_R)) for share in found}) == 1 and found[0].size % multiple == 0
        everywhere = torch.cat([share.own_S[: share.own] for share in found])  # packed positions on all ranks in turn
        for share in found:
            first = held = 0
            stretches = zip(share.spans.new, share.spans.reach, strict=True)
            for number, (new, reach) in enumerate(stretches):
                length, start = lengths[number // 2], firsts[number // 2]
                seen = everywhere[share.keys[first : first + reach]] - start
                assert seen.tolist() == [min(place, length - 1) for place in range(reach)]
                own = share.positions_S[held : held + new]
                assert own.tolist() == [min(place, length - 1) for place in range(reach - new, reach)]
                first, held = first + reach, held + new
            assert (first, held) == (len(share.keys), share.own)
            assert share.own_S[share.rows_R[: len(share.chosen)]].tolist() == [rows[i] for i in share.chosen]
        assert sorted(i for share in found for i in share.chosen) == list(range(len(rows)))


@pytest.mark.parametrize(("cp", "device", "usable"), [(3, "cuda", True), (1, "cuda", True), (3, "cpu", True), (3, "cuda", False)])
def test_the_rings_communicators_are_made_if_it_can_be_used(cp: int, device: str, usable: bool) -> None:
    groups = mock.Mock(cp=cp)
    with mock.patch.object(context, "usable", lambda library: usable), mock.patch.object(context, "use_ring_once") as made:
        connect_ring(groups, torch.device(device))
    expected = [mock.call(groups.context, torch.device(device), [groups.context])]
    assert made.mock_calls == (expected if (cp, device, usable) == (3, "cuda", True) else [])

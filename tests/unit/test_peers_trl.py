"""The script that runs in TRL's environment, as far as it goes without TRL: versions, clock, forced lengths."""

from __future__ import annotations

import ast
import math

import pytest
import torch

from benchmarks.peers.trl_common import Clock, ForcedGenerate, ForcedRows, PeerError
from benchmarks.peers.trl_training import REQUIREMENTS, main, require_versions

EOS, PAD, VOCAB, PROMPT = 2, 9, 10, 3


def test_script_needs_nothing_of_this_package() -> None:
    scripts = sorted(REQUIREMENTS.parent.glob("trl_*.py"))
    assert len(scripts) == 5
    for script in scripts:
        tree = ast.parse(script.read_text(encoding="utf-8"))
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        names |= {f"{n.module}.{a.name}" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
        ours = [name for name in names if name.split(".")[0] in ("oppo_megatron", "benchmarks")]
        assert [name for name in ours if not name.startswith("benchmarks.peers.trl_")] == [], script


def test_versions_are_those_that_are_pinned() -> None:
    pins = dict(line.split("==") for line in REQUIREMENTS.read_text().splitlines() if not line.startswith("#"))
    assert set(pins) == {"torch", "trl", "transformers", "accelerate", "requests"}
    built = {**pins, "torch": pins["torch"] + "+cpu"}
    assert require_versions(REQUIREMENTS.read_text(), built.get) == built


def test_wrong_and_missing_versions_are_named_with_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    """TRL alone has to be as pinned on a GPU's machine; in this environment it is missing."""
    found = {"trl": "1.13.0", "torch": "2.13.0"}
    with pytest.raises(PeerError) as error:
        require_versions("torch==2.13.0\n# a comment\ntrl==1.12.0\naccelerate==1.15.0\n", found.get)
    text = str(error.value)
    assert "trl 1.13.0 (pinned: 1.12.0)" in text and "accelerate none (pinned: 1.15.0)" in text
    assert "torch" not in text and "make bench-trl" in text
    pins, found = "torch==2.13.0\ntrl==1.12.0\n", {"trl": "1.12.0", "torch": "2.11.0+cu130"}
    assert require_versions(pins, found.get, ["trl"]) == found
    for wrong, said in (({**found, "trl": "1.13.0"}, "trl 1.13.0"), ({"trl": "1.12.0"}, "torch none")):
        with pytest.raises(PeerError, match=said):
            require_versions(pins, wrong.get, ["trl"])
    assert main(["--check"]) == 2
    assert "trl none" in capsys.readouterr().err


def generate(input_ids: torch.Tensor, logits_processor: list[ForcedRows]) -> torch.Tensor:
    """A sampling loop as that of transformers: rows that drew EOS are padded, all ended rows end the loop."""
    generator = torch.Generator().manual_seed(1)
    unfinished_B = torch.ones(len(input_ids), dtype=torch.bool)
    while unfinished_B.any():
        scores_BV = torch.zeros(len(input_ids), VOCAB)
        for processor in logits_processor:
            scores_BV = processor(input_ids, scores_BV)
        drawn_B = torch.multinomial(scores_BV.softmax(-1), 1, generator=generator)[:, 0]
        drawn_B = torch.where(unfinished_B, drawn_B, PAD)
        unfinished_B &= drawn_B != EOS
        input_ids = torch.cat([input_ids, drawn_B[:, None]], 1)
    return input_ids


def test_forced_rows_end_with_eos_at_their_length_and_never_before() -> None:
    lengths = [5, 1, 12, 5]
    forced = ForcedRows(lengths, PROMPT, EOS, PAD)
    responses = generate(torch.full((4, PROMPT), 7), [forced])[:, PROMPT:]
    assert responses.shape[1] == max(lengths)
    for row, length in zip(responses.tolist(), lengths, strict=True):
        assert row.index(EOS) == length - 1
        assert PAD not in row[:length] and set(row[length:]) <= {PAD}
    assert forced.seconds > 0


def test_each_call_of_generate_has_the_lengths_of_its_own_rows() -> None:
    work = {"lengths": [3, 1, 2, 4], "eos_id": EOS, "pad_id": PAD}
    forced = ForcedGenerate(generate, work)
    prompts = torch.full((2, PROMPT), 7)
    found = [forced(input_ids=prompts)[:, PROMPT:] for _ in range(2)]
    assert [(row != PAD).sum().item() for rows in found for row in rows] == work["lengths"]
    assert forced.rows == 4 and forced.seconds > 0


def test_clock_divides_a_step_into_its_phases() -> None:
    waits: list[None] = []
    clock = Clock(lambda: waits.append(None))
    clock.begin()
    for phase in ("generate", "score", "train", "train", "score"):  # the later ones are entered already
        clock.enter(phase)
    seconds = clock.end()
    assert set(seconds) == {"step_s", "other_s", "generate_s", "score_s", "train_s"}
    assert all(value >= 0 for value in seconds.values())
    parts = sum(value for name, value in seconds.items() if name != "step_s")
    assert math.isclose(parts, seconds["step_s"], rel_tol=1e-6)
    assert len(waits) == 6  # made, begun, three boundaries, the end
    clock = Clock(lambda: None)  # a step that skips a phase
    clock.enter("score")
    clock.enter("generate")
    with pytest.raises(PeerError, match="2 phases"):
        clock.end()

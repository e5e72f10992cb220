"""`oppo bench decode` on a tiny model: every greedy peer, the bare loop too, finds the same tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oppo_megatron.bench.decode import DecodeWork, available_peers
from oppo_megatron.cli.main import main

TINY = "--hidden 64 --layers 2 --heads 4 --kv-heads 2 --ffn 128 --vocab 200 --prompt 6 --new 8 --repeats 1".split()


def test_all_peers_decode_the_same_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "folder"
    assert main(["bench", "decode", *TINY, "--batch", "1,3", "--out", str(out)]) == 0
    rows = json.loads((out / "decode.json").read_text())["results"]
    assert [row["peer"] for row in rows] == available_peers() * 2
    for row in rows:
        assert row["tokens_per_s"] >= row["min"] > 0
        assert row["same_tokens"] == (None if row["peer"] == "ours-engine" else 1.0), row
    assert "x bare-packed" in capsys.readouterr().out
    assert (out / "decode.png").read_bytes().startswith(b"\x89PNG")


def test_in_bfloat16_the_bare_loop_and_ours_agree(tmp_path: Path) -> None:
    arguments = ["--batch", "2", "--dtype", "bfloat16", "--peers", "bare,ours-fused,ours-module", "--out", str(tmp_path)]
    assert main(["bench", "decode", *TINY, *arguments]) == 0
    assert all(row["same_tokens"] >= 0.9 for row in json.loads((tmp_path / "decode.json").read_text())["results"])


@pytest.mark.long
def test_sequences_end_at_the_given_lengths(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,GeneratedTokens\n" + "".join(f"0,{length}\n" for length in (1, 2, 3, 4, 9)))
    arguments = ["--batch", "4", "--trace", str(trace), "--peers", "bare,ours-packed,ours-engine"]
    assert main(["bench", "decode", *TINY, *arguments, "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "decode.json").read_text())
    bare, packed, _ = found["results"]
    assert bare["same_tokens"] == packed["same_tokens"] == 1.0

    stopping = DecodeWork({}, [4], 6, 8, 1, 1, forced_lengths={"forced_lengths": str(trace)}).stopping
    assert {stopping.limit(i) - 1 for i in range(200)} == {1, 2, 3, 4, 8}, "the trace's, cut at --new"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--trace", "none.csv"], "none.csv"),
        (["--lognormal", "0,1"], "median"),
        (["--trace-column", "x"], "give --trace, too"),
        (["--peers", "bare,none"], "['none']"),
        (["--out", __file__], f"{__file__}: File exists"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_runs(
    arguments: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["bench", "decode", *TINY, "--out", str(out), *arguments]) == 2
    assert reason in capsys.readouterr().err and not out.exists()

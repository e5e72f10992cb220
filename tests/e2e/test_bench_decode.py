"""`oppo bench decode` on a tiny model: every greedy peer, the bare loop too, finds the same tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oppo_megatron.cli.main import main
from oppo_megatron.integrations.bench_decode import PEERS, available_peers

TINY = "--hidden 64 --layers 2 --heads 4 --kv-heads 2 --ffn 128 --vocab 200 --prompt 6 --new 8 --repeats 1".split()


def test_all_peers_decode_the_same_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "folder" / "decode.json"
    assert main(["bench", "decode", *TINY, "--batch", "1,3", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["results"]
    assert [row["peer"] for row in rows] == available_peers() * 2
    for row in rows:
        # That of transformers is a difference of two times, which a busy machine may turn round in a run so short.
        assert row["tokens_per_s"] > 0 or row["peer"] == "hf"
        assert row["same_tokens"] == (None if row["peer"] == "ours-engine" else 1.0), row
    assert "x bare-packed" in capsys.readouterr().out


def test_in_bfloat16_the_bare_loop_and_ours_agree(tmp_path: Path) -> None:
    out = tmp_path / "decode.json"
    peers = "bare,ours-lean,ours-module"
    assert (
        main(["bench", "decode", *TINY, "--batch", "2", "--dtype", "bfloat16", "--peers", peers, "--out", str(out)])
        == 0
    )
    assert all(row["same_tokens"] >= 0.9 for row in json.loads(out.read_text())["results"])


def test_unknown_peers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "decode", "--peers", "bare,none"]) == 2
    said = capsys.readouterr().err
    assert "['none']" in said and all(name in said for name in PEERS)


def test_an_output_that_cannot_be_written_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "decode", *TINY, "--out", str(tmp_path)]) == 2
    assert "which is a folder; name a file in it" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["bench", "decode", *TINY, "--out", str(tmp_path / "file" / "x.json")]) == 2
    assert "its folder cannot be made" in capsys.readouterr().err

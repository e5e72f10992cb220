"""`oppo serve`: sequences that are streamed to it, who may, how much; and the client of a run."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import numpy as np
import pytest
import torch
from pydantic import SecretStr
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("fastapi", reason="fastapi is not installed: it is of the extras `serve` and `test`")

from fastapi import FastAPI
from fastapi.responses import Response

from oppo_megatron.config.aligner import StreamConfig
from oppo_megatron.config.model import RoleConfig, RuntimeConfig
from oppo_megatron.config.serve import ServeConfig
from oppo_megatron.errors import CapacityError, RewardError
from oppo_megatron.rewards import streaming
from oppo_megatron.rewards.protocol import Item
from oppo_megatron.rewards.streaming import ScorerStream, checksum
from oppo_megatron.serving.app import Extend, Known, Piece, RequestLimits, build_app, build_stream_app
from oppo_megatron.serving.model_scorer import ModelScorer, open_reward_model
from oppo_megatron.serving.stream_scorer import StreamScorer, open_stream_scorer
from tests.support.hf import save_tiny
from tests.support.processes import held_port
from tests.support.serving import HTTP, TOKEN, served_app


class Sums:
    """Scores a sequence by its sum.  Forgets all that it knows after each `memory` pieces."""

    def __init__(self, memory: int = 10**9):
        self.held: dict[int, list[int]] = {}
        self.memory, self.num_pieces, self.num_tokens = memory, 0, 0

    def __call__(self, session: str, pieces: Sequence[Piece]) -> list[Known]:
        return [self.take(piece) for piece in pieces]

    def take(self, piece: Piece) -> Known:
        self.num_pieces += 1
        if self.num_pieces % self.memory == 0:
            self.held.clear()
        tokens = self.held.setdefault(piece.id, [])
        if piece.offset != len(tokens):
            del self.held[piece.id]
            return Known(id=piece.id, known=0)
        tokens += piece.tokens
        assert piece.checksum == checksum(tokens)
        self.num_tokens += len(piece.tokens)
        return Known(id=piece.id, known=len(tokens), score=float(sum(tokens)) if piece.final else None)


@contextmanager
def served(extend: Extend, token: str | None = None, **limits: Any) -> Iterator[str]:
    secret = None if token is None else SecretStr(token)
    with served_app(build_stream_app(extend, secret, RequestLimits(**limits))) as address:
        yield address


def streaming_to(address: str, token: str | None = None) -> closing[ScorerStream]:
    return closing(ScorerStream(StreamConfig(url=address), None if token is None else SecretStr(token)))


def piece(seq_id: int = 1, tokens: Sequence[int] = (1, 2), **changes: Any) -> dict[str, Any]:
    return {"id": seq_id, "offset": 0, "tokens": list(tokens), "checksum": checksum(tokens), "final": False} | changes


def post(address: str, rows: Any, token: str | None = None, **changes: Any) -> httpx.Response:
    headers = {"content-type": "application/json"} | ({} if token is None else {"authorization": f"Bearer {token}"})
    return HTTP.post(f"{address}/extend", content=json.dumps({"session": "s", "rows": rows} | changes), headers=headers)


def test_the_client_hands_in_what_grew_and_gets_the_scores_of_whole_sequences() -> None:
    sums = Sums()
    with served(sums, TOKEN) as address, streaming_to(address, TOKEN) as stream:
        for end in range(2, 12):
            for seq_id in range(3):
                stream.put(seq_id, list(range(seq_id, seq_id + end)), final=end == 11)
        assert [stream.result(seq_id) for seq_id in range(3)] == [sum(range(i, i + 11)) for i in range(3)]
        assert sums.num_tokens == 33, "each token is sent once"


@pytest.mark.parametrize("memory", [2, 3, 5])
def test_a_service_that_forgets_gets_the_sequence_again(memory: int) -> None:
    with served(Sums(memory)) as address, streaming_to(address) as stream:
        for end in range(2, 12):
            stream.put(0, list(range(end)), final=False)
            stream.put(1, list(range(end)), final=end == 11)
        stream.put(0, list(range(11)), final=True)
        assert (stream.result(0), stream.result(1)) == (55.0, 55.0)


def test_a_request_is_of_few_enough_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that has forgotten all gets all again: not in one body, which it would refuse."""
    monkeypatch.setattr(streaming, "TOKENS_A_REQUEST", 40)
    with served(Sums(), max_bytes=1024) as address, streaming_to(address) as stream:
        for seq_id in range(40):
            stream.put(seq_id, list(range(30)), final=True)
        assert [stream.result(seq_id) for seq_id in range(40)] == [435.0] * 40


class Failing(TorchDispatchMode):
    def __init__(self, at: int = 0):
        super().__init__()
        self.num_operations, self._at = 0, at

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_operations += 1
        if self.num_operations == self._at:
            raise MemoryError
        return operation(*args, **(kwargs or {}))


def test_a_request_that_memory_does_not_hold_gets_an_error_and_the_next_one_its_scores(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", "scalar", num_hidden_layers=1)
    short, items = [False, True, False], [{"id": 0, "prompt": "", "response": "", "tokens": list(range(1, 50))}]
    config = RoleConfig(checkpoint=tmp_path)
    with open_reward_model(config, RuntimeConfig(device="cpu"), max_tokens=64) as (model, device):
        scorer = ModelScorer(model, mock.Mock(decode=lambda ids: ""), 64, 64, device)

        def scores(asked: Sequence[Item]) -> list[float]:
            with Failing(20) if short.pop(0) else nullcontext():
                return scorer.scores(asked)

        with served_app(build_app(scores, None)) as address:
            answers = [httpx.post(f"{address}/score", json={"items": items}) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 500, 200]
    assert answers[0].json() == answers[2].json() and "tokens" not in answers[1].text


def test_wherever_memory_runs_out_the_same_request_again_gets_the_same_scores(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", "scalar", num_hidden_layers=1)
    runtime = {"device": "cpu", "micro_batch_tokens": 7}
    config = ServeConfig(reward={"checkpoint": tmp_path}, sequences=3, max_tokens=64, runtime=runtime)
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(1, 64, (length,), generator=generator).tolist() for length in (30, 23, 17, 9)]

    def part(seq_id: int, start: int, end: int) -> Piece:
        tokens = sequences[seq_id]
        known = checksum(tokens[:end])
        return Piece(id=seq_id, offset=start, tokens=tokens[start:end], checksum=known, final=end == len(tokens))

    def scores(scorer: StreamScorer, failing: Failing) -> list[float | None]:
        known = {row.id: row.known for row in scorer.extend("s", [part(0, 0, 10), part(1, 0, 8)])}
        found: dict[int, float | None] = {}
        pieces = [part(i, known.get(i, 0), len(tokens)) for i, tokens in enumerate(sequences)]
        with suppress(MemoryError), failing:
            scorer.extend("s", pieces)
        while missing := [i for i in range(len(sequences)) if i not in found]:
            for row in scorer.extend("s", [pieces[i] for i in missing]):
                if row.score is not None:
                    found[row.id] = row.score
                pieces[row.id] = part(row.id, row.known, len(sequences[row.id]))
        return [found[i] for i in range(len(sequences))]

    with open_stream_scorer(config) as scorer:
        counting = Failing()
        due = scores(scorer, counting)
        for at in np.linspace(1, counting.num_operations, 20, dtype=int):
            assert scores(scorer, Failing(int(at))) == pytest.approx(due, abs=1e-5), at


def test_a_slot_that_could_not_be_given_up_is_given_up_later(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", "scalar")
    config = ServeConfig(reward={"checkpoint": tmp_path}, sequences=1, max_tokens=64, runtime={"device": "cpu"})
    with pytest.raises(CapacityError, match="caches for 1000000000 sequences of 64 tokens.*lower sequences"):
        with open_stream_scorer(config.model_copy(update={"sequences": 10**9})):
            pass
    with open_stream_scorer(config) as scorer:
        whole = Piece(**piece(final=True))
        with mock.patch.object(scorer.cache, "close", side_effect=MemoryError), pytest.raises(MemoryError):
            scorer.extend("s", [whole])
        first, other = scorer.extend("s", [whole]), scorer.extend("s", [Piece(**piece(2, final=True))])
    assert first[0].score == other[0].score


def test_a_service_that_cannot_be_had_ends_the_run_with_a_reason() -> None:
    with held_port() as port:
        stream = ScorerStream(StreamConfig(url=f"http://127.0.0.1:{port}"), give_up_s=0.3)
        stream.put(0, [1], final=True)
        with pytest.raises(RewardError, match="cannot be asked.*for 0.3 s; start it"):
            stream.result(0)
        with pytest.raises(RewardError):
            stream.put(1, [1], final=True)
    with served(Sums(), TOKEN) as address, streaming_to(address, "x" + TOKEN) as stranger:
        stranger.put(0, [1], final=True)
        with pytest.raises(RewardError, match="answered 401.*correct its address, token or limits"):
            stranger.result(0)


@pytest.mark.parametrize("body", [
    "", "[]", "null", "[" * 9000, '{"rows": []}', '{"rows": [{"id": 0, "known": 1}]}',
    '{"rows": [{"id": 0, "known": 1, "score": 1e999}]}', '{"rows": [{"id": 0, "known": 1, "score": NaN}]}',
    '{"rows": [{"id": 0, "known": 1, "score": "2.0"}]}', '{"rows": [{"id": 0, "known": 7, "score": 2.0}]}',
    '{"rows": [{"id": 5, "known": 1, "score": 2.0}]}', '{"rows": [0]}', '{"rows": {"id": 0}}', "\udcff",
], ids=lambda body: ascii(body)[:50])  # fmt: skip
def test_an_answer_that_is_none_is_never_a_score(body: str) -> None:
    app = FastAPI()

    @app.post("/extend")
    async def answer() -> Response:
        return Response(body.encode("utf-8", "surrogateescape"), media_type="application/json")

    with served_app(app) as address, streaming_to(address) as stream:
        stream.put(0, [1], final=True)
        with pytest.raises(RewardError, match="the scorer's answer is not of the form"):
            stream.result(0)


def test_tokens_and_limits_of_requests() -> None:
    sums = Sums()
    with served(sums, TOKEN, max_items=2, max_bytes=2000) as address:
        assert post(address, [piece()]).status_code == 401
        assert post(address, [piece()], "x" + TOKEN).status_code == 401
        assert post(address, [piece(i) for i in range(3)], TOKEN).status_code == 413
        assert post(address, [piece(tokens=range(1000))], TOKEN).status_code == 413
        assert sums.num_pieces == 0, "what is refused reaches no model"
        answer = post(address, [piece(), piece(2, final=True)], TOKEN)
        assert answer.json() == {"rows": [{"id": 1, "known": 2, "score": None}, {"id": 2, "known": 2, "score": 3.0}]}


@pytest.mark.parametrize("rows", [
    [], [piece(), piece()], [piece() | {"tokens": [1.5]}], [piece() | {"tokens": [-1]}], [piece() | {"more": 1}],
    [piece() | {"offset": -1}], [piece() | {"final": 1}], [piece() | {"tokens": [2**31]}], {},
], ids=lambda rows: str(rows)[:50])  # fmt: skip
def test_what_is_no_request_is_answered_with_a_reason(rows: Any, address: str) -> None:
    answer = post(address, rows)
    assert answer.status_code == 422 and answer.json()["error"]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served(Sums()) as found:
        yield found


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any]]:
    folder = tmp_path_factory.mktemp("scorer")
    model = save_tiny(folder / "rm", "llama", "scalar")
    config = folder / "scorer.yaml"
    config.write_text(
        f"reward: {{checkpoint: {folder / 'rm'}}}\nport: 0\nmax_tokens: 64\nsequences: 3\n"
        "runtime: {device: cpu, micro_batch_tokens: 7}\n"
    )
    command = [sys.executable, "-m", "oppo_megatron", "serve", str(config)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("serving streamed rewards at http://127.0.0.1:"), line
    yield line.split()[-1], model
    process.terminate()
    process.wait(60)


def test_scores_of_streamed_sequences_are_the_models_of_whole_ones(service: tuple[str, Any]) -> None:
    address, model = service
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(1, 64, (length,), generator=generator).tolist() for length in (5, 64, 23, 40, 1)]
    with streaming_to(address) as stream:
        for end in range(1, 65, 3):
            for seq_id, tokens in enumerate(sequences):
                stream.put(seq_id, tokens[: min(end, len(tokens) - 1)], final=False)
        for seq_id, tokens in enumerate(sequences):
            stream.put(seq_id, tokens, final=True)
        scores = [stream.result(seq_id) for seq_id in range(len(sequences))]
    with torch.no_grad():
        expected = [float(model.score(model.model(torch.tensor([tokens]))[0])[0, -1, 0]) for tokens in sequences]
    assert scores == pytest.approx(expected, abs=1e-4)
    for row, text in [  # which the model cannot read
        (piece(tokens=range(65)), "must have 1 to max_tokens 64"),
        (piece(tokens=[64]), "token id 64, but the reward model knows 64"),
        (piece(checksum=0), "the checksum does not fit its 2 tokens"),
    ]:
        answer = post(address, [row])
        assert answer.status_code == 422 and text in answer.json()["error"]


@pytest.mark.parametrize(("decoded", "taken"), [(" one two\N{REPLACEMENT CHARACTER}", [3, 4]), ("other words", [7, 0])])
def test_ids_of_another_tokenizer_are_not_taken_for_those_of_the_model(decoded: str, taken: list[int]) -> None:
    tokenizer = mock.Mock(eos_id=0, adds_bos=False, encode=lambda text: [7], decode=lambda ids: decoded)
    scorer = ModelScorer(mock.Mock(shape=mock.Mock(vocab_size=8)), tokenizer, 64, 64, torch.device("cpu"))
    item = Item(id=0, prompt="one ", response="two", tokens=[3, 4])
    with mock.patch("oppo_megatron.serving.model_scorer.pack_at", side_effect=InterruptedError) as packed:
        with pytest.raises(InterruptedError):
            scorer.scores([item])
    assert packed.call_args.args[0] == [taken]

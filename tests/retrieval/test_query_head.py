"""The query head: its features by hand, a conversation that is read once, and what it refuses."""

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gerund.errors import ConfigError, DataError, FingerprintError, TextError
from gerund.inference.generate.session import read_with_states
from gerund.retrieval.documents import Chunking, Document
from gerund.retrieval.index import open_index
from gerund.retrieval.query_head import ConversationReader, QueryHead, states_of
from gerund.retrieval.question_answering import PendingAnswer, Question
from tests.cli.helpers import run_cli
from tests.retrieval.test_question_answering import chat_model

WORDS = (
    *("bread", "flour", "railway", "steam", "barn", "swallow", "mud", "river"),
    *("sea", "wave", "engine", "salt", "yeast", "dough", "roof", "station"),
)
FIRST, SECOND = "what of the steam engine?", "and the barn?"
TURN = [{"role": "user", "content": FIRST}, {"role": "assistant", "content": "It moves."}]


def documents() -> list[Document]:
    chance = random.Random(0)
    texts = [". ".join(" ".join(chance.sample(WORDS, 5)).capitalize() for _ in range(3)) + "." for _ in range(12)]
    return [Document(f"{number}.txt", text) for number, text in enumerate(texts)]


@pytest.fixture(scope="module")
def lm() -> Any:
    return chat_model()


@pytest.fixture(scope="module")
def index(lm: Any) -> Any:
    made = open_index(None, lm, chunking=Chunking(tokens=200))
    made.add_documents(documents())
    made.fit_query_head(30)
    return made


def asked(question: str, history: Any = ()) -> Question:
    return Question.of(question, 3, {"chat": True, "history": history, "method": "generate", "fallback": False})


def test_the_head_is_ridge_regression_on_means_of_states(index: Any, lm: Any) -> None:
    head = index.query_head
    reader = ConversationReader(lm, head)
    vector = reader.vector(asked(FIRST))
    ids = reader.prompter.without_sources(FIRST, ())
    with_sources = reader.prompter.prompt_ids(reader.prompter.prompt(FIRST, [], ()))
    assert with_sources[: len(ids)] == ids
    [states] = [read_with_states(lm, ids)[1]]
    depths = [states[round(depth * (len(states) - 1))][0].float().numpy() for depth in (0, 1 / 3, 2 / 3, 1)]
    [(begin, end)] = reader._turns(asked(FIRST), ids, 0)
    assert (lm.tokenizer.decode(ids[begin:end]).strip(), end) == (FIRST, len(ids))
    rarity = head.rarity[ids[begin:]]
    plain = [depth[begin:].mean(axis=0) for depth in depths]
    rare = [rarity @ depth[begin:] / rarity.sum() for depth in depths]
    features = np.concatenate([*plain, *rare])
    expected = (features - head.means) / head.scales @ head.weights + head.bias
    assert np.allclose(vector, expected / np.linalg.norm(expected), atol=1e-4)


def test_a_conversation_is_read_once(index: Any, lm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, fresh = ConversationReader(lm, index.query_head), ConversationReader(lm, index.query_head)
    read: list[int] = []

    def counted(lm: Any, ids: Any, session: Any = None) -> Any:
        read.append(len(ids))
        return states_of(lm, ids, session)

    monkeypatch.setattr("gerund.retrieval.query_head.states_of", counted)
    reader.vector(asked(FIRST))
    follow = reader.vector(asked(SECOND, TURN))
    assert np.allclose(follow, fresh.vector(asked(SECOND, TURN)), atol=1e-4)
    whole = reader.prompter.without_sources(SECOND, TURN)
    assert read[0] + read[1] == read[2] == len(whole)
    assert not np.allclose(follow, fresh.vector(asked(SECOND)), atol=1e-3)


def test_the_answer_goes_on_from_what_was_read(index: Any, lm: Any) -> None:
    pending = index.prepare(asked(FIRST))
    assert isinstance(pending, PendingAnswer)
    assert pending.session is not None
    beginning = pending.session.token_ids
    assert pending.prompt.ids[: len(beginning)] == beginning
    assert len(beginning) > 100
    answer = index.ask(FIRST, 3, chat=True, method="generate", fallback=False, max_new_tokens=6)
    expected = lm.generate(pending.prompt.ids, 6)[0]
    assert answer.usage == expected.usage
    follow = index.ask(SECOND, 3, chat=True, history=TURN, method="extractive")
    assert follow.found


def test_without_a_head_or_a_chat_the_query_is_encoded(index: Any, lm: Any) -> None:
    other = open_index(None, lm, chunking=Chunking(tokens=200))
    other.add_documents(documents())
    question = "which barn has a swallow?"
    assert other.query_head is None
    assert other.ask(question, 3, chat=True, method="extractive") == index.ask(question, 3, method="extractive")


def test_the_oldest_turns_go_where_the_context_is_full(index: Any, lm: Any) -> None:
    long = [{"role": "user", "content": "x " * 300}, {"role": "assistant", "content": "y " * 300}]
    reader = ConversationReader(lm, index.query_head)
    vector = reader.vector(asked(FIRST, [*long, *long, *TURN]))
    assert np.array_equal(vector, ConversationReader(lm, index.query_head).vector(asked(FIRST, TURN)))
    with pytest.raises(TextError):
        reader.vector(asked("x " * 2000))


def test_a_head_is_stored_with_its_index(lm: Any, tmp_path: Path) -> None:
    pytest.importorskip("lancedb", reason="needs gerund[index]")
    where = tmp_path / "my.index"
    made = open_index(where, lm, chunking=Chunking(tokens=200))
    made.add_documents(documents())
    head = made.fit_query_head(30)
    again = open_index(where, lm).query_head
    assert again is not None
    assert (again.model, again.encoder) == (lm.weights_hash, lm.fingerprint())
    assert np.array_equal(again.weights, head.weights)
    path = where / "query-head.safetensors"
    with pytest.raises(FingerprintError, match="another model"):
        QueryHead.load(path, lm, "another")
    path.write_bytes(b"no head")
    with pytest.raises(DataError, match="--query-head makes it anew"):
        open_index(where, lm).ask(FIRST, chat=True)
    shutil.rmtree(where)


def test_what_cannot_be_fitted(lm: Any) -> None:
    index = open_index(None, lm, chunking=Chunking(tokens=200))
    with pytest.raises(DataError, match="no index yet"):
        index.fit_query_head()
    index.add_documents([Document("a", "One sentence about bread.")])
    with pytest.raises(DataError, match="has 1 sentences"):
        index.fit_query_head()
    with pytest.raises(ConfigError, match="texts=0"):
        index.fit_query_head(0)


def test_the_command_line(tmp_path: Path) -> None:
    given = run_cli("ask", tmp_path, "what?", "--chat")
    assert (given.code, "one per line" in given.err) == (2, True)
    watched = run_cli("index", tmp_path, "-o", tmp_path / "i", "--query-head", "--watch")
    assert (watched.code, "--query-head has no use with --watch" in watched.err) == (2, True)


def test_each_line_is_a_turn(index: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gerund.cli.ask.open_existing", lambda *_: index)
    monkeypatch.setattr("gerund.cli.ask._demand_there", lambda *_: None)
    said = run_cli("ask", "my.index", "--chat", "--extractive", stdin=f"{FIRST}\n\n{SECOND}\n")
    assert said.code == 0
    first = index.ask(FIRST, chat=True, method="extractive")
    history = [{"role": "user", "content": FIRST}, {"role": "assistant", "content": first.text}]
    second = index.ask(SECOND, chat=True, method="extractive", history=history)
    assert first.text in said.out
    assert second.text in said.out
    assert ">" not in said.out

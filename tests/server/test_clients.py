"""The clients that people use, each as its own documentation says, against a server with a tiny model."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from pydantic import BaseModel

from tests.server.conftest import Running

# Some of the clients leave their connections to the garbage collector, or use what newer libraries warn of.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

HELLO: Any = [{"role": "user", "content": "Hello"}]
TEXTS = ["a cat", "the dogs run"]


@pytest.fixture(scope="module")
def openai(live: Running) -> Iterator[Any]:
    module = pytest.importorskip("openai")
    client = module.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)
    yield client
    client.close()


def same_vectors(found: Any, expected: np.ndarray) -> bool:
    return np.allclose(np.asarray(found, dtype=np.float32), expected, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------- openai


def test_openai_chat_stream(openai: Any, served_lm: Any) -> None:
    chunks = list(
        openai.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=6, temperature=0, stream=True,
            stream_options={"include_usage": True}, logprobs=True, top_logprobs=2,
        )
    )  # fmt: skip
    [expected] = served_lm.chat(HELLO, 6, logprobs=2)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(one.choices[0].delta.content or "" for one in chunks if one.choices) == expected.text
    logprobs = [one for chunk in chunks if chunk.choices and chunk.choices[0].logprobs
                for one in chunk.choices[0].logprobs.content]  # fmt: skip
    assert [one.logprob for one in logprobs] == pytest.approx([one.logprob for one in expected.logprobs], abs=1e-4)
    assert all(len(one.top_logprobs) == 2 for one in logprobs)
    assert not chunks[-1].choices
    assert chunks[-1].usage.completion_tokens == expected.usage.completion_tokens


def test_openai_parse(openai: Any) -> None:
    pytest.importorskip("llguidance")

    class Answer(BaseModel):
        yes: bool

    found = openai.chat.completions.parse(model="tiny", messages=HELLO, response_format=Answer, temperature=0)
    assert isinstance(found.choices[0].message.parsed, Answer)
    assert found.choices[0].finish_reason == "stop"


def test_openai_embeddings(openai: Any, served_lm: Any) -> None:
    found = openai.embeddings.create(model="tiny", input=TEXTS)  # as base64, which the client reads
    assert same_vectors([one.embedding for one in found.data], served_lm.encode(TEXTS))
    assert found.usage.prompt_tokens == sum(served_lm.encode_with_usage(TEXTS).token_counts)
    assert found.fingerprint == served_lm.fingerprint()


# ------------------------------------------------------------------------------------------------------------- cohere


@pytest.mark.parametrize("version", [1, 2])
def test_cohere_rerank(live: Running, served_lm: Any, version: int) -> None:
    module = pytest.importorskip("cohere")
    make = module.Client if version == 1 else module.ClientV2
    documents = ["the cat", "rain and sun", "a dog"]
    with httpx.Client() as transport:
        client = make(api_key="none", base_url=live.url, httpx_client=transport)
        found = client.rerank(model="tiny", query="the dog", documents=documents, top_n=2)
    expected = served_lm.rerank("the dog", documents, 2)
    assert [one.index for one in found.results] == expected.indices
    assert [one.relevance_score for one in found.results] == pytest.approx(expected.scores, abs=1e-5)


# ---------------------------------------------------------------------------------------------------------- langchain


def langchain(live: Running, name: str, **more: Any) -> Any:
    module = pytest.importorskip("langchain_openai", reason="needs gerund[clients]")
    return getattr(module, name)(base_url=f"{live.url}/v1", api_key="none", model="tiny", max_retries=0, **more)


@pytest.mark.slow
def test_langchain_writes(live: Running, served_lm: Any) -> None:
    [expected] = served_lm.chat(HELLO, 6)
    chat = langchain(live, "ChatOpenAI", temperature=0, max_tokens=6)
    assert chat.invoke("Hello").content == expected.text
    assert "".join(one.content for one in chat.stream("Hello")) == expected.text
    legacy = langchain(live, "OpenAI", temperature=0, max_tokens=6)
    assert legacy.invoke("Hello") == served_lm.generate("Hello", 6)[0].text


def test_langchain_by_texts_and_by_the_tokens_of_this_tokenizer(
    live: Running, served_lm: Any, served_folder: Path
) -> None:
    own = {"tiktoken_enabled": False, "tiktoken_model_name": str(served_folder), "embedding_ctx_length": 500}
    for settings in ({"check_embedding_ctx_length": False}, own):
        embeddings = langchain(live, "OpenAIEmbeddings", **settings)
        assert same_vectors(embeddings.embed_documents(TEXTS), served_lm.encode(TEXTS))
    assert same_vectors(embeddings.embed_query("a cat"), served_lm.encode("a cat"))
    # That client spells its pieces out again; one that sends the ids themselves gets the same.
    ids = [served_lm.tokenizer.encode(text) for text in TEXTS]
    found = embeddings.client.create(input=ids, model="tiny", encoding_format="float")
    assert same_vectors([one.embedding for one in found.data], served_lm.encode(TEXTS))


# --------------------------------------------------------------------------------------------- LlamaIndex and Haystack


@pytest.mark.slow
def test_llama_index_embeds_texts(live: Running, served_lm: Any) -> None:
    module = pytest.importorskip("llama_index.embeddings.openai_like", reason="needs gerund[clients]")
    embedding = module.OpenAILikeEmbedding(model_name="tiny", api_base=f"{live.url}/v1", api_key="none")
    assert same_vectors(embedding.get_text_embedding_batch(["a\ncat", "dog"]), served_lm.encode(["a cat", "dog"]))


@pytest.mark.slow
def test_haystack(live: Running, served_lm: Any) -> None:
    pytest.importorskip("haystack", reason="needs gerund[clients]")
    from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage, Document
    from haystack.utils import Secret

    own = {"api_key": Secret.from_token("none"), "api_base_url": f"{live.url}/v1", "model": "tiny"}
    assert same_vectors(OpenAITextEmbedder(**own).run("a cat")["embedding"], served_lm.encode("a cat"))
    found = OpenAIDocumentEmbedder(**own).run([Document(content=text) for text in TEXTS])["documents"]
    assert same_vectors([one.embedding for one in found], served_lm.encode(TEXTS))
    pieces: list[str] = []
    chat = OpenAIChatGenerator(**own, generation_kwargs={"temperature": 0, "max_tokens": 6},
                               streaming_callback=lambda chunk: pieces.append(chunk.content))  # fmt: skip
    [answer] = chat.run([ChatMessage.from_user("Hello")])["replies"]
    [expected] = served_lm.chat(HELLO, 6)
    assert answer.text == "".join(pieces) == expected.text
    assert math.isfinite(expected.score)

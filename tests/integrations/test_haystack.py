"""gerund inside Haystack: what it gives is what gerund gives, in pipelines that can be stored."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

import gerund
from gerund.errors import ConfigError, ModelError, TextError
from tests.inference.generate.test_prompts import chat_tokenizer
from tests.integrations.common import PLAIN_HELLO, TEXTS, chat_model
from tests.tiny import tiny

# Haystack counts its users over the network unless it is told not to, before it is imported.
with pytest.MonkeyPatch.context() as patch:
    patch.setenv("HAYSTACK_TELEMETRY_ENABLED", "False")
    pytest.importorskip("haystack", reason="haystack-ai is not installed")
    from haystack import Document, Pipeline
    from haystack.components.retrievers.in_memory import InMemoryEmbeddingRetriever
    from haystack.dataclasses import ChatMessage, ImageContent, StreamingChunk
    from haystack.document_stores.in_memory import InMemoryDocumentStore

    from gerund.integrations.haystack import (
        GerundChatGenerator,
        GerundDocumentEmbedder,
        GerundRanker,
        GerundRetriever,
        GerundTextEmbedder,
    )

pytestmark = pytest.mark.slow

HELLO = [ChatMessage.from_system("Be kind."), ChatMessage.from_user("the cat")]
QUESTION = "what is bread made of"


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    return [Document(content=text, meta={"title": text.split()[0]}) for text in TEXTS]


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    tokenizer = chat_tokenizer()
    tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=512).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def keep(chunk: StreamingChunk) -> None:
    kept.append(chunk)


kept: list[StreamingChunk] = []


def test_embedders(documents: list[Document]) -> None:
    lm = chat_model()
    found = GerundDocumentEmbedder(lm).run(documents)
    np.testing.assert_allclose(
        [one.embedding for one in found["documents"]], lm.encode(TEXTS, prompt_name="document"), atol=1e-5
    )
    assert found["meta"] == {"model": lm.name}
    assert documents[0].embedding is None
    titled = GerundDocumentEmbedder(lm, prompt="P:", meta_fields_to_embed=["title", "x"]).run(documents[:1])
    wanted = lm.encode(f"Bread\n{TEXTS[0]}", prompt="P:")
    np.testing.assert_allclose(titled["documents"][0].embedding, wanted, atol=1e-5)
    own = GerundTextEmbedder(lm).run("bread")["embedding"]
    np.testing.assert_allclose(own, lm.encode("bread", prompt_name="query"), atol=1e-5)
    with pytest.raises(ConfigError, match="embeds one text"):
        GerundTextEmbedder(lm).run(["bread"])
    with pytest.raises(ConfigError, match="embeds a list of documents"):
        GerundDocumentEmbedder(lm).run("bread")


def test_a_pipeline(documents: list[Document], bundled: gerund.LanguageModel) -> None:
    store = InMemoryDocumentStore()
    store.write_documents(GerundDocumentEmbedder(bundled).run(documents)["documents"])
    pipeline = Pipeline()
    pipeline.add_component("embedder", GerundTextEmbedder(bundled))
    pipeline.add_component("retriever", InMemoryEmbeddingRetriever(store, top_k=3))
    pipeline.add_component("ranker", GerundRanker(bundled, top_k=1))
    pipeline.connect("embedder.embedding", "retriever.query_embedding")
    pipeline.connect("retriever.documents", "ranker.documents")
    found = pipeline.run({"embedder": {"text": QUESTION}, "ranker": {"query": QUESTION}})
    assert [one.content for one in found["ranker"]["documents"]] == [TEXTS[0]]


def test_ranker(documents: list[Document], bundled: gerund.LanguageModel) -> None:
    found = GerundRanker(bundled).run(QUESTION, [*documents, Document(content=None)], top_k=2)["documents"]
    ranking = bundled.rerank(QUESTION, TEXTS, 2)
    assert [(one.content, one.score) for one in found] == [
        (TEXTS[place], score) for place, score in zip(ranking.indices, ranking.scores, strict=True)
    ]
    assert GerundRanker(bundled).run(QUESTION, []) == {"documents": []}


def test_chat() -> None:
    lm = chat_model()
    sampling = gerund.Sampling(temperature=1.0, top_p=0.9, seed=3)
    [own] = lm.chat(PLAIN_HELLO, 8, sampling)
    generator = GerundChatGenerator(
        lm, generation_kwargs={"max_new_tokens": 8, "temperature": 1.0, "top_p": 0.9, "seed": 3}
    )
    [reply] = generator.run(HELLO)["replies"]
    assert reply.text == own.text
    assert reply.meta["usage"]["total_tokens"] == own.usage.total_tokens
    assert (reply.meta["finish_reason"], reply.meta["model"]) == ("length", lm.name)
    assert len(generator.run("the cat", generation_kwargs={"n": 2})["replies"]) == 2
    kept.clear()
    [streamed] = generator.run(HELLO, streaming_callback=keep)["replies"]
    assert "".join(one.content for one in kept) == streamed.text == own.text
    assert kept[-1].finish_reason == "length"


def test_asynchronous_chat() -> None:
    lm = chat_model()
    [own] = lm.chat(PLAIN_HELLO, 8)
    generator, pieces = GerundChatGenerator(lm, generation_kwargs={"max_new_tokens": 8}), []

    async def keep_later(chunk: StreamingChunk) -> None:
        pieces.append(chunk.content)

    async def both() -> list[str]:
        whole = await generator.run_async(HELLO)
        streamed = await generator.run_async(HELLO, streaming_callback=keep_later)
        # One that does not wait is taken too.
        plain = await generator.run_async(HELLO, streaming_callback=lambda chunk: None)
        return [one["replies"][0].text for one in (whole, streamed, plain)]

    assert asyncio.run(both()) == [own.text] * 3
    assert "".join(pieces) == own.text


def test_mistakes(bundled: gerund.LanguageModel) -> None:
    with pytest.raises(ModelError, match="this model has no chat template"):
        GerundChatGenerator(bundled)
    with pytest.raises(ModelError, match="this model has no chat template"):
        GerundChatGenerator().run(HELLO)
    with pytest.raises(ConfigError, match="unknown setting 'top_q'"):
        GerundChatGenerator(generation_kwargs={"top_q": 1})
    with pytest.raises(ConfigError, match="takes no tools"):
        GerundChatGenerator(chat_model()).run(HELLO, tools=[object()])
    with pytest.raises(ConfigError, match=r"what gerund\.load takes or gives"):
        GerundTextEmbedder(5).run("a")
    image = ChatMessage.from_user(content_parts=["See:", ImageContent("aGk=", mime_type="image/png", validation=False)])
    with pytest.raises(TextError, match="image"):
        GerundChatGenerator(chat_model()).run([image])


def test_stored_pipelines_share_their_model(chat_folder: Path, tmp_path: Path) -> None:
    spec = gerund.ModelSpec(model=str(chat_folder), k=1)
    pipeline = Pipeline()
    pipeline.add_component("embedder", GerundTextEmbedder(spec, prompt="Q:"))
    pipeline.add_component("documents", GerundDocumentEmbedder(gerund.load(spec)))
    pipeline.add_component("chat", GerundChatGenerator(spec, generation_kwargs={"seed": 3}, streaming_callback=keep))
    pipeline.add_component("ranker", GerundRanker(str(chat_folder), by="likelihood"))
    pipeline.add_component("retriever", GerundRetriever(tmp_path / "my.index", search={"mode": "words"}))
    again = Pipeline.loads(pipeline.dumps(), allowed_modules=["gerund.integrations.haystack", __name__])
    assert again.to_dict() == pipeline.to_dict()
    embedder, chat = again.get_component("embedder"), again.get_component("chat")
    assert embedder.lm is chat.lm
    assert embedder.lm.spec.k == 1
    assert chat.streaming_callback is keep
    assert again.get_component("ranker").by == "likelihood"
    with pytest.raises(ConfigError, match="save it first"):
        GerundTextEmbedder(chat_model()).to_dict()


def test_retriever(index: gerund.Index) -> None:
    [own] = index.search("rails", 1)
    [found] = GerundRetriever(index).run("rails", top_k=1)["documents"]
    assert (found.content, found.score, found.meta["source"]) == (own.text, own.score, own.source)
    [word] = GerundRetriever(index, search={"mode": "words"}).run("rails", top_k=1)["documents"]
    assert word.meta["similarity"] is None
    with pytest.raises(ConfigError, match="the place of its index"):
        GerundRetriever(index).to_dict()

"""gerund inside LlamaIndex: what it gives is what gerund gives, and LlamaIndex's own machinery takes it."""

import asyncio
import warnings

import numpy as np
import pytest
from pydantic import ValidationError

import gerund
from gerund.errors import ConfigError, ModelError, TextError
from tests.integrations.common import PLAIN_HELLO, TEXTS, chat_model

with warnings.catch_warnings():
    # Its dependencies warn of each other while they are imported.
    warnings.simplefilter("ignore")
    pytest.importorskip("llama_index.core", reason="llama-index-core is not installed")
    from llama_index.core import Document, VectorStoreIndex
    from llama_index.core.base.llms.types import ChatMessage, ImageBlock
    from llama_index.core.query_engine import RetrieverQueryEngine
    from llama_index.core.schema import NodeWithScore, TextNode

    from gerund.integrations.llama_index import GerundEmbedding, GerundLLM, GerundRerank, GerundRetriever

pytestmark = pytest.mark.slow

HELLO = [ChatMessage(role="system", content="Be kind."), ChatMessage(role="user", content="the cat")]


def test_embeddings() -> None:
    lm = chat_model()
    model = GerundEmbedding(lm)
    wanted = lm.encode(TEXTS, prompt_name="document")
    np.testing.assert_allclose(model.get_text_embedding_batch(TEXTS), wanted, atol=1e-5)
    np.testing.assert_allclose(model.get_text_embedding(TEXTS[0]), wanted[0], atol=1e-5)
    np.testing.assert_allclose(model.get_query_embedding("bread"), lm.encode("bread", prompt_name="query"), atol=1e-5)
    np.testing.assert_allclose(asyncio.run(model.aget_text_embedding_batch(TEXTS)), wanted, atol=1e-5)
    found = asyncio.run(GerundEmbedding(lm, query_prompt="Ask:").aget_query_embedding("bread"))
    np.testing.assert_allclose(found, lm.encode("bread", prompt="Ask:"), atol=1e-5)
    assert model.to_dict()["class_name"] == "GerundEmbedding"


def test_an_index_of_llama_index(bundled: gerund.LanguageModel) -> None:
    documents = [Document(text=text) for text in TEXTS]
    made = VectorStoreIndex.from_documents(documents, embed_model=GerundEmbedding(bundled))
    [found] = made.as_retriever(similarity_top_k=1).retrieve("what is bread made of")
    assert found.text == TEXTS[0]


def test_completion(bundled: gerund.LanguageModel) -> None:
    [own] = bundled.generate("The old man", 6)
    model = GerundLLM(bundled, max_tokens=6)
    assert not model.metadata.is_chat_model
    assert model.metadata.context_window == bundled.max_length
    assert GerundLLM(gerund.load(max_length=64)).metadata.context_window == bundled.max_length
    with pytest.raises(ConfigError, match="n=2: LlamaIndex takes one text of a call"):
        model.complete("The", n=2, temperature=1)
    done = model.complete("The old man")
    assert (done.text, done.raw["usage"]["total_tokens"]) == (own.text, own.usage.total_tokens)
    *pieces, last = model.stream_complete("The old man")
    assert "".join(one.delta for one in pieces) == pieces[-1].text == last.text == own.text
    assert last.raw["finish_reason"] == "length"

    async def asynchronous() -> tuple[str, str]:
        pieces = [one.delta async for one in await model.astream_complete("The old man")]
        return "".join(pieces), (await model.acomplete("The old man")).text

    assert asyncio.run(asynchronous()) == (own.text, own.text)


def test_chat() -> None:
    lm = chat_model()
    sampling = gerund.Sampling(temperature=1.0, top_p=0.9, seed=3)
    [own] = lm.chat(PLAIN_HELLO, 8, sampling)
    model = GerundLLM(lm, max_tokens=8, temperature=1.0, additional_kwargs={"top_p": 0.9, "seed": 3})
    assert model.metadata.is_chat_model
    assert model.chat(HELLO).message.content == own.text
    assert "".join(one.delta for one in model.stream_chat(HELLO)) == own.text
    assert model.chat(HELLO, seed=4).message.content != own.text

    async def asynchronous() -> tuple[str, str]:
        pieces = [one.delta async for one in await model.astream_chat(HELLO)]
        return "".join(pieces), (await model.achat(HELLO)).message.content

    assert asyncio.run(asynchronous()) == (own.text, own.text)


def test_mistakes(bundled: gerund.LanguageModel) -> None:
    with pytest.raises(ModelError, match="this model has no chat template"):
        GerundLLM(bundled).chat(HELLO)
    with pytest.raises(ConfigError, match="unknown setting 'top_q'"):
        GerundLLM(bundled, additional_kwargs={"top_q": 1})
    with pytest.raises(ValidationError, match="wrong"):
        GerundLLM(bundled, wrong=1)
    with pytest.raises(ConfigError, match=r"what gerund\.load takes or gives"):
        GerundEmbedding(5)
    with pytest.raises(TextError, match="image"):
        GerundLLM(chat_model()).chat([ChatMessage(role="user", blocks=[ImageBlock(url="http://127.0.0.1/a.png")])])
    with pytest.raises(ModelError, match="knows no tools"):
        GerundLLM(chat_model()).chat([ChatMessage(role="tool", content="5", additional_kwargs={"tool_call_id": "1"})])


def test_what_is_found(index: gerund.Index) -> None:
    [own] = index.search("rails", 1)
    retriever = GerundRetriever(index, k=1)
    [found] = retriever.retrieve("rails")
    assert (found.text, found.score, found.metadata["source"]) == (own.text, own.score, own.source)
    [later] = asyncio.run(retriever.aretrieve("rails"))
    assert later.node_id == found.node_id == f"{own.source}:{own.start}-{own.end}"
    [word] = GerundRetriever(index, k=1, mode="words").retrieve("rails")
    assert word.metadata["similarity"] is None


def test_what_is_kept(bundled: gerund.LanguageModel) -> None:
    nodes = [NodeWithScore(node=TextNode(text=text, metadata={"x": "y"}), score=0.5) for text in [*TEXTS, ""]]
    for one in nodes:
        one.node.excluded_embed_metadata_keys = ["x"]
    found = GerundRerank(bundled, top_n=2).postprocess_nodes(nodes, query_str="what is bread made of")
    ranking = bundled.rerank("what is bread made of", TEXTS, 2, scores=[0.5] * 3)  # those of the nodes
    assert [one.text for one in found] == [TEXTS[place] for place in ranking.indices]
    assert [one.score for one in found] == ranking.scores
    assert [one.score for one in nodes] == [0.5] * 4
    assert GerundRerank(bundled).postprocess_nodes([], query_str="bread") == []
    with pytest.raises(TextError, match="the query is empty"):
        GerundRerank(bundled).postprocess_nodes(nodes)


def test_a_whole_engine(index: gerund.Index, bundled: gerund.LanguageModel) -> None:
    engine = RetrieverQueryEngine.from_args(
        GerundRetriever(index, k=3),
        llm=GerundLLM(bundled, max_tokens=4),
        node_postprocessors=[GerundRerank(bundled, top_n=1)],
    )
    answer = engine.query("what is bread made of")
    assert [one.text for one in answer.source_nodes] == [TEXTS[0]]

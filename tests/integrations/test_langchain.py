"""gerund inside LangChain: its standard tests, and that what it gives is what gerund gives."""

import asyncio
from typing import Any, Literal

import numpy as np
import pytest
from pydantic import BaseModel, ValidationError

import gerund
from gerund.errors import ConfigError, ModelError
from tests.integrations.common import PLAIN_HELLO, TEXTS, chat_model

pytest.importorskip("langchain_core", reason="langchain-core is not installed")
pytest.importorskip("langchain_tests", reason="langchain-tests is not installed")
from langchain_core.documents import Document
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_tests.integration_tests import (
    ChatModelIntegrationTests,
    EmbeddingsIntegrationTests,
    RetrieversIntegrationTests,
)
from langchain_tests.unit_tests import ChatModelUnitTests, EmbeddingsUnitTests

from gerund.integrations.langchain import ChatGerund, GerundEmbeddings, GerundLLM, GerundReranker, GerundRetriever

HELLO = [SystemMessage("Be kind."), HumanMessage("the cat")]

# What is asynchronous in the standard tests runs by anyio's plugin.
pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def benchmark() -> Any:
    """Stand in for the plugin's: call, and measure nothing."""
    return lambda function, *arguments, **settings: function(*arguments, **settings)


@pytest.fixture
def vcr() -> None:
    """Stand in for the plugin's: there is no request to record."""


@pytest.fixture
def snapshot() -> None:
    """Stand in for the plugin's: nothing of ours is serialized."""


class _Chat:
    """What both sets of standard tests for chat models are told."""

    chat_model_class = ChatGerund
    chat_model_params = {"lm": chat_model()}  # noqa: RUF012
    # There is no request that could time out or be sent again.
    standard_chat_model_params = {"temperature": 0, "max_tokens": 8, "stop": []}  # noqa: RUF012
    supports_model_override = False


class TestChatUnit(_Chat, ChatModelUnitTests):
    pass


class TestChatIntegration(_Chat, ChatModelIntegrationTests):
    # A model of noise never ends a string of JSON at temperature 0, and after some tokens where it samples.
    structured_output_kwargs = {"temperature": 1.0, "max_tokens": 400, "seed": 9}  # noqa: RUF012
    has_tool_calling = False  # it would have to call tools by itself
    # What is asynchronous is the same in a thread, which shorter tests than this one try too.
    test_structured_output_async = pytest.mark.full(ChatModelIntegrationTests.test_structured_output_async)
    # Other versions and kinds of the same schema.
    test_structured_output_pydantic_2_v1 = pytest.mark.full(
        ChatModelIntegrationTests.test_structured_output_pydantic_2_v1
    )
    test_structured_output_optional_param = pytest.mark.full(
        ChatModelIntegrationTests.test_structured_output_optional_param
    )


class TestEmbeddingsUnit(EmbeddingsUnitTests):
    embeddings_class = GerundEmbeddings
    embedding_model_params = {"lm": chat_model()}  # noqa: RUF012


class TestEmbeddingsIntegration(EmbeddingsIntegrationTests):
    embeddings_class = GerundEmbeddings
    embedding_model_params = {"lm": chat_model()}  # noqa: RUF012


class TestRetriever(RetrieversIntegrationTests):
    retriever_constructor = GerundRetriever
    retriever_query_example = "what is bread made of"

    @pytest.fixture(autouse=True)
    def _with_index(self, index: gerund.Index) -> None:
        type(self).retriever_constructor_params = {"index": index}


class TestChat:
    def test_text_usage_and_end(self) -> None:
        lm = chat_model()
        [own] = lm.chat(PLAIN_HELLO, 8)
        message = ChatGerund(lm=lm, max_tokens=8).invoke(HELLO)
        assert message.content == own.text
        assert message.usage_metadata["total_tokens"] == own.usage.total_tokens
        assert message.response_metadata["finish_reason"] == own.finish_reason == "length"
        assert message.response_metadata["model_name"] == lm.name

    def test_streams_are_the_text(self) -> None:
        model = ChatGerund(lm=chat_model(), max_tokens=8)
        whole = model.invoke(HELLO)
        added = AIMessageChunk(content="")
        for chunk in model.stream(HELLO):
            added += chunk
        assert (added.content, added.usage_metadata) == (whole.content, whole.usage_metadata)
        assert added.response_metadata["finish_reason"] == "length"

        async def asynchronous() -> tuple[str, str]:
            pieces = [chunk.content async for chunk in model.astream(HELLO)]
            return "".join(pieces), (await model.ainvoke(HELLO)).content

        assert asyncio.run(asynchronous()) == (whole.content, whole.content)

    def test_settings_of_the_model_and_of_the_call(self) -> None:
        lm = chat_model()
        model = ChatGerund(lm=lm, max_tokens=8, temperature=1.0, top_p=0.9, seed=3, stop=["e"])
        wanted = lm.chat(PLAIN_HELLO, 8, gerund.Sampling(temperature=1.0, top_p=0.9, seed=3), stop=["e", "x"])
        assert model.invoke(HELLO, stop=["x"]).content == wanted[0].text
        other = model.invoke(HELLO, seed=4, max_tokens=12, logprobs=1)
        assert other.content != wanted[0].text
        assert len(other.response_metadata["logprobs"]) <= 12
        both = model.generate([HELLO], n=2)
        assert len(both.generations[0]) == 2

    def test_mistakes(self, bundled: gerund.LanguageModel) -> None:
        with pytest.raises(ModelError, match="this model has no chat template"):
            ChatGerund(lm=bundled)
        with pytest.raises(ValidationError, match="max_token"):
            ChatGerund(lm=chat_model(), max_token=5)
        with pytest.raises(ConfigError, match="unknown setting 'model'"):
            ChatGerund(lm=chat_model()).invoke("a", model="another")
        with pytest.raises(ConfigError, match=r"what gerund\.load takes or gives"):
            ChatGerund(lm=5)
        with pytest.raises(ModelError, match="knows no tools"):
            ChatGerund(lm=chat_model()).invoke([*HELLO, ToolMessage("5", tool_call_id="1")])
        with pytest.raises(ConfigError, match="unknown method 'magic'"):
            ChatGerund(lm=chat_model()).with_structured_output({}, method="magic")

    def test_structured_output(self) -> None:
        pytest.importorskip("llguidance", reason="llguidance is not installed")

        class Weather(BaseModel):
            rains: bool

        model = ChatGerund(lm=chat_model(), max_tokens=40)
        plain = {"type": "object", "properties": {"rains": {"type": "boolean"}}, "required": ["rains"]}
        assert set(model.with_structured_output(plain).invoke("Does it rain?")) == {"rains"}
        both = model.with_structured_output(Weather, include_raw=True).invoke("Does it rain?")
        assert isinstance(both["parsed"], Weather)
        assert both["parsing_error"] is None
        cut = model.with_structured_output(Weather, include_raw=True, max_tokens=2)
        short = cut.invoke("Does it rain?")
        assert (short["parsed"], type(short["parsing_error"]).__name__) == (None, "OutputParserException")

    def test_tokens_are_counted_without_a_network(self) -> None:
        lm = chat_model()
        assert ChatGerund(lm=lm).get_num_tokens("the cat") == len(lm.tokenizer("the cat", add_special_tokens=False)[0])


class TestCompletion:
    def test_batches(self, bundled: gerund.LanguageModel) -> None:
        prompts = ["The old man", "Bread is", "A"]
        wanted = [one.text for one in bundled.generate(prompts, 6)]
        model = GerundLLM(lm=bundled, max_tokens=6)
        assert model.batch(prompts) == wanted
        assert asyncio.run(model.abatch(prompts)) == wanted
        found = model.generate(prompts, temperature=1.0, n=2, seed=0)
        assert [len(own) for own in found.generations] == [2, 2, 2]
        assert found.llm_output["token_usage"]["output_tokens"] <= 36
        assert model.generate([]).generations == []

    def test_streams(self, bundled: gerund.LanguageModel) -> None:
        model = GerundLLM(lm=bundled, max_tokens=6)
        whole = model.invoke("The old man")
        assert "".join(model.stream("The old man")) == whole

        async def asynchronous() -> str:
            return "".join([piece async for piece in model.astream("The old man")])

        assert asyncio.run(asynchronous()) == whole


class TestEmbeddings:
    def test_prompts_of_queries_and_documents(self) -> None:
        lm = chat_model()
        model = GerundEmbeddings(lm=lm)
        np.testing.assert_allclose(model.embed_documents(TEXTS), lm.encode(TEXTS, prompt_name="document"), atol=1e-5)
        np.testing.assert_allclose(model.embed_query("bread"), lm.encode("bread", prompt_name="query"), atol=1e-5)
        other = GerundEmbeddings(lm=lm, query_prompt="Ask:")
        np.testing.assert_allclose(other.embed_query("bread"), lm.encode("bread", prompt="Ask:"), atol=1e-5)
        assert model.embed_documents([]) == []
        assert not any(model.embed_documents([" "])[0])


class TestRetrieval:
    def test_what_is_found(self, index: gerund.Index) -> None:
        [own] = index.search("rails", 1)
        [found] = GerundRetriever(index=index, k=1).invoke("rails")
        assert (found.page_content, found.metadata["source"], found.metadata["score"]) == (
            own.text,
            own.source,
            own.score,
        )
        assert found.id == f"{own.source}:{own.start}-{own.end}"
        [word] = GerundRetriever(index=index, k=1, mode="words").invoke("rails")
        assert word.metadata["similarity"] is None
        with pytest.raises(ConfigError, match="unknown mode"):
            GerundRetriever(index=index).invoke("rails", mode="x")

    def test_compressor(self, bundled: gerund.LanguageModel) -> None:
        documents = [Document(page_content=text, metadata={"at": place}) for place, text in enumerate([*TEXTS, " "])]
        found = GerundReranker(lm=bundled, top_n=2).compress_documents(documents, "what is bread made of")
        ranking = bundled.rerank("what is bread made of", TEXTS, 2)
        assert [one.metadata["at"] for one in found] == ranking.indices
        assert [one.metadata["relevance_score"] for one in found] == ranking.scores
        assert "relevance_score" not in documents[0].metadata
        assert len(GerundReranker(lm=bundled, top_n=None).compress_documents(documents, "bread")) == 3
        assert GerundReranker(lm=bundled).compress_documents([], "bread") == []


def forecast(city: Literal["Bonn", "Rome"]) -> str:
    """Get the weather forecast of a city."""
    return f"rain in {city}"


@pytest.mark.parametrize("streaming", [False, True])
def test_tools_are_bound_called_and_answered(streaming: bool) -> None:
    pytest.importorskip("llguidance")
    model = ChatGerund(lm=chat_model(context=2048), max_tokens=80, tool_prompt="generic", streaming=streaming)
    asked: list[Any] = [HumanMessage("What is the weather?")]
    answer = model.bind_tools([forecast], tool_choice="any", parallel_tool_calls=False).invoke(asked)
    [call] = answer.tool_calls
    assert (call["name"], call["args"]["city"] in ("Bonn", "Rome"), bool(call["id"])) == ("forecast", True, True)
    assert answer.response_metadata["finish_reason"] == "tool_calls"
    result = ToolMessage(forecast(**call["args"]), tool_call_id=call["id"])
    # The conversation goes on, with the call and its result.
    after = model.bind_tools([forecast], tool_choice="none").invoke([*asked, answer, result])
    assert not after.tool_calls
    assert after.usage_metadata["input_tokens"] > model.invoke(asked).usage_metadata["input_tokens"]
    named = model.bind_tools([forecast], tool_choice="forecast").invoke(asked)
    assert named.tool_calls[0]["name"] == "forecast"


def test_arguments_that_are_no_json_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = chat_model()
    broken = gerund.types.Generation("", [], 0.0, True, tool_calls=[gerund.types.ToolCall("forecast", "{city", "1")])
    monkeypatch.setattr(type(lm), "chat", lambda *_, **__: [broken])
    [call] = ChatGerund(lm=lm).bind_tools([forecast]).invoke("Hello").invalid_tool_calls
    assert (call["name"], call["args"], call["id"]) == ("forecast", "{city", "1")

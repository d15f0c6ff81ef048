"""Agents of LangChain and LlamaIndex around gerund's classes and its server: calls, their results and an answer."""

import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import anyio
import pytest

import gerund
from gerund.inference.generate.config import Constraint
from gerund.inference.generate.tools import ToolUse
from tests.integrations.common import chat_model
from tests.server.conftest import Running, with_tools  # noqa: F401 - a fixture

pytest.importorskip("llguidance", reason="needs gerund[structured]")

pytestmark = pytest.mark.slow

# A real model, where it lies beside the repository.
SMOLLM2 = Path(__file__).resolve().parents[3] / "real" / "SmolLM2-135M-Instruct.Q4_1.gguf"
TWO_CALLS = (
    '<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>'
    '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
)
ANSWER = "It rains in both."
QUESTION = "What is the weather in Rome?"


def weather(city: Literal["Bonn", "Rome"]) -> str:
    """Forecast the weather of a city."""
    return f"rain in {city}"


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let a model of noise write given texts, one for each of its answers with tools."""
    settings, script = ToolUse.settings, list[str]()

    def next_settings(self: ToolUse, given: Any) -> Any:
        return replace(settings(self, given), constraint=Constraint("choice", json.dumps([script.pop(0)])))

    monkeypatch.setattr(ToolUse, "settings", next_settings)
    return lambda *texts: script.extend(texts)


@pytest.fixture(scope="module")
def smollm2() -> gerund.LanguageModel:
    pytest.importorskip("onnxruntime", reason="needs gerund[packed]")
    if not SMOLLM2.is_file():
        pytest.skip("there is no SmolLM2 in ../real")
    return gerund.load(SMOLLM2, runtime="packed", adapter="none")


class TestLangChain:
    @pytest.fixture(autouse=True)
    def _needs_langchain(self) -> None:
        pytest.importorskip("langchain.agents", reason="langchain is not installed")

    def agent(self, model: Any, **how: Any) -> Any:
        from langchain.agents import create_agent

        return create_agent(model, [weather], system_prompt="Be brief.", **how)

    def check(self, agent: Any) -> None:
        messages = agent.invoke({"messages": [{"role": "user", "content": QUESTION}]})["messages"]
        assert [message.type for message in messages] == ["human", "ai", "tool", "tool", "ai"]
        assert [call["args"]["city"] for call in messages[1].tool_calls] == ["Bonn", "Rome"]
        assert [message.text for message in messages[2:]] == ["rain in Bonn", "rain in Rome", ANSWER]

    def test_in_this_process(self, scripted: Callable[..., None]) -> None:
        from gerund.integrations.langchain import ChatGerund

        model = ChatGerund(lm=chat_model(context=4096), max_tokens=200, tool_prompt="generic")
        scripted(TWO_CALLS, ANSWER)
        self.check(self.agent(model))
        scripted(TWO_CALLS, ANSWER)
        asked = {"messages": [{"role": "user", "content": QUESTION}]}
        chunks = [chunk for chunk, _ in self.agent(model).stream(asked, stream_mode="messages")]
        assert "".join(chunk.text for chunk in chunks if chunk.type == "AIMessageChunk") == ANSWER

    @pytest.fixture
    def served(self, with_tools: Running) -> Any:  # noqa: F811
        module = pytest.importorskip("langchain_openai", reason="needs gerund[clients]")
        own = {"base_url": f"{with_tools.url}/v1", "api_key": "none", "model": "tiny"}
        return module.ChatOpenAI(**own, max_retries=0, temperature=0)

    def test_over_http(self, served: Any, scripted: Callable[..., None]) -> None:
        for settings in ({}, {"streaming": True}, {"use_responses_api": True}):
            scripted(TWO_CALLS, ANSWER)
            self.check(self.agent(served.model_copy(update=settings)))

    def test_an_answer_in_a_form(self, served: Any) -> None:
        from pydantic import BaseModel

        class Forecast(BaseModel):
            rains: bool

        strategies = pytest.importorskip("langchain.agents.structured_output")
        form = strategies.ToolStrategy(Forecast)  # the answer is a call, so the choice is `any`
        found = self.agent(served, response_format=form).invoke({"messages": [{"role": "user", "content": QUESTION}]},
                                                               {"recursion_limit": 50})  # fmt: skip
        assert isinstance(found["structured_response"], Forecast)

    def test_a_real_model(self, smollm2: gerund.LanguageModel) -> None:
        from langchain.agents.middleware import wrap_model_call

        from gerund.integrations.langchain import ChatGerund

        @wrap_model_call
        def call_first(request: Any, handler: Any) -> Any:
            is_first = request.messages[-1].type == "human"
            return handler(request.override(tool_choice="any" if is_first else "none"))

        model = ChatGerund(lm=smollm2, max_tokens=40, tool_prompt="smollm2")
        agent = self.agent(model, middleware=[call_first])
        _, call, result, answer = agent.invoke({"messages": [{"role": "user", "content": QUESTION}]})["messages"]
        assert call.tool_calls[0]["args"] == {"city": "Rome"}
        assert result.text == "rain in Rome"
        assert answer.text


class TestLlamaIndex:
    @pytest.fixture(autouse=True)
    def _needs_llama_index(self) -> Iterator[None]:
        with warnings.catch_warnings():
            # Its dependencies warn of each other, while they are imported and while agents run.
            warnings.simplefilter("ignore")
            pytest.importorskip("llama_index.core", reason="llama-index-core is not installed")
            yield

    def answer(self, llm: Any, **how: Any) -> tuple[Any, list[Any]]:
        """Run an agent; return what it says, and the results of its calls."""
        from llama_index.core.agent.workflow import FunctionAgent, ToolCallResult

        async def run() -> tuple[Any, list[Any]]:
            agent = FunctionAgent(tools=[weather], llm=llm, system_prompt="Be brief.", **how)
            handler = agent.run(QUESTION)
            events = [event async for event in handler.stream_events()]
            return await handler, [event for event in events if isinstance(event, ToolCallResult)]

        return anyio.run(run)

    @pytest.mark.parametrize("streaming", [True, False])
    def test_in_this_process(self, scripted: Callable[..., None], streaming: bool) -> None:
        from gerund.integrations.llama_index import GerundLLM

        llm = GerundLLM(chat_model(context=4096), max_tokens=200, tool_prompt="generic")
        scripted(TWO_CALLS, ANSWER)
        said, results = self.answer(llm, streaming=streaming)
        assert sorted(result.tool_kwargs["city"] for result in results) == ["Bonn", "Rome"]
        assert sorted(str(result.tool_output) for result in results) == ["rain in Bonn", "rain in Rome"]
        assert str(said) == ANSWER

    def test_calls_and_what_is_wrong_with_them(self, scripted: Callable[..., None]) -> None:
        from llama_index.core.tools import FunctionTool

        from gerund.integrations.llama_index import GerundLLM

        assert not GerundLLM(chat_model(context=4096)).metadata.is_function_calling_model
        llm = GerundLLM(chat_model(context=4096), max_tokens=200, tool_prompt="generic")
        tool = FunctionTool.from_defaults(weather)
        scripted(ANSWER)
        with pytest.raises(ValueError, match="the model called no tool"):
            llm.get_tool_calls_from_response(llm.chat_with_tools([tool], QUESTION))
        scripted('<tool_call>{"name": "weather", "arguments": {"city": }}</tool_call>')
        answer = llm.chat_with_tools([tool], QUESTION)
        assert answer.message.blocks[-1].tool_kwargs == '{"city": }'
        assert llm.get_tool_calls_from_response(answer)[0].tool_kwargs == {}

    def test_a_required_call(self) -> None:
        from llama_index.core.tools import FunctionTool

        from gerund.integrations.llama_index import GerundLLM

        llm = GerundLLM(chat_model(context=4096), max_tokens=80, tool_prompt="generic")
        tool = FunctionTool.from_defaults(weather)
        whole = llm.chat_with_tools([tool], QUESTION, tool_required=True)
        *_, last = llm.stream_chat_with_tools([tool], QUESTION, tool_required=True)
        for answer in (whole, last):
            [call] = llm.get_tool_calls_from_response(answer)
            assert call.tool_kwargs["city"] in ("Bonn", "Rome")

"""Answer the last question of a chat from the served index, whole or as a stream, in the form of any of the APIs.

A client chooses it by the model's name with ``+index`` behind it, as that is what every client lets its user choose.
"""

import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Request

from gerund.retrieval.question_answering import (
    ANSWER_HITS,
    NOTHING,
    AnswerPieces,
    AskKeywords,
    PendingAnswer,
    Question,
)
from gerund.server.errors import ApiError, errors_about
from gerund.server.generation_work import GenerationWork, chat_work
from gerund.server.openai_format import AnswerForm, EventStream, usage_of
from gerund.server.schemas.generation import ChatRequest, Sampled
from gerund.server.service import RequestContext, Service
from gerund.settings.sampling import GREEDY, Sampling
from gerund.types import Answer, Generation

_TURN = 2
# The list of sources below an answer, as ``listed_sources`` writes it.
_LIST = re.compile(r"\n\n\[\d+\] \S.*:\d+-\d+(?:\n\[\d+\] \S.*:\d+-\d+)*\s*\Z")


def any_chat_work(service: Service, body: ChatRequest, param: str = "messages") -> "GenerationWork | AnswerWork":
    """Return the work of a chat: from the index if the model's name says so, else by the model alone."""
    return (answer_work if service.asks_index(body.model) else chat_work)(service, body, param)


def answer_work(service: Service, body: ChatRequest, param: str = "messages") -> "AnswerWork":
    """Return the work of answering the last question of a chat, whose conversation is in the field ``param``.

    Raises an error for fields that belong to free text, such as tools.
    """
    body.refuse_with_index()
    conversation = body.conversation()
    turns = turns_of(conversation, param)
    options: AskKeywords = {
        "instructions": "\n\n".join(_content_of(message) for message in conversation if message["role"] == "system"),
        "history": turns[:-1],
        "chat": True,
        "max_new_tokens": body.requested_tokens or service.settings.max_new_tokens,
    }
    with errors_about(param):
        is_sampled = any(getattr(body, name) is not None for name in Sampled.model_fields if name != "model")
        options["sampling"] = settings = body.sampling(1.0) if is_sampled else GREEDY
        return AnswerWork(service, body, Question.of(turns[-1]["content"], ANSWER_HITS, options), settings)


def turns_of(conversation: Sequence[Mapping[str, Any]], param: str) -> list[dict[str, str]]:
    r"""Return a chat as questions and answers in turn, ending with a question.

    Messages of one role that follow each other are one turn; answers before the first question, questions that found
    nothing, system messages and the lists of sources below answers are left out.

    >>> chat = [("assistant", "Hello!"), ("user", "When?"), ("assistant", "In 1825. [1]\n\n[1] a.txt:0-9"),
    ...         ("user", "And"), ("user", "where?")]
    >>> [turn["content"] for turn in turns_of([{"role": role, "content": text} for role, text in chat], "messages")]
    ['When?', 'In 1825. [1]', 'And\n\nwhere?']
    """
    turns: list[dict[str, str]] = []
    for number, message in enumerate(conversation):
        role, text = message["role"], _content_of(message)
        if role == "system":
            continue
        if role not in ("user", "assistant") or message.get("tool_calls"):
            kind = "a tool call" if message.get("tool_calls") else f"a message of the role {role!r}"
            raise ApiError(
                f"{param}.{number} is {kind}; answers from the index take the roles system, user and assistant",
                param=f"{param}.{number}",
                code="not_supported",
            )
        if role == "assistant":
            text = _LIST.sub("", text)
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += f"\n\n{text}"
        elif turns or role == "user":
            turns.append({"role": role, "content": text})
    if not turns or turns[-1]["role"] != "user":
        raise ApiError("the last message must be the user's question", param=param)
    pairs = zip(turns[:-1:_TURN], turns[1::_TURN], strict=True)
    return [turn for pair in pairs if pair[1]["content"] != NOTHING for turn in pair] + turns[-1:]


def _content_of(message: Mapping[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def listed_sources(answer: Answer) -> str:
    """Return the cited sources as they follow the text of an answer; empty without any.

    A quoted answer gets its number too, which a generated one already has where the model cited it.
    """
    cited = [source for source in answer.sources if source.number in answer.cited]
    missing = "".join(f" [{source.number}]" for source in cited if f"[{source.number}]" not in answer.text)
    lines = "\n".join(f"[{source.number}] {source.source}:{source.start}-{source.end}" for source in cited)
    return f"{missing}\n\n{lines}" if cited else ""


def described_sources(answer: Answer) -> dict[str, Any]:
    """Return what a message says of its sources, for programs."""
    checks = {check.text: check.to_dict() for check in answer.checks}
    return {
        "found": answer.found,
        "method": answer.method,
        "sources": [source.to_dict() for source in answer.sources if source.number in answer.cited],
        "checks": list(checks.values()),
    }


@dataclass(frozen=True)
class AnswerWork:
    """A question of a chat that the index answers, with the settings of a generated answer."""

    service: Service
    body: ChatRequest
    question: Question
    sampling: Sampling

    async def answer(self, request: Request, form: AnswerForm) -> Any:
        """Return the answer: all together, or as a stream."""
        if self.body.stream:
            return await self._stream(request, form)
        async with self.service.context(request) as context:
            with errors_about("messages"):
                answer = await context.ask(self.question)
        form.times = context.times
        form.details = described_sources(answer)
        return form.whole([_completion(answer)], _usage(answer))

    async def _stream(self, request: Request, form: AnswerForm) -> EventStream:
        """Return a stream; an error before its first piece still has a status of its own."""
        context = self.service.context(request)
        try:
            with errors_about("messages"):
                prepared = await context.prepare(self.question)
        except BaseException:
            context.close()
            raise
        return EventStream(self._chunks(context, prepared, form), context.close, form.wire)

    async def _chunks(
        self, context: RequestContext, prepared: Answer | PendingAnswer, form: AnswerForm
    ) -> AsyncIterator[Any]:
        for chunk in form.first(1):
            yield chunk
        sent = ""

        def parts(text: str) -> Iterable[Any]:
            nonlocal sent
            sent += text
            return form.parts(0, [text], ()) if text else ()

        if isinstance(prepared, Answer):
            answer = prepared
        else:
            pieces = AnswerPieces(prepared)
            future = context.submit(prepared, on_text=context.on_text(0, 1))
            async for piece in context.pieces([future]):
                for chunk in parts(pieces.put(piece.text)):
                    yield chunk
            for chunk in parts(pieces.end()):
                yield chunk
            [generation] = await context.result(future)
            form.times = future.times
            answer = await context.call(partial(prepared.answer, generation), tokens=1)
        # A quoted answer, or one that was held back, comes at once; every answer ends with its list of sources.
        text = _text(answer)
        for chunk in parts(text.removeprefix(sent) if text.startswith(sent) else ""):
            yield chunk
        form.details = described_sources(answer)
        for chunk in form.last(0, _completion(answer)):
            yield chunk
        for chunk in form.end(_usage(answer)):
            yield chunk


def _text(answer: Answer) -> str:
    return answer.text + listed_sources(answer)


def _completion(answer: Answer) -> Generation:
    return Generation(_text(answer), [], 0.0, answer.finished, usage=answer.usage)


def _usage(answer: Answer) -> dict[str, Any]:
    usage = answer.usage
    return usage_of(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)

"""Generate what a request asks for, whole or as a stream, in the form of any of the APIs.

The last question of a chat is answered from the served index where the client puts ``+index`` behind the model's name,
as that is what every client lets its user choose.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi import Request

from gerund.engine.config import EngineFuture
from gerund.errors import GerundError, TextError, TooLargeError
from gerund.inference.generate.config import GenerationConfig
from gerund.inference.generate.prompts import (
    NEXT_TURN,
    Prompt,
    TemplateOptions,
    check_prompts,
    prompt_ids,
    require_chat_template,
)
from gerund.inference.generate.sequence import Piece
from gerund.inference.generate.tool_reading import CallReader, Event
from gerund.inference.generate.tools import ToolUse
from gerund.retrieval.question_answering import ANSWER_HITS, NOTHING, AnswerPieces, AskKeywords, PendingAnswer, Question
from gerund.server.errors import ApiError, api_error, blamed, errors_about, unsupported
from gerund.server.generation_bodies import ChatRequest, CompletionRequest, GenerationBody, Sampled
from gerund.server.openai_format import AnswerForm, Echo, EventStream, usage_of
from gerund.server.service import RequestContext, Service
from gerund.settings.sampling import GREEDY, Sampling
from gerund.types import Answer, Generation, TokenLogprob, Usage


def chat_work(service: Service, body: ChatRequest, param: str = "messages") -> "GenerationWork":
    """Return the work of answering a chat, whose conversation is in the field ``param``.

    Raises an error for what the model or its template cannot do.
    """
    service.require_model(body.model)
    conversation, template = body.conversation(), body.template
    with errors_about(partial(blamed, given=body.model_fields_set)):
        require_chat_template(service.lm.tokenizer)
        most = body.requested_tokens or service.settings.max_new_tokens
        settings = body.settings(most, body.requested_logprobs)
    about = "tools" if body.tools else param
    with errors_about(lambda error: blamed(error, body.model_fields_set) or about):
        tools = ToolUse.of(service.lm.tokenizer, conversation, body.tool_keywords(service.settings.tool_prompt))
    if tools is not None:
        with errors_about(partial(blamed, given=body.model_fields_set)):
            settings = tools.settings(settings)
            conversation, template = tools.conversation(conversation), tools.template(template)
    explicit = body.requested_tokens is not None
    return GenerationWork(service, body, [conversation], settings, param, explicit, template, tools=tools)


def text_work(service: Service, body: CompletionRequest, usual: int, *, is_explicit: bool = True) -> "GenerationWork":
    """Return the work of continuing texts, by ``usual`` tokens if the request does not say.

    Without ``is_explicit``, a length that was not requested is cut to the remaining context.
    """
    body.refuse_no_tokens()
    with errors_about(partial(blamed, given=body.model_fields_set)):
        settings = body.settings(body.requested_tokens or usual, body.logprobs)
    explicit = is_explicit or body.requested_tokens is not None
    return GenerationWork(
        *(service, body, body.prompts, settings, "prompt", explicit),
        echo=bool(body.echo),
        generates=body.requested_tokens != 0,
    )


async def _streamed(
    context: RequestContext, form: AnswerForm, begin: Callable[[RequestContext, AnswerForm], Awaitable[Any]]
) -> EventStream:
    """Return a stream; an error before its first piece still has a status of its own."""
    try:
        chunks = await begin(context, form)
    except BaseException:
        context.close()
        raise
    return EventStream(chunks, context.close, form.wire)


@dataclass(frozen=True)
class GenerationWork:
    """A request to generate: ``settings.n`` completions per prompt, of which the best ``body.choices`` are returned.

    ``param`` is the field with the prompts, and ``explicit`` is False if the request does not limit its tokens. With
    ``echo``, prompts are repeated before their completions, and without ``generates`` they come back alone.
    """

    service: Service
    body: GenerationBody
    prompts: Sequence[Prompt]
    settings: GenerationConfig
    param: str
    explicit: bool = True
    template: TemplateOptions = NEXT_TURN
    echo: bool = False
    generates: bool = True
    tools: ToolUse | None = None

    def __post_init__(self) -> None:
        if self.body.truncate_prompt_tokens == 0:
            raise ApiError("truncate_prompt_tokens: 0 leaves nothing of the prompt", param="truncate_prompt_tokens")

    @property
    def sampling(self) -> Sampling:
        """How tokens are sampled."""
        return self.settings.sampling

    async def answer(self, request: Request, form: AnswerForm) -> Any:
        """Return the completions: all together, or as a stream."""
        if self.body.stream:
            return await _streamed(self.service.context(request), form, self._begun)
        return await self._complete(request, form)

    async def _complete(self, request: Request, form: AnswerForm) -> dict[str, Any]:
        async with self.service.context(request) as context:
            ids, futures = await self._submit(context, streams=False)
            form.echoes = await self._echoes(context, ids)
            try:
                completions = [await context.result(future) for future in futures]
            except GerundError as error:  # contradictory settings may show only in the middle of a completion
                raise api_error(error, blamed(error, self.body.model_fields_set)) from error
            form.times = futures[0].times if futures else None
            if self.tools is not None:
                completions = [list(map(self.tools.read, items)) for items in completions]
            if not self.generates:
                nothing = Generation("", [], 0.0, False, logprobs=None if self.settings.logprobs is None else [])
                completions = [[replace(nothing, usage=Usage(len(prompt)))] * self.settings.n for prompt in ids]
            completion_tokens = sum(item.usage.completion_tokens for items in completions for item in items)
            cached_tokens = sum(items[0].usage.cached_tokens for items in completions)
            usage = usage_of(sum(map(len, ids)), completion_tokens, cached_tokens)
            if not self.body.ranks:
                return form.whole([item for items in completions for item in items], usage)
            scores = await self._scores(context, completions)
        best = [
            pair
            for items, item_scores in zip(completions, scores, strict=True)
            for pair in sorted(zip(items, item_scores, strict=True), key=lambda pair: -pair[1])[: self.body.choices]
        ]
        content = form.whole([item for item, _ in best], usage)
        for choice, (_, score) in zip(content["choices"], best, strict=True):
            choice["rank_score"] = None if score == float("-inf") else score
        return content

    async def _begun(self, context: RequestContext, form: AnswerForm) -> AsyncIterator[Any]:
        """Wait for the first piece of a stream, and return all of its chunks."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        ids, futures = await self._submit(context, streams=True)
        form.echoes = await self._echoes(context, ids)
        form.times = futures[0].times if futures else None
        pieces = context.pieces(futures)
        first = await anext(pieces, None)
        self.service.metrics.first.observe(loop.time() - began)
        return self._all_chunks(form, first, pieces, sum(map(len, ids)))

    async def _all_chunks(
        self, form: AnswerForm, first: Piece | None, pieces: AsyncIterator[Piece], prompt_tokens: int
    ) -> AsyncIterator[Any]:
        loop, count, completion_tokens = asyncio.get_running_loop(), len(self.prompts) * self.body.choices, 0
        cached_tokens: dict[int, int] = {}  # by prompt
        for chunk in form.first(count):
            yield chunk
        piece, last = first, loop.time()
        readers = [None if self.tools is None else self.tools.reader() for _ in range(count)]
        while piece is not None:
            for chunk in self._chunks(form, piece, readers[piece.index]):
                yield chunk
            if piece.result is not None:
                completion_tokens += piece.result.usage.completion_tokens
                cached_tokens[piece.index // self.settings.n] = piece.result.usage.cached_tokens
            piece = await anext(pieces, None)
            self.service.metrics.gaps.observe(loop.time() - last)
            last = loop.time()
        for index in range(0 if self.generates else count):
            for chunk in form.last(index, Generation("", [], 0.0, False)):
                yield chunk
        for chunk in form.end(usage_of(prompt_tokens, completion_tokens, sum(cached_tokens.values()))):
            yield chunk

    def _chunks(self, form: AnswerForm, piece: Piece, reader: CallReader | None) -> Iterator[Any]:
        """Yield the chunks of a piece of text, with the tool calls in it."""
        parts: list[Event] = [piece.text] * bool(piece.text)
        if reader is not None:
            parts = [*reader.put(piece.text), *(reader.end() if piece.result is not None else ())]
        logprobs = piece.logprobs if self.settings.logprobs is not None else ()
        if parts or logprobs:
            yield from form.parts(piece.index, parts, logprobs)
        if piece.result is not None:
            yield from form.last(piece.index, piece.result if self.tools is None else self.tools.read(piece.result))

    async def _submit(
        self, context: RequestContext, *, streams: bool
    ) -> tuple[list[list[int]], list[EngineFuture[list[Generation]]]]:
        """Submit all prompts to the engine, or none."""

        def work() -> tuple[list[list[int]], list[EngineFuture[list[Generation]]]]:
            ids = [self._prompt_ids(prompt) for prompt in self.prompts]
            if not self.generates:
                return ids, []
            limit, settings = self.service.limit, self.settings
            # An explicit length that never fits is an error; a default length is cut to the remaining context.
            tokens = sum(len(prompt) + settings.max_new_tokens * settings.n for prompt in ids) if self.explicit else 0
            most = max(self.service.settings.queue_tokens, limit or 0)
            if tokens > most:
                raise TooLargeError(
                    f"the request has {tokens} tokens with those to be written; at most {most} are taken"
                )
            futures = []
            for number, prompt in enumerate(ids):
                room = settings.max_new_tokens if limit is None else min(settings.max_new_tokens, limit - len(prompt))
                future = self.service.engine.submit_generate(
                    prompt,
                    replace(settings, max_new_tokens=max(1, room)),
                    on_text=context.on_text(number, settings.n) if streams else None,
                    deadline=context.deadline,
                )
                futures.append(context.hold(future))
            return ids, futures

        with errors_about(lambda error: blamed(error, self.body.model_fields_set) or self.param):
            return await context.run(work)

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        lm, limit, last = self.service.lm, self.service.limit, self.body.truncate_prompt_tokens
        if last == -1:
            room = self.settings.max_new_tokens if self.generates else 0
            last = None if limit is None else max(1, limit - room)
        try:
            [checked] = check_prompts([prompt])
            return prompt_ids(
                *(lm.model, lm.tokenizer, checked, "messages" if self.param in ("messages", "input") else "prompt"),
                template=self.template,
                last=last,
                is_read_only=not self.generates,
            )
        except TextError as error:
            if not error.exceeds_context:
                raise
            message = f"This model's maximum context length is {limit} tokens. However, the {error}"
            raise ApiError(message, code="context_length_exceeded", param=self.param) from error

    async def _echoes(self, context: RequestContext, prompts: Sequence[Sequence[int]]) -> list[Echo]:
        """Return the prompts to repeat before their completions, with log-probabilities if they are requested."""
        if not self.echo:
            return []
        lm, top = self.service.lm, self.settings.logprobs

        def texts_of_prompts() -> list[str]:
            return [
                prompt
                if isinstance(prompt, str) and self.body.truncate_prompt_tokens is None
                else lm.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
                for prompt, ids in zip(self.prompts, prompts, strict=True)
            ]

        def logprobs_of_prompts(top: int) -> list[list[TokenLogprob]]:
            from gerund.inference.likelihood import prompt_logprobs  # which imports torch

            return prompt_logprobs(lm.full.model, lm.full.tokenizer, prompts, top=top)

        with errors_about("echo"):
            texts = await context.run(texts_of_prompts)
            if top is None:
                return [Echo(text) for text in texts]
            logprobs = await context.call(lambda: logprobs_of_prompts(top), tokens=sum(map(len, prompts)))
        return [Echo(text, items) for text, items in zip(texts, logprobs, strict=True)]

    async def _scores(self, context: RequestContext, completions: Sequence[Sequence[Generation]]) -> list[list[float]]:
        """Score how well each completion follows its prompt; a blank one gets minus infinity."""
        lm, seed = self.service.lm, self.settings.sampling.seed

        def score() -> list[list[float]]:
            from gerund.scoring.registry import find_scorer, on_prompts, score_samples  # which imports torch

            scorer = find_scorer(self.body.scorer, lm.full, seed=seed if isinstance(seed, int) else 0)
            scorer, prefixes = on_prompts(scorer, lm.tokenizer, self.prompts, self.template)
            return score_samples(scorer, prefixes, [[item.text for item in items] for items in completions])

        with errors_about("best_of"):
            tokens = sum(item.usage.total_tokens for items in completions for item in items)
            return await context.call(score, tokens=tokens)


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
            place = f"{param}.{number}"
            raise unsupported(
                place, f"{place} is {kind}; answers from the index take the roles system, user and assistant"
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
            return await _streamed(self.service.context(request), form, self._begun)
        async with self.service.context(request) as context:
            with errors_about("messages"):
                answer = await context.ask(self.question)
        form.times = context.times
        form.details = described_sources(answer)
        return form.whole([_completion(answer)], _usage(answer))

    async def _begun(self, context: RequestContext, form: AnswerForm) -> AsyncIterator[Any]:
        """Prepare the answer, and return the chunks of its stream."""
        with errors_about("messages"):
            prepared = await context.prepare(self.question)
        return self._chunks(context, prepared, form)

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

"""Requests to write: prompts become token ids, the engine writes, the texts come back whole, in pieces, or ranked.

Knows: the engine, scorers, streams. Does not know: the fields of bodies, HTTP.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request

from gerund.engine.work import Ticket
from gerund.errors import GerundError, TextError, TooLargeError
from gerund.inference.generate.chat import NEXT_TURN, TemplateOptions
from gerund.inference.generate.config import GenerationConfig
from gerund.inference.generate.prompts import Prompt, check_prompts, plain_text, prompt_ids, prompt_text
from gerund.inference.likelihood.alternatives import prompt_logprobs
from gerund.scoring.likelihood import LikelihoodScorer
from gerund.scoring.registry import find_scorer
from gerund.server.choices import Echo, Form, usage_of
from gerund.server.errors import ApiError, api_error, blamed
from gerund.server.events import EventStream
from gerund.server.request_claims import Claim
from gerund.server.service import Service
from gerund.types import Generation, Usage

# What the texts in a field are called.
_WHAT = {"messages": "conversation", "prompt": "prompt"}


@dataclass(frozen=True)
class WritingRequest:
    """What one request wants written.

    Attributes:
        prompts: texts, token ids or conversations.
        settings: for each of them; ``settings.n`` texts are written.
        choices: how many of these are returned.
        scorer: who ranks them; None where all are returned as they come.
        ranks: whether they are ranked.
        explicit: whether the request itself says how much may be written.
        param: the field with the prompts.
        usage: whether a stream ends with its usage.
        given: the fields that the body has.
        template: how conversations are rendered.
        last: keep so many tokens of the end of each prompt; -1 for as many as leave room for the text, None for all.
        echo: whether prompts are repeated before their texts.
        writes: whether anything is written at all.
    """

    prompts: Sequence[Prompt]
    settings: GenerationConfig
    choices: int
    param: str
    explicit: bool = True
    ranks: bool = False
    scorer: str | None = None
    usage: bool = False
    given: Collection[str] = ()
    template: TemplateOptions = NEXT_TURN
    last: int | None = None
    echo: bool = False
    writes: bool = True

    @property
    def reads_logprobs(self) -> bool:
        """Whether the log-probabilities of the prompts are asked for."""
        return self.echo and self.settings.logprobs is not None


async def answer(service: Service, request: Request, asked: WritingRequest, form: Form) -> dict[str, Any]:
    """Return all texts of a request."""
    async with service.claim(request) as claim:
        ids, tickets = await _begin(service, claim, asked, emits=False)
        form.echoes = await _echoes(service, claim, asked, ids)
        written = [await _result(claim, asked, ticket) for ticket in tickets]
        if not asked.writes:
            nothing = Generation("", [], 0.0, False, logprobs=None if asked.settings.logprobs is None else [])
            written = [[replace(nothing, usage=Usage(len(own)))] * asked.settings.n for own in ids]
        completion = sum(one.usage.completion_tokens for own in written for one in own)
        usage = usage_of(sum(map(len, ids)), completion)
        if not asked.ranks:
            return form.whole([one for own in written for one in own], usage)
        scores = await _scored(service, claim, asked, written)
    ranked = [
        sorted(zip(own, of_own, strict=True), key=lambda pair: -pair[1])[: asked.choices]
        for own, of_own in zip(written, scores, strict=True)
    ]
    listed = [pair for own in ranked for pair in own]
    found = form.whole([one for one, _ in listed], usage)
    for choice, (_, score) in zip(found["choices"], listed, strict=True):
        choice["rank_score"] = None if score == float("-inf") else score
    return found


async def stream(service: Service, request: Request, asked: WritingRequest, form: Form) -> EventStream:
    """Return the texts of a request as a stream; what is wrong with the request is raised before it begins."""
    claim = service.claim(request)
    try:
        began = asyncio.get_running_loop().time()
        ids, tickets = await _begin(service, claim, asked, emits=True)
        form.echoes = await _echoes(service, claim, asked, ids)
        pieces = claim.pieces(tickets)
        # The first piece is waited for, so that what fails before it has a status of its own.
        first = await anext(pieces, None)
        service.metrics.first.observe(asyncio.get_running_loop().time() - began)
    except BaseException:
        claim.close()
        raise

    async def events() -> AsyncIterator[Any]:
        completion, loop = 0, asyncio.get_running_loop()
        for chunk in form.first(len(asked.prompts) * asked.choices):
            yield chunk
        piece, last = first, loop.time()
        while piece is not None:
            if piece.text or piece.logprobs:
                wants = asked.settings.logprobs is not None
                yield form.piece(piece.index, piece.text, piece.logprobs, wants=wants)
            if piece.result is not None:
                completion += piece.result.usage.completion_tokens
                yield form.last(piece.index, piece.result)
            piece = await anext(pieces, None)
            service.metrics.gaps.observe(loop.time() - last)
            last = loop.time()
        if not asked.writes:
            for index in range(len(asked.prompts) * asked.choices):
                yield form.last(index, Generation("", [], 0.0, False))
        if asked.usage:
            yield form.usage(usage_of(sum(map(len, ids)), completion))

    return EventStream(events(), claim.close)


async def _begin(
    service: Service, claim: Claim, asked: WritingRequest, *, emits: bool
) -> tuple[list[list[int]], list[Ticket[list[Generation]]]]:
    """Hand all prompts of a request to the engine, or none."""
    engine, wanted_each = service.engine, asked.settings

    def work() -> tuple[list[list[int]], list[Ticket[list[Generation]]]]:
        ids = [_ids(service, prompt, asked) for prompt in asked.prompts]
        if not asked.writes:
            return ids, []
        limit = service.limit
        # What the request itself asks for is refused where it can never be; how much the model has room for is
        # what is then counted.
        wanted = sum(len(own) + wanted_each.max_new_tokens * wanted_each.n for own in ids) if asked.explicit else 0
        most = max(service.settings.queue_tokens, limit or 0)
        if wanted > most:
            raise TooLargeError(f"the request has {wanted} tokens with those to be written; at most {most} are taken")
        tickets = []
        for number, own in enumerate(ids):
            room = wanted_each.max_new_tokens if limit is None else min(wanted_each.max_new_tokens, limit - len(own))
            settings = replace(wanted_each, max_new_tokens=max(1, room))
            emit = claim.emit(number, wanted_each.n) if emits else None
            tickets.append(claim.hold(engine.write(own, settings, emit=emit, deadline=claim.deadline)))
        return ids, tickets

    try:
        return await claim.run(work)
    except Exception as error:
        raise api_error(error, blamed(error, asked.given) or asked.param) from error


async def _result(claim: Claim, asked: WritingRequest, ticket: Ticket[list[Generation]]) -> list[Generation]:
    try:
        return await claim.result(ticket)
    except GerundError as error:  # what contradicts each other may show only in the middle of a text
        raise api_error(error, blamed(error, asked.given)) from error


async def _echoes(
    service: Service, claim: Claim, asked: WritingRequest, prompts: Sequence[Sequence[int]]
) -> list[Echo]:
    """Return what stands before the texts: each prompt, with its log-probabilities where they are asked for."""
    if not asked.echo:
        return []
    tokenizer, top = service.lm.tokenizer, asked.settings.logprobs

    def spelled() -> list[str]:
        return [
            prompt
            if isinstance(prompt, str) and asked.last is None
            else tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for prompt, ids in zip(asked.prompts, prompts, strict=True)
        ]

    try:
        texts = await claim.run(spelled)
        if not asked.reads_logprobs:
            return [Echo(text) for text in texts]
        ticket = claim.hold(
            service.engine.call(
                lambda: prompt_logprobs(service.lm.model, tokenizer, prompts, top=top or 0),
                tokens=sum(map(len, prompts)),
                deadline=claim.deadline,
            )
        )
        found = await claim.result(ticket)
    except Exception as error:
        raise api_error(error, "echo") from error
    return [Echo(text, logprobs) for text, logprobs in zip(texts, found, strict=True)]


def _ids(service: Service, prompt: Prompt, asked: WritingRequest) -> list[int]:
    param, last = asked.param, asked.last
    if last == -1:
        room = asked.settings.max_new_tokens if asked.writes else 0
        last = None if service.limit is None else max(1, service.limit - room)
    try:
        [checked] = check_prompts([prompt])
        return prompt_ids(
            *(service.lm.model, service.lm.tokenizer, checked, "messages" if param == "messages" else "prompt"),
            template=asked.template,
            last=last,
            is_read_only=not asked.writes,
        )
    except TextError as error:
        if not error.exceeds_context:
            raise
        said = f"This model's maximum context length is {service.limit} tokens. However, the {error}"
        raise ApiError(said, code="context_length_exceeded", param=param) from error


async def _scored(
    service: Service, claim: Claim, asked: WritingRequest, written: Sequence[Sequence[Generation]]
) -> list[list[float]]:
    """Say how well each text follows its prompt; a blank one comes last."""
    lm = service.lm
    seed = asked.settings.sampling.seed

    def score() -> list[list[float]]:
        scorer = find_scorer(asked.scorer, lm, own=lm.scorer, seed=seed if isinstance(seed, int) else 0)
        # Likelihoods are those behind a conversation as the model reads it; other scorers know no templates.
        if isinstance(scorer, LikelihoodScorer):
            prefixes = [prompt_text(lm.tokenizer, prompt, asked.template) for prompt in asked.prompts]
        else:
            prefixes = [plain_text(lm.tokenizer, prompt) for prompt in asked.prompts]
        texts = [list(dict.fromkeys(one.text for one in own if one.text.strip())) for own in written]
        places = [place for place, own in enumerate(texts) if own]
        found = scorer.score([prefixes[place] for place in places], [texts[place] for place in places])
        known = {
            (place, text): float(value)
            for place, own in zip(places, found, strict=True)
            for text, value in zip(texts[place], own, strict=True)
        }
        return [[known.get((place, one.text), float("-inf")) for one in own] for place, own in enumerate(written)]

    tokens = sum(one.usage.total_tokens for own in written for one in own)
    try:
        ticket = claim.hold(service.engine.call(score, tokens=tokens, deadline=claim.deadline))
        return await claim.result(ticket)
    except ApiError:
        raise
    except Exception as error:
        raise api_error(error, "best_of") from error

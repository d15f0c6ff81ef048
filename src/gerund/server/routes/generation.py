"""Chats, completions, infilling and tokenization."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request

from gerund.engine.config import Ticket
from gerund.errors import GerundError, TextError, TooLargeError
from gerund.inference.generate.config import GenerationConfig
from gerund.inference.generate.prompts import (
    NEXT_TURN,
    Prompt,
    TemplateOptions,
    check_prompts,
    plain_text,
    prompt_ids,
    prompt_text,
    require_chat_template,
)
from gerund.inference.infill.infilling import BLANK, untrained_to_fill
from gerund.inference.likelihood import prompt_logprobs
from gerund.inference.text_ids import encode_texts
from gerund.inference.tokens import check_unicode
from gerund.scoring.likelihood import LikelihoodScorer
from gerund.scoring.registry import find_scorer
from gerund.server.errors import STREAMS, ApiError, api_error, blamed
from gerund.server.openai_format import Echo, EventStream, Form, usage_of
from gerund.server.schemas.embeddings import DetokenizeRequest, TokenizeRequest
from gerund.server.schemas.generation import (
    USUAL_COMPLETION,
    ChatRequest,
    CompletionRequest,
    InfillRequest,
    Writing,
    template_options,
)
from gerund.server.service import Claim, Served, Service
from gerund.types import Generation, Infill, Usage

router = APIRouter()


@router.post("/v1/chat/completions", tags=["writing"], responses=STREAMS, response_model=None)
async def chat(body: ChatRequest, request: Request, service: Served) -> Any:
    """Write the next turn of a conversation, in the form of the model's own chat template."""
    service.demand_model(body.model)
    conversation, template = body.conversation(), body.template
    try:
        require_chat_template(service.lm.tokenizer)
        most = body.asked_tokens or service.settings.max_new_tokens
        settings = body.settings(most, body.asked_logprobs)
    except Exception as error:
        raise api_error(error, blamed(error, body.model_fields_set)) from error
    asked = WritingRequest(
        [conversation],
        settings,
        body.choices,
        "messages",
        explicit=body.asked_tokens is not None,
        ranks=body.ranks,
        scorer=body.scorer,
        usage=_wants_usage(body),
        given=body.model_fields_set,
        template=template,
        last=_last(body),
    )
    form = Form("chat", service.names[0])
    return await (stream if body.stream else answer)(service, request, asked, form)


@router.post("/v1/completions", tags=["writing"], responses=STREAMS, response_model=None)
async def completions(body: CompletionRequest, request: Request, service: Served) -> Any:
    """Continue one or several texts; with ``suffix`` fill the gap between the two."""
    service.demand_model(body.model)
    body.refuse_unread()
    prompts = body.prompts
    if body.suffix:
        body.refuse_with_suffix()
        if len(prompts) != 1 or not isinstance(prompts[0], str):
            raise ApiError("beside suffix the prompt is one text", param="prompt")
        return await complete(service, request, body, prompts[0], wants_usage=_wants_usage(body))
    body.refuse_no_tokens()
    writes = body.asked_tokens != 0
    try:
        settings = body.settings(body.asked_tokens or USUAL_COMPLETION, body.logprobs)
    except Exception as error:
        raise api_error(error, blamed(error, body.model_fields_set)) from error
    asked = WritingRequest(
        prompts,
        settings,
        body.choices,
        "prompt",
        ranks=body.ranks,
        scorer=body.scorer,
        usage=_wants_usage(body),
        given=body.model_fields_set,
        last=_last(body),
        echo=bool(body.echo),
        writes=writes,
    )
    form = Form("text", service.names[0], choices=body.choices, control=_control(service))
    return await (stream if body.stream else answer)(service, request, asked, form)


@router.post("/infill", tags=["writing"])
async def infill(body: InfillRequest, request: Request, service: Served) -> dict[str, Any]:
    """Fill the gaps of a text, seeing both sides of them."""
    service.demand_model(body.model)
    body.refuse_unread()
    return await fill(service, request, body)


def _wants_usage(body: Writing) -> bool:
    return bool(body.stream_options and body.stream_options.include_usage)


def _last(body: Writing) -> int | None:
    """Return how many tokens of the end of each prompt are read.

    Raises:
        ApiError: none would be.
    """
    if body.truncate_prompt_tokens == 0:
        raise ApiError("truncate_prompt_tokens: 0 leaves nothing of the prompt", param="truncate_prompt_tokens")
    return body.truncate_prompt_tokens


def _control(service: Service) -> Callable[[int], str | None]:
    """Return what spells control tokens out."""
    added = service.lm.tokenizer.added_tokens_decoder
    return lambda token: added[token].content if token in added else None


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
        scorer = find_scorer(asked.scorer, lm, seed=seed if isinstance(seed, int) else 0)
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


_USUAL_INFILL = 32


async def fill(service: Service, request: Request, body: InfillRequest) -> dict[str, Any]:
    """Return a text with its gaps filled."""
    pieces, param = _pieces(body)
    most = body.max_tokens or (body.n_predict if body.n_predict and body.n_predict > 0 else None) or _USUAL_INFILL
    more: dict[str, Any] = {"beams": body.beams or 1, "samples": body.samples or 1, "method": body.method or "infill"}
    found, read = await _filled(service, request, pieces, param, body, most, lengths=body.lengths, **more)
    inserts = _inserts(pieces, found)
    return {
        "id": f"infill-{uuid.uuid4().hex}",
        "object": "infill",
        "created": int(time.time()),
        "model": service.names[0],
        "text": found.text,
        "spans": found.spans,
        "inserts": inserts,
        "content": inserts[0],
        "scores": [round(score, 6) for score in found.scores],
        "lengths": found.lengths,
        "usage": usage_of(read, sum(found.lengths)),
        **_warning(service, more["method"]),
    }


async def complete(
    service: Service, request: Request, body: CompletionRequest, prompt: str, *, wants_usage: bool
) -> dict[str, Any] | EventStream:
    """Return what stands between a prompt and its suffix, as a completion."""
    suffix = body.suffix or ""
    pieces = [prompt, suffix]
    most = body.asked_tokens or USUAL_COMPLETION
    found, read = await _filled(service, request, pieces, "prompt", body, most)
    [span] = _inserts(pieces, found)
    usage = usage_of(read, found.lengths[0])
    one = Generation(span, found.token_ids[0], found.scores[0], True, usage=Usage(read, found.lengths[0]))
    form = Form("text", service.names[0])
    if not body.stream:
        return {**form.whole([one], usage), **_warning(service, "infill")}

    async def events() -> AsyncIterator[Any]:
        yield form.piece(0, span, [], wants=False)
        yield form.last(0, one)
        if wants_usage:
            yield form.usage(usage)

    return EventStream(events(), lambda: None)


def _warning(service: Service, method: str) -> dict[str, str]:
    """Return the field that says that the model was not trained to fill gaps; none where it was."""
    untrained = method == "infill" and service.lm.fills_gaps is False
    return {"warning": untrained_to_fill(service.names[0])} if untrained else {}


async def _filled(
    service: Service,
    request: Request,
    pieces: Sequence[str],
    param: str,
    body: InfillRequest | CompletionRequest,
    most: int,
    **more: Any,
) -> tuple[Infill, int]:
    lm = service.lm
    for piece in pieces:
        try:
            check_unicode("the text", piece)
        except Exception as error:
            raise api_error(error, param) from error
    blank = marker(pieces)
    text = blank.join(pieces)
    async with service.claim(request) as claim:
        try:
            sampling = body.sampling(0.0)
            count = await claim.run(lambda: sum(len(one.ids) for one in encode_texts(lm.tokenizer, list(pieces))))
            # All lengths up to the longest are tried, half of it on average.
            gaps = len(pieces) - 1
            tokens = gaps * (count + 4 * most * max(more.get("samples", 1), more.get("beams", 1)))

            def work() -> Infill:
                return lm.infill(text, blank=blank, max_tokens=most, sampling=sampling, **more)

            ticket = claim.hold(service.engine.call(work, tokens=tokens, deadline=claim.deadline))
            return await claim.result(ticket), count
        except Exception as error:
            raise api_error(error, blamed(error, body.model_fields_set) or param) from error


def marker(pieces: Sequence[str]) -> str:
    """Return what marks the gaps between pieces and stands in none of them.

    >>> marker(["a [blank] in a text", "."])
    '[blank 1]'
    """
    number, found = 0, BLANK
    # Joined by the marker, pieces must not make up another one where they meet.
    while any(found in piece for piece in pieces) or found.join(pieces).count(found) != len(pieces) - 1:
        number += 1
        found = f"[blank {number}]"
    return found


def _pieces(body: InfillRequest) -> tuple[list[str], str]:
    """Return what stands around the gaps, and the field that says so."""
    forms = {
        "text": body.text is not None,
        "pieces": body.pieces is not None,
        "input_prefix": body.input_prefix is not None or body.input_suffix is not None,
    }
    given = [name for name, is_given in forms.items() if is_given]
    if len(given) != 1:
        raise ApiError(
            "give one of: text with [blank] for each gap, pieces around the gaps, input_prefix with input_suffix",
            param=given[-1] if given else "text",
        )
    if body.text is not None:
        blank = body.blank or BLANK
        pieces = body.text.split(blank)
        if not blank.strip() or len(pieces) == 1:
            raise ApiError(f"the text has no {blank} to fill", param="text")
        return pieces, "text"
    if body.pieces is not None:
        return body.pieces, "pieces"
    return [body.input_prefix or "", body.input_suffix or ""], "input_prefix"


def _inserts(pieces: Sequence[str], found: Infill) -> list[str]:
    """Return what a client puts between its own pieces.

    The library takes spaces before a gap away and the model writes them with the filling; the client's are still there.
    """
    inserts = []
    for piece, span in zip(pieces, found.spans, strict=False):
        spaces = len(piece) - len(piece.rstrip(" \t"))
        own = len(span) - len(span.lstrip(" \t"))
        inserts.append(span[min(spaces, own) :])
    return inserts


@router.post("/tokenize", tags=["tokens"])
async def tokenize(body: TokenizeRequest, service: Served) -> dict[str, Any]:
    """Return the token ids of a text, or of a conversation as the chat template writes it.

    Control tokens in a text are text. By ``prompt`` the tokenizer's special tokens are added, by ``content`` they are
    not, unless the request says otherwise.
    """
    service.demand_model(body.model)
    given = [name for name in ("prompt", "content", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        raise ApiError("give one of prompt, content and messages", param=given[-1] if given else "prompt")
    try:
        ids = await asyncio.to_thread(_tokenized, service, body)
    except Exception as error:
        raise api_error(error, given[0]) from error
    return {"tokens": ids, "count": len(ids), "max_model_len": service.limit}


def _tokenized(service: Service, body: TokenizeRequest) -> list[int]:
    lm = service.lm
    if body.messages is not None:
        if body.add_special_tokens or body.add_special:
            named = "add_special_tokens" if body.add_special_tokens else "add_special"
            raise ApiError(
                f"{named} is not supported with messages, whose template writes the special tokens; leave it out",
                param=named,
                code="not_supported",
            )
        conversation = ChatRequest(messages=body.messages).conversation()
        template = template_options(body.add_generation_prompt, body.continue_final_message, body.chat_template_kwargs)
        return prompt_ids(lm.model, lm.tokenizer, conversation, "conversation", template=template)
    text = body.prompt if body.prompt is not None else body.content or ""
    said = body.add_special_tokens if body.add_special_tokens is not None else body.add_special
    specials = body.prompt is not None if said is None else said
    check_unicode("the text", text)
    [found] = encode_texts(lm.tokenizer, [text], specials=specials)
    return found.ids


@router.post("/detokenize", tags=["tokens"])
async def detokenize(body: DetokenizeRequest, service: Served) -> dict[str, Any]:
    """Return the text that token ids spell."""
    service.demand_model(body.model)
    tokenizer = service.lm.tokenizer
    size = len(tokenizer)
    wrong = next((token for token in body.tokens if token >= size), None)
    if wrong is not None:
        raise ApiError(f"{wrong} is no token id of this model, which has 0 to {size - 1}", param="tokens")
    text = await asyncio.to_thread(tokenizer.decode, body.tokens, clean_up_tokenization_spaces=False)
    return {"prompt": text, "content": text}

"""Chats, completions, infilling and tokenization."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request

from gerund.engine.config import EngineFuture
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
from gerund.server.errors import STREAMS, ApiError, api_error, blamed, errors_about
from gerund.server.openai_format import Echo, EventStream, Form, usage_of
from gerund.server.schemas.embeddings import DetokenizeRequest, TokenizeRequest
from gerund.server.schemas.generation import (
    USUAL_COMPLETION,
    ChatRequest,
    CompletionRequest,
    GenerationBody,
    InfillRequest,
    template_options,
)
from gerund.server.service import RequestContext, Served, Service
from gerund.types import Generation, Infill, Usage

router = APIRouter()

# Completion tokens of an infilling request that does not say.
_USUAL_INFILL = 32


@router.post("/v1/chat/completions", tags=["writing"], responses=STREAMS, response_model=None)
async def chat(body: ChatRequest, request: Request, service: Served) -> Any:
    """Generate the next message of a conversation, in the form of the model's own chat template."""
    service.require_model(body.model)
    conversation, template = body.conversation(), body.template
    with errors_about(partial(blamed, given=body.model_fields_set)):
        require_chat_template(service.lm.tokenizer)
        most = body.requested_tokens or service.settings.max_new_tokens
        settings = body.settings(most, body.requested_logprobs)
    work = _GenerationWork(
        service, body, [conversation], settings, "messages", body.requested_tokens is not None, template
    )
    return await work.answer(request, Form("chat", service.names[0]))


@router.post("/v1/completions", tags=["writing"], responses=STREAMS, response_model=None)
async def completions(body: CompletionRequest, request: Request, service: Served) -> Any:
    """Continue one or several texts; with ``suffix``, infill between the two."""
    service.require_model(body.model)
    body.refuse_unsupported()
    prompts = body.prompts
    if body.suffix:
        body.refuse_with_suffix()
        if len(prompts) != 1 or not isinstance(prompts[0], str):
            raise ApiError("beside suffix the prompt is one text", param="prompt")
        return await _complete_before_suffix(service, request, body, prompts[0])
    body.refuse_no_tokens()
    with errors_about(partial(blamed, given=body.model_fields_set)):
        settings = body.settings(body.requested_tokens or USUAL_COMPLETION, body.logprobs)
    work = _GenerationWork(
        service, body, prompts, settings, "prompt", echo=bool(body.echo), generates=body.requested_tokens != 0
    )
    added = service.lm.tokenizer.added_tokens_decoder
    form = Form(
        "text",
        service.names[0],
        choices=body.choices,
        control=lambda token: added[token].content if token in added else None,
    )
    return await work.answer(request, form)


@router.post("/infill", tags=["writing"])
async def infill(body: InfillRequest, request: Request, service: Served) -> dict[str, Any]:
    """Infill the blanks of a text, from its left and right context."""
    service.require_model(body.model)
    body.refuse_unsupported()
    pieces, param = _pieces(body)
    most = body.max_tokens or (body.n_predict if body.n_predict and body.n_predict > 0 else None) or _USUAL_INFILL
    options: dict[str, Any] = {
        "beams": body.beams or 1,
        "samples": body.samples or 1,
        "method": body.method or "infill",
    }
    result, prompt_tokens = await _infill(service, request, pieces, param, body, most, lengths=body.lengths, **options)
    inserts = _inserts(pieces, result)
    return {
        "id": f"infill-{uuid.uuid4().hex}",
        "object": "infill",
        "created": int(time.time()),
        "model": service.names[0],
        "text": result.text,
        "spans": result.spans,
        "inserts": inserts,
        "content": inserts[0],
        "scores": [round(score, 6) for score in result.scores],
        "lengths": result.lengths,
        "usage": usage_of(prompt_tokens, sum(result.lengths)),
        **_warning(service, options["method"]),
    }


@router.post("/tokenize", tags=["tokens"])
async def tokenize(body: TokenizeRequest, service: Served) -> dict[str, Any]:
    """Return the token ids of a text, or of a conversation as the chat template renders it.

    Control tokens in a text are text. For ``prompt`` the tokenizer's special tokens are added, for ``content`` they are
    not, unless the request says otherwise.
    """
    service.require_model(body.model)
    given = [name for name in ("prompt", "content", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        raise ApiError("give one of prompt, content and messages", param=given[-1] if given else "prompt")
    with errors_about(given[0]):
        ids = await asyncio.to_thread(_tokenized, service, body)
    return {"tokens": ids, "count": len(ids), "max_model_len": service.limit}


@router.post("/detokenize", tags=["tokens"])
async def detokenize(body: DetokenizeRequest, service: Served) -> dict[str, Any]:
    """Return the text that token ids spell."""
    service.require_model(body.model)
    tokenizer = service.lm.tokenizer
    size = len(tokenizer)
    wrong = next((token for token in body.tokens if token >= size), None)
    if wrong is not None:
        raise ApiError(f"{wrong} is no token id of this model, which has 0 to {size - 1}", param="tokens")
    text = await asyncio.to_thread(tokenizer.decode, body.tokens, clean_up_tokenization_spaces=False)
    return {"prompt": text, "content": text}


def _tokenized(service: Service, body: TokenizeRequest) -> list[int]:
    lm = service.lm
    if body.messages is not None:
        if body.add_special_tokens or body.add_special:
            name = "add_special_tokens" if body.add_special_tokens else "add_special"
            raise ApiError(
                f"{name} is not supported with messages, whose template writes the special tokens; leave it out",
                param=name,
                code="not_supported",
            )
        conversation = ChatRequest(messages=body.messages).conversation()
        template = template_options(body.add_generation_prompt, body.continue_final_message, body.chat_template_kwargs)
        return prompt_ids(lm.model, lm.tokenizer, conversation, "conversation", template=template)
    text = body.prompt if body.prompt is not None else body.content or ""
    explicit = body.add_special_tokens if body.add_special_tokens is not None else body.add_special
    specials = body.prompt is not None if explicit is None else explicit
    check_unicode("the text", text)
    [result] = encode_texts(lm.tokenizer, [text], specials=specials)
    return result.ids


# ------------------------------------------------------------------------------------------- chats and completions


@dataclass(frozen=True)
class _GenerationWork:
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

    def __post_init__(self) -> None:
        if self.body.truncate_prompt_tokens == 0:
            raise ApiError("truncate_prompt_tokens: 0 leaves nothing of the prompt", param="truncate_prompt_tokens")

    @property
    def given(self) -> Collection[str]:
        """The fields that the request has."""
        return self.body.model_fields_set

    async def answer(self, request: Request, form: Form) -> Any:
        """Return the completions: all together, or as a stream."""
        return await (self._stream if self.body.stream else self._complete)(request, form)

    async def _complete(self, request: Request, form: Form) -> dict[str, Any]:
        async with self.service.context(request) as context:
            ids, futures = await self._submit(context, streams=False)
            form.echoes = await self._echoes(context, ids)
            try:
                completions = [await context.result(future) for future in futures]
            except GerundError as error:  # contradictory settings may show only in the middle of a completion
                raise api_error(error, blamed(error, self.given)) from error
            if not self.generates:
                nothing = Generation("", [], 0.0, False, logprobs=None if self.settings.logprobs is None else [])
                completions = [[replace(nothing, usage=Usage(len(prompt)))] * self.settings.n for prompt in ids]
            completion_tokens = sum(item.usage.completion_tokens for items in completions for item in items)
            usage = usage_of(sum(map(len, ids)), completion_tokens)
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

    async def _stream(self, request: Request, form: Form) -> EventStream:
        """Return a stream; an error before its first piece still has a status of its own."""
        context, metrics, loop = self.service.context(request), self.service.metrics, asyncio.get_running_loop()
        try:
            began = loop.time()
            ids, futures = await self._submit(context, streams=True)
            form.echoes = await self._echoes(context, ids)
            pieces = context.pieces(futures)
            first = await anext(pieces, None)
            metrics.first.observe(loop.time() - began)
        except BaseException:
            context.close()
            raise
        count, has_logprobs = len(self.prompts) * self.body.choices, self.settings.logprobs is not None

        async def events() -> AsyncIterator[Any]:
            completion_tokens = 0
            for chunk in form.first(count):
                yield chunk
            piece, last = first, loop.time()
            while piece is not None:
                if piece.text or piece.logprobs:
                    yield form.piece(piece.index, piece.text, piece.logprobs if has_logprobs else None)
                if piece.result is not None:
                    completion_tokens += piece.result.usage.completion_tokens
                    yield form.last(piece.index, piece.result)
                piece = await anext(pieces, None)
                metrics.gaps.observe(loop.time() - last)
                last = loop.time()
            if not self.generates:
                for index in range(count):
                    yield form.last(index, Generation("", [], 0.0, False))
            if self.body.wants_usage:
                yield form.usage(usage_of(sum(map(len, ids)), completion_tokens))

        return EventStream(events(), context.close)

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

        with errors_about(lambda error: blamed(error, self.given) or self.param):
            return await context.run(work)

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        lm, limit, last = self.service.lm, self.service.limit, self.body.truncate_prompt_tokens
        if last == -1:
            room = self.settings.max_new_tokens if self.generates else 0
            last = None if limit is None else max(1, limit - room)
        try:
            [checked] = check_prompts([prompt])
            return prompt_ids(
                *(lm.model, lm.tokenizer, checked, "messages" if self.param == "messages" else "prompt"),
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

        with errors_about("echo"):
            texts = await context.run(texts_of_prompts)
            if top is None:
                return [Echo(text) for text in texts]
            logprobs = await context.call(
                lambda: prompt_logprobs(lm.model, lm.tokenizer, prompts, top=top), tokens=sum(map(len, prompts))
            )
        return [Echo(text, items) for text, items in zip(texts, logprobs, strict=True)]

    async def _scores(self, context: RequestContext, completions: Sequence[Sequence[Generation]]) -> list[list[float]]:
        """Score how well each completion follows its prompt; a blank one gets minus infinity."""
        lm, seed = self.service.lm, self.settings.sampling.seed

        def score() -> list[list[float]]:
            scorer = find_scorer(self.body.scorer, lm, seed=seed if isinstance(seed, int) else 0)
            # Likelihoods are conditioned on the rendered conversation; other scorers know no templates.
            if isinstance(scorer, LikelihoodScorer):
                prefixes = [prompt_text(lm.tokenizer, prompt, self.template) for prompt in self.prompts]
            else:
                prefixes = [plain_text(lm.tokenizer, prompt) for prompt in self.prompts]
            texts = [list(dict.fromkeys(item.text for item in items if item.text.strip())) for items in completions]
            scored = [number for number, items in enumerate(texts) if items]
            scores = scorer.score([prefixes[number] for number in scored], [texts[number] for number in scored])
            known = {
                (number, text): float(value)
                for number, values in zip(scored, scores, strict=True)
                for text, value in zip(texts[number], values, strict=True)
            }
            return [
                [known.get((number, item.text), float("-inf")) for item in items]
                for number, items in enumerate(completions)
            ]

        with errors_about("best_of"):
            tokens = sum(item.usage.total_tokens for items in completions for item in items)
            return await context.call(score, tokens=tokens)


# ------------------------------------------------------------------------------------------------------- infilling


async def _complete_before_suffix(
    service: Service, request: Request, body: CompletionRequest, prompt: str
) -> dict[str, Any] | EventStream:
    """Return what belongs between a prompt and its suffix, as a completion."""
    pieces = [prompt, body.suffix or ""]
    most = body.requested_tokens or USUAL_COMPLETION
    result, prompt_tokens = await _infill(service, request, pieces, "prompt", body, most)
    [span] = _inserts(pieces, result)
    usage = usage_of(prompt_tokens, result.lengths[0])
    completion = Generation(
        span, result.token_ids[0], result.scores[0], True, usage=Usage(prompt_tokens, result.lengths[0])
    )
    form = Form("text", service.names[0])
    if not body.stream:
        return {**form.whole([completion], usage), **_warning(service, "infill")}

    async def events() -> AsyncIterator[Any]:
        yield form.piece(0, span, None)
        yield form.last(0, completion)
        if body.wants_usage:
            yield form.usage(usage)

    return EventStream(events(), lambda: None)


def _warning(service: Service, method: str) -> dict[str, str]:
    """Return a ``warning`` field if the model was not trained to infill."""
    untrained = method == "infill" and service.lm.fills_gaps is False
    return {"warning": untrained_to_fill(service.names[0])} if untrained else {}


async def _infill(
    service: Service,
    request: Request,
    pieces: Sequence[str],
    param: str,
    body: InfillRequest | CompletionRequest,
    most: int,
    **options: Any,
) -> tuple[Infill, int]:
    """Infill between pieces, and return the result and the number of prompt tokens."""
    lm = service.lm
    with errors_about(param):
        for piece in pieces:
            check_unicode("the text", piece)
    blank = marker(pieces)
    text = blank.join(pieces)
    async with service.context(request) as context:
        with errors_about(lambda error: blamed(error, body.model_fields_set) or param):
            sampling = body.sampling(0.0)
            count = await context.run(lambda: sum(len(item.ids) for item in encode_texts(lm.tokenizer, list(pieces))))
            # All lengths up to the longest are tried, half of it on average.
            blanks = len(pieces) - 1
            tokens = blanks * (count + 4 * most * max(options.get("samples", 1), options.get("beams", 1)))
            result = await context.call(
                lambda: lm.infill(text, blank=blank, max_tokens=most, sampling=sampling, **options), tokens=tokens
            )
            return result, count


def marker(pieces: Sequence[str]) -> str:
    """Return a placeholder for the blanks between pieces that none of them contains.

    >>> marker(["a [blank] in a text", "."])
    '[blank 1]'
    """
    number, blank = 0, BLANK
    # Nor may a placeholder arise where a piece and a placeholder meet.
    while any(blank in piece for piece in pieces) or blank.join(pieces).count(blank) != len(pieces) - 1:
        number += 1
        blank = f"[blank {number}]"
    return blank


def _pieces(body: InfillRequest) -> tuple[list[str], str]:
    """Return the texts around the blanks, and the field that they come from."""
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


def _inserts(pieces: Sequence[str], result: Infill) -> list[str]:
    """Return what a client puts between its own pieces.

    The library strips spaces before a blank, and the model generates them again; the client's pieces still have them.
    """
    inserts = []
    for piece, span in zip(pieces, result.spans, strict=False):
        spaces = len(piece) - len(piece.rstrip(" \t"))
        generated = len(span) - len(span.lstrip(" \t"))
        inserts.append(span[min(spaces, generated) :])
    return inserts

"""Chats, completions, infilling and tokenization: the routes, and the bodies of the latter two."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from pydantic import Field

from gerund.inference.generate.prompts import prompt_ids
from gerund.inference.infill import BLANK, untrained_to_fill
from gerund.inference.text_ids import encode_texts
from gerund.inference.tokens import check_unicode
from gerund.server.bodies import Accepted, RequestBody, Text, TokenId
from gerund.server.errors import STREAMS, ApiError, blamed, errors_about, unsupported
from gerund.server.generation_bodies import (
    LLAMA_CPP,
    MOST_FILLED,
    USUAL_COMPLETION,
    ChatRequest,
    CompletionRequest,
    Message,
    Sampled,
    refuse_first,
    template_options,
)
from gerund.server.openai_format import AnswerForm, EventStream, Form, usage_of
from gerund.server.service import Served, Service
from gerund.server.work import any_chat_work, text_work
from gerund.types import Generation, Infill, Usage

router = APIRouter()

# Completion tokens of an infilling request that does not say.
_USUAL_INFILL = 32
Length = Annotated[int, Field(ge=1, le=MOST_FILLED)]


class TokenizeRequest(RequestBody):
    """A text or a conversation to tokenize."""

    without_effect: ClassVar[Accepted | None] = {
        **dict.fromkeys(("return_token_strs", "with_pieces", "parse_special"), (False,)),
        "tools": ([],),
        "mm_processor_kwargs": ({},),
    }
    prompt: str | None = None
    content: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(RequestBody):
    """Token ids to decode."""

    tokens: Annotated[list[TokenId], Field(max_length=65536, fail_fast=True)]


class InfillRequest(Sampled):
    """A text with gaps: ``text`` with blanks, ``pieces`` around the gaps, or prefix and suffix."""

    without_effect: ClassVar[Accepted | None] = {**LLAMA_CPP, "input_extra": ([],), "prompt": ("",), "stop": ([],)}
    text: Text | None = None
    blank: Annotated[str, Field(min_length=1, max_length=100)] | None = None
    pieces: Annotated[list[str], Field(min_length=2, max_length=65, fail_fast=True)] | None = None
    input_prefix: str | None = None
    input_suffix: str | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MOST_FILLED)] | None = None
    n_predict: Annotated[int, Field(ge=-1, le=MOST_FILLED)] | None = None
    lengths: Length | Annotated[list[Length], Field(min_length=1, max_length=32, fail_fast=True)] | None = None
    samples: Annotated[int, Field(ge=1, le=64)] | None = None
    beams: Annotated[int, Field(ge=1, le=64)] | None = None
    method: Literal["infill", "left-only", "blank", "contextual", "prefix-suffix", "line-by-line"] | None = None
    stream: bool | None = None

    def refuse_unsupported(self) -> None:
        """Raise an error for streams, since all tokens of a blank are there at once, and for two lengths."""
        refuse_first({"stream": bool(self.stream)})
        for name in ("max_tokens", "n_predict"):  # llama.cpp's n_predict of -1 leaves it to the server
            if self.lengths is not None and (getattr(self, name) or 0) > 0:
                raise ApiError(f"lengths say how many tokens to generate; leave {name} out", param=name)
        if self.blank is not None and self.text is None:
            raise ApiError("blank is the sign for a gap in text, which is not given; leave blank out", param="blank")
        lengths = {length for length in (self.max_tokens, self.n_predict) if length is not None and length > 0}
        if len(lengths) > 1:
            raise ApiError(
                "max_tokens and n_predict both say how many tokens to generate; leave one out", param="n_predict"
            )


@router.post("/v1/chat/completions", tags=["writing"], responses=STREAMS, response_model=None)
async def chat(body: ChatRequest, request: Request, service: Served) -> Any:
    """Generate the next message of a conversation, in the form of the model's own chat template."""
    name = str(body.model) if service.asks_index(body.model) else service.names[0]
    form = Form("chat", name, sends_usage=body.wants_usage)
    return await any_chat_work(service, body).answer(request, form)


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
        form = Form("text", service.names[0], sends_usage=body.wants_usage)
        return await complete_before_suffix(service, request, body, prompts[0], form)
    added = service.lm.tokenizer.added_tokens_decoder
    form = Form(
        "text",
        service.names[0],
        choices=body.choices,
        sends_usage=body.wants_usage,
        control=lambda token: added[token].content if token in added else None,
    )
    return await text_work(service, body, USUAL_COMPLETION).answer(request, form)


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
    fields = [name for name in ("prompt", "content", "messages") if getattr(body, name) is not None]
    if len(fields) != 1:
        raise ApiError("give one of prompt, content and messages", param=fields[-1] if fields else "prompt")
    with errors_about(fields[0]):
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
            raise unsupported(
                name, f"{name} is not supported with messages, whose template writes the special tokens; leave it out"
            )
        conversation = ChatRequest(messages=body.messages).conversation()
        template = template_options(body.add_generation_prompt, body.continue_final_message, body.chat_template_kwargs)
        return prompt_ids(lm.model, lm.tokenizer, conversation, "conversation", template=template)
    for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
        if getattr(body, name):
            raise ApiError(f"{name} is for messages; leave it out", param=name)
    text = body.prompt if body.prompt is not None else body.content or ""
    explicit = body.add_special_tokens if body.add_special_tokens is not None else body.add_special
    specials = body.prompt is not None if explicit is None else explicit
    check_unicode("the text", text)
    [result] = encode_texts(lm.tokenizer, [text], specials=specials)
    return result.ids


# ------------------------------------------------------------------------------------------------------- infilling


async def complete_before_suffix(
    service: Service, request: Request, body: CompletionRequest, prompt: str, form: AnswerForm
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
    if not body.stream:
        return {**form.whole([completion], usage), **_warning(service, "infill")}

    async def events() -> AsyncIterator[Any]:
        for chunk in (*form.first(0), *form.parts(0, [span], ()), *form.last(0, completion), *form.end(usage)):
            yield chunk

    return EventStream(events(), lambda: None, form.wire)


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
    fields = [name for name, is_given in forms.items() if is_given]
    if len(fields) != 1:
        raise ApiError(
            "give one of: text with [blank] for each span, pieces around the spans, input_prefix with input_suffix",
            param=fields[-1] if fields else "text",
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

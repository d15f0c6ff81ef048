"""``/v1/chat/completions`` and ``/v1/completions``, OpenAI's two ways to have a text written, and ``/infill``.

Knows: which field means what. Does not know: how anything is written.
"""

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request

from gerund.inference.generate.chat import demand_template
from gerund.server import infilling
from gerund.server.choices import Form
from gerund.server.errors import ApiError, api_error, blamed
from gerund.server.routes.common import STREAMS, Served
from gerund.server.schemas.writing import USUAL_COMPLETION, ChatRequest, CompletionRequest, InfillRequest, Writing
from gerund.server.service import Service
from gerund.server.writing import WritingRequest, answer, stream

router = APIRouter(tags=["writing"])


@router.post("/v1/chat/completions", responses=STREAMS, response_model=None)
async def chat(body: ChatRequest, request: Request, service: Served) -> Any:
    """Write the next turn of a conversation, in the form of the model's own chat template."""
    service.demand_model(body.model)
    conversation, template = body.conversation(), body.template
    try:
        demand_template(service.lm.tokenizer)
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


@router.post("/v1/completions", responses=STREAMS, response_model=None)
async def completions(body: CompletionRequest, request: Request, service: Served) -> Any:
    """Continue one or several texts; with ``suffix`` fill the gap between the two."""
    service.demand_model(body.model)
    body.refuse_unread()
    prompts = body.prompts
    if body.suffix:
        body.refuse_with_suffix()
        if len(prompts) != 1 or not isinstance(prompts[0], str):
            raise ApiError("beside suffix the prompt is one text", param="prompt")
        return await infilling.complete(service, request, body, prompts[0], wants_usage=_wants_usage(body))
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


@router.post("/infill")
async def infill(body: InfillRequest, request: Request, service: Served) -> dict[str, Any]:
    """Fill the gaps of a text, seeing both sides of them."""
    service.demand_model(body.model)
    body.refuse_unread()
    return await infilling.fill(service, request, body)


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

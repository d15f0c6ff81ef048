"""OpenAI's Responses API: a conversation in, text and tool calls out. Nothing is stored."""

from typing import Any

from fastapi import APIRouter, Request

from gerund.server.answer_work import any_chat_work
from gerund.server.errors import STREAMS
from gerund.server.responses_format import ResponsesForm
from gerund.server.schemas.responses import ResponsesRequest
from gerund.server.service import Served

router = APIRouter()


@router.post("/v1/responses", tags=["writing"], responses=STREAMS, response_model=None)
async def responses(body: ResponsesRequest, request: Request, service: Served) -> Any:
    """Generate the next message of a conversation, and tool calls, in the form of the model's own chat template."""
    work = any_chat_work(service, body.chat(), "input")
    sampling = work.sampling
    text = body.text.model_dump(exclude_none=True, by_alias=True) if body.text is not None else {}
    about = {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": body.model_dump(include={"tool_choice"})["tool_choice"] or "auto",
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
        "truncation": "disabled",
    }
    name = str(body.model) if service.asks_index(body.model) else service.names[0]
    return await work.answer(request, ResponsesForm(name, about))

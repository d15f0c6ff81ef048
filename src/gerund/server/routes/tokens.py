"""``/tokenize`` and ``/detokenize``: what the model reads of a text, and back.

Knows: the fields of vLLM and llama.cpp. Does not know: tokenizers' details.
"""

import asyncio
from typing import Any

from fastapi import APIRouter

from gerund.inference.generate.prompts import prompt_ids
from gerund.inference.text_ids import encode_texts
from gerund.inference.tokens import check_unicode
from gerund.server.errors import ApiError, api_error
from gerund.server.routes.common import Served
from gerund.server.schemas.representation import DetokenizeRequest, TokenizeRequest
from gerund.server.schemas.writing import ChatRequest, template_options
from gerund.server.service import Service

router = APIRouter(tags=["tokens"])


@router.post("/tokenize")
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
        ids = await asyncio.to_thread(_ids, service, body)
    except Exception as error:
        raise api_error(error, given[0]) from error
    return {"tokens": ids, "count": len(ids), "max_model_len": service.limit}


def _ids(service: Service, body: TokenizeRequest) -> list[int]:
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


@router.post("/detokenize")
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

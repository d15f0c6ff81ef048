"""Requests to encode: texts or token ids become vectors.

Knows: the engine, the tokenizer, the encoder's prompts. Does not know: HTTP, the form of answers.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gerund.engine.work import Ticket
from gerund.errors import ConfigError, TextError
from gerund.inference.text_ids import encode_texts
from gerund.inference.tokens import check_unicode
from gerund.models.pooling import compared
from gerund.server.errors import ApiError, api_error
from gerund.server.request_claims import Claim
from gerund.server.service import Service
from gerund.types import EncodeResult

# What encoders and servers call the two sides of a search.
_KINDS = (
    ("query", "search_query", "retrieval.query", "retrieval_query"),
    ("document", "passage", "search_document", "retrieval.passage", "retrieval_document"),
)
# What is tokenized in the event loop, the prompt counted as a text.
_FEW, _LETTERS = 5, 2048


async def encoded(
    service: Service,
    claim: Claim,
    inputs: Sequence[str | list[int]],
    *,
    param: str,
    prompt: str | None = None,
    prompt_name: str | None = None,
    prompt_param: str = "prompt_name",
    dimensions: int | None = None,
    truncate: bool = False,
    places: Sequence[str] | None = None,
) -> EncodeResult:
    """Return the vectors of texts.

    Args:
        service: the model.
        claim: the request's.
        inputs: texts, or lists of token ids.
        param: the field that they stand in.
        prompt: put before every text.
        prompt_name: the name of a stored prompt, to be put there.
        prompt_param: the field that says so.
        dimensions: numbers that are kept of each vector.
        truncate: cut texts that are too long, instead of refusing them.
        places: where each text stands in the body, for texts of several fields.

    Raises:
        ApiError: the texts cannot be encoded.
    """

    def work() -> Ticket[EncodeResult]:
        texts = [one if isinstance(one, str) else text_of_ids(service, one, param, at) for at, one in enumerate(inputs)]
        how: dict[str, Any] = {"prompt": prompt, "prompt_name": prompt_name, "dimensions": dimensions}
        return claim.hold(
            service.engine.encode(texts, overflow="truncate" if truncate else "error", deadline=claim.deadline, **how)
        )

    try:
        found = await claim.result(work() if _is_short([prompt or "", *inputs]) else await claim.run(work))
    except TextError as error:
        if places is not None and error.index is not None:
            raise ApiError(f"{places[error.index]} {error.reason}", param=places[error.index]) from error
        place = param if error.index is None or len(inputs) == 1 else f"{param}.{error.index}"
        if error.exceeds_context:
            raise ApiError(
                f"This model's maximum context length is {service.lm.max_length} tokens. However, "
                f"{str(error).partition(';')[0]}; shorten it, or send truncate: true",
                code="context_length_exceeded",
                param=place,
            ) from error
        raise api_error(error, place) from error
    except ConfigError as error:
        named = "prompt" if prompt_name is None else prompt_param
        raise api_error(error, "dimensions" if "dimensions" in str(error) else named) from error
    except Exception as error:
        raise api_error(error, param) from error
    return found


def prompt_for(service: Service, kind: str, param: str) -> str | None:
    """Return the name of the encoder's prompt for a kind of text; None where it reads that kind without one.

    Args:
        service: the model.
        kind: ``query``, ``document``, what other servers call them, or the name of a prompt.
        param: the field that says so.

    Raises:
        ApiError: there is no such kind of text.
    """
    prompts = service.lm.encoder.prompts
    if kind in prompts:
        return kind
    for names in _KINDS:
        if kind in names:
            return next((name for name in names if name in prompts), None)
    known = ", ".join(repr(name) for name in dict.fromkeys((*prompts, "query", "document")))
    raise ApiError(f"{param}: this encoder has no prompt for {kind!r}; it has {known}", param=param)


def _is_short(inputs: Sequence[str | list[int]]) -> bool:
    """Whether texts are tokenized in less time than it takes to hand them to a thread and back."""
    return len(inputs) <= _FEW and all(isinstance(one, str) for one in inputs) and sum(map(len, inputs)) <= _LETTERS


def text_of_ids(service: Service, ids: list[int], param: str, index: int) -> str:
    """Return the text of token ids, after making sure as far as possible that they are this tokenizer's.

    Ids of another tokenizer are the worst that can come: valid numbers, vectors without a meaning.

    Raises:
        ApiError: they are not.
    """
    tokenizer = service.lm.tokenizer
    size = len(tokenizer)
    wrong = next((token for token in ids if token >= size), None)
    hint = "send texts instead (in langchain-openai: check_embedding_ctx_length=False)"
    if wrong is not None:
        raise ApiError(
            f"{param}.{index} has the token id {wrong}, and this model's are 0 to {size - 1}; {hint}",
            param=param,
            code="foreign_token_ids",
        )
    [letter] = encode_texts(tokenizer, ["a"])
    before, after = letter.ids[: letter.before], letter.ids[len(letter.ids) - letter.after :]
    own = list(ids)
    if before and own[: len(before)] == before:
        own = own[len(before) :]
    if after and own[len(own) - len(after) :] == after:
        own = own[: len(own) - len(after)]
    text: str = tokenizer.decode(own, clean_up_tokenization_spaces=False)
    try:
        check_unicode("text", text)
        [again] = encode_texts(tokenizer, [text], specials=False)
    except TextError as error:
        raise api_error(error, param) from error
    if again.ids != own:
        raise ApiError(
            f"{param}.{index} has token ids that this model's tokenizer would not give for any text; {hint}",
            param=param,
            code="foreign_token_ids",
        )
    return text


async def cosines(
    service: Service,
    claim: Claim,
    query: str,
    documents: Sequence[str],
    *,
    param: str = "documents",
    truncate: bool = True,
) -> tuple[np.ndarray, int]:
    """Return the cosine of a query with each document ``(n,)``, and how many tokens were read; as ``rerank`` does.

    Args:
        service: the model.
        claim: the request's.
        query: what is asked.
        documents: what is compared with it.
        param: the field that they stand in.
        truncate: cut texts that are too long, instead of refusing them.

    Raises:
        ApiError: the texts cannot be encoded.
    """
    prompts = service.lm.encoder.prompts
    own = {"query": "query" if "query" in prompts else None, "documents": "document" if "document" in prompts else None}
    asked = await encoded(service, claim, [query], param="query", prompt_name=own["query"], truncate=truncate)
    read = await encoded(service, claim, documents, param=param, prompt_name=own["documents"], truncate=truncate)
    found_N = compared(read.vectors, asked.vectors[:1], service.lm.encoder.similarity)[:, 0]
    return found_N, sum(asked.token_counts) + sum(read.token_counts)

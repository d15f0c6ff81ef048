"""Requests to fill gaps: ``/infill``, and completions with a suffix.

Knows: the library's ``infill``, markers of gaps. Does not know: HTTP.
"""

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request

from gerund.inference.infill.infilling import BLANK, untrained_to_fill
from gerund.inference.text_ids import encode_texts
from gerund.inference.tokens import check_unicode
from gerund.server.choices import Form, usage_of
from gerund.server.errors import ApiError, api_error, blamed
from gerund.server.events import EventStream
from gerund.server.schemas.writing import USUAL_COMPLETION, CompletionRequest, InfillRequest
from gerund.server.service import Service
from gerund.types import Generation, Infill, Usage

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

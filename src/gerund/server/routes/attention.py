"""``/v1/attention``: which tokens each layer attends to in a text, untouched and under a plan.

Knows: the fields and the answer. Does not know: how attention is recorded.
"""

from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request

from gerund.inference.inspection import AttentionInspection, inspect_attention, sink_fraction, token_labels
from gerund.language_model import LanguageModel
from gerund.server.errors import ApiError, api_error
from gerund.server.routes.common import Served
from gerund.server.schemas.representation import AttentionRequest
from gerund.server.service import Service
from gerund.settings.plan import AttentionPlan

router = APIRouter(tags=["representation"])

# A map has a number for each pair of tokens.
_TOKENS = 64
_DIGITS = 4
_OF_PLAN = ("k", "k0", "sink_tokens", "skips")


@router.post("/v1/attention")
async def attention(body: AttentionRequest, request: Request, service: Served) -> dict[str, Any]:
    """Return where each layer looks in a text, averaged over heads, untouched and under a plan.

    A row is a token that looks, a column one that is looked at; rows add up to one.
    """
    service.demand_model(body.model)
    lm = service.lm
    if not isinstance(lm, LanguageModel):
        raise ApiError("no attention plan applies to a model with an encoder of its own", code="not_with_this_model")
    async with service.claim(request) as claim:
        try:
            read = await claim.run(lambda: _read_as(lm, body))
            work = claim.hold(
                service.engine.call(
                    lambda: inspect_attention(read.runtime, [body.text], longest=_TOKENS),
                    tokens=2 * _TOKENS,
                    deadline=claim.deadline,
                )
            )
            found = await claim.result(work)
        except Exception as error:
            raise api_error(error, "text" if "token" in str(error) else "plan") from error
    return _shown(service, read, found)


def _read_as(lm: LanguageModel, body: AttentionRequest) -> LanguageModel:
    given = {name: value for name in _OF_PLAN if (value := getattr(body, name)) is not None}
    if body.plan is None:
        if given:
            name = next(iter(given))
            raise ApiError(f"{name} is a setting of a plan; name the plan", param=name)
        return lm
    plan = AttentionPlan(body.plan, **given)
    return lm.with_encoder(replace(lm.encoder, attention=plan))


def _shown(service: Service, read: LanguageModel, found: AttentionInspection) -> dict[str, Any]:
    plan = read.encoder.attention.with_defaults(read.n_layers)
    sinks = zip(found.after, sink_fraction(found.after), strict=True)
    after: dict[int, list[tuple[Any, float]]] = {}
    for one, sink in sinks:
        after.setdefault(one.layer, []).append((one.weights, sink))
    layers = [
        {
            "before": _rows(one.weights),
            "after": [_rows(weights) for weights, _ in after[one.layer]],
            "sink_before": round(sink, _DIGITS),
            "sink_after": round(sum(own for _, own in after[one.layer]) / len(after[one.layer]), _DIGITS),
        }
        for one, sink in zip(found.before, sink_fraction(found.before), strict=True)
    ]
    return {
        "object": "attention",
        "model": service.names[0],
        "plan": ", ".join([plan.name, *(f"{name}={value}" for name, value in _settings(plan).items())]),
        "tokens": token_labels(read.tokenizer, found.ids[0]),
        "cut": bool(found.cut),
        "layers": layers,
    }


def _settings(plan: AttentionPlan) -> dict[str, int]:
    """Return what is to be said of a plan beside its name."""
    usual = AttentionPlan(plan.name)
    found = {name: getattr(plan, name) for name in _OF_PLAN if getattr(plan, name) is not None}
    return {name: value for name, value in found.items() if name == "k" or value != getattr(usual, name)}


def _rows(weights_TT: Any) -> list[list[float]]:
    return [[round(value, _DIGITS) for value in row] for row in weights_TT.tolist()]

"""What gerund can do with an architecture: found out on a tiny random model, against the slow and obvious way.

A survey never trusts a probe: what is not refused is compared.
"""

import copy
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from gerund.attention.recurrent import recurrent_modules
from gerund.errors import GerundError
from gerund.inference.infill.span_search import Context, SpanPass
from gerund.inference.likelihood import causal_runtime
from gerund.language_model import LanguageModel
from gerund.settings.encoder import EncoderConfig
from gerund.settings.plan import AttentionPlan
from tests.architectures.configs import NOT_TRIED, small_config
from tests.architectures.slow import SlowModel
from tests.tiny import _spread, byte_tokenizer

PLANS = [
    AttentionPlan("bidir"),
    AttentionPlan("mask0-bidir", k=2),
    AttentionPlan("mask0-all", k=2),
    AttentionPlan("inplace-back", k=3),
    AttentionPlan("inter-bidir", k=3),
    AttentionPlan("extra-back", k=2),
    AttentionPlan("extend-bidir", k=1),
]
BOTH = [AttentionPlan.from_dict({**plan.to_dict(), "recurrent": "both"}) for plan in PLANS]
TEXTS = ["a dog in the garden", "an owl", "the end of it"]
NEAR = 1e-4
LARGEST = 5_000_000


@dataclass(frozen=True)
class Found:
    """What was found out about one architecture.

    Attributes:
        kind: what transformers calls it.
        verdict: ``exact``, ``recurrent`` (exact, with recurrent layers causal or both ways), ``causal`` (no plan but
            the causal ones), ``refused``, ``untried``, or ``wrong``, which must never be.
        why: the reason, where there is one.
        without: plans that are refused where others are exact.
        gaps: why no gap is filled; empty where gaps are filled exactly.
    """

    kind: str
    verdict: str
    why: str = ""
    without: tuple[str, ...] = ()
    gaps: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        return asdict(self)


def survey(kind: str) -> Found:
    """Try an architecture."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            config = small_config(kind)
            plain, slow = build(config), build(config, attn_implementation="eager")
        except Exception as error:  # whatever a config asks for in vain
            return Found(kind, "untried", NOT_TRIED.get(kind) or _one_line(error))
        tokenizer = byte_tokenizer()
        ids = [tokenizer(text).input_ids for text in TEXTS]
        try:
            untouched = [body(plain)(torch.tensor([own]), use_cache=False).last_hidden_state for own in ids]
        except Exception as error:
            return Found(kind, "untried", f"the untouched model does not run on text alone: {_one_line(error)}")
        try:
            written = generated(plain, ids[0])
        except Exception:
            written = None  # plain transformers does not generate with it either
        try:
            lm = LanguageModel(build(config), tokenizer, EncoderConfig(attention=AttentionPlan("causal")), name=kind)
        except GerundError as error:
            return Found(kind, "refused", str(error))
        return _compare(kind, lm, SlowModel(slow), ids, untouched, written)


def _compare(kind: str, lm: LanguageModel, slow: SlowModel, ids: Any, untouched: Any, written: Any) -> Found:
    recurrent = bool(recurrent_modules(lm.model))
    refused: dict[str, str] = {}
    wrong: list[str] = []
    plans = [AttentionPlan("causal"), *PLANS, *(BOTH if recurrent else [])]
    for plan in plans:
        try:
            read = lm.with_encoder(EncoderConfig(attention=plan))
            apart = _distance(read, slow, ids, plan)
        except GerundError as error:
            refused[_name(plan)] = str(error)
            continue
        if not apart <= NEAR:
            wrong.append(f"{_name(plan)} is {apart:.0e} away")
    own = [body(lm.model)(torch.tensor([own]), use_cache=False).last_hidden_state for own in ids]
    if not all(torch.equal(a, b) for a, b in zip(own, untouched, strict=True)):
        wrong.append("states without a plan have changed")
    after = None if written is None else generated(lm.model, ids[0])
    if after is not None and not all(torch.equal(a, b) for a, b in zip(written, after, strict=True)):
        wrong.append("generation has changed")
    gaps = ""
    try:
        if not (apart := _gap_distance(lm, slow, ids)) <= NEAR:
            wrong.append(f"gaps are {apart:.0e} away")
    except GerundError as error:
        gaps = str(error)
    if wrong:
        return Found(kind, "wrong", "; ".join(wrong))
    exact = [_name(plan) for plan in plans[1:] if _name(plan) not in refused]
    if not exact:
        return Found(kind, "causal", next(iter(refused.values())))
    why = next(iter(refused.values())) if refused else ""
    return Found(kind, "recurrent" if recurrent else "exact", why, tuple(refused), gaps)


@torch.no_grad()
def _gap_distance(lm: LanguageModel, slow: SlowModel, ids: Any) -> float:
    """Return how far predictions in gaps, written with a cache, lie from whole texts under the mask written out."""
    gaps = [(2, 3), (3, 3)]
    rows = [
        Context(own[:at], own[at + size :], range(at + size, len(own)))
        for own, (at, size) in zip(ids, gaps, strict=False)
    ]
    filling = SpanPass(causal_runtime(lm.model, lm.tokenizer), rows, sees_right=True)
    steps = [filling.logprobs_BV]
    for step in range(3):
        filling.advance(range(len(rows)), [own[at + step] for own, (at, _) in zip(ids, gaps, strict=False)])
        steps.append(filling.logprobs_BV)
    apart = 0.0
    for row, (own, (at, size)) in enumerate(zip(ids, gaps, strict=False)):
        span = [int(at <= place < at + size) for place in range(len(own))]
        expected = slow.logprobs(own, span)[at - 1 : at + size]
        found = torch.stack([step[row] for step in steps])
        apart = max(apart, float((found - expected).abs().max() / expected.abs().max()))
    return apart


@torch.no_grad()
def _distance(read: LanguageModel, slow: SlowModel, ids: Any, plan: AttentionPlan) -> float:
    """Return how far padded batches lie from each text alone in the slow way, as a fraction of the largest state."""
    expected = [slow.states(own, plan) for own in ids]
    largest = max(float(states.abs().max()) for states in expected)
    apart = 0.0
    for side in ("left", "right"):
        read.tokenizer.padding_side = side
        found = read.encode_tokens(TEXTS)
        apart = max(
            apart, *(float((torch.from_numpy(a) - b).abs().max()) for a, b in zip(found, expected, strict=True))
        )
    return apart / largest


def build(config: Any, **settings: Any) -> PreTrainedModel:
    """Build a random model whose weights are large enough that who sees whom shows.

    Raises:
        ValueError: it would not be tiny.
    """
    with torch.device("meta"):
        size = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise ValueError(f"it would have {size / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32, **settings)
    _spread(model)
    return model.eval()


def body(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of a model that gives hidden states."""
    return getattr(model, "model", model) if model.base_model is model else model.base_model


@torch.no_grad()
def generated(model: PreTrainedModel, ids: list[int]) -> list[torch.Tensor]:
    """Return the scores of six tokens that a model writes behind a text."""
    settings = dict(max_new_tokens=6, do_sample=False, output_scores=True, return_dict_in_generate=True)
    found = model.generate(torch.tensor([ids]), **settings, pad_token_id=0)
    return [*found.scores, found.sequences]


def _name(plan: AttentionPlan) -> str:
    return plan.name if plan.recurrent == "causal" else f"{plan.name} both"


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"

"""Rerankers: score a query and a document, which a language model reads together, by one token or one linear layer.

Everything that differs between rerankers is in a ``RerankerConfig``; the chat template of a model becomes pieces of
text too, so there is one way from two texts to a score. In queries and documents control tokens are plain text.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from jinja2 import TemplateError
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gerund.checks import check_unicode
from gerund.errors import ConfigError, ModelError, TextError
from gerund.inference.encode.batches import in_batches
from gerund.inference.encode.runtime import EncoderRuntime
from gerund.inference.lm_head import TokenHead
from gerund.inference.text_ids import beginnings, encode_texts, pair_ids, text_ids
from gerund.inference.tokens import Tokens
from gerund.models.adapters import active_adapter
from gerund.models.architectures import is_bidirectional
from gerund.models.reranker_folder import ScoreLayer, write_reranker
from gerund.settings.encoder import ST_CONVENTIONS, EncoderConfig
from gerund.settings.plan import AttentionPlan
from gerund.settings.ranking import PLACES, RerankerConfig
from gerund.types import Rendered

# Stand for the query and the document while a chat template is rendered; no text has them.
_QUERY, _DOCUMENT = "\U00100000", "\U00100001"
_PLACE = re.compile(r"\{(" + "|".join(PLACES) + r")\}")
# By these a chat template reads lists of parts instead of texts (as sentence-transformers tells).
_STRUCTURED = ("content[0]", ".type", "'type'", '"type"', "message.content[")
# How far logits in half precision may be from those in float32.
_HALF = 3e-2
# A document with more characters per token that fits is cut before it is tokenized.
_LONG = 64


@dataclass(frozen=True)
class Place:
    """A place in a piece: of the ``query`` or the ``document``."""

    name: str


@dataclass(frozen=True)
class _Form:
    """How two texts become one.

    Attributes:
        pieces: parts that are tokenized apart, each made of texts and places.
        strips: white space around query and document is removed, as the chat template does.
    """

    pieces: tuple[tuple[str | Place, ...], ...]
    strips: bool = False


class Reranker:
    """Scores documents for a query by a model that was trained for that.

    Attributes:
        name: the model's name in messages.
        settings: how it scores, with every setting resolved.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: RerankerConfig,
        layer: ScoreLayer | None = None,
        *,
        name: str = "a model in memory",
        adapter: str | None = None,
    ) -> None:
        """Prepare a model.

        Args:
            model: the language model.
            tokenizer: its tokenizer.
            settings: how it scores.
            layer: the layer of a sequence classifier, where ``settings.true`` is None.
            name: the model's name in messages.
            adapter: the adapter that is active while it scores; None for none.

        Raises:
            ModelError: the tokenizer has no such token, or the chat template does not take a query and a document.
        """
        self.name = name
        plan = AttentionPlan("bidir" if is_bidirectional(model.config) else "causal")
        config = EncoderConfig(plan, max_length=settings.max_length, conventions=ST_CONVENTIONS)
        resolved = plan.resolve(int(model.config.get_text_config(decoder=True).num_hidden_layers))
        sends = plan.name != "causal"
        self._runtime = EncoderRuntime(model, tokenizer, config, resolved, sends_plan=sends, adapter=adapter)
        self._tokenizer, self._layer = tokenizer, layer
        self._form, layout = _form(tokenizer, settings, name)
        true, false = (_token(tokenizer, token, name) for token in (settings.true, settings.false))
        self.settings = replace(settings, layout=layout, true=true, false=false)
        self._activate: nn.Module = getattr(nn, settings.activation)()

    @property
    def runtime(self) -> EncoderRuntime:
        """How the model reads a query and a document: with which plan and adapter."""
        return self._runtime

    @property
    def fingerprint(self) -> str:
        """Hash of the settings and the layer."""
        layer = b"" if self._layer is None else self._layer.weight_1D.cpu().numpy().tobytes()
        return hashlib.blake2b(json.dumps(self.settings.to_dict()).encode() + layer, digest_size=8).hexdigest()

    @torch.no_grad()
    def score(self, prefixes: Sequence[str], continuations: Sequence[Sequence[str]]) -> list[list[float]]:
        """Return a score for each document (in ``continuations``) of each query (in ``prefixes``); higher is better.

        Raises:
            TextError: a text is no string, or a query is so long that no document fits next to it.
        """
        pairs = [(query, text) for query, texts in zip(prefixes, continuations, strict=True) for text in texts]
        scores_N = torch.zeros(len(pairs))
        head = None if self._layer is not None else TokenHead(self._runtime.model)

        def keep(rows: list[int], batch: list[Tokens], hidden_BTD: Tensor, begin: Tensor) -> None:
            last_B = begin + torch.tensor([self._last(text.ids) for text in batch], device=begin.device)
            states_BD = hidden_BTD[torch.arange(len(batch), device=begin.device), last_B]
            scores_N[rows] = self._scored(states_BD, head).float().cpu()

        tokens = list(self.tokens(pairs))
        in_batches(self._runtime, tokens, self._runtime.states, keep, show=False, label="scoring")
        if not bool(torch.isfinite(scores_N).all()):
            raise ModelError(
                f"the scores of {self.name} are not numbers in {self._runtime.model.dtype}; use another dtype"
            )
        values = iter(self._activate(scores_N).tolist())
        return [[next(values) for _ in texts] for texts in continuations]

    def _scored(self, states_BD: Tensor, head: TokenHead | None) -> Tensor:
        """Return the score ``(B,)`` of last states, before the activation."""
        layer, true, false = self._layer, self.settings.true, self.settings.false
        if layer is not None:
            bias = None if layer.bias_1 is None else layer.bias_1.to(states_BD.device)
            return nn.functional.linear(states_BD.float(), layer.weight_1D.to(states_BD.device), bias)[:, 0]
        assert head is not None
        tokens = [cast(int, token) for token in (true, false) if token is not None]
        with active_adapter(self._runtime.adapter):  # an adapter may change the head too
            logits_BN = head.logits(states_BD)[:, tokens].float()
        if states_BD.dtype != torch.float32 and self._runtime.adapter is None:
            logits_BN = self._finer(states_BD, tokens, logits_BN)
        return logits_BN[:, 0] if false is None else logits_BN[:, 0] - logits_BN[:, 1]

    def _finer(self, states_BD: Tensor, tokens: list[int], logits_BN: Tensor) -> Tensor:
        """Return the logits in float32 where the head is a linear layer: half precision would give many ties."""
        head: Any = self._runtime.model.get_output_embeddings()
        if not isinstance(getattr(head, "weight", None), Tensor) or not head.weight.is_floating_point():
            return logits_BN
        bias = None if getattr(head, "bias", None) is None else head.bias[tokens].float()
        finer_BN = nn.functional.linear(states_BD.float(), head.weight[tokens].float(), bias)
        is_same = torch.allclose(finer_BN, logits_BN, rtol=_HALF, atol=_HALF)
        return finer_BN if is_same else logits_BN

    def _last(self, ids: Sequence[int]) -> int:
        """Return the position whose state is scored."""
        skipped = self.settings.ignored_end
        return next((place for place in range(len(ids) - 1, -1, -1) if ids[place] != skipped), len(ids) - 1)

    def tokens(self, pairs: Sequence[tuple[str, str]]) -> Iterator[Tokens]:
        """Yield the tokens of each query and document; too long a document loses its end.

        Raises:
            TextError: a text is no string, or a query is so long that no document fits next to it.
        """
        limit = self._runtime.max_length
        for index, (query, document) in enumerate(pairs):
            check_unicode("the query", query)
            check_unicode("document", document, index)
            if limit is not None and len(document) > _LONG * limit:
                [document] = beginnings(self._tokenizer, [document], limit)
            if self._form is None:
                ids = pair_ids(self._tokenizer, self.settings.instruction + query, document, limit)
            else:
                ids = self._joined(self._form, query, document, limit)
            yield Tokens(ids, 0, 0)

    def _joined(self, form: _Form, query: str, document: str, limit: int | None) -> list[int]:
        """Return the tokens of all pieces; what is too long loses tokens at the end of its last text."""
        texts = {"query": query, "document": document}
        if form.strips:
            texts = {name: text.strip() for name, text in texts.items()}
        ids: list[int] = []
        first = end = 0  # of the last text: its first token, and the one behind its last
        for piece in form.pieces:
            text, places = _filled(piece, texts)
            [encoded] = encode_texts(self._tokenizer, [text], offsets=bool(places))
            if places:
                start, stop = places[-1]
                first = len(ids) + next((at for at, (_, last) in enumerate(encoded.offsets) if last > start), 0)
                end = len(ids) + next(
                    (at for at, (one, _) in enumerate(encoded.offsets) if one >= stop), len(encoded.ids)
                )
            ids += encoded.ids
        excess = 0 if limit is None else max(0, len(ids) - limit)
        if excess >= max(1, end - first):
            error = TextError(
                f"the query is so long that no document fits next to it: this reranker reads {limit} tokens, and its "
                f"prompt and the query take {len(ids) - (end - first)}"
            )
            error.exceeds_context = True
            raise error
        return ids[: end - excess] + ids[end:]

    def save(self, folder: Path) -> None:
        """Write ``reranker.json``, and the layer of a sequence classifier, into a model's folder."""
        write_reranker(folder, self.settings)
        if self._layer is not None:
            self._layer.save(folder)


def _filled(piece: Sequence[str | Place], texts: dict[str, str]) -> tuple[Rendered, list[tuple[int, int]]]:
    """Return a piece with its texts, and where each of them stands."""
    whole, places = "", []
    for part in piece:
        text = texts[part.name] if isinstance(part, Place) else part
        if isinstance(part, Place):
            places.append((len(whole), len(whole) + len(text)))
        whole += text
    return Rendered(whole, literal=places), places


def _token(tokenizer: PreTrainedTokenizerBase, token: str | int | None, name: str) -> int | None:
    """Return the id of a token that is given as a text."""
    if isinstance(token, str):
        ids = text_ids(tokenizer, token, specials=False)
        if len(ids) != 1:
            raise ModelError(f"{name} answers {token!r} as a reranker, which is no single token of its vocabulary")
        return ids[0]
    if token is not None and token >= len(tokenizer):
        raise ModelError(f"{name} scores the token {token}, and its vocabulary has {len(tokenizer)}")
    return token


def _form(tokenizer: PreTrainedTokenizerBase, settings: RerankerConfig, name: str) -> tuple[_Form | None, Any]:
    """Return how two texts become one, None for the tokenizer's own layout; and the layout that was resolved."""
    if settings.layout == "pair":
        return None, "pair"
    if settings.layout == "pieces":
        return _Form(tuple(_parted(piece, tokenizer, settings) for piece in settings.pieces)), "pieces"
    try:
        return _chat_form(tokenizer, settings), "chat"
    except (ConfigError, TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if settings.layout == "chat-or-pair":
            return None, "pair"
        reason = " ".join(str(error).split())
        raise ModelError(
            f"{name} scores a query and a document in its chat template, which does not take them: {reason}"
        ) from error


def _parted(piece: str, tokenizer: PreTrainedTokenizerBase, settings: RerankerConfig) -> tuple[str | Place, ...]:
    if settings.optional and not settings.instruction:
        piece = piece.replace(settings.optional, "")
    known = {"instruction": settings.instruction, "bos": str(tokenizer.bos_token or "")}
    parts = _PLACE.split(piece)  # every second one is a place
    return tuple(
        part if index % 2 == 0 else known[part] if part in known else Place(part) for index, part in enumerate(parts)
    )


def _chat_form(tokenizer: PreTrainedTokenizerBase, settings: RerankerConfig) -> _Form:
    """Return the piece that a chat template makes of a query and a document."""
    if not tokenizer.chat_template:
        raise ConfigError("the model has none")
    structured = settings.is_structured
    if structured is None:
        structured = any(mark in str(tokenizer.chat_template) for mark in _STRUCTURED)

    def rendered(query: str, document: str) -> str:
        given = {"system": settings.instruction, "query": query, "document": document}
        messages = [
            {"role": role, "content": [{"type": "text", "text": text}] if structured else text}
            for role, text in given.items()
            if text or role != "system"
        ]
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **settings.template_variables))

    whole = rendered(_QUERY, _DOCUMENT)
    for mark, role in ((_QUERY, "query"), (_DOCUMENT, "document")):
        if mark not in whole:
            raise ConfigError(f"the {role} is not in its text")
    # What the template does to its texts, besides putting them somewhere.
    padded = [f" {mark} A<&>b\n{mark} " for mark in (_QUERY, _DOCUMENT)]
    seen = rendered(*padded)
    strips = seen == whole.replace(_QUERY, padded[0].strip()).replace(_DOCUMENT, padded[1].strip())
    if not strips and seen != whole.replace(_QUERY, padded[0]).replace(_DOCUMENT, padded[1]):
        raise ConfigError("it changes its texts")
    places = {_QUERY: Place("query"), _DOCUMENT: Place("document")}
    parts = (part for part in re.split(f"([{_QUERY}{_DOCUMENT}])", whole) if part)
    return _Form((tuple(places.get(part, part) for part in parts),), strips)

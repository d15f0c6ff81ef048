"""``LanguageModel``: one language model that generates, embeds, infills and re-ranks.

The public class. Its methods check what they are given and call ``inference`` and ``scoring``.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event, Lock
from typing import TYPE_CHECKING, Any, ClassVar, Self, Unpack

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gerund.attention.interface import attach
from gerund.attention.layouts import attach_streams, decoder_layers
from gerund.attention.probe import verify_once
from gerund.checks import check_candidates, check_texts
from gerund.errors import ConfigError
from gerund.inference.encode import runtime as encoding
from gerund.inference.encode.embeds import Embeds
from gerund.inference.encode.kv_embedding_layers import chosen_layers, layer_dimensions
from gerund.inference.encode.runtime import choose_autocast
from gerund.inference.encode.texts import (
    text_tokens,
)
from gerund.inference.generate import generation
from gerund.inference.generate.config import NUCLEUS, GenerationConfig, GenerationKeywords
from gerund.inference.generate.decoding import Decoding
from gerund.inference.generate.prompts import Prompt, prompt_ids
from gerund.inference.generate.reranking import Judge, search, stream_search
from gerund.inference.generate.sequence import Emit, Piece
from gerund.inference.generate.session import Session, encode_and_prefill, read_prompt, sessions_of
from gerund.inference.generate.writing import Writes
from gerund.inference.infill import BLANK, expansion, infilling, untrained_to_fill
from gerund.inference.infill.infilling import InfillKeywords, Method, each, infill_sampling
from gerund.inference.likelihood import SpanMode, SpannedText, span_logprobs
from gerund.jobs.files import atomic_folder
from gerund.models import loading
from gerund.models.adapters import Adapters, base_state, load_adapters
from gerund.models.encoder_settings import write_settings
from gerund.models.fingerprint import cache_passed_probe, probe_passed
from gerund.models.hash_cache import CachedWeightsHash, probe_key
from gerund.models.heads import AnswerTokens, LateHead, ProjectionHead
from gerund.models.kinds import is_encoder_decoder
from gerund.models.origin import origin_of
from gerund.models.sources import Source
from gerund.models.vectors import Transform, fit
from gerund.progress import say_once
from gerund.scoring.dual_encoder import DualScorer
from gerund.scoring.likelihood import LikelihoodScorer
from gerund.scoring.ranks import Ranks
from gerund.scoring.registry import MixedScorer, find_scorer, on_prompts, score_samples
from gerund.scoring.reranker import Reranker
from gerund.settings.aliases import takes_aliases
from gerund.settings.encoder import JOBS, EncoderConfig, ExportFormat, GgufType, Job, read_alike, vectors_alike
from gerund.settings.model_spec import ModelSpec
from gerund.settings.plan import AttentionPlan, ResolvedPlan
from gerund.settings.ranking import NO_RERANKER
from gerund.settings.sampling import Rerank, Sampling
from gerund.settings.templates import NO_TRANSFORM, TRUNCATE
from gerund.types import Generation, Infill, Scorer

if TYPE_CHECKING:
    from gerund.exporting.hub import Uploaded
    from gerund.exporting.shared import Export

_attaching = Lock()  # two encoders of the same model must not both register its hooks


class LanguageModel(Writes, Embeds, Ranks):
    """One language model that generates text and embeds it with the same weights; ``gerund.load`` makes it.

    Without a plan in the call, ``model`` is bit-identical to plain transformers in the same dtype. Safe to use from
    several threads at once.

    Attributes:
        model: the Hugging Face causal language model.
        tokenizer: its tokenizer; batches are padded on its ``padding_side``.
        encoder: the encoder settings.
        name: what it was loaded from.
        runtime: model, settings and resolved plan, as the functions of ``inference`` take them.
        n_layers: number of decoder layers.
        adapters: its PEFT adapters, each active for its jobs only.
        head: projects the pooled states; None without one.
        transform: the fitted transform of the vectors; None without one.
    """

    job: Job = "encode"
    """Whose adapter is active in ``encode``."""
    scorer: DualScorer | None = None
    """The model's own scorer of continuations, where it was trained to be one."""
    late: LateHead | None = None
    """What its token vectors were trained with."""
    reranker: Reranker | None = None
    """Scores a query and a document together, where the model was trained for that."""
    fills_gaps: bool | None = None
    """Whether the model or its infilling adapter is known to be trained to infill; None for a model made in memory."""
    was_trained_to_embed: bool = False
    """Whether the record of a training in its folder says that its vectors were trained."""
    load_again: Callable[[ModelSpec], Any] | None = None
    """Loads a model by its spec; set by ``gerund.load``."""
    bundled: EncoderConfig | None = None
    """How the adapter reads texts that came with gerund; None for a model whose adapter is its own."""
    loader: ClassVar[Callable[..., Any]]
    """``gerund.load``, which sets itself here: this module can't import it."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        encoder: EncoderConfig | None = None,
        *,
        name: str = "a model in memory",
        adapters: Adapters | None = None,
        autocast: bool = False,
        head: ProjectionHead | None = None,
        transform: Transform | None = None,
        spec: ModelSpec | None = None,
        stamp: str | None = None,
    ) -> None:
        """Wrap a model that is in memory, and verify that its attention plan is applied in every layer.

        Args:
            model: a Hugging Face decoder-only language model.
            tokenizer: its tokenizer.
            encoder: the encoder settings; None for the default plan.
            name: the model's name in messages.
            adapters: PEFT adapters to put into the model.
            autocast: encode float32 weights in bfloat16 where that is fast and accurate enough.
            head: projects the pooled states.
            transform: what ``encoder.transform`` was fitted to; None where it was not fitted yet (see ``fitted``).
            spec: what it was loaded by; None for a model made in memory.
            stamp: the key under which the hash of its files is cached (``hash_cache``); None computes it.

        Raises:
            UnsupportedModelError: the plan is not applied in every layer.
            ConfigError: the plan needs more layers, or the transform can't be used in 8 bits.
            ModelError: in 8 bits the vectors would be too inaccurate.
        """
        self.model = model
        self.tokenizer = tokenizer
        self.encoder = encoder or EncoderConfig()
        self.name = name
        self.adapters = adapters or Adapters()
        self.head = head
        self._spec = spec
        self.n_layers = self._attach()
        plan = self.encoder.resolved(self.n_layers)
        if self.adapters.folders:
            load_adapters(model, self.adapters.by_name)
        self._weights = CachedWeightsHash(self._hashed_part(), stamp)
        self._verify(plan)
        runtime = encoding.EncoderRuntime(
            model,
            tokenizer,
            self.encoder,
            plan,
            sends_plan=self._sends_plan(plan, self.encoder),
            adapter=self.adapters.name(self.job),
            head=head,
            transform=transform,
        )
        self.runtime = runtime.truncating()
        self.transform = self.runtime.transform
        # A fitted transform scales small directions up, and their rounding errors with them.
        is_fitted = self.encoder.transform.split("-")[0] not in (NO_TRANSFORM, TRUNCATE)
        if autocast and not is_fitted:
            self.runtime = replace(self.runtime, autocast=choose_autocast(self.runtime))

    def _attach(self) -> int:
        """Prepare the model for attention plans, and return the number of its layers."""
        layers = decoder_layers(self.model)
        with _attaching:
            attach(self.model)
            attach_streams(layers)
        return len(layers)

    def _verify(self, plan: ResolvedPlan) -> None:
        """Verify that the plan is applied in every layer, unless that is cached for these files."""
        key, files = None, self._weights.files_key
        if files is not None:
            key = probe_key(files, self.model, plan, adapters=" ".join(map(self.adapters.hash, JOBS)))
        if key is not None and probe_passed(key):
            return
        verify_once(self.model, plan)
        if key is not None:
            cache_passed_probe(key)

    @staticmethod
    def _sends_plan(plan: ResolvedPlan, encoder: EncoderConfig) -> bool:
        # A causal pass needs no plan, so architectures without support for plans still encode causally.
        return not plan.is_causal or encoder.reads_beside or encoder.exit_layer is not None

    def _hashed_part(self) -> PreTrainedModel:
        """Return the part of the model that the vectors depend on."""
        return self.model

    @classmethod
    def from_pretrained(cls, model: Any = None, **settings: Any) -> Any:
        """Load a model as ``gerund.load`` does, under transformers' name; the arguments are the same."""
        return cls.loader(model, **settings)

    def __repr__(self) -> str:
        plan = self.encoder.plan_label(self.n_layers)
        return f"<{type(self).__name__} {self.name}: {plan}, {self.encoder.pooling}, {self.dimensions} dimensions>"

    def __reduce__(self) -> tuple[Callable[[ModelSpec], Any], tuple[ModelSpec]]:
        """Pickle the spec, by which another process loads the model."""
        if self.load_again is None or self.job != LanguageModel.job:
            raise ConfigError(f"{self.name} can't be pickled: only models from gerund.load can, by their spec")
        return self.load_again, (self.spec,)

    def __copy__(self) -> Self:
        # Not by __reduce__: a copy is the same model in the same memory.
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    @property
    def spec(self) -> ModelSpec:
        """The spec that loads this model again: its source, and every encoder setting resolved.

        Raises:
            ConfigError: the model was made in memory.
        """
        if self._spec is None:
            raise ConfigError(f"{self.name} was not loaded from a folder or the hub, so it has no spec; save it first")
        return self._spec.with_encoder(self.encoder, self.n_layers)

    @property
    def n_parameters(self) -> int:
        """Number of parameters, adapters included."""
        return int(self.model.num_parameters())

    @property
    def device(self) -> torch.device:
        """The device of the model's weights."""
        return self.runtime.device

    @property
    def full(self) -> Self:
        """Itself; of a model that is computed without torch, what has all methods."""
        return self

    @property
    def decoding(self) -> Decoding | None:
        """How sequences are decoded together; None for a model that does not write."""
        return generation.decoding_of(self.model, self.tokenizer)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype that ``encode`` computes in; the weights keep their own."""
        return self.runtime.autocast or self.model.dtype

    def with_encoder(self, encoder: EncoderConfig) -> Self:
        """Return the same model, in the same memory, with other encoder settings.

        A head's shared space, the model's own scorer and a bundled adapter are dropped if trained for the old settings.

        Raises:
            UnsupportedModelError: the plan is not applied in every layer.
            ConfigError: the plan needs more layers.
        """
        if not isinstance(encoder, EncoderConfig):
            raise ConfigError(
                f"encoder must be an EncoderConfig, such as EncoderConfig(pooling='last'), not {encoder!r}"
            )
        if self.runtime.answers is not None and not read_alike(encoder, self.encoder):
            raise ConfigError(f'{self.name} encodes by answer tokens; load it with adapter="none" to read it otherwise')
        if self.bundled is not None and not read_alike(encoder, self.bundled):
            return self._without_bundled().with_encoder(encoder)
        plan = encoder.resolved(self.n_layers)
        self._verify(plan)
        other = copy(self)
        other.encoder = encoder
        same_vectors = vectors_alike(encoder, self.encoder)
        other.head = self.head if self.head is None or same_vectors else self.head.without_space()
        runtime = replace(
            self.runtime,
            head=other.head,
            config=encoder,
            plan=plan,
            sends_plan=self._sends_plan(plan, encoder),
            transform=self.transform if same_vectors else None,
            why_no_vectors="",
        )
        other.runtime = runtime.truncating()
        other.transform = other.runtime.transform
        if self.runtime.why_no_vectors:
            other.reranker = None
            other._spec = None if self._spec is None else ModelSpec.of(self._spec, reranker=NO_RERANKER)
        if not same_vectors and self.scorer is not None and not self.scorer.has_own_config:
            other.scorer = None
        if encoder.attention.with_defaults(self.n_layers) != self.encoder.attention.with_defaults(self.n_layers):
            other.late = None
        return other

    def _without_bundled(self) -> Self:
        other = copy(self)
        other.bundled, other.head, other.scorer = None, None, None
        other._spec = self._spec and self._spec.without_auto()
        others = self.adapters.without("encode").without("score")
        other.adapters, other.runtime = others, replace(self.runtime, adapter=None, head=None)
        return other

    def take_answers(self, answers: AnswerTokens) -> None:
        """Encode by answer tokens from now on (``gerund train gen``), in the dtype of the weights."""
        self.runtime = replace(self.runtime.in_own_type(), answers=answers)

    def fitted(self, texts: Sequence[str], prompt: str | None = None, *, prompt_name: str | None = None) -> Self:
        """Return the same model with its ``transform`` fitted on the vectors of texts; they need no labels.

        ``texts`` is a sample of what you are going to encode; whitening needs more texts than a vector has dimensions.
        The prompts are those of ``encode``.

        Raises:
            ConfigError: the encoder settings name no transform, or the sample is too small for it.

        >>> lm = gerund.load(transform="all-but-the-top").fitted(["a cat", "a dog", "a house", "rain", "snow", "hail"])
        >>> lm.transform.name
        'all-but-the-top'
        """
        if self.encoder.transform == NO_TRANSFORM:
            raise ConfigError("there is no transform to fit; set one, such as transform='whitening'")
        plain = self.with_encoder(replace(self.encoder, transform=NO_TRANSFORM))
        sample = [text for text in check_texts(texts) if text.strip()]
        place = {text: index for index, text in enumerate(dict.fromkeys(sample))}
        vectors = np.zeros((0, self.dimensions))
        if sample:
            vectors = plain.encode(list(place), prompt, False, prompt_name=prompt_name)
        return self.fitted_on(vectors[[place[text] for text in sample]])

    def fitted_on(self, vectors: np.ndarray) -> Self:
        """Return the same model with its ``transform`` fitted on vectors ``(N, D)`` that are not normalized.

        Raises:
            ConfigError: the encoder settings name no transform, or there are too few vectors for it.
        """
        if self.encoder.transform == NO_TRANSFORM:
            raise ConfigError("there is no transform to fit; set one, such as transform='whitening'")
        return self._with_transform(fit(self.encoder.transform, vectors))

    def _with_transform(self, transform: Transform) -> Self:
        other = copy(self)
        other.transform = transform
        other.runtime = replace(self.runtime, transform=transform, autocast=None)
        other._spec = None  # no spec fits it again, but that of a file of texts: see ``load``
        return other

    def rerouting_layers(self, texts: Sequence[str]) -> str:
        """Return the layers in which KV-Embedding would reroute, as ``reroute`` spells them.

        They are chosen by the intrinsic dimension of the tokens' states under plain causal attention (Tang and Yang,
        2026, section 3.2.3). ``texts`` is a sample of what you are going to encode, some hundred or more.

        Raises:
            DataError: the texts have too few tokens.

        >>> lm = gerund.load(attention="causal", adapter="none")
        >>> texts = ["The train was late because of the snow.", "A cat sleeps by the fire.", "Rates rose again."]
        >>> layers = lm.rerouting_layers([f"{one} {other}" for one in texts for other in texts])
        >>> lm = gerund.load(attention="causal", adapter="none", template="kv-embedding", reroute=layers)
        """
        plain = self.with_encoder(EncoderConfig(AttentionPlan("causal"), max_length=self.encoder.max_length)).runtime
        tokens = [text for text in text_tokens(plain, check_texts(texts), empty="zeros") if text is not None]
        return "+".join(map(str, chosen_layers(layer_dimensions(plain, tokens))))

    @property
    def weights_hash(self) -> str:
        """Hash of the base weights, on which all generated text depends."""
        return self._weights.value()

    @property
    def adapter_hash(self) -> str:
        """Hash of the encoder's adapter, projection head and transform; empty without any of them."""
        parts = (self.runtime.answers, self.head, self.transform)
        fitted = (part.fingerprint for part in parts if part is not None)
        return self.adapters.hash(self.job) + "".join(fitted)

    def _write(
        self,
        prompts: Sequence[Prompt],
        settings: GenerationConfig,
        batch_size: int,
        stop: Event,
        emit: Emit | None = None,
    ) -> list[Generation]:
        return generation.generate(
            self.model, self.tokenizer, prompts, settings, batch_size=batch_size, emit=emit, cancelled=stop
        )

    def _search(
        self, prompts: Sequence[Prompt], settings: GenerationConfig, rerank: Rerank, stop: Event
    ) -> list[Generation]:
        return list(search(self.model, self.tokenizer, prompts, **self._ranked_search(prompts, settings, rerank, stop)))

    def _search_streamed(
        self, prompt: Prompt, settings: GenerationConfig, rerank: Rerank, stop: Event
    ) -> Iterator[Piece]:
        ranked = self._ranked_search([prompt], settings, rerank, stop)
        return stream_search(self.model, self.tokenizer, prompt, **ranked)

    def _ranked_search(
        self, prompts: Sequence[Prompt], settings: GenerationConfig, rerank: Rerank, stop: Event
    ) -> dict[str, Any]:
        """Return the arguments of a search for what a scorer ranks highest."""
        return {
            "judge": self._judge(prompts, rerank, settings.sampling),
            "rerank": rerank,
            "max_new_tokens": settings.max_new_tokens,
            "sampling": settings.sampling,
            "cancelled": stop,
        }

    def _judge(self, prompts: Sequence[Prompt], rerank: Rerank, sampling: Sampling) -> Judge:
        if not isinstance(rerank, Rerank):
            raise ConfigError(f"rerank must be a Rerank, such as Rerank(scorer='pmi'), not {rerank!r}")
        seed = sampling.seed if isinstance(sampling.seed, int) else 0
        scorer, prefixes = on_prompts(find_scorer(rerank.scorer, self, seed=seed), self.tokenizer, prompts)
        if isinstance(scorer, DualScorer | LikelihoodScorer | MixedScorer) and rerank.every is not None:
            scorer = scorer.incremental()
        return lambda numbers, texts: score_samples(scorer, [prefixes[number] for number in numbers], texts)

    @takes_aliases
    def infill(
        self,
        text: str | Sequence[str],
        *,
        blank: str = BLANK,
        max_tokens: int = 32,
        lengths: int | Sequence[int] | None = None,
        sampling: Sampling | None = None,
        beams: int = 1,
        samples: int = 1,
        method: Method = "infill",
        shots: int = 0,
        **options: Unpack[InfillKeywords],
    ) -> Any:
        """Fill the blanks of a text, using left and right context (MAGNET, sections 3.1 and 3.2.3).

        The position of the right context depends on the length of the blank, so a blank is filled once for each
        candidate length. Each filling is scored: the sum of the log-probabilities of its tokens under the hybrid mask
        and of the first 16 tokens after the blank (up to the next blank) under the causal base model, divided by their
        number. The best filling of each length is kept. The length is then chosen by the text after the blank alone,
        if there is any, since a mean over a long span nearly always looks better. The adapter for infilling is active
        under the hybrid mask only.

        Several blanks are filled from left to right; each sees the earlier fillings, and the text after later blanks
        at a distance that leaves room for them. A length above 32 is filled in chunks of 32 tokens, each becoming
        context of the next while the right context keeps its position (MAGNET, appendix F). A filling never contains
        a special token.

        A T5 fills all blanks together, by sentinels (T5; GUR, section V-C), and determines how long a filling is:
        ``lengths``, ``beams``, ``method`` and ``shots`` are for decoder-only models. With ``samples`` the one with the
        highest mean log-probability is returned.

        Args:
            text: the text, or several, each filled on its own. The model generates spaces before a blank; all else
                stays unchanged.
            blank: the placeholder that marks a blank.
            max_tokens: the longest length that is tried when ``lengths`` is None: 1, 2, 3, 4, 6, 8, 12, ... up to it.
                The other methods generate until the model ends its text, ``max_tokens`` at most.
            lengths: number of tokens to fill in, or several to try.
            sampling: how tokens are chosen; None is greedy.
            beams: beam width for each length; can't be combined with sampling.
            samples: number of sampled fillings per length; needs a temperature above 0.
            method: ``infill``; or ``left-only``, the paper's baseline, which continues the left context with the base
                model: neither a filling nor its length depends on the text after the blank (among several ``lengths``
                the one at which the model most likely ends its text is chosen); or a prompt to the base model
                (appendix B): ``blank``, ``contextual``, ``prefix-suffix`` or ``line-by-line``.
            shots: solved examples in the prompt, 0 or 5.
            options: the fields of ``Sampling`` instead of ``sampling``: ``temperature``, ``top_p``, ``seed``, ...;
                and ``max_new_tokens`` for ``max_tokens``.

        Returns:
            The full text and the spans in it: an ``Infill``, or for several texts a list of them.

        Raises:
            TextError: the text is not a string or not valid Unicode, has no blank or nothing else, has two adjacent
                blanks, starts with one and the tokenizer has no BOS token, or is too long for the model's context.
            ConfigError: a setting is impossible, or doesn't apply to the method.
            UnsupportedModelError: the hybrid mask is not applied in every layer.
            ModelError: a T5's tokenizer has no sentinels (``<extra_id_0>``, ...).

        >>> lm = gerund.load()
        >>> filled = lm.infill("The old man looked at [blank] and went home.", lengths=[1, 2])
        >>> filled.text == "The old man looked at" + filled.spans[0] + " and went home."
        True
        """
        fill = self._filler(
            blank=blank,
            max_tokens=max_tokens,
            lengths=lengths,
            sampling=infill_sampling(sampling, options),
            beams=beams,
            samples=samples,
            method=method,
            shots=shots,
        )
        filled = each(fill, text)
        if method == "infill" and self.fills_gaps is False:
            say_once(untrained_to_fill(self.name))
        return filled

    def _filler(self, **settings: Any) -> Callable[[str], Infill]:
        """Return what fills the blanks of one text."""
        adapter = self.adapters.name("infill")
        return partial(infilling.infill, self.model, self.tokenizer, **settings, adapter=adapter)

    @takes_aliases
    def expand(
        self,
        query: str,
        count: int = 5,
        *,
        keep: Sequence[str] = (),
        fraction: float = expansion.FRACTION,
        max_tokens: int = expansion.MAX_TOKENS,
        sampling: Sampling | None = None,
        **options: Unpack[InfillKeywords],
    ) -> list[str]:
        """Return variants of a query, with some of its words rewritten by ``infill`` (GUR, section V-C).

        Args:
            query: blanks of its own (``[blank]``) are filled; else words are masked at random for each variant.
            count: number of variants at most; those that equal the query or each other are omitted.
            keep: words of the query, or several together, that are never masked.
            fraction: fraction of the words that is masked; at least one is.
            max_tokens: tokens of a filling at most.
            sampling: how tokens are chosen; None is nucleus sampling with p 0.9. Its seed determines the masks too.
            options: as in ``infill``: the fields of ``Sampling``, and ``max_new_tokens``.

        Returns:
            The most likely fillings first, with a warning when there are fewer than ``count``.

        Raises:
            InputError: the query has no word, lacks a word to ``keep``, or is too long; or a setting is impossible.
        """
        return expansion.expand(
            lambda text, chosen: self.infill(text, max_tokens=max_tokens, sampling=chosen),
            *(query, count),
            keep=keep,
            fraction=fraction,
            blank=BLANK,
            sampling=infill_sampling(sampling, options, NUCLEUS),
            begins=is_encoder_decoder(self.model) or self.tokenizer.bos_token_id is not None,
        )

    def span_logprobs(self, left: str, span: str, right: str, *, mode: SpanMode = "infill") -> np.ndarray:
        """Return the log-probability of every token of ``span`` between its left and right context.

        Args:
            left: the text before the span.
            span: the span.
            right: the text after it.
            mode: ``infill`` sees left and right context under MAGNET's hybrid mask (section 3.1), with the adapter for
                infilling; ``causal`` only the left, with the base model.

        Returns:
            Natural logarithms ``(n,)`` float32. The tokens are those of the joined text that contain a character of
            the span.

        Raises:
            TextError: a text is not a string or too long, the span is empty, or nothing precedes it.
            UnsupportedModelError: the hybrid mask is not applied in every layer.

        >>> lm = gerund.load()
        >>> len(lm.span_logprobs("The old man", " looked at", " the sea.", mode="causal")) > 0
        True
        """
        text = SpannedText.between(*check_texts([left, span, right]))
        adapter = self.adapters.name("infill")
        return span_logprobs(self.model, self.tokenizer, [text], mode, show=False, adapter=adapter)[0][0]

    @property
    def has_scorer(self) -> bool:
        """Whether the model was trained to score continuations."""
        return self.scorer is not None

    def score(
        self, prefixes: Sequence[str], continuations: Sequence[Sequence[str]], scorer: str | Scorer | None = None
    ) -> list[list[float]]:
        """Score how well texts continue a prefix (RankGen, appendix C.6).

        Args:
            prefixes: any number of texts.
            continuations: for each prefix its candidates, with the space that they start with.
            scorer: ``pmi``, ``avg_cll``, ``cll``, ``avg_ull``, ``self_certainty``, ``overlap``, ``consensus``,
                ``random``; ``model``, this model's trained scorer; ``mixed``, it and PMI; ``default``, the bundled
                model's; a scorer's folder or hub id; or an object with a ``score`` method. None is its own if it has
                one, else ``pmi``.

        Returns:
            A score for each candidate of each prefix; higher is better. Only scores of one prefix by one scorer can
            be compared.

        Raises:
            TextError: a text is not a string, a candidate is blank, the number of lists differs from that of the
                prefixes, or a prefix fills the context of a model whose likelihoods are used. (Where prefix and
                candidate together are too long for it, the prefix is truncated at its start. A trained scorer reads
                only the end of a long prefix.)
            ConfigError: there is no such scorer.

        >>> lm = gerund.load()
        >>> [[right, wrong]] = lm.score(["The king of France and his"], [[" queen went to Paris.", " oil was sold."]])
        >>> right > wrong
        True
        """
        checked, texts = check_candidates(prefixes, continuations)
        chosen = find_scorer(scorer, self)
        if getattr(chosen, "reads_model", False):
            for index, prefix in enumerate(checked):
                if prefix:
                    prompt_ids(self.model, self.tokenizer, prefix, "prefix", index)
        return chosen.score(checked, texts)

    def prefill(self, prompt: Prompt) -> Session:
        """Run the base model over a prompt and keep its keys and values, so that it needn't be run again.

        The prompt is as in ``generate``: a text, token ids, or the messages of a conversation.

        Returns:
            The session: ``generate`` and ``stream`` continue the prompt, ``prefill`` extends it, ``save`` stores it.

        Raises:
            TextError: the prompt is not valid, or fills the model's context.
            ModelError: it is a conversation, and the model has no chat template.

        >>> lm = gerund.load()
        >>> session = lm.prefill("The old man looked at")
        >>> session.generate(4).text == lm.generate("The old man looked at", 4)[0].text
        True
        """
        return read_prompt(self.model, self.tokenizer, prompt, lambda: self.weights_hash)

    def encode_and_prefill(
        self, text: str, prompt: str | None = None, *, prompt_name: str | None = None
    ) -> tuple[np.ndarray, Session]:
        """Embed one text causally and keep the keys and values, so that generation continues without another pass.

        The prompt is that of ``encode``: not pooled, but part of what is continued.

        Returns:
            The vector ``(dimensions,)`` float32 of ``encode``, computed in the dtype of the weights; and the
            session, whose ``generate`` returns what this model's ``generate`` returns for prompt and text.

        Raises:
            ConfigError: the plan is not causal or reads the text twice, or an adapter is active while encoding, so
                generation couldn't continue from the pass.
            TextError: the text is empty, not a string, or too long; it is never truncated.

        >>> lm = gerund.load(attention="causal", adapter="none")
        >>> vector, session = lm.encode_and_prefill("The old man looked at")
        >>> session.generate(4).text == lm.generate("The old man looked at", 4)[0].text
        True
        """
        if self.runtime.adapter is not None:
            raise ConfigError(
                "this model encodes with an adapter and generates without it, so generation can't continue from what "
                'encoding computed; load it with adapter="none", or merge the adapter (gerund convert --merge)'
            )
        [checked] = check_texts([text])
        before = self.encoder.prompt_text(prompt, prompt_name)
        return encode_and_prefill(self.runtime, before, checked, lambda: self.weights_hash)

    def read_vector(
        self,
        vectors: np.ndarray | str | Sequence[str],
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        **options: Unpack[GenerationKeywords],
    ) -> Any:
        """Read vectors as text: what the model writes after the embeddings that its answer tokens make of them.

        For a model with answer tokens (``gerund train gen``). Vectors are those of its ``encode``, or made of them,
        such as the mean of a cluster, and need not be of length 1; texts are encoded first. An adapter that was
        trained with ``prefix: states`` reads texts alone.

        Args:
            vectors: ``(dimensions,)`` or ``(n, dimensions)``; or one text or several.
            max_new_tokens: tokens to write at most.
            sampling: how tokens are chosen; None is greedy.
            options: as in ``Session.generate``.

        Returns:
            A ``Generation``, or a list of them for several.

        Raises:
            ConfigError: the model has no answer tokens, or they read texts alone.
            TextError: a text is empty, or the vectors have other dimensions or numbers that are not finite.
        """
        sessions = sessions_of(self.runtime, vectors, lambda: self.weights_hash)
        written = [session.generate(max_new_tokens, sampling, **options) for session in sessions]
        is_one = isinstance(vectors, str) or (isinstance(vectors, np.ndarray) and vectors.ndim == 1)
        return written[0] if is_one else written

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Save weights, tokenizer, ``gerund.json`` and a model card atomically; each adapter goes into a subfolder.

        The folder opens with ``AutoModelForCausalLM`` as a plain language model with the same weights, in their
        current dtype. The card, ``README.md``, has examples for gerund, transformers and sentence-transformers, the
        encoder settings, and the base model and its license as far as they are known here.

        Args:
            folder: the target folder.
            overwrite: replace an existing folder.

        Raises:
            OutputExistsError: the folder exists.
            ResourceError: the disk is full; nothing is left behind.
        """
        with atomic_folder(folder, overwrite=overwrite) as work:
            save_into(self, work)

    def save_pretrained(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Save the model as ``save`` does, by the name that transformers and sentence-transformers use."""
        self.save(folder, overwrite=overwrite)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        commit_message: str | None = None,
        revision: str | None = None,
        base: bool | None = None,
        base_model: str | None = None,
        results: str | Path | None = None,
    ) -> "Uploaded":
        """Save the model and upload it to the Hugging Face hub, with its model card, in one commit.

        What is uploaded, and its size, is logged first. Afterwards the sizes of the files on the hub are verified.

        Args:
            repo_id: the repository, as OWNER/NAME; created if it does not exist.
            private: whether a new repository is private; None for the hub's default.
            token: the access token; None for that of ``hf auth login`` or ``HF_TOKEN``.
            commit_message: the message of the commit.
            revision: the branch, created if it does not exist; None for main.
            base: for a model with adapters, whether the weights of its base go along. You must choose, as they
                are large and somebody else's; with False, only the adapters, settings and card are uploaded.
            base_model: the base's id on the hub, if gerund does not know it.
            results: the folder of a report of ``gerund eval``, whose scores of this model go into the card.

        Returns:
            The repository's URL, the commit's hash, and the size of each file in bytes.

        Raises:
            ConfigError: ``repo_id`` is not valid, ``base`` must be chosen, or the base's id isn't known.
            DataError: ``results`` has no scores of this model.
            ModelError: the hub can't be reached, or refuses the upload.
        """
        from gerund.exporting.hub import push_model

        options: dict[str, Any] = {"token": token, "commit_message": commit_message, "revision": revision}
        about: dict[str, Any] = {"base": base, "base_model": base_model, "results": results, "private": private}
        return push_model(self.save, repo_id, **about, **options)

    def export(
        self, folder: str | Path, format: ExportFormat, *, type: GgufType | None = None, overwrite: bool = False
    ) -> "Export":
        """Export the encoder for other tools, in the current dtype of its weights.

        Args:
            folder: the target folder.
            format: ``sentence-transformers``, a folder for ``SentenceTransformer``; ``multi-vector``, one of trained
                token vectors for ``MultiVectorEncoder``; ``merged``, a plain model, whose scorer is kept only if its
                plan and pooling equal the encoder's; ``onnx`` or ``openvino``, a graph from token ids to vectors in
                float32, or ``onnx-int8``, with weights in 8 bits.
                Each has the encoder's adapter merged in, and so has ``gguf-embedding``, the encoder for llama.cpp,
                whose plan must be ``causal`` or ``bidir``. Or ``gguf``, the base language model for llama.cpp,
                which generates.
            type: for GGUF, the type of the weights: f32, bf16, f16, q8_0, q6_k, q5_k_m, q4_k_m or q4_0. Default: the
                dtype of the weights.
            overwrite: replace an existing folder.

        Returns:
            Where it is and how to load it. Plain sentence-transformers reads causal and fully bidirectional
            encoders; other plans need ``gerund.integrations.sentence_transformers.load``.

        Raises:
            ConfigError: an unknown format, or a plan that it doesn't support.
            ModelError: torch cannot export the architecture, the adapter cannot be merged into the weights, or the
                other program computes something else.
            MissingDependencyError: the format needs an extra that is not installed.
            OutputExistsError: the folder exists.
            ResourceError: the disk is full; nothing is left behind.
        """
        scorer = None if self.scorer is None or self.scorer.has_own_config else self.scorer
        # Loaded on use: few processes export.
        from gerund.exporting import formats

        return formats.export(self, folder, format, type=type, scorer=scorer, overwrite=overwrite)


def save_into(lm: LanguageModel, folder: Path, *, source: Source | None = None) -> None:
    """Write the files of ``LanguageModel.save`` into a folder; ``source`` is what it was made from, None its spec's."""
    # Loaded on use: exporters are not needed to load a model.
    from gerund.exporting.hub import origin_of_spec, write_card
    from gerund.exporting.shared import with_weights

    lm = with_weights(lm)
    loading.save_model(lm.model, lm.tokenizer, base_state(lm.model), folder)
    write_settings(folder, lm.encoder, lm.n_layers, lm.fingerprint(), adapters=lm.adapters)
    for part in (lm.scorer, lm.late, lm.reranker, lm.runtime.answers, lm.head, lm.transform):
        if part is not None:
            part.save(folder)
    origin = origin_of_spec(lm._spec) if source is None else origin_of(source)
    write_card(folder, lm.runtime, origin, adapters=list(lm.adapters.folders))

"""``GenerativeModel``: what every model that writes and encodes has, with or without an encoder of its own.

``LanguageModel`` (decoder-only) and ``Seq2SeqModel`` (encoder-decoder) stand beside each other on it; each adds what it
alone can do.

Knows: which function does what. Does not know: how any of it is done.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import Any, ClassVar, Self, Unpack

from gerund.checks import check_candidates, flag
from gerund.errors import ConfigError
from gerund.exporting.shared import write_settings
from gerund.inference.generate import generation
from gerund.inference.generate.config import GenerationConfig, GenerationKeywords
from gerund.inference.generate.prompts import Prompt, check_conversation, check_prompts, prompt_ids
from gerund.inference.generate.sequence import Emit, Piece
from gerund.inference.generate.streams import AsyncTextStream, TextStream, Work, in_thread
from gerund.inference.infill import expansion
from gerund.inference.infill.infilling import BLANK, InfillKeywords, Method, infill_sampling
from gerund.jobs.files import atomic_folder
from gerund.models import loading
from gerund.models.adapters import base_state
from gerund.models.architectures import is_encoder_decoder
from gerund.scoring import relevance
from gerund.scoring.dual_encoder import DualScorer
from gerund.scoring.likelihood import LikelihoodScorer
from gerund.scoring.names import DEFAULT_MEASURE, RelevanceMeasure, check_relevance
from gerund.scoring.registry import find_scorer
from gerund.settings.aliases import takes_aliases
from gerund.settings.encoder import EncoderConfig
from gerund.settings.sampling import Rerank, Sampling
from gerund.text_encoder import TextEncoder
from gerund.types import Generation, Ranked, Ranking, Scorer

# How tokens are sampled where several fillings or continuations are ranked and nothing else is said (RankGen,
# section 3.2).
NUCLEUS = Sampling(temperature=1.0, top_p=0.9)


class GenerativeModel(TextEncoder):
    """A model that encodes, generates, fills gaps and scores, and is saved; see ``LanguageModel``."""

    scorer: DualScorer | None = None
    """The encoder's own scorer of continuations, where it was trained to be one."""
    fills_gaps: bool | None = None
    """Whether the model, or the adapter that infills, is known to be trained to fill gaps; None for a model that was
    made in memory, of which nothing is known."""

    loader: ClassVar[Callable[..., Any]]
    """``gerund.load``, which puts itself here: this module imports nothing of it."""

    @classmethod
    def from_pretrained(cls, model: Any = None, **settings: Any) -> Any:
        """Load a model as ``gerund.load`` does, by the name that transformers uses; the arguments are the same."""
        return cls.loader(model, **settings)

    def with_encoder(self, encoder: EncoderConfig) -> Self:
        """Return the same model, in the same memory, read another way.

        The model's own scorer does not go with it where it has no encoder config of its own.

        Raises:
            UnsupportedModelError: the plan does not reach every layer.
            ConfigError: the plan does not fit the number of layers.
        """
        other = super().with_encoder(encoder)
        if encoder != self.encoder and self.scorer is not None and not self.scorer.has_own_config:
            other.scorer = None
        return other

    @takes_aliases
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        *,
        rerank: Rerank | None = None,
        batch_size: int = 16,
        **options: Unpack[GenerationKeywords],
    ) -> list[Generation]:
        """Continue each prompt with the untouched model; an encoder-decoder writes a text of its own for it.

        Args:
            prompts: one prompt or many, of any lengths. A prompt is a text, in which control tokens are text unless it
                is a ``Rendered`` one; token ids, which are read as they are; or the messages of a conversation, as
                in ``chat``. The empty text starts from nothing.
            max_new_tokens: how much to write at most; less where the model's context ends first.
            sampling: how tokens are chosen; None is greedy, or with ``rerank`` nucleus sampling with p 0.9. A
                continuation depends on its prompt and its seed, and on no other prompt of the call.
            rerank: write several continuations and keep what a scorer likes best (RankGen, section 2.3).
            batch_size: continuations in one pass; with ``rerank`` it is chosen by how many there are of a prompt.
            options: ``n``, how many continuations of each prompt, above 1 sampled ones; ``stop`` and
                ``stop_token_ids``, what ends the text; ``min_tokens``, ``ignore_eos``, ``bad_words`` and
                ``allowed_token_ids``, which tokens may follow; ``logprobs``, the log-probability of each token and
                how many alternatives; ``schema``, ``regex`` or ``choice``, the form of the text, which need
                llguidance. See
                ``gerund.inference.generate.config.GenerationKeywords``. None of them goes with ``rerank``. And the
                fields of ``Sampling`` in the place of ``sampling``: ``temperature``, ``top_p``, ``top_k``, ``min_p``,
                ``seed``, ...; ``do_sample``; ``max_tokens`` for ``max_new_tokens``; and ``response_format``, OpenAI's
                form of ``schema``.

        Returns:
            ``n`` times a ``Generation`` for each prompt, those of one prompt together, in the order of the
            prompts; with ``rerank`` one ``Ranked`` a prompt, which also has the score and all that competed.

        Raises:
            TextError: a prompt is none, or fills the model's context.
            ConfigError: a setting is impossible, such as ranking greedy continuations, which are all the same, or
                ranking at all with an encoder-decoder, which does not continue its prompt; or it is given twice.
            ModelError: a conversation is given, and the model has no chat template.

        >>> from gerund import Rerank, Sampling
        >>> settings = Rerank(samples=2, beams=2, every=4, scorer="overlap")
        >>> [story] = gerund.load().generate("The old man", 8, Sampling(temperature=1.0, seed=0), rerank=settings)
        >>> story.rank_score == story.beams[0].rank_score >= story.beams[1].rank_score
        True
        >>> [answer] = gerund.load().generate("To be or not to", 4, stop=[" "], logprobs=0)
        >>> len(answer.logprobs) == len(answer.token_ids), " " in answer.text
        (True, False)
        """
        settings = self._settings(max_new_tokens, sampling, rerank, options)
        return self._write(check_prompts(prompts), settings, rerank, batch_size, Event())

    @takes_aliases
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_new_tokens: int = 256,
        sampling: Sampling | None = None,
        *,
        rerank: Rerank | None = None,
        **options: Unpack[GenerationKeywords],
    ) -> list[Generation]:
        """Write the next turn of a conversation, in the form that the model's own chat template gives it.

        Control tokens that somebody typed into a message, such as ``<|im_start|>``, are text.

        Args:
            messages: dicts with ``role`` (``system``, ``user`` or ``assistant``) and ``content``, a text or a list of
                parts of the form ``{"type": "text", "text": ...}``; a ``name`` where the template reads one.
            max_new_tokens: how much to write at most; less where the model's context ends first.
            sampling: as in ``generate``.
            rerank: as in ``generate``.
            options: as in ``generate``.

        Returns:
            ``n`` answers, one unless more were asked for.

        Raises:
            ModelError: the model has no chat template.
            TextError: a message is malformed, or the template refuses the conversation.
            ConfigError: a setting is impossible.
        """
        conversation = check_conversation(messages)
        return self.generate([conversation], max_new_tokens, sampling, rerank=rerank, **options)

    @takes_aliases
    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        *,
        rerank: Rerank | None = None,
        **options: Unpack[GenerationKeywords],
    ) -> TextStream:
        """Continue one prompt, a conversation too, and yield the text piece by piece; as ``generate``.

        With ``rerank`` a piece comes as soon as all continuations that are kept agree on it. No part of a stop string
        is ever yielded. When the iteration ends, ``result`` is the whole ``Generation``. The model writes on until
        then, unless the stream is closed: by ``close``, by leaving its ``with`` block, or with its last reference.

        >>> stream = gerund.load().stream("The old man", max_new_tokens=5)
        >>> "".join(stream) == stream.result.text
        True
        """
        return TextStream(self._stream_work(prompt, max_new_tokens, sampling, rerank, options))

    @takes_aliases
    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        *,
        rerank: Rerank | None = None,
        batch_size: int = 16,
        **options: Unpack[GenerationKeywords],
    ) -> list[Generation]:
        """Continue each prompt as ``generate`` does, while the event loop goes on; cancelling it stops the model."""
        settings = self._settings(max_new_tokens, sampling, rerank, options)
        checked = check_prompts(prompts)
        return await in_thread(lambda stop: self._write(checked, settings, rerank, batch_size, stop))

    @takes_aliases
    async def achat(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_new_tokens: int = 256,
        sampling: Sampling | None = None,
        *,
        rerank: Rerank | None = None,
        **options: Unpack[GenerationKeywords],
    ) -> list[Generation]:
        """Write the next turn of a conversation as ``chat`` does, while the event loop goes on."""
        conversation = check_conversation(messages)
        return await self.agenerate([conversation], max_new_tokens, sampling, rerank=rerank, **options)

    @takes_aliases
    def astream(
        self,
        prompt: Prompt,
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        *,
        rerank: Rerank | None = None,
        **options: Unpack[GenerationKeywords],
    ) -> AsyncTextStream:
        """Continue one prompt as ``stream`` does, for ``async for``; to cancel the task stops the model."""
        return AsyncTextStream(self._stream_work(prompt, max_new_tokens, sampling, rerank, options))

    def _settings(
        self, max_new_tokens: int, sampling: Sampling | None, rerank: Rerank | None, options: GenerationKeywords
    ) -> GenerationConfig:
        """Return what is asked for as one value, checked."""
        if rerank is None:
            return GenerationConfig.of(max_new_tokens, sampling, options)
        settings = GenerationConfig.of(max_new_tokens, sampling, options, NUCLEUS)
        settings.refuse_with_rerank()
        return settings

    def _write(
        self, prompts: Sequence[Prompt], settings: GenerationConfig, rerank: Rerank | None, batch_size: int, stop: Event
    ) -> list[Generation]:
        if rerank is not None:
            return list(self._search(prompts, settings, rerank, stop))
        own = self.model, self.tokenizer, prompts, settings
        return generation.generate(*own, batch_size=batch_size, cancelled=stop)

    def _stream_work(
        self,
        prompt: Prompt,
        max_new_tokens: int,
        sampling: Sampling | None,
        rerank: Rerank | None,
        options: GenerationKeywords,
    ) -> Work:
        """Return what writes a stream."""
        settings = self._settings(max_new_tokens, sampling, rerank, options)
        if settings.n != 1:
            raise ConfigError(f"n={settings.n}: a stream is one text; take generate, or several streams")
        [checked] = check_prompts([prompt])

        def work(emit: Emit, stop: Event) -> None:
            if rerank is None:
                generation.generate(self.model, self.tokenizer, [checked], settings, emit=emit, cancelled=stop)
                return
            for piece in self._stream_search(checked, settings, rerank, stop):
                emit(piece)

        return work

    def _search(
        self, prompts: Sequence[Prompt], settings: GenerationConfig, rerank: Rerank, stop: Event
    ) -> list[Ranked]:
        """Continue each prompt by what a scorer likes best; only a model that continues its prompt can."""
        del prompts, settings, rerank, stop
        raise self._not_continuing()

    def _stream_search(
        self, prompt: Prompt, settings: GenerationConfig, rerank: Rerank, stop: Event
    ) -> Iterator[Piece]:
        """Do so for one prompt, piece by piece."""
        del prompt, settings, rerank, stop
        raise self._not_continuing()

    def _not_continuing(self) -> ConfigError:
        return ConfigError(f"{self.name} writes beside its prompt, not behind it; re-rank with a decoder-only model")

    def score(
        self, prefixes: Sequence[str], continuations: Sequence[Sequence[str]], scorer: str | Scorer | None = None
    ) -> list[list[float]]:
        """Say how well texts continue a prefix (RankGen, appendix C.6).

        Args:
            prefixes: any number of texts.
            continuations: for each prefix its candidates, as they follow it: with the space that begins them.
            scorer: ``pmi``, ``avg_cll``, ``cll``, ``avg_ull``, ``self_certainty``, ``overlap``, ``random``;
                ``model``, this model's, if it was trained to be one; ``default``, the bundled model's; a scorer's
                folder or hub id; or an object with a ``score`` method. None takes its own if it has one, else ``pmi``.

        Returns:
            For each prefix a score for each of its candidates; higher is better. Scores of one prefix by one scorer
            can be compared, others not.

        Raises:
            TextError: a text is no string, a candidate is blank, there are not as many lists as prefixes, or a prefix
                fills the context of a model whose likelihoods are read. (Where prefix and candidate together are too
                long for it, the prefix loses its beginning. A trained scorer reads only the end of a long prefix.)
            ConfigError: there is no such scorer.

        >>> lm = gerund.load()
        >>> [[right, wrong]] = lm.score(["The king of France and his"], [[" queen went to Paris.", " oil was sold."]])
        >>> right > wrong
        True
        """
        checked, texts = check_candidates(prefixes, continuations)
        found = find_scorer(scorer, self)
        if isinstance(found, LikelihoodScorer) and found.reads_model:
            for index, prefix in enumerate(checked):
                if prefix:
                    prompt_ids(self.model, self.tokenizer, prefix, "prefix", index)
        return found.score(checked, texts)

    def rerank(
        self, query: str, documents: Sequence[str], top_k: int | None = None, *, by: RelevanceMeasure | None = None
    ) -> Ranking:
        """Order documents by how relevant they are to a query.

        Args:
            query: what is looked for.
            documents: any number of texts.
            top_k: keep only so many, the most relevant ones.
            by: ``vectors``, the cosine of what ``encode`` gives; ``model``, the model's own scorer, where it was
                trained to be one; or ``likelihood``, how probable the untouched model finds the query behind the
                document (UPR, Sachan et al. 2022). None takes ``vectors``.

        Raises:
            TextError: a text is no string or blank.
            ConfigError: there is no such measure, or the model has no scorer of its own.

        >>> lm = gerund.load()
        >>> ranking = lm.rerank("how to bake bread", ["Trains run on rails.", "Bread is baked of flour."], top_k=1)
        >>> ranking.indices
        [1]
        """
        asked, texts = check_relevance(query, documents, top_k, by)
        return relevance.rank(self, asked, texts, by=by or DEFAULT_MEASURE, scorer=self.scorer, top_k=top_k)

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        top_k: int | None = None,
        return_documents: bool = False,
        *,
        by: RelevanceMeasure | None = None,
    ) -> list[dict[str, Any]]:
        """Order documents as ``rerank`` does, and return what sentence-transformers' ``CrossEncoder.rank`` returns.

        Args:
            query: what is looked for.
            documents: any number of texts.
            top_k: keep only so many, the most relevant ones.
            return_documents: whether each entry has the document's ``text`` too.
            by: as in ``rerank``.

        Returns:
            One dict per document, the most relevant first: ``corpus_id``, its place in ``documents``, and ``score``.

        >>> [best] = gerund.load().rank("how to bake bread", ["Trains run on rails.", "Bread is baked."], top_k=1)
        >>> best["corpus_id"]
        1
        """
        with_text = flag("return_documents", return_documents)
        return [
            {"corpus_id": index, "score": score, **({"text": documents[index]} if with_text else {})}
            for index, score in self.rerank(query, documents, top_k, by=by)
        ]

    @abstractmethod
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
        """Fill the gaps of a text; the models say how, and which of the settings are theirs."""

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
        """Return other ways to ask, with some of a query's words written anew by ``infill`` (GUR, section V-C).

        Args:
            query: with gaps of its own (``[blank]``) filled as it is; else words are masked at random, anew each time.
            count: how many at most; what says the same as the query or as each other is left out.
            keep: words of the query, or several together, that are never masked.
            fraction: fraction of the words that is masked; at least one is.
            max_tokens: tokens of a filling at most.
            sampling: how tokens are chosen; None is nucleus sampling with p 0.9. Its seed determines the masks too.
            options: as in ``infill``: the fields of ``Sampling``, and ``max_new_tokens``.

        Returns:
            The most probable fillings first. A warning says when there are fewer than ``count``.

        Raises:
            InputError: the query has no word, lacks what is to be kept, or is too long; or a setting is impossible.
        """
        return expansion.expand(
            lambda text, own: self.infill(text, max_tokens=max_tokens, sampling=own),
            *(query, count),
            keep=keep,
            fraction=fraction,
            blank=BLANK,
            sampling=infill_sampling(sampling, options, NUCLEUS),
            begins=is_encoder_decoder(self.model) or self.tokenizer.bos_token_id is not None,
        )

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Save weights, tokenizer and ``gerund.json`` in one step; each adapter goes into a folder of its own.

        The folder opens with ``AutoModelForCausalLM`` as a plain language model with the same weights, in the
        type in which they are held here.

        Args:
            folder: where to.
            overwrite: replace what is there.

        Raises:
            OutputExistsError: there is something already.
            ResourceError: the disk is full; nothing is left behind.
        """
        with atomic_folder(folder, overwrite=overwrite) as work:
            self.save_into(work)

    def save_pretrained(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Save the model as ``save`` does, by the name that transformers and sentence-transformers use."""
        self.save(folder, overwrite=overwrite)

    def save_into(self, folder: Path) -> None:
        """Write the files of ``save`` into a folder that is there."""
        loading.save_model(self.model, self.tokenizer, base_state(self.model), folder)
        write_settings(folder, self.encoder, self.n_layers, self.fingerprint(), adapters=self.adapters)
        if self.scorer is not None:
            self.scorer.save(folder)
        if self.head is not None:
            self.head.save(folder)
        if self.transform is not None:
            self.transform.save(folder)

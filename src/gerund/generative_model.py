"""``GenerativeModel``: what every model that writes and encodes has, with or without an encoder of its own.

``LanguageModel`` (decoder-only) and ``Seq2SeqModel`` (encoder-decoder) stand beside each other on it; each adds what it
alone can do.

Knows: which function does what. Does not know: how any of it is done.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

from gerund.config import EncoderConfig, Rerank, Sampling, sampling_or
from gerund.errors import ConfigError
from gerund.exporting.folders import write_settings
from gerund.inference.generate import generation
from gerund.inference.infill import expansion
from gerund.inference.infill.infilling import BLANK, Method
from gerund.inference.tokens import check_candidates, check_texts
from gerund.jobs.folders import atomic_folder
from gerund.models import loading
from gerund.models.adapters import base_state
from gerund.models.encoder_decoder import is_encoder_decoder
from gerund.scoring.dual import DualScorer
from gerund.scoring.registry import find_scorer
from gerund.text_encoder import TextEncoder
from gerund.types import Generation, Infill, Ranked, Scorer

# How tokens are sampled where several fillings or continuations are ranked and nothing else is said (RankGen,
# section 3.2).
NUCLEUS = Sampling(temperature=1.0, top_p=0.9)


class GenerativeModel(TextEncoder):
    """A model that encodes, generates, fills gaps and scores, and is saved; see ``LanguageModel``."""

    scorer: DualScorer | None = None
    """The encoder's own scorer of continuations, where it was trained to be one."""

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

    def generate(
        self,
        prompts: str | Sequence[str],
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        *,
        rerank: Rerank | None = None,
        batch_size: int = 16,
        samples: int = 1,
    ) -> list[Generation]:
        """Continue each prompt with the untouched model; an encoder-decoder writes a text of its own for it.

        Args:
            prompts: one prompt or many, of any lengths. The empty prompt starts from nothing.
            max_new_tokens: how much to write at most; less where the model's context ends first.
            sampling: how tokens are chosen; None is greedy, or with ``rerank`` nucleus sampling with p 0.9. A
                continuation depends on its prompt and its seed, and on no other prompt of the call.
            rerank: write several continuations and keep what a scorer likes best (RankGen, section 2.3).
            batch_size: continuations in one pass; with ``rerank`` it is chosen by how many there are of a prompt.
            samples: how many continuations of each prompt; above 1 they are sampled. Not with ``rerank``, which has
                its own.

        Returns:
            ``samples`` times a ``Generation`` for each prompt, those of one prompt together, in the order of the
            prompts; with ``rerank`` one ``Ranked`` a prompt, which also has the score and all that competed.

        Raises:
            TextError: a prompt is no string or fills the model's context.
            ConfigError: a setting is impossible, such as ranking greedy continuations, which are all the same, or
                ranking at all with an encoder-decoder, which does not continue its prompt.

        >>> from gerund import Rerank, Sampling
        >>> settings = Rerank(samples=2, beams=2, every=4, scorer="overlap")
        >>> [story] = gerund.load().generate("The old man", 8, Sampling(temperature=1.0, seed=0), rerank=settings)
        >>> story.rank_score == story.beams[0].rank_score >= story.beams[1].rank_score
        True
        """
        if rerank is not None:
            if samples != 1:
                raise ConfigError(f"samples={samples} beside rerank: set the samples of Rerank, which keeps the best")
            return list(self._search(check_texts(prompts), max_new_tokens, sampling, rerank))
        return generation.generate(
            self.model,
            self.tokenizer,
            check_texts(prompts),
            max_new_tokens=max_new_tokens,
            sampling=sampling_or(sampling),
            batch_size=batch_size,
            samples=samples,
        )

    def stream(
        self,
        prompt: str,
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        *,
        rerank: Rerank | None = None,
    ) -> Iterator[str]:
        """Continue one prompt and yield the text piece by piece; the arguments are those of ``generate``.

        With ``rerank`` a piece comes as soon as all continuations that are kept agree on it.
        """
        [checked] = check_texts([prompt])
        if rerank is not None:
            return self._stream_search(checked, max_new_tokens, sampling, rerank)
        return generation.stream(
            self.model, self.tokenizer, checked, max_new_tokens=max_new_tokens, sampling=sampling_or(sampling)
        )

    def _search(
        self, prompts: Sequence[str], max_new_tokens: int, sampling: Sampling | None, rerank: Rerank
    ) -> list[Ranked]:
        """Continue each prompt by what a scorer likes best; only a model that continues its prompt can."""
        del prompts, max_new_tokens, sampling, rerank
        raise self._not_continuing()

    def _stream_search(
        self, prompt: str, max_new_tokens: int, sampling: Sampling | None, rerank: Rerank
    ) -> Iterator[str]:
        """Do so for one prompt, piece by piece."""
        del prompt, max_new_tokens, sampling, rerank
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
                ``own``, this model's, if it was trained to be one; ``default``, the bundled model's; a scorer's
                folder or hub id; or an object with a ``score`` method. None takes its own if it has one, else ``pmi``.

        Returns:
            For each prefix a score for each of its candidates; higher is better. Scores of one prefix by one scorer
            can be compared, others not.

        Raises:
            TextError: a text is no string, a candidate is blank, or there are not as many lists as prefixes.
            ConfigError: there is no such scorer.

        >>> lm = gerund.load()
        >>> [[right, wrong]] = lm.score(["The king of France and his"], [[" queen went to Paris.", " oil was sold."]])
        >>> right > wrong
        True
        """
        checked, texts = check_candidates(prefixes, continuations)
        return find_scorer(scorer, self, own=self.scorer).score(checked, texts)

    @abstractmethod
    def infill(
        self,
        text: str,
        *,
        blank: str = BLANK,
        max_tokens: int = 32,
        lengths: int | Sequence[int] | None = None,
        sampling: Sampling | None = None,
        beams: int = 1,
        samples: int = 1,
        method: Method = "infill",
        shots: int = 0,
    ) -> Infill:
        """Fill the gaps of a text; the models say how, and which of the settings are theirs."""

    def expand(
        self,
        query: str,
        count: int = 5,
        *,
        keep: Sequence[str] = (),
        fraction: float = expansion.FRACTION,
        max_tokens: int = expansion.MAX_TOKENS,
        sampling: Sampling | None = None,
    ) -> list[str]:
        """Return other ways to ask, with some of a query's words written anew by ``infill`` (GUR, section V-C).

        Args:
            query: with gaps of its own (``[blank]``) filled as it is; else words are masked at random, anew each time.
            count: how many at most; what says the same as the query or as each other is left out.
            keep: words of the query, or several together, that are never masked.
            fraction: fraction of the words that is masked; at least one is.
            max_tokens: tokens of a filling at most.
            sampling: how tokens are chosen; None is nucleus sampling with p 0.9. Its seed determines the masks too.

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
            sampling=sampling_or(sampling, NUCLEUS),
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

"""``rerank`` and ``rank``, which order documents by how relevant they are to a query."""

from collections.abc import Sequence
from typing import Any

from gerund.checks import check_texts, flag, flag_or_none
from gerund.inference.encode.multi import TokenReader, rounded
from gerund.scoring import late_interaction, relevance
from gerund.scoring.names import MODEL, MODEL_NAMES, check_first_stage, check_relevance
from gerund.settings.encoder import TokenPrecision, check_multi
from gerund.settings.ranking import DEFAULT_DEPTH, TRAINED_FUSION, UNTRAINED_FUSION, RelevanceMeasure
from gerund.types import Ranking


class Ranks:
    """What a ``LanguageModel`` does to documents and a query."""

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        top_k: int | None = None,
        *,
        by: RelevanceMeasure | None = None,
        scores: Sequence[float] | None = None,
        weight: float | None = None,
        depth: int | None = None,
        deadline: float | None = None,
    ) -> Ranking:
        """Order documents by how relevant they are to a query.

        Args:
            query: the search query.
            documents: any number of texts.
            top_k: return only the ``top_k`` most relevant ones.
            by: ``lift``, how much likelier the document makes each token of the query, where it helps at all;
                ``mixed``, the log-probability under the mean of the predictions with the document and without it;
                ``likelihood``, the log-probability of the query after the document (Sachan et al. 2022); ``maxsim``,
                late interaction of token vectors (``encode_multi``); ``vectors``, the similarity of the embeddings;
                ``model``, the model's own scorer, if it is a reranker or was trained to score; or for large language
                models ``yesno``, ``listwise`` (several documents in one prompt) and ``attention``, which ask it (see
                ``gerund.scoring.prompted``). None is ``model`` for a
                reranker, else the model's tuned measure (``gerund tune --rerank``), else ``maxsim`` where token vectors
                were trained, ``lift`` for a language model, and ``vectors`` for one that was trained to embed or does
                not generate.
            scores: the score of each document in a first stage, such as a keyword search, which is fused with the
                measure: both as z-scores. None ranks by the measure alone, which is worse wherever there are scores.
            weight: what the measure counts beside ``scores``, from 0 to 1; None for the tuned weight, else 0.5.
            depth: read only this many documents, the best by ``scores``; None for 100.
            deadline: seconds after which no further document is read (no further window, by ``listwise``).

        Returns:
            The ranking. Documents that were not read come last, in the order of ``scores``; ``Ranking.read`` says how
            many were.

        Raises:
            TextError: a text is not a string, or blank, or the query leaves no room for a document.
            ConfigError: there is no such measure, the model has no scorer of its own, or a score is not a number.

        >>> lm = gerund.load()
        >>> ranking = lm.rerank("how to bake bread", ["Trains run on rails.", "Bread is baked of flour."], top_k=1)
        >>> ranking.indices
        [1]
        """
        checked, texts = check_relevance(query, documents, top_k, by)
        first = check_first_stage(scores, len(texts), weight, depth, deadline)
        lm: Any = self
        measure = by or self.default_measure()
        return relevance.rank(
            lm,
            checked,
            texts,
            by=measure,
            scorer=(lm.reranker or lm.scorer) if measure in MODEL_NAMES else None,
            top_k=top_k,
            scores=first,
            weight=weight,
            depth=depth or DEFAULT_DEPTH,
            deadline=deadline,
        )

    def token_reader(self) -> TokenReader:
        """Return what reads texts for their token vectors, as ``encode_multi`` does."""
        lm: Any = self
        config = late_interaction.default_late(lm) if lm.late is None else lm.late.config
        return TokenReader(lm.runtime, config, lm.late)

    def encode_multi(
        self,
        texts: str | Sequence[str],
        *,
        is_query: bool = False,
        precision: TokenPrecision = "float32",
        pool_factor: int = 1,
        batch_tokens: int | None = None,
        show_progress: bool | None = None,
    ) -> Any:
        """Return a vector for each token of a text, for late interaction (``rerank(by="maxsim")``).

        The states of the text's own tokens, under the encoder's attention plan and with its adapter: of the last layer
        for a model that was trained to embed, of the one in the middle for any other; where token vectors were
        trained (the objective ``late``), as they were, and projected.

        Args:
            texts: one text or many.
            is_query: whether they are queries, which are read after another marker than documents.
            precision: ``float32``, ``float16``, or ``int8``, where each vector is divided by its largest number, since
                only its direction counts.
            pool_factor: replace so many neighboring tokens by their mean.
            batch_tokens: as in ``encode``.
            show_progress: None shows a bar on a terminal.

        Returns:
            ``(tokens, dimensions)`` for each text, of length 1 but for rounding; one array for a single string.

        Raises:
            TextError: a text is empty or not a string.
            ConfigError: an unknown precision, a ``pool_factor`` below 1, or a model that encodes no texts.

        >>> lm = gerund.load()
        >>> vectors = lm.encode_multi("Bread is baked of flour.", precision="int8", pool_factor=2)
        >>> vectors.dtype.name, vectors.shape[1] == lm.model.config.hidden_size
        ('int8', True)
        """
        check_multi(precision, pool_factor)
        reader = self.token_reader()
        tokens = reader.tokens(check_texts(texts), is_query=flag("is_query", is_query))
        show = flag_or_none("show_progress", show_progress)
        parts = reader.vectors(tokens, pool_factor=pool_factor, batch_tokens=batch_tokens, show=show)
        vectors = [rounded(own_TE, precision) for own_TE in parts]
        return vectors[0] if isinstance(texts, str) else vectors

    @property
    def fusion_weight(self) -> float:
        """What the vectors count beside words in hybrid search: the tuned weight (``gerund tune --fusion``).

        Else 0.5 for a model that was trained to embed, and 0.2 for any other language model, whose vectors find less.
        """
        lm: Any = self
        if lm.encoder.fusion is not None:
            return float(lm.encoder.fusion)
        return TRAINED_FUSION if relevance.is_trained_to_embed(lm) else UNTRAINED_FUSION

    def default_measure(self, *, is_second: bool = False) -> RelevanceMeasure:
        """Return the measure of ``rerank`` where none is named; with ``is_second`` as the second stage of a search."""
        lm: Any = self
        # A reranker that embeds too may have been tuned to another measure.
        if lm.reranker is not None and (lm.encoder.rerank_by is None or not lm.reranker.settings.embeds):
            return MODEL
        return relevance.default_measure(lm, has_scorer=lm.has_scorer, is_second=is_second)

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

        The other arguments are those of ``rerank``; ``return_documents`` adds each document's ``text``.

        Returns:
            One dict per document, the most relevant first: ``corpus_id``, its index in ``documents``, and ``score``.

        >>> [best] = gerund.load().rank("how to bake bread", ["Trains run on rails.", "Bread is baked."], top_k=1)
        >>> best["corpus_id"]
        1
        """
        with_text = flag("return_documents", return_documents)
        return [
            {"corpus_id": index, "score": score, **({"text": documents[index]} if with_text else {})}
            for index, score in self.rerank(query, documents, top_k, by=by)
        ]

"""``gerund.load``: from a ``ModelSpec`` to a ``LanguageModel`` that obeys it.

Knows: what the user may say. Does not know: which setting wins, or what is done with the model.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, cast

from gerund.checks import read_sample
from gerund.errors import ConfigError, DataError
from gerund.generative_model import GenerativeModel
from gerund.language_model import LanguageModel
from gerund.models import loading
from gerund.models.adapters import ADAPTER_FILES, Adapters
from gerund.models.encoder_settings import default_encoder_config, read_adapters, read_saved
from gerund.models.fingerprint import fingerprint
from gerund.models.heads import read_head
from gerund.models.loading import open_model
from gerund.models.sources import find, find_spec
from gerund.scoring.dual_encoder import DualScorer, has_scorer, read_scorer_config
from gerund.seq2seq_model import Seq2SeqModel
from gerund.settings.encoder import CONFIG_FILE, EncoderConfig, read_settings
from gerund.settings.model_spec import NO_ADAPTER, ModelSpec
from gerund.settings.plan import AttentionPlan
from gerund.settings.templates import NO_TRANSFORM
from gerund.text_encoder import TextEncoder


def load(
    model: str | Path | ModelSpec | None = None,
    *,
    attention: str | AttentionPlan | None = None,
    k: int | Literal["auto"] | None = None,
    k0: int | Literal["auto"] | None = None,
    sink_tokens: int | None = None,
    combine: Literal["sum", "mean"] | None = None,
    variant: Literal["paper", "released"] | None = None,
    skips: int | None = None,
    recurrent: Literal["causal", "both"] | None = None,
    pooling: str | None = None,
    prompt: str | None = None,
    prompts: Mapping[str, str] | None = None,
    pool_prompt: bool | None = None,
    append_eos: bool | None = None,
    normalize: bool | None = None,
    adapter: str | Path | Literal[False] | None = None,
    infill_adapter: str | Path | Literal[False] | None = None,
    scorer: str | Path | Literal[False] | None = None,
    dtype: str | None = None,
    device: str | None = None,
    max_length: int | Literal["auto"] | None = None,
    template: str | None = None,
    layers: str | None = None,
    prepend: int | None = None,
    reroute: str | None = None,
    transform: str | None = None,
    pool_bos: str | None = None,
    text_normalization: str | None = None,
    fusion: float | Literal["auto"] | None = None,
    sample: str | Path | None = None,
    conventions: str | None = None,
    similarity: str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
) -> LanguageModel:
    """Load a decoder-only language model that also encodes, or a T5.

    What is left out comes from the folder's ``gerund.json``; else from ``modules.json`` and the files beside it, so
    that a ready-made encoder of sentence-transformers is read as its author means it. Where neither is there the plan
    is ``mask0-bidir`` with k about 0.45 of the layers (and ``recurrent="both"`` where no layer attends), or ``bidir``
    where the config says that the model attends in both directions, and the pooling is the mean. A T5 has an encoder
    of its own, whose plan is ``bidir``.

    Args:
        model: a folder, a hub id, None (or ``default``) for the bundled model; or a :class:`ModelSpec`, whose settings
            the others here replace.
        attention: the name of a plan (``gerund.PLAN_NAMES``) or a plan.
        k: number of converted layers; ``auto`` for the plan's own fraction of the layers.
        k0: for ``mask0+bidir``, how many of them hide the first token, or ``auto``.
        sink_tokens: how many first tokens a ``mask0`` plan hides.
        combine: how ``inter`` and ``extra`` plans join their two outputs: ``sum`` or ``mean``.
        variant: ``paper``, or ``released`` for the layout of the authors' code where it differs.
        skips: residual connections across so many layers, from the first converted one on; 0 for none.
        recurrent: in models with layers without attention, whether the converted ones of these stay ``causal`` or run
            on the text and on the text reversed (``both``).
        pooling: ``mean``, ``weighted-mean``, ``last``, ``first``, ``last-mean`` (half of both), ``max`` or
            ``mean-sqrt``; of several, such as ``first+mean``, the vectors are concatenated. ``lasttoken``, ``cls`` and
            sentence-transformers' other names are taken too.
        prompt: default prompt of ``encode``: the text itself.
        prompts: prompts by name, for ``encode(..., prompt_name=NAME)``, in the place of the model's own; searches and
            ``rerank`` take those named ``query`` and ``document``.
        pool_prompt: whether the prompt's tokens are pooled as well.
        append_eos: whether an end token is put after every text.
        normalize: whether vectors have length 1.
        adapter: a PEFT folder, active while encoding and infilling and never while generating; ``none``, or False,
            leaves the folder's own ones aside, and with them the head and the scorer that were trained with them.
        infill_adapter: another one to infill with: a PEFT folder, or a model trained from the same weights, whose
            adapter is taken, also ``default``; ``none`` infills with the untouched model.
        scorer: a model trained from the same weights to score continuations, whose adapter and encoder config are
            taken; also ``default``.
        dtype: ``auto`` keeps the checkpoint's type and encodes float32 weights in bfloat16 where the processor
            computes in it and the vectors' cosine to float32 is at least 0.999; or a type by name, for both.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:1``, ...
        max_length: longest text in tokens; ``auto`` for what the model was made for.
        template: what is put around a text: ``prompteol``, ``prompteol-few-shot``, ``prompteol-cot``,
            ``prompteol-knowledge`` or ``metaeol``, which are pooled by their last token unless ``pooling`` says
            otherwise; ``kv-embedding``, pooled by that and the mean of all tokens; or a text with ``{text}``; ``none``.
        layers: the layers whose states are averaged: ``last``, ``all``, ``6``, ``4-8`` or ``1+8``.
        prepend: Token Prepending below this layer, into a template; 0 for none.
        reroute: KV-Embedding: the layers in which the last token's key and value stand before the text for all tokens
            to see, such as ``4-5``; ``none``. ``lm.rerouting_layers(texts)`` chooses some.
        transform: ``whitening`` or ``all-but-the-top``, with ``-`` and a number for the dimensions kept or the
            directions taken out; ``none``. It is fitted by ``sample``, by ``lm.fitted(texts)``, or was saved so.
            ``truncate-128`` keeps the first 128 numbers of each vector and needs no sample.
        pool_bos: whether special tokens before a text without a prompt are pooled: ``always``, ``never`` or ``auto``.
        text_normalization: ``nfkc`` encodes texts that read the same alike: in NFKC, without invisible characters and
            without hyphens at line ends; ``none`` encodes every text as it is.
        fusion: what the vectors count where a search joins them with words, from 0 to 1; ``auto`` for what is usual.
        sample: a file of texts, one a line, on which ``transform`` is fitted.
        conventions: whose conventions hold where libraries differ: ``gerund``, or ``sentence-transformers``, as for
            every ready-made encoder.
        similarity: how ``lm.similarity`` compares vectors: ``cosine``, ``dot``, ``euclidean`` or ``manhattan``.
        revision: the branch, tag or commit of a model on the hub.
        token: what the hub is asked with for a private or gated model: a token, or True for the one that
            ``hf auth login`` has stored. It is saved nowhere, so a spec and other processes do without it.

    Returns:
        The model; that every layer obeys the plan is verified.

    Raises:
        ModelError: no such model, or neither a decoder-only one nor a T5.
        UnsupportedModelError: the plan does not reach every layer.
        ConfigError: an unknown name or impossible setting, or a revision or token for a model that is not on the hub.
        DataError: ``infill_adapter`` or ``scorer`` has nothing to take, or was trained from other weights.

    >>> lm = gerund.load()
    >>> scores = lm.similarity(["a dog in the garden"], ["the dog is outside", "interest rates rose"])
    >>> scores.shape
    (1, 2)
    >>> gerund.load(lm.spec).fingerprint() == lm.fingerprint()
    True
    """
    settings = dict(locals())  # by the names of ModelSpec's fields
    del settings["token"]  # a secret is no part of a spec, which is stored and sent
    spec = ModelSpec.of(**settings)
    texts = None if spec.sample is None else read_sample(spec.sample)
    opened = open_model(spec, token)
    # Both have the verbs of `GenerativeModel`. A union as the return type would have everybody who loads a decoder-only
    # model ask first whether it is one.
    kind = cast("type[LanguageModel]", Seq2SeqModel if opened.is_seq2seq else LanguageModel)
    lm = kind(opened.model, opened.tokenizer, opened.encoder, **opened.options)
    lm.load_again = load
    lm.fills_gaps = opened.fills_gaps
    for given in (spec.infill_adapter, spec.scorer):
        if given is not None and given != NO_ADAPTER:
            _demand_same_weights(lm, given)
    if spec.scorer is not None and spec.scorer != NO_ADAPTER:
        lm.scorer = DualScorer.of_folder(lm, loading.settings_folder(find(spec.scorer)), is_other=True)
    elif spec.scorer is None and opened.settings is not None and _keeps_scorer(lm, spec, opened.settings):
        lm.scorer = DualScorer.of_folder(lm, opened.settings)
    if texts is None:
        return lm
    if lm.encoder.transform == NO_TRANSFORM:
        raise ConfigError("a sample is for a transform, such as transform='whitening'; give one")
    return lm.fitted(texts)


GenerativeModel.loader = staticmethod(load)


def _keeps_scorer(lm: LanguageModel, spec: ModelSpec, folder: Path) -> bool:
    """Whether the scorer in a model's folder goes with what is asked for."""
    if not has_scorer(folder):
        return False
    if spec.adapter is not None and (spec.adapter != NO_ADAPTER or read_adapters(folder)):
        return False
    # Without a config of its own it was trained for the one beside it, and would score wrongly by another.
    if read_scorer_config(folder) is not None:
        return True
    saved = _saved_config(lm, folder)
    return saved is not None and saved.with_defaults(lm.n_layers) == lm.encoder.with_defaults(lm.n_layers)


def _saved_config(lm: TextEncoder, folder: Path) -> EncoderConfig | None:
    """Return how ``gerund.json`` in a folder says that a model of this kind is read; None where there is none."""
    saved = read_saved(folder)
    return None if saved is None else saved.applied_to(default_encoder_config(lm.model.config))


def _demand_same_weights(lm: TextEncoder, other: str | Path) -> None:
    """Refuse what was trained from other weights; of a bare PEFT folder nothing is known."""
    if (Path(other) / ADAPTER_FILES[0]).is_file():
        return
    folder = loading.settings_folder(find(other))
    encoder = None if folder is None else _saved_config(lm, folder)
    if folder is None or encoder is None:
        raise DataError(f"{other} has no {CONFIG_FILE}, so nothing says which weights it was trained from")
    head = read_head(folder)
    own = Adapters(read_adapters(folder)).hash("encode") + (head.fingerprint if head is not None else "")
    said = read_settings(folder / CONFIG_FILE, "encoder").get("fingerprint")
    if fingerprint(lm.weights_hash, own, encoder, lm.n_layers) != said:
        raise DataError(f"{other} was not trained from the weights of {lm.name} (or its {CONFIG_FILE} was changed)")


def load_writer(spec: ModelSpec, *, only_writes: bool = False) -> LanguageModel:
    """Load a model to generate with: no attention plan takes part, so models that no plan reaches generate too.

    Args:
        spec: which model.
        only_writes: leave its own adapters on the disk, since generating uses none of them.

    Raises:
        GerundError: as ``load``.
    """
    seq2seq = loading.is_seq2seq(find_spec(spec))
    adapter = NO_ADAPTER if only_writes and spec.adapter is None and not seq2seq else None
    return load(spec, attention=None if seq2seq else "causal", adapter=adapter)

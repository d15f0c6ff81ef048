"""``gerund.load``: load the ``LanguageModel`` that a ``ModelSpec`` describes.

Knows: what the user may say. Does not know: which setting wins, or what is done with the model.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from gerund.checks import read_sample
from gerund.errors import ConfigError, DataError, ModelError
from gerund.language_model import LanguageModel
from gerund.models import loading
from gerund.models.adapters import Adapters
from gerund.models.bundled import same_weights, tell_bundled
from gerund.models.encoder_settings import default_encoder_config
from gerund.models.fingerprint import fingerprint
from gerund.models.heads import embedding_width, read_answers, read_head, read_late
from gerund.models.loading import LoadedModel, open_model
from gerund.models.saved_settings import has_scorer, read_adapters, read_saved
from gerund.models.sentence_transformers_folder import is_ready_made
from gerund.models.sources import ADAPTER_FILES, Source, find, find_spec
from gerund.models.weights import weight_files
from gerund.scoring.dual_encoder import DualScorer, read_scorer_config
from gerund.scoring.reranker import Reranker
from gerund.seq2seq_model import Seq2SeqModel
from gerund.settings.encoder import ANSWERS_FILE, CONFIG_FILE, EncoderConfig, answers_folder, read_alike, read_settings
from gerund.settings.fields import NO_ADAPTER
from gerund.settings.model_spec import LoadKeywords, ModelSpec, takes
from gerund.settings.ranking import OWN_RERANKER
from gerund.settings.templates import NO_TRANSFORM


@takes(LoadKeywords)
def load(
    model: str | Path | ModelSpec | None = None, *, token: str | bool | None = None, **settings: Any
) -> LanguageModel:
    """Load a decoder-only language model that also encodes, or a T5.

    Each setting that is left out comes from the folder's ``gerund.json``; else from ``modules.json`` and the files next
    to it, so that a ready-made encoder of sentence-transformers is used as its author means it. Where neither is there,
    the plan is ``mask0-bidir`` with k about 0.45 of the layers (and ``recurrent="both"`` where no layer attends), or
    ``bidir`` where the config says that the model attends in both directions, and the pooling is the mean. A T5 has an
    encoder of its own, whose plan is ``bidir``.

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
    return _load(ModelSpec.of(model, **settings), token)


def _load(spec: ModelSpec, token: str | bool | None = None, *, generates: bool = False) -> LanguageModel:
    texts = None if spec.sample is None else read_sample(spec.sample)
    opened = open_model(spec, token, generates=generates)
    if opened.is_bundled and spec.adapter is None:
        tell_bundled(opened.options["name"])
    spec = spec.without_auto()
    kind = Seq2SeqModel if opened.is_seq2seq else LanguageModel
    lm = kind(opened.model, opened.tokenizer, opened.encoder, **opened.options)
    lm.load_again = load
    lm.fills_gaps = opened.fills_gaps
    lm.bundled = opened.encoder if opened.is_bundled else None
    lm.was_trained_to_embed = opened.embeds
    if opened.reranker is not None:
        _make_reranker(lm, opened)
    for given in (spec.infill_adapter, spec.scorer, spec.adapter_of("rerank")):
        if given is not None and given != NO_ADAPTER:
            _demand_same_weights(lm, given)
    if spec.scorer is not None and spec.scorer != NO_ADAPTER:
        lm.scorer = DualScorer.of_folder(lm, loading.settings_folder(find(spec.scorer)), is_other=True)
    elif spec.scorer is None and opened.settings is not None and _keeps_scorer(lm, spec, opened.settings):
        lm.scorer = DualScorer.of_folder(lm, opened.settings)
    if opened.settings is not None and _keeps_late(lm, spec, opened.settings):
        lm.late = read_late(opened.settings, lm.runtime.state_width)
    _take_answers(lm, spec, opened.settings)
    if texts is None:
        return lm
    if lm.encoder.transform == NO_TRANSFORM:
        raise ConfigError("a sample is for a transform, such as transform='whitening'; give one")
    fitted = lm.fitted(texts)
    fitted._spec = lm._spec
    return fitted


def _take_answers(lm: LanguageModel, spec: ModelSpec, folder: Path | None) -> None:
    """Let a model encode by the answer tokens in the folder of its settings, unless it is to encode otherwise."""
    if folder is None or not (folder / ANSWERS_FILE).is_file():
        return
    if spec.adapter is not None and answers_folder(spec.adapter) is None:
        return
    width = embedding_width(lm.model)
    answers = read_answers(folder, embedding=width, state=lm.runtime.state_width, vector=lm.dimensions)
    saved = _saved_config(lm, folder)
    if saved is None or not read_alike(saved.with_defaults(lm.n_layers), lm.encoder.with_defaults(lm.n_layers)):
        raise ConfigError(
            f"the answer tokens in {folder} were trained for the encoder settings beside them; leave attention, "
            'pooling and other ways to read out, or load the model with adapter="none"'
        )
    lm.take_answers(answers.to(lm.device))


def _make_reranker(lm: LanguageModel, opened: LoadedModel) -> None:
    assert opened.reranker is not None
    adapter = lm.adapters.name("rerank") if opened.reranker.embeds else lm.runtime.adapter
    lm.reranker = Reranker(lm.model, lm.tokenizer, opened.reranker, opened.score_layer, name=lm.name, adapter=adapter)
    if opened.reranker.embeds:
        return
    # In a spec with its plan, so that it is loaded as a reranker again.
    lm._spec = ModelSpec.of(opened.options["spec"], reranker=opened.options["spec"].reranker or OWN_RERANKER)
    why = (
        f"{lm.name} is a reranker: it scores a query and a document together and gives no vectors; call rerank, or "
        'load it with reranker="none" to encode with it all the same'
    )
    lm.runtime = replace(lm.runtime, why_no_vectors=why)


LanguageModel.loader = staticmethod(load)


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


def _keeps_late(lm: LanguageModel, spec: ModelSpec, folder: Path) -> bool:
    """Whether the projection of token vectors in a model's folder goes with what is asked for: its adapter and plan."""
    if spec.adapter is not None and (spec.adapter != NO_ADAPTER or read_adapters(folder)):
        return False
    if is_ready_made(folder):  # which says its attention by the checkpoint's config
        return spec.attention is None
    saved = _saved_config(lm, folder)
    return saved is not None and saved.attention.with_defaults(lm.n_layers) == lm.encoder.attention.with_defaults(
        lm.n_layers
    )


def _saved_config(lm: LanguageModel, folder: Path) -> EncoderConfig | None:
    """Return how ``gerund.json`` in a folder says that a model of this kind is read; None where there is none."""
    saved = read_saved(folder)
    return None if saved is None else saved.applied_to(default_encoder_config(lm.model.config))


def _demand_same_weights(lm: LanguageModel, other: str | Path) -> None:
    """Refuse what was trained from other weights; of a bare PEFT folder nothing is known."""
    if (Path(other) / ADAPTER_FILES[0]).is_file():
        return
    folder = loading.settings_folder(find(other))
    encoder = None if folder is None else _saved_config(lm, folder)
    if folder is None or encoder is None:
        raise DataError(f"{other} has no {CONFIG_FILE}, so nothing says which weights it was trained from")
    head = read_head(folder)
    actual = Adapters(read_adapters(folder)).hash("encode") + (head.fingerprint if head is not None else "")
    recorded = read_settings(folder / CONFIG_FILE, "encoder").get("fingerprint")
    if fingerprint(lm.weights_hash, actual, encoder, lm.n_layers) == recorded:
        return
    # The same weights may be stored otherwise, as in a quantized file.
    if not _is_same_base(lm, find(other)):
        raise DataError(f"{other} was not trained from the weights of {lm.name} (or its {CONFIG_FILE} was changed)")


def _is_same_base(lm: LanguageModel, other: Source) -> bool:
    try:
        files = weight_files(other)
    except ModelError:  # a folder of adapters alone
        return False
    return same_weights(weight_files(find_spec(lm.spec)), files, lm.n_layers)


def load_writer(spec: ModelSpec, *, only_writes: bool = False) -> LanguageModel:
    """Load a model to generate with: no attention plan takes part, so models that no plan reaches generate too.

    ``only_writes`` leaves its adapters on the disk, since generating uses none of them.
    """
    seq2seq = loading.is_seq2seq(find_spec(spec))
    adapter = NO_ADAPTER if only_writes and spec.without_auto().adapter is None and not seq2seq else None
    spec = ModelSpec.of(spec, attention=None if seq2seq else "causal", adapter=adapter)
    return _load(spec, generates=True)

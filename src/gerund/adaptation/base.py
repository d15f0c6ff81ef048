"""The model that is adapted: what it is, whether it can be, and how it is put together again with its new adapter.

Knows: models' folders, adapters, scorers. Does not know: documents, recipes.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gerund.adaptation.choosing import Base
from gerund.entry import load
from gerund.errors import ModelError
from gerund.inference.tokens import context_length
from gerund.models import loading
from gerund.models.adapters import count_parameters
from gerund.models.settings_file import read_adapters
from gerund.models.sources import find
from gerund.scoring.dual_encoder import has_scorer
from gerund.settings.model_spec import NO_ADAPTER, EncoderSpec, ModelSpec
from gerund.training.recipe_files import made_by

if TYPE_CHECKING:
    from gerund.language_model import LanguageModel


def demand_adaptable(model: str) -> None:
    """Refuse what cannot be adapted, before anything is read.

    Raises:
        ModelError: there is no such model, or it is a T5.
    """
    try:
        source = find(model)
    except ModelError as error:
        raise ModelError(f"{error}{made_by(model)}") from error
    source.demand_reachable()
    if loading.is_seq2seq(source):
        raise ModelError(
            f"{model} has an encoder of its own, which no adapter is trained for; train it whole: gerund mine on your "
            f"texts, then gerund train gur-default model.base={model}"
        )


def said_of_encoder(spec: ModelSpec) -> dict[str, Any]:
    """Return what a spec says about how the model is read, as a recipe writes it; empty where it says nothing."""
    return spec.model_dump(mode="json", include=set(EncoderSpec.model_fields), exclude_none=True)


def open_base(spec: ModelSpec) -> "tuple[LanguageModel, Base]":
    """Load a model, and say what a recipe depends on in it.

    Raises:
        GerundError: as ``gerund.load``; or it is read in a way that cannot be trained.
    """
    lm = load(spec)
    lm.encoder.refuse_methods("training")
    base = Base(
        name=spec.model,
        parameters=count_parameters(lm.model),
        layers=lm.n_layers,
        width=lm.runtime.state_width,
        vocabulary=int(lm.model.get_input_embeddings().weight.shape[0]),
        adapter="encode" in _adapters(spec.model),
        longest=context_length(lm.model.config, lm.tokenizer),
    )
    return lm, base


def finish(model: str, trained: Path, target: Path) -> None:
    """Write the model as it was, with the new adapter for encoding and for nothing else.

    What fills gaps and scores continuations stays what it was, as generation does.

    Args:
        model: the model that was adapted.
        trained: the folder that the training wrote.
        target: where the whole model is written.

    Raises:
        ResourceError: the disk is full.
    """
    settings = loading.settings_folder(find(model))
    infill = model if "infill" in _adapters(model) else NO_ADAPTER
    scorer = model if settings is not None and has_scorer(settings) else None
    load(trained, infill_adapter=infill, scorer=scorer).save(target)


def _adapters(model: str) -> dict[str, Path]:
    settings = loading.settings_folder(find(model))
    return {} if settings is None else {str(job): place for job, place in read_adapters(settings).items()}

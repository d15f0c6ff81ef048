"""Use gerund's encoders in MTEB: a model's metadata (``ModelMeta``), with a loader that MTEB calls.

::

    meta = model_meta("./encoder", name="me/encoder")
    mteb.evaluate(meta, mteb.get_tasks(["STSBenchmark"]))
"""

from pathlib import Path
from typing import Any

from gerund.entry import load
from gerund.errors import FingerprintError, MissingDependencyError
from gerund.language_model import LanguageModel
from gerund.models.adapters import base_state
from gerund.models.light_runtime import for_many_texts
from gerund.settings.model_spec import ModelSpec

try:
    from mteb.models import ModelMeta
except ImportError as error:
    raise MissingDependencyError("this needs mteb: pip install 'gerund[eval]'") from error

from gerund.evaluation.mteb import MTEBEncoder

_MEGABYTE = 1024**2


def model_meta(model: LanguageModel | ModelSpec | str | Path | None = None, *, name: str | None = None) -> ModelMeta:
    """Describe an encoder to MTEB, which loads it by this description.

    The revision is the encoder's fingerprint, so that no cache of MTEB's mixes two plans.

    Args:
        model: a loaded model that came from a folder or the hub, or what ``gerund.load`` takes.
        name: what MTEB calls it, as ``organization/name``; None makes one of the model's own name.

    Returns:
        A description for ``mteb.evaluate``, with ``load_model()``, which gives an ``MTEBEncoder``.

    Raises:
        ConfigError: the model was made in memory, so that nothing could load it again.
        ModelError: as ``gerund.load``.

    >>> meta = model_meta(gerund.load())
    >>> meta.name, meta.revision == gerund.load().fingerprint()
    ('gerund/default', True)
    """
    lm = model if isinstance(model, LanguageModel) else load(model)
    spec = lm.spec
    last = Path(spec.model).expanduser().resolve().name if Path(spec.model).is_dir() else spec.model.rpartition("/")[2]
    # Tied weights are one tensor under two names; adapters are not counted.
    weights = list({weight.data_ptr(): weight for weight in base_state(lm.model).values()}.values())
    known: dict[str, Any] = {
        "name": name or f"gerund/{last}",
        "loader": _load,
        "loader_kwargs": {"spec": spec.model_dump_json()},
        "revision": lm.fingerprint(),
        "n_parameters": sum(weight.numel() for weight in weights),
        "n_embedding_parameters": lm.model.get_input_embeddings().weight.numel(),
        "memory_usage_mb": round(sum(weight.nbytes for weight in weights) / _MEGABYTE),
        "max_tokens": lm.max_length,
        "embed_dim": lm.dimensions,
        "framework": ["PyTorch", "Transformers", "safetensors"],
        "similarity_fn_name": "cosine",
        "use_instructions": bool(lm.encoder.prompt or lm.encoder.prompts),
    }
    empty = ModelMeta.create_empty().model_dump()
    return ModelMeta(**{**empty, **known})


def _load(name: str, *, revision: str, spec: str, device: str | None = None, **_others: Any) -> MTEBEncoder:
    lm = load(for_many_texts(ModelSpec.model_validate_json(spec)), device=device)
    if lm.fingerprint() != revision:
        raise FingerprintError(f"{lm.name} is no longer the encoder that {name} describes; make its model_meta again")
    return MTEBEncoder(lm, name=name)

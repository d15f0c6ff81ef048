"""``gerund.load``: from a name and a few settings to a proven ``LanguageModel``.

Knows: what the user may say. Does not know: which setting wins, or what is done with the model.
"""

from pathlib import Path

from gerund.attention.plan import AttentionPlan
from gerund.config import read_encoder_config
from gerund.language_model import LanguageModel
from gerund.models import loading
from gerund.models.adapters import NO_ADAPTER
from gerund.models.opening import open_model
from gerund.scoring.dual import DualScorer, has_scorer
from gerund.seq2seq_model import Seq2SeqModel


def load(
    model: str | Path | None = None,
    *,
    attention: str | AttentionPlan | None = None,
    k: int | None = None,
    k0: int | None = None,
    sink_tokens: int | None = None,
    pooling: str | None = None,
    prompt: str | None = None,
    adapter: str | Path | None = None,
    dtype: str = "auto",
    device: str = "auto",
    max_length: int | None = None,
) -> LanguageModel:
    """Load a decoder-only language model that also encodes, or a T5.

    What is left out comes from the folder's ``gerund.json``; without one the plan is ``mask0-bidir`` with k
    about 0.45 of the layers, and the pooling is the mean. A T5 has an encoder of its own, whose plan is ``bidir``.

    Args:
        model: a folder, a hub id, or None for the embedded default.
        attention: the name of a plan (``gerund.PLAN_NAMES``) or a plan.
        k: number of converted layers.
        k0: for ``mask0+bidir``, how many of them hide the first token.
        sink_tokens: how many first tokens a ``mask0`` plan hides.
        pooling: ``mean``, ``weighted-mean``, ``last`` or ``first``.
        prompt: default prompt of ``encode``.
        adapter: a PEFT folder, active only while encoding; ``none`` leaves the folder's own aside, and with it the
            head and the scorer that were trained with it.
        dtype: ``auto`` keeps the checkpoint's type and encodes float32 weights in bfloat16 where the processor
            computes in it and the vectors' cosine to float32 is at least 0.999; or a type by name, for both.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:1``, ...
        max_length: longest text in tokens.

    Returns:
        The model, proven to obey the plan in every layer.

    Raises:
        ModelError: no such model, or neither a decoder-only one nor a T5.
        UnsupportedModelError: the plan does not reach every layer.
        ConfigError: an unknown name or impossible setting.

    >>> lm = gerund.load()
    >>> scores = lm.similarity(["a dog in the garden"], ["the dog is outside", "interest rates rose"])
    >>> scores.shape
    (1, 2)
    """
    opened = open_model(
        model,
        attention=attention,
        k=k,
        k0=k0,
        sink_tokens=sink_tokens,
        pooling=pooling,
        prompt=prompt,
        adapter=adapter,
        dtype=dtype,
        device=device,
        max_length=max_length,
    )
    kind = Seq2SeqModel if opened.is_seq2seq else LanguageModel
    lm = kind(opened.model, opened.tokenizer, opened.encoder, **opened.options)
    # Its scorer was trained for the reading that lies beside it, and would score wrongly by another one.
    folder = opened.settings
    other = adapter is not None and str(adapter) != NO_ADAPTER
    own = folder is not None and not other and read_encoder_config(folder) == opened.encoder
    if own and folder is not None and has_scorer(folder):
        lm.scorer = DualScorer.beside(lm, folder)
    return lm


def load_writer(
    model: str | Path | None = None, *, adapter: str | Path | None = None, dtype: str = "auto", device: str = "auto"
) -> LanguageModel:
    """Load a model to write with: no attention plan takes part, so models that no plan reaches write too.

    The arguments and errors are those of ``load``.
    """
    seq2seq = loading.is_seq2seq(loading.find(model))
    return load(model, attention=None if seq2seq else "causal", adapter=adapter, dtype=dtype, device=device)

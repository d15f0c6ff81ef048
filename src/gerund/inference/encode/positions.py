"""Whether a model can be told where in its text each token stands, found out by running it.

Knows: models. Does not know: texts, batches.
"""

import inspect
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from gerund.attention.shared_layer_state import counts_rows


def takes_positions(model: PreTrainedModel) -> bool:
    """Tell whether a model can be told where in its text each token stands, 0 for the first; found out once a model.

    Some are not told, some count from another number, and some have no use for it.
    """
    if model not in _told:
        takes = "position_ids" in inspect.signature(model.base_model.forward).parameters
        _told[model] = takes and not counts_rows(model) and _told_apart(model)
    return _told[model]


_told: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


@torch.no_grad()
def _told_apart(model: PreTrainedModel) -> bool:
    embeddings = model.get_input_embeddings().weight
    place_1T = torch.arange(4, device=embeddings.device)[None]
    ids_1T = (place_1T * 7 + 3) % len(embeddings)
    training = model.training
    model.eval()
    try:
        own, counted, doubled = (
            # Without a mask, places with gaps would be taken for several texts in one row.
            model.base_model(
                ids_1T, attention_mask=torch.ones_like(ids_1T), use_cache=False, **told
            ).last_hidden_state.float()
            for told in ({}, {"position_ids": place_1T}, {"position_ids": 2 * place_1T})
        )
    finally:
        model.train(training)
    near = 1e-2 * float(own.abs().max())
    return float((own - counted).abs().max()) <= near < float("inf") and not torch.equal(own, doubled)

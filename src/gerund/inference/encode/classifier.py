"""Text classification: an encoder with a linear layer on top."""

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput

from gerund.errors import ConfigError
from gerund.inference.encode.runtime import EncoderRuntime, hidden_states
from gerund.models.adapters import active_adapter
from gerund.poolings import pool


class TextClassifier(nn.Module):
    """Labels of texts from their vectors, with the interface of transformers' ``...ForSequenceClassification``."""

    def __init__(self, runtime: EncoderRuntime, num_labels: int, *, dropout: float = 0.1) -> None:
        super().__init__()
        if type(num_labels) is not int or num_labels < 2:
            raise ConfigError(f"num_labels={num_labels!r}: there is nothing to tell apart")
        runtime.config.refuse_methods("a classifier that is trained with its encoder", takes=("exit_layer",))
        self.model, self.head = runtime.model, runtime.head
        self.plan = runtime.plan if runtime.sends_plan else None
        self.adapter = runtime.adapter
        self.pooling = runtime.config.pooling
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(runtime.width, num_labels).to(runtime.device)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        pooled: Tensor | None = None,
    ) -> SequenceClassifierOutput:
        """Return ``logits`` ``(B, num_labels)`` and, with ``labels`` ``(B,)``, the mean cross-entropy as ``loss``.

        Tokens ``(B, T)`` are padded on the right; ``pooled`` ``(B, T)`` selects those to pool, all by default.
        """
        real_BT = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        with active_adapter(self.adapter):
            hidden_BTD = hidden_states(self.model, input_ids, real_BT.bool(), self.plan)
        pooled_BT = real_BT.bool() if pooled is None else pooled
        vectors_BD = pool(hidden_BTD, pooled_BT, self.pooling)
        if self.head is not None:
            vectors_BD = self.head(vectors_BD, input_ids, pooled_BT)
        logits_BC = self.classifier(self.dropout(vectors_BD))
        loss = None if labels is None else nn.functional.cross_entropy(logits_BC, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits_BC)

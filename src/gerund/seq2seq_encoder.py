"""``Seq2SeqEncoder``: the encoder of a T5.

Knows: which part encodes. Does not know: how the decoder writes.
"""

from collections.abc import Mapping

from torch import Tensor

from gerund.errors import ConfigError
from gerund.inference.encode import runtime as encoding
from gerund.models.adapters import base_state
from gerund.models.architectures import encoder_of
from gerund.settings.encoder import EncoderConfig
from gerund.settings.plan import ResolvedPlan
from gerund.text_encoder import TextEncoder


class Seq2SeqEncoder(TextEncoder):
    """The encoder of a T5, with the projection head where there is one.

    Its attention looks both ways by itself, so no plan is sent; the verbs are those of ``TextEncoder``.
    """

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {self.encoder.pooling}, {self.dimensions} dimensions>"

    def _hashed_state(self) -> Mapping[str, Tensor]:
        # With the decoder or without it, the vectors are the same.
        return base_state(encoder_of(self.model))

    def _attach(self) -> int:
        return int(self.model.config.num_layers)

    def _verify(self, plan: ResolvedPlan) -> None:
        if not plan.is_bidirectional:
            raise ConfigError(f"{self.name} has an encoder of its own, which looks both ways: its plan is bidir")

    def _make_runtime(self, plan: ResolvedPlan) -> encoding.EncoderRuntime:
        own = self.model, self.tokenizer, self.encoder
        return encoding.EncoderRuntime(*own, plan, sends_plan=False, head=self.head, transform=self.transform)

    @staticmethod
    def _sends_plan(plan: ResolvedPlan, encoder: EncoderConfig) -> bool:
        del plan, encoder
        return False

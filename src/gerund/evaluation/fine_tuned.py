"""A copy of an encoder trained with a linear layer on labelled texts; the model itself stays as it is.

Knows: tokens, labels, AdamW. Does not know: texts, files, scores.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from gerund.errors import ModelError, ResourceError
from gerund.inference.encode.batching import token_batches
from gerund.inference.encode.classifier import TextClassifier
from gerund.inference.encode.runtime import EncoderRuntime, default_batch_tokens
from gerund.inference.tokens import Tokens
from gerund.models.encoder_decoder import encoder_of, is_encoder_decoder
from gerund.progress import progress

# What the gradient is cut to, as in nearly every fine-tuning of an encoder.
_LONGEST_GRADIENT = 1.0


@dataclass(frozen=True)
class FineTuning:
    """How a copy is trained.

    Attributes:
        epochs: how often each text is read.
        learning_rate: AdamW's at the beginning; it falls to 0 in a straight line.
        batch_size: texts a step.
        seed: decides the first weights of the linear layer, the order of texts and what dropout drops.
    """

    epochs: int
    learning_rate: float
    batch_size: int
    seed: int


def copied(runtime: EncoderRuntime) -> EncoderRuntime:
    """Return the half of a model that reads, copied and in float32, every weight of it ready to be trained.

    Plan, adapter and head are those of the model: an adapter takes part as it does in encoding, and is trained too.

    Raises:
        ModelError: the weights are quantised.
    """
    model = runtime.model
    part = encoder_of(model) if is_encoder_decoder(model) else model.base_model
    if not all(weight.is_floating_point() for weight in part.parameters()):
        raise ModelError("this model's weights are quantised and cannot be trained; load it in float32 or bfloat16")
    own, head = copy.deepcopy(part).float(), copy.deepcopy(runtime.head)
    for module in (own, head):
        if module is not None:
            module.requires_grad_(True)
    return replace(runtime, model=own, head=None if head is None else head.float(), autocast=None)


def fine_tuned(
    runtime: EncoderRuntime,
    texts: Sequence[Tokens | None],
    labels: Sequence[int],
    settings: FineTuning,
    *,
    show: bool | None = None,
) -> TextClassifier:
    """Train a copy of an encoder, and a linear layer over its vectors, to tell texts apart.

    Torch's own random state is not touched.

    Args:
        runtime: the model and how it is read; it stays as it is.
        texts: what is learnt from; None for an empty text.
        labels: their classes, from 0 on.
        settings: how.
        show: whether to show progress; None only on a terminal.

    Returns:
        The classifier, not training any more.

    Raises:
        ModelError: the weights cannot be trained, or the loss is no number any more.
        ResourceError: a step does not fit the memory.
    """
    steps = settings.epochs * -(-len(texts) // settings.batch_size)
    devices = [runtime.device] if runtime.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        torch.manual_seed(settings.seed)
        classifier = TextClassifier(copied(runtime), max(labels) + 1).train()
        trained = [weight for weight in classifier.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=settings.learning_rate)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
        with progress(steps, "fine-tuning", show=show) as advance:
            for _ in range(settings.epochs):
                for rows in torch.randperm(len(texts)).split(settings.batch_size):
                    batch = [texts[row] for row in rows.tolist()]
                    right_B = torch.tensor([labels[row] for row in rows.tolist()], device=runtime.device)
                    _step(classifier, _inputs(runtime, batch), right_B, settings)
                    nn.utils.clip_grad_norm_(trained, _LONGEST_GRADIENT)
                    optimizer.step()
                    optimizer.zero_grad()
                    schedule.step()
                    advance(1)
    return classifier.eval()


@torch.no_grad()
def predicted(classifier: TextClassifier, runtime: EncoderRuntime, texts: Sequence[Tokens | None]) -> list[int]:
    """Return the likeliest class of each text.

    Args:
        classifier: as ``fine_tuned`` returns it.
        runtime: that it was made from.
        texts: any; None for an empty one.
    """
    found = [0] * len(texts)
    budget = default_batch_tokens(runtime.device.type, runtime.state_width)
    for rows in token_batches([1 if text is None else len(text) for text in texts], budget):
        logits_BC = classifier(**_inputs(runtime, [texts[row] for row in rows])).logits
        for row, label in zip(rows, logits_BC.argmax(-1).tolist(), strict=True):
            found[row] = label
    return found


def _step(classifier: TextClassifier, inputs: dict[str, Tensor], right_B: Tensor, settings: FineTuning) -> None:
    """Compute the gradients of one batch."""
    try:
        loss = classifier(**inputs, labels=right_B).loss
        loss.backward()
    except torch.OutOfMemoryError as error:
        raise ResourceError(
            f"out of memory on a step of {settings.batch_size} texts; set a smaller batch_size or max_length"
        ) from error
    if not torch.isfinite(loss):
        raise ModelError(
            f"the loss is no number any more at the learning rate {settings.learning_rate:g}; set a lower one"
        )


def _inputs(runtime: EncoderRuntime, texts: Sequence[Tokens | None]) -> dict[str, Tensor]:
    """Return texts as a classifier takes them, padded on the right; of an empty one nothing is pooled."""
    shape = len(texts), max(1 if text is None else len(text) for text in texts)
    ids_BT = torch.full(shape, runtime.tokenizer.pad_token_id or 0)
    real_BT, pooled_BT = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.bool)
    for row, text in enumerate(texts):
        real_BT[row, : 1 if text is None else len(text)] = 1
        if text is not None:
            ids_BT[row, : len(text)] = torch.tensor(text.ids)
            pooled_BT[row, runtime.pool_from(text) : len(text)] = True
    inputs = {"input_ids": ids_BT, "attention_mask": real_BT, "pooled": pooled_BT}
    return {name: tensor.to(runtime.device) for name, tensor in inputs.items()}

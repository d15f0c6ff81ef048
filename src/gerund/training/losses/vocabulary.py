"""Cross-entropy over a vocabulary, in chunks that never hold all logits; of chosen positions or of whole blocks.

Shapes: B texts, T tokens, L tokens of the decoder, N positions, D numbers of a state, V tokens of the vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import Node
from torch.nn import functional
from transformers import PreTrainedModel

from gerund.errors import ModelError
from gerund.inference.lm_head import TokenHead

# From last hidden states ``(N, D)`` to logits ``(N, V)``.
Head = Callable[[Tensor], Tensor]

NOTHING = -100
"""Stands in the place of padding among the targets of a decoder."""

# Logits that are held at once. On a CPU 8 MiB in float32, which stay in its caches and are not asked of the system anew
# each time, but no fewer rows than a matrix product wants; a GPU takes 128 MiB.
_LOGITS_AT_ONCE = {"cpu": 2**21}
_LOGITS_AT_ONCE_ELSEWHERE = 2**25
_SMALLEST_CHUNK = 256


def token_loss(
    head: Head,
    states_ND: Tensor,
    targets_N: Tensor,
    *,
    parameters: Sequence[nn.Parameter] = (),
    chunk: int | None = None,
) -> Tensor:
    """Return the summed cross-entropy of N positions, holding the logits of a few of them at a time.

    Logits, their loss and the gradients of both the states and the head are computed chunk by chunk in the forward
    pass; the backward pass only scales them. What is kept is as large as the states and the head's weights, whatever
    the vocabulary. A sum, because only the trainer knows what to divide by. Gradients of gradients are not offered.

    ``head`` maps states ``(n, D)`` to logits ``(n, V)``, row by row; ``parameters`` are all of its parameters that may
    be trained, else ModelError. No id is ignored: leave such rows out. The scalar is computed in float32 (in float64
    for float64 logits).

    >>> states, targets = torch.eye(3), torch.tensor([0, 1, 2])
    >>> round(token_loss(nn.Identity(), states, targets, chunk=2).item(), 4)
    1.6543
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not len(targets_N):
        return _nothing(states_ND, trained)
    if chunk is None:
        # Not under no_grad: autocast in older torch would remember the weights that it casts here as constants.
        at_once = _LOGITS_AT_ONCE.get(states_ND.device.type, _LOGITS_AT_ONCE_ELSEWHERE)
        chunk = max(_SMALLEST_CHUNK, at_once // head(states_ND[:1].detach()).shape[-1])
    if len(targets_N) <= chunk:
        return -_at(_logprobs(head(states_ND)), targets_N).sum()
    if torch.is_grad_enabled() and (states_ND.requires_grad or trained):
        loss: Tensor = _ChunkedLoss.apply(head, chunk, targets_N, states_ND, *trained)
        return loss
    with torch.no_grad():
        parts = [-_at(_logprobs(head(own_CD)), own_C).sum() for own_CD, own_C in _chunks(states_ND, targets_N, chunk)]
    return torch.stack(parts).sum()


def head_of(model: PreTrainedModel) -> tuple[Head, list[nn.Parameter]]:
    """Return the way from last hidden states (after the final norm) to logits, and what is trained on it.

    The way is the model's own forward pass behind the decoder, so scaled and capped logits are those of the model.

    Returns the function from ``(N, D)`` to ``(N, V)``, and the parameters of the output embedding that require a
    gradient; for tied embeddings, the shared table. PEFT layers may be in the model, or a PEFT model around it.
    """
    unwrap = getattr(model, "get_base_model", None)
    inner: PreTrainedModel = unwrap() if unwrap is not None else model
    head = TokenHead(inner)
    return head.logits, [p for p in inner.get_output_embeddings().parameters() if p.requires_grad]


def causal_loss(model: PreTrainedModel, input_ids_BT: Tensor) -> Tensor:
    """Return the summed cross-entropy of tokens 1..T-1 of every row, a scalar in fp32."""
    logits_BTV = model(input_ids=input_ids_BT, use_cache=False).logits
    # Cut after the head: the product keeps its round shape, and the compiler fuses the cut into the loss.
    predictions_NV = logits_BTV[:, :-1].flatten(0, 1).float()
    return functional.cross_entropy(predictions_NV, input_ids_BT[:, 1:].flatten(), reduction="sum")


def decoder_loss(model: PreTrainedModel, hidden_BTD: Tensor, real_BT: Tensor, labels_BL: Tensor) -> Tensor:
    """Return the summed cross-entropy of what the decoder writes for texts that the encoder has read.

    ``labels_BL`` has ``NOTHING`` where a row is shorter.
    """
    counted_BL = labels_BL != NOTHING
    start: int = model.config.decoder_start_token_id
    ids_BL = torch.cat([torch.full_like(labels_BL[:, :1], start), labels_BL[:, :-1].clamp(min=0)], dim=1)
    # Behind its end a row is read as padding, and nothing before looks there.
    states_BLD = model.decoder(
        input_ids=ids_BL, encoder_hidden_states=hidden_BTD, encoder_attention_mask=real_BT.long(), use_cache=False
    ).last_hidden_state
    head = model.get_output_embeddings()
    scale = model.config.d_model**-0.5 if getattr(model.config, "scale_decoder_outputs", False) else 1.0
    return token_loss(
        lambda states_ND: head(states_ND * scale),
        states_BLD[counted_BL],
        labels_BL[counted_BL],
        parameters=list(head.parameters()),
    )


class _ChunkedLoss(torch.autograd.Function):
    """The summed loss of all chunks; its gradients are computed along with it."""

    @staticmethod
    def forward(
        ctx: Any, head: Head, chunk: int, targets_N: Tensor, states_ND: Tensor, *trained: nn.Parameter
    ) -> Tensor:
        """Compute loss and gradients, a chunk at a time."""
        wants_states = states_ND.requires_grad
        losses: list[Tensor] = []
        state_gradients: list[Tensor] = []
        # Many small contributions: summed up in float32 even where the weights are bfloat16.
        sums = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in trained]
        for own_CD, own_C in _chunks(states_ND, targets_N, chunk):
            inputs_CD = own_CD.detach().requires_grad_(wants_states)
            with torch.enable_grad():
                logits_CV = head(inputs_CD)
            inputs = [inputs_CD, *trained] if wants_states else list(trained)
            if not losses:
                _check(logits_CV, inputs_CD, trained)
            logprobs_CV = _logprobs(logits_CV.detach())
            losses.append(-_at(logprobs_CV, own_C).sum())
            # The gradient of the loss by its logits: softmax minus one-hot, in the place of the log-probabilities.
            gradient_CV = logprobs_CV.exp_()
            gradient_CV.scatter_add_(1, own_C[:, None], gradient_CV.new_full((len(own_C), 1), -1.0))
            # As in an ordinary backward pass, which lies outside autocast.
            with torch.autocast(logits_CV.device.type, enabled=False):
                result = list(torch.autograd.grad(logits_CV, inputs, gradient_CV.to(logits_CV.dtype)))
            if wants_states:
                state_gradients.append(result.pop(0))
            for total, part in zip(sums, result, strict=True):
                total += part
        gradients = [torch.cat(state_gradients)] if wants_states else []
        gradients += [total.to(p.dtype) for total, p in zip(sums, trained, strict=True)]
        ctx.save_for_backward(*gradients)
        ctx.wants_states = wants_states
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Scale what the forward pass found."""
        scaled: list[Tensor | None] = [gradient * upstream.to(gradient.dtype) for gradient in ctx.saved_tensors]
        return None, None, None, *(scaled if ctx.wants_states else [None, *scaled])


def _chunks(states_ND: Tensor, targets_N: Tensor, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(states_ND.split(chunk), targets_N.split(chunk), strict=True)


def _logprobs(logits_NV: Tensor) -> Tensor:
    return logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)).log_softmax(dim=-1)


def _at(logprobs_NV: Tensor, targets_N: Tensor) -> Tensor:
    # Unlike torch's cross_entropy this passes over no id: -100 is an error, as is any other id out of range.
    return logprobs_NV.gather(1, targets_N[:, None])[:, 0]


def _nothing(states_ND: Tensor, trained: Sequence[nn.Parameter]) -> Tensor:
    """Return a zero that depends on everything, so that processes without a target stay in step with others."""
    parts = [tensor.flatten()[:0].sum() for tensor in (states_ND, *trained)]
    dtype = torch.float64 if states_ND.dtype == torch.float64 else torch.float32
    return torch.stack([part.to(dtype) for part in parts]).sum()


def _check(logits_CV: Tensor, inputs_CD: Tensor, trained: Sequence[nn.Parameter]) -> None:
    """Demand that the head is trained in exactly what the caller named: the rest would stay without a gradient."""
    used = {id(leaf) for leaf in trained_leaves(logits_CV)} - {id(inputs_CD)}
    named = {id(parameter) for parameter in trained}
    if used - named:
        raise ModelError("the output head has trained parameters that the loss was not told of; freeze or name them")
    if named - used:
        raise ModelError("a parameter that is to be trained has no part in the logits; leave it out or freeze it")


def trained_leaves(result: Tensor) -> list[Tensor]:
    """Return the leaves of the graph behind ``result`` that would receive a gradient from it, each once.

    >>> import torch
    >>> weight, frozen = torch.ones(2, requires_grad=True), torch.ones(2)
    >>> [leaf is weight for leaf in trained_leaves((weight * frozen + weight).sum())]
    [True]
    """
    results: dict[int, Tensor] = {}
    waiting = [result.grad_fn]
    seen: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            results[id(leaf)] = leaf
        waiting += [following for following, _ in node.next_functions]
    return list(results.values())

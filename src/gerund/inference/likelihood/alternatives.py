"""Log-probabilities of the tokens of prompts, with the most likely alternatives at each place.

Knows: models, token ids. Does not know: what the numbers are for.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gerund.inference.generate.detokenizing import vocabulary_bytes
from gerund.inference.likelihood.lm_head import TokenHead
from gerund.inference.likelihood.tokens import sequence_logprobs
from gerund.types import TokenLogprob

NAN = float("nan")


def prompt_logprobs(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Sequence[int]], *, top: int = 0
) -> list[list[TokenLogprob]]:
    """Return how likely the unmodified model finds each token of each prompt after those before it.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        prompts: token ids.
        top: how many of the most likely tokens of each place are returned too.

    Returns:
        For each prompt one item per token. The log-probability of the first is NaN: nothing precedes it.

    Raises:
        UnsupportedModelError: an encoder reads the prompts, so no token of theirs is predicted.
        TextError: a prompt is longer than the model's context.
        ModelError: the model's head cannot be run on its own.
    """

    def read(head: TokenHead, states_ND: Tensor, tokens_N: Tensor) -> np.ndarray:
        return head.alternatives(states_ND, tokens_N, top)

    scored = [(list(ids), 1) for ids in prompts]
    found = sequence_logprobs(model, tokenizer, scored, read=read, show=False)
    spelled = vocabulary_bytes(tokenizer, int(model.get_input_embeddings().weight.shape[0]))

    def described(token: int, logprob: float, best: Sequence[TokenLogprob] = ()) -> TokenLogprob:
        return TokenLogprob(token, spelled[token], logprob, tuple(best))

    result = []
    for ids, rows in zip(prompts, found, strict=True):
        tokens = [described(ids[0], NAN)]
        for token, row in zip(ids[1:], rows.tolist(), strict=True):
            best = [described(int(one), value) for one, value in zip(row[1 : 1 + top], row[1 + top :], strict=True)]
            tokens.append(described(token, row[0], best))
        result.append(tokens)
    return result

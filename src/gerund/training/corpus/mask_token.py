"""Chooses the token that stands for a hidden one.

Knows: vocabularies. Does not know: which tokens are hidden (``data.masking``). No token is added to a vocabulary:
embeddings would have to grow, and the model would no longer be the one that was given.
"""

from typing import TYPE_CHECKING

from gerund.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

USUAL = "_"
"""Rare and a token of its own in most vocabularies; MAGNET's choice for LLaMA-2 (Appendix A)."""


def pick_mask_token(tokenizer: "PreTrainedTokenizerBase", wanted: str | None) -> int:
    """Return the id of the mask token: the wanted one, else the tokenizer's own, else ``_``.

    Args:
        tokenizer: the tokenizer.
        wanted: a text that is one token; None for no wish.

    Returns:
        The id.

    Raises:
        ConfigError: the wanted text is not one token, or there is none to fall back on.
    """
    if wanted is not None:
        found = _single(tokenizer, wanted)
        if found is None:
            pieces = tokenizer.tokenize(wanted)
            raise ConfigError(
                f"mask_token {wanted!r} is no token of this tokenizer but {len(pieces)} pieces; "
                "give the text of one token, such as '_', or leave it out"
            )
        return found
    own: int | None = tokenizer.mask_token_id
    if own is not None:
        return own
    found = _single(tokenizer, USUAL)
    if found is None:
        raise ConfigError(
            f"this tokenizer has no mask token and {USUAL!r} is no token of it either; "
            "set mask_token to a rarely used token of its vocabulary"
        )
    return found


def _single(tokenizer: "PreTrainedTokenizerBase", text: str) -> int | None:
    # The vocabulary comes first: encoding "_" with SentencePiece gives "▁" and "_", or another token, "▁_".
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    if text in vocabulary:
        return vocabulary[text]
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False) if text else []
    return ids[0] if len(ids) == 1 and ids[0] != tokenizer.unk_token_id else None

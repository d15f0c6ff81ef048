"""What an engine does before it takes work: find out how the model writes side by side, and make room for it.

Knows: models, reproducibility, slots. Does not know: threads, requests.
"""

from collections import Counter
from dataclasses import dataclass, replace

from gerund.attention.ragged_batch import whole_blocks
from gerund.engine.encoding import EncodingPart
from gerund.engine.work import EngineConfig
from gerund.engine.writing import WritingPart
from gerund.generative_model import GenerativeModel
from gerund.inference.generate.prefixes import Prefixes
from gerund.inference.generate.reproducibility import (
    LEAST_READ,
    Reproducibility,
    check_batching,
    check_compiled_batching,
)
from gerund.inference.generate.slot_writers import Writers
from gerund.inference.generate.slots import unfit
from gerund.inference.tokens import context_length, rotary_limit
from gerund.text_encoder import TextEncoder
from gerund.types import Promise

_CONTEXT = 2048
_PREFIX_TOKENS = 4096


@dataclass(frozen=True)
class Prepared:
    """The parts of an engine that is ready.

    Attributes:
        writing: writes.
        encoding: encodes.
        promise: what holds for texts.
        why: how that was found out.
        context: room of a slot in tokens; None without slots.
    """

    writing: WritingPart
    encoding: EncodingPart
    promise: Promise
    why: str
    context: int | None


def prepare(lm: TextEncoder, config: EngineConfig, counts: "Counter[str]", *, verify: bool) -> Prepared:
    """Make a model ready.

    Args:
        lm: the model.
        config: the engine's settings.
        counts: where its parts count what they do.
        verify: prove what can be promised.
    """
    encoding = EncodingPart(lm, counts)
    if not isinstance(lm, GenerativeModel):
        writing = WritingPart(lm, None, config.slots, counts)  # type: ignore[arg-type]
        return Prepared(writing, encoding, "none", "this model does not write", None)
    room = _room(lm, config)
    found = _reproducibility(lm, config, room, verify=verify)
    if found.fits and not config.reproducible:
        why = "each step has as many rows as there are texts (reproducible is off)"
        found = Reproducibility(True, "none", why, recalls=found.recalls)
    if not found.fits:
        return Prepared(WritingPart(lm, None, config.slots, counts), encoding, found.promise, found.why, None)
    # Reading by blocks would take the bits of generate, which a compiled step has not got.
    costs_nothing = found.recalls and (found.promise != "bits of generate" or config.compile)
    tokens = config.prefix_tokens
    if tokens is None:
        tokens = _PREFIX_TOKENS if costs_nothing else 0
    by_blocks = costs_nothing or tokens > 0
    if by_blocks and not found.recalls:
        found = replace(
            found, promise="none", why="parts of prompts are kept, and on this machine that changes last bits"
        )
    elif by_blocks and found.promise == "bits of generate":
        why = f"{found.why}; parts of prompts are kept, for which prompts are read otherwise than generate reads them"
        found = replace(found, promise="same text under any load", why=why)
    if config.compile:
        slots, found = check_compiled_batching(found, lm.model, config.slots, room, by_blocks=by_blocks)
    else:
        slots = found.slots(lm.model, config.slots, room, by_blocks=by_blocks)
    # A pause between two layers lets others write on, and a layer takes the shorter the fewer tokens it gets.
    portion = whole_blocks(config.read_tokens) if by_blocks else None
    writers = Writers(slots, Prefixes(tokens, LEAST_READ) if tokens else None, portion)
    return Prepared(WritingPart(lm, writers, config.slots, counts), encoding, found.promise, found.why, room)


def _room(lm: GenerativeModel, config: EngineConfig) -> int:
    # What needs more room than the second one is written one at a time, and changes none of the others.
    limits = (context_length(lm.model.config, lm.tokenizer), rotary_limit(lm.model.config))
    return min([config.context or _CONTEXT, *(limit for limit in limits if limit is not None)])


def _reproducibility(lm: GenerativeModel, config: EngineConfig, room: int, *, verify: bool) -> Reproducibility:
    if config.exact:
        return Reproducibility(False, "bits of generate", "each text is written alone, through transformers' own loop")
    if verify:
        return check_batching(lm.model, lm.tokenizer, config.slots, room)
    reason = unfit(lm.model)
    if reason is None:
        return Reproducibility(True, "none", "nothing was verified at the start")
    return Reproducibility(
        False, "bits of generate", f"{reason}; each text is written alone, through transformers' own loop"
    )

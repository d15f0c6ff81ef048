"""What an engine does before it takes work: find out how the model writes side by side, and make room for it.

Knows: models, proofs, slots. Does not know: threads, requests.
"""

from collections import Counter
from dataclasses import dataclass

from gerund.engine.encoding import EncodingPart
from gerund.engine.work import EngineConfig
from gerund.engine.writing import WritingPart
from gerund.generative_model import GenerativeModel
from gerund.inference.generate.prefixes import Prefixes
from gerund.inference.generate.proving import LEAST_READ, Proof, prove, prove_compiled
from gerund.inference.generate.slots import unfit
from gerund.inference.generate.writers import Writers
from gerund.inference.tokens import context_length
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
    proof = _proof(lm, config, room, verify=verify)
    if not proof.fits:
        return Prepared(WritingPart(lm, None, config.slots, counts), encoding, proof.promise, proof.why, None)
    tokens = config.prefix_tokens
    if tokens is None:
        tokens = _PREFIX_TOKENS if proof.recalls else 0
    prefixes = Prefixes(tokens, LEAST_READ) if tokens else None
    if config.compile:
        slots, proof = prove_compiled(proof, lm.model, config.slots, room)
    else:
        slots = proof.slots(lm.model, config.slots, room)
    writers = Writers(slots, prefixes)
    promise, why = proof.promise, proof.why
    if prefixes is not None and not proof.recalls:
        promise, why = "none", "beginnings of prompts are kept, and on this machine that changes last bits"
    return Prepared(WritingPart(lm, writers, config.slots, counts), encoding, promise, why, room)


def _room(lm: GenerativeModel, config: EngineConfig) -> int:
    limit = context_length(lm.model.config, lm.tokenizer)
    wanted = config.context or min(limit or _CONTEXT, _CONTEXT)
    return wanted if limit is None else min(wanted, limit)


def _proof(lm: GenerativeModel, config: EngineConfig, room: int, *, verify: bool) -> Proof:
    if config.exact:
        return Proof(False, "bits of generate", "each text is written alone, through transformers' own loop")
    if verify:
        return prove(lm.model, lm.tokenizer, config.slots, room)
    reason = unfit(lm.model)
    if reason is None:
        return Proof(True, "none", "nothing was proved at the start")
    return Proof(False, "bits of generate", f"{reason}; each text is written alone, through transformers' own loop")

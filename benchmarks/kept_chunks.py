"""What `gerund ask --approximate-cache` loses and saves: chunks that were read apart and are set one behind another.

    python benchmarks/kept_chunks.py --data ../shared/data [--articles 60]

`loss`: behind three chunks of an article, the loss of its next tokens, with the chunks read together, kept apart and
turned to their places, and less of them. `time`: what a question about six kept chunks saves.
"""

import copy
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gerund
import harness
from gerund import Session
from gerund.attention.layer_state import CACHE
from gerund.data.corpus import read_documents
from gerund.inference.generate.session import load_cached_text
from inputs import random_llama, save, size_of
from results import Column, Table

TOGETHER, APART, ON_DISK_APART = "chunks read together", "chunks kept apart", "chunks kept apart on the disk"
LAST, NOTHING = "the last chunk alone", "no chunk"
# What stands before all chunks, how many of how many tokens there are, how many tokens follow; and how many are timed.
_BEFORE, _PARTS, _CHUNK, _NEXT, _CHUNKS = "An article from an encyclopedia:\n\n", 3, 128, 48, 6
_SIZES = {
    "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_key_value_heads": 4,
}  # fmt: skip


def loss(options: Any) -> Table:
    """Measure what is lost where chunks do not see each other, with the bundled model's base."""
    lm = gerund.load(attention="causal", adapter="none", dtype="float32", device="cpu")
    begun = lm.prefill(lm.tokenizer(_BEFORE).input_ids)
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in (TOGETHER, APART, LAST, NOTHING)}
    needed = _PARTS * _CHUNK + _NEXT
    for document in read_documents([options.data / "lm" / "wiki.valid.jsonl"]):
        ids = lm.tokenizer(document.text[:4000], add_special_tokens=False).input_ids[:needed]
        if len(ids) < needed:
            continue
        chunks = [ids[first : first + _CHUNK] for first in range(0, _PARTS * _CHUNK, _CHUNK)]
        session = begun
        for chunk in chunks:
            session = session.with_tail(begun.prefill(chunk).tail(len(begun.token_ids)), len(begun.token_ids))
        sessions = {
            TOGETHER: begun.prefill([one for chunk in chunks for one in chunk]),
            APART: session, LAST: begun.prefill(chunks[-1]), NOTHING: begun,
        }  # fmt: skip
        logs = {name: _predicted(lm, one, ids[-_NEXT:]) for name, one in sessions.items()}
        exact_TV, next_T = logs[TOGETHER], torch.tensor(ids[-_NEXT + 1 :])
        for name, log_TV in logs.items():
            lost = -log_TV.gather(1, next_T[:, None]).mean()
            apart_by = (exact_TV.exp() * (exact_TV - log_TV)).sum(-1).mean()
            same = (exact_TV.argmax(-1) == log_TV.argmax(-1)).float().mean()
            found[name].append((float(lost), float(apart_by), 100 * float(same)))
        if len(found[TOGETHER]) == options.articles:
            break
    names = ("loss", "kl", "same")
    rows = [
        {"known": name, **dict(zip(names, np.mean(own, axis=0).tolist(), strict=True))} for name, own in found.items()
    ]  # fmt: skip
    columns = [
        Column("known", "the model knows"), Column("loss", "loss", "nats a token", 3, "lower"),
        Column("kl", "KL divergence", "nats", 3, "lower"), Column("same", "same best token", "%", 1, "higher"),
    ]  # fmt: skip
    caption = (
        f"The next {_NEXT - 1} tokens of {len(found[TOGETHER])} articles of Wikipedia behind {_PARTS} chunks of "
        f"{_CHUNK} tokens; the bundled model's base."
    )
    return Table("loss", caption, columns, rows)


@torch.no_grad()
def _predicted(lm: Any, session: Session, ids: list[int]) -> torch.Tensor:
    """Return logarithms of the probabilities of what follows each token but the last ``(T - 1, V)``."""
    found = lm.model(torch.tensor([ids]), use_cache=True, **{CACHE: copy.deepcopy(session._cache)})
    return found.logits[0, :-1].float().log_softmax(-1)


def seconds(options: Any) -> Table:
    """Time a question about chunks up to the first token of the answer."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = random_llama(**_SIZES)
        save(model, folder / "model")
        lm = gerund.load(folder / "model", attention="causal", dtype="float32", device="cpu")
        rng = np.random.default_rng(0)
        begin, question = (rng.integers(300, 2000, size=size).tolist() for size in (64, 32))
        chunks = rng.integers(300, 2000, size=(_CHUNKS, _CHUNK)).tolist()
        begun = lm.prefill(begin)
        for number, chunk in enumerate(chunks):
            (folder / str(number)).mkdir()
            begun.prefill(chunk).tail(len(begin)).save_into(folder / str(number))

        def kept() -> Session:
            session = begun
            for number in range(_CHUNKS):
                session = session.with_tail(load_cached_text(folder / str(number), lm), len(begin))
            return session.prefill(question)

        whole = [*(one for chunk in chunks for one in chunk), *question]
        if kept().token_ids != begun.prefill(whole).token_ids:
            raise harness.NotTheSame("they have read other tokens")
        # So much further on, the first chunk has seen what it sees in the whole text.
        first = harness.largest_difference(
            begun.prefill(chunks[0])._cache.layers[-1].keys, kept()._cache.layers[-1].keys[:, :, : len(begin) + _CHUNK]
        )
        checks = [harness.require("keys of the first chunk, kept against read", first, 1e-4)]
        rounds = harness.alternate({TOGETHER: lambda: begun.prefill(whole), ON_DISK_APART: kept}, options.rounds)
    caption = (
        f"{_CHUNKS} chunks of {_CHUNK} tokens and a question of 32 behind instructions that are known, up to the "
        f"logits of the answer's first token; a random Llama of {size_of(model) / 4 * 2**20 / 1e6:.0f} million "
        "parameters in float32."
    )
    return rounds.table("time", caption, base=TOGETHER, checks=checks)


def main(argv: list[str] | None = None) -> None:
    """Measure both."""
    parser = harness.parser(__doc__, rounds=5)
    parser.add_argument("--data", type=Path, required=True, help="a folder with lm/")
    parser.add_argument("--articles", type=int, default=60, help="of Wikipedia's validation part (%(default)s)")
    options = harness.parse(parser, argv, quick={"articles": 2})
    torch.set_num_threads(options.threads)
    harness.report(options, __file__, [loss(options), seconds(options)])


if __name__ == "__main__":
    main()

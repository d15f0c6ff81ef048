"""RankGen's beam search beside the released algorithm, on the same generator, scorer and prefix.

    python benchmarks/guided_search.py [--every 20 5] [--rounds 3] [--layers 6] [--width 384]

A random GPT-2 writes and a random T5 encoder scores, both of 6 layers and width 384 (the T5's feed-forward part as
wide beside it as in the published base encoder), behind a prefix of 256 tokens: B = 2, N = 10, 115 new tokens. The peer
is the released `RankGenGenerator.beam_search`, mended where it does not end: it tokenises prefix and text anew in every
round, has transformers' `generate` read both for every sample, and scores the texts so far against the prefix's vector,
which it computes once. Checks first that, without chance and with one sample, both write the same text and score
it alike. Beside the search in float32 the one with a scorer in bfloat16, which `T5Scorer.load` chooses where the
processor has it. Then the same with the generator as its own scorer, by the state of the end token, whose states of a
text so far the search here keeps. The goals are 4 times as fast every 20 tokens, 8 times every 5.
"""

import copy
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, T5Config
from transformers.activations import NewGELUActivation

import gerund
import harness
from gerund.language_model import LanguageModel
from gerund.scoring.dual_encoder import DualScorer, VectorScorer
from gerund.scoring.t5 import T5EncoderWithProjection, T5Scorer
from gerund.settings.encoder import EncoderConfig
from gerund.settings.plan import AttentionPlan
from gerund.settings.sampling import Rerank, Sampling
from inputs import bundled_tokenizer
from results import Column, Row, Table

BEAMS, SAMPLES, PREFIX_TOKENS = 2, 10, 256
RELEASED = "released"
GOALS = {20: 4.0, 5: 8.0}
# Makes a random model about as sure of the next token as a small trained one (about 4 nats of entropy), as
# the time that nucleus sampling takes here depends on it.
SHARPNESS = 9
END_TOKEN = EncoderConfig(attention=AttentionPlan("causal"), pooling="last", append_eos=True)
TEXT = "The old man looked at the sea, and the waves came in as they had come in all the years of his life. "


class Released:
    """The released search on given models.

    Args:
        lm: the generator.
        scorer: the scorer, whose vectors are computed anew for whole texts.
    """

    def __init__(self, lm: gerund.LanguageModel, scorer: VectorScorer) -> None:
        self.model, self.tokenizer = lm.model, lm.tokenizer
        self.scorer = scorer
        if isinstance(scorer, T5Scorer):
            self.scorer = T5Scorer(as_transformers_has_it(scorer.model), scorer.tokenizer, "released")

    @torch.inference_mode()
    def search(
        self, prefix: str, beams: int, samples: int, every: int, new_tokens: int, *, greedy: bool = False
    ) -> tuple[str, float]:
        """Return the best text and its score."""
        [vector_D] = self.scorer.prefix_vectors([prefix])
        kept = [("", False)] * beams
        written, score = 0, 0.0
        while written < new_tokens and not all(ended for _, ended in kept):
            room = min(every, new_tokens - written)
            pool = []
            for text, ended in kept:
                if ended:
                    pool.append((text, True))
                    continue
                inputs = self.tokenizer(prefix + text, return_tensors="pt", truncation=True, max_length=1024 - room)
                choice = {"do_sample": False} if greedy else {"do_sample": True, "top_p": 0.9, "top_k": 0}
                output = self.model.generate(
                    **inputs,
                    **choice,
                    max_new_tokens=room,
                    num_return_sequences=samples,
                    pad_token_id=self.tokenizer.eos_token_id,
                )
                new = output[:, inputs["input_ids"].shape[1] :]
                texts = self.tokenizer.batch_decode(new, skip_special_tokens=True)
                ends = (new == self.tokenizer.eos_token_id).any(dim=1).tolist()
                pool += [(text + more, end) for more, end in zip(texts, ends, strict=True)]
            written += room
            vectors = self.scorer.continuation_vectors([text.strip() or "." for text, _ in pool])
            scores = [float(own_D @ vector_D) for own_D in vectors]
            order = sorted(range(len(pool)), key=lambda place: -scores[place])[:beams]
            kept, score = [pool[place] for place in order], scores[order[0]]
        return kept[0][0], score


def main(argv: list[str] | None = None) -> None:
    """Run the comparison."""
    parser = harness.parser(__doc__)
    parser.add_argument("--every", type=int, nargs="+", default=[20, 5])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--new-tokens", type=int, default=115)
    options = harness.parse(parser, argv, quick={"every": [20], "layers": 1, "width": 96, "new_tokens": 20})
    with tempfile.TemporaryDirectory() as folder:
        lm, scorer = models(Path(folder), options.layers, options.width)
    prefix = lm.tokenizer.decode(lm.tokenizer(TEXT * 20)["input_ids"][:PREFIX_TOKENS], skip_special_tokens=True)
    half = T5Scorer(scorer.model, scorer.tokenizer, "bfloat16", autocast=torch.bfloat16)
    own = DualScorer(LanguageModel(lm.model, lm.tokenizer, END_TOKEN), projection_DD=None, name="own")
    rows: list[Row] = []
    apart = 0.0
    for title, peer_scorer, scorers in (
        ("a T5 encoder", scorer, {"gerund, fp32": scorer, "gerund, bf16 scorer": half}),
        ("the generator itself", own, {"gerund, fp32": own}),
    ):
        peer = Released(lm, peer_scorer)
        apart = max(apart, difference(lm, peer, peer_scorer, prefix))
        for every in options.every:
            rows += compare(lm, peer, scorers, prefix, every, options, title)
    checks = ["both write the same text greedily", harness.require("relative difference of its score", apart, 1e-3)]
    columns = harness.time_columns(
        RELEASED,
        Column("scored by", "scored by"),
        Column("every", "ranked every, tokens"),
        Column("goal", "goal", "", 0),
    )
    caption = (
        f"Beam search by a scorer beside the released one: {BEAMS} beams of {SAMPLES} samples, "
        f"{options.new_tokens} tokens behind {PREFIX_TOKENS}, {options.layers} layers of width {options.width}."
    )
    harness.report(options, __file__, [Table("search", caption, columns, rows, checks=checks)])


def compare(
    lm: gerund.LanguageModel,
    peer: Released,
    scorers: dict[str, VectorScorer],
    prefix: str,
    every: int,
    options: Any,
    title: str,
) -> list[Row]:
    """Time all searches in turn."""
    seed = 0

    def next_seed(_system: str, number: int) -> None:
        nonlocal seed
        seed = number

    def theirs() -> object:
        torch.manual_seed(seed)
        return peer.search(prefix, BEAMS, SAMPLES, every, options.new_tokens)

    def ours(scorer: VectorScorer) -> object:
        # Forgets the prefix's vector, which a search computes once.
        scorer._prefix_cache.clear()
        rerank = Rerank(SAMPLES, beams=BEAMS, every=every, scorer=scorer)
        return lm.generate(prefix, options.new_tokens, Sampling(1.0, top_p=0.9, seed=seed), rerank=rerank)

    systems: dict[str, Callable[[], object]] = {RELEASED: theirs}
    systems |= {name: functools.partial(ours, scorer) for name, scorer in scorers.items()}
    rows = harness.alternate(systems, options.rounds, prepare=next_seed).rows(RELEASED)
    more = {"scored by": title, "every": every}
    return [{**row, **more, "goal": None if row["system"] == RELEASED else GOALS.get(every)} for row in rows]


def models(folder: Path, layers: int, width: int) -> tuple[gerund.LanguageModel, T5Scorer]:
    """Return a random generator and a random scorer, both with the tokenizer of the bundled model."""
    tokenizer = bundled_tokenizer()
    torch.manual_seed(0)
    vocabulary = len(tokenizer)
    config = GPT2Config(
        vocab_size=vocabulary, n_embd=width, n_layer=layers, n_head=6, n_positions=1024,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=False,
    )  # fmt: skip
    generator = GPT2LMHeadModel(config)
    with torch.no_grad():
        # A text that ends at once would leave nothing to measure.
        generator.lm_head.weight *= SHARPNESS
        generator.lm_head.weight[tokenizer.eos_token_id] = 0
    generator.save_pretrained(folder / "gpt2")
    tokenizer.save_pretrained(folder / "gpt2")
    t5 = T5Config(
        vocab_size=vocabulary, d_model=width, d_kv=64, d_ff=8 * width // 3, num_layers=layers, num_heads=6,
        num_decoder_layers=layers, feed_forward_proj="gated-gelu", tie_word_embeddings=False,
    )  # fmt: skip
    lm = gerund.load(folder / "gpt2", attention="causal", dtype="float32")
    return lm, T5Scorer(T5EncoderWithProjection(t5).eval(), tokenizer, "random")


def as_transformers_has_it(model: T5EncoderWithProjection) -> T5EncoderWithProjection:
    """Return a copy with transformers' own activation, which ours computes in one kernel."""
    own = copy.deepcopy(model)
    for block in own.t5_encoder.encoder.block:
        block.layer[-1].DenseReluDense.act = NewGELUActivation()
    return own


def difference(lm: gerund.LanguageModel, peer: Released, scorer: VectorScorer, prefix: str) -> float:
    """Return how differently both searches score what they write where no chance takes part.

    Raises:
        NotTheSame: they write different texts.
    """
    # In one round: what the released search does to its tokens between rounds is not to be had twice.
    text, score = peer.search(prefix, 1, 1, 40, 40, greedy=True)
    [own] = lm.generate(prefix, 40, Sampling(), rerank=Rerank(1, scorer=scorer))
    if own.text != text:
        raise harness.NotTheSame(f"the systems write different texts: {own.text!r} and {text!r}")
    [[again]] = lm.score([prefix], [[text]], scorer)
    return abs(score - float(again)) / max(1.0, abs(score))


if __name__ == "__main__":
    main()

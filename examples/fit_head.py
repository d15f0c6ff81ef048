"""Fit the head of a distilled encoder again, on states that are computed once.

    python examples/fit_head.py runs/mine/model TEACHER runs/mine/fitted --texts texts.jsonl --pairs pairs.jsonl

The head is the linear map behind the layers, with the vectors of words beside it. It needs one pass over the texts, and
its steps cost next to nothing: it learns in minutes what a training of all layers reaches late. The loss is the
distance from the teacher's vectors (objective `distill`) and CoSENT on pairs with scores (objective `cosent`). One text
and one pair in ten are held out and tell how well it went, before and after.

`--share` takes a part of the change: what was fitted to some kinds of text costs a little on others.

`--length` multiplies the vectors: no cosine depends on it, but a logistic regression on few examples does, whose usual
regularization is made for longer vectors.
"""

import argparse
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor
from torch.nn.functional import normalize

import gerund
from gerund.models.heads import ProjectionHead
from gerund.progress import progress
from gerund.training.losses.contrastive import cosent

HELD_OUT = 10
_TEXTS, _PAIRS = 1024, 256  # of a step
_READ = 64  # texts that are encoded at once


def main() -> None:
    """Read the arguments, fit the head and write the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="the folder that a training with the objective distill wrote")
    parser.add_argument("teacher", help="the encoder that it was distilled from")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--texts", type=Path, required=True, help='JSON lines {"text": ...}')
    parser.add_argument("--pairs", type=Path, required=True, help='JSON lines {"sentence1": ..., "sentence2", "score"}')
    parser.add_argument("--steps", type=int, default=800, help="(%(default)s)")
    parser.add_argument("--rate", type=float, default=1e-3, help="the learning rate, lowered to 0 (%(default)s)")
    parser.add_argument("--weight", type=float, default=2.0, help="of pairs; that of texts is 30 (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.3, help="of pairs (%(default)s)")
    parser.add_argument("--share", type=float, default=1.0, help="of the way to the fitted head, 0 to 1 (%(default)s)")
    parser.add_argument("--length", type=float, default=1.0, help="multiplies the vectors (%(default)s)")
    given = parser.parse_args()
    if given.out.exists():
        parser.error(f"{given.out} is there already")
    try:
        texts, pairs = (
            [json.loads(line) for line in path.read_text("utf-8").splitlines()] for path in (given.texts, given.pairs)
        )
        lines = [row["text"] for row in texts]
        scored = [(row["sentence1"], row["sentence2"], float(row["score"])) for row in pairs]
        lm, teacher = gerund.load(given.model, runtime="torch"), gerund.load(given.teacher)
    except (OSError, ValueError, KeyError, TypeError, gerund.GerundError) as error:
        parser.error(f"cannot read texts, pairs or models: {type(error).__name__}: {error}")
    head = lm.runtime.head
    if head is None or head.settings.variant != "linear":
        parser.error(f"{given.model} has no linear head; train it with the objective distill")
    if len(lines) < HELD_OUT or len(scored) < HELD_OUT:
        parser.error(f"give {HELD_OUT} texts and {HELD_OUT} pairs at least; thousands are better")
    fit = Fit(lm, head, teacher, lines, scored)
    print("before:", fit.quality())
    fit.run(given.steps, given.rate, given.weight, given.temperature)
    fit.go_back(head, given.share)
    print("after:", fit.quality())
    shutil.copytree(given.model, given.out)
    fit.store(head, given.length)
    head.save(given.out)


class Fit:
    """A head that is fitted: a map of states ``(E, D)``, and maps of parts of the vectors of words ``(C, P, P)``."""

    def __init__(
        self, lm: Any, head: ProjectionHead, teacher: Any, texts: Sequence[str], pairs: Sequence[tuple[str, str, float]]
    ) -> None:
        self.state_ED = head.outer.weight.detach().clone().requires_grad_()
        # Of quantized words each part is mapped by itself, which changes their centers and no code.
        parts, dimensions = head.settings.word_bytes or 1, head.settings.dimensions
        self.word_CPP = torch.eye(dimensions // parts).repeat(parts, 1, 1)
        self.word_CPP.requires_grad_(head.settings.vocabulary is not None)
        both = [text for pair in pairs for text in pair[:2]]
        distinct = list(dict.fromkeys([*texts, *both]))
        random.Random(0).shuffle(distinct)
        place = {text: number for number, text in enumerate(distinct)}
        self.read_NF = features(lm, head, distinct)
        self.taught_NE = torch.tensor(teacher.encode(distinct))
        order = random.Random(1).sample(range(len(pairs)), len(pairs))
        self.pair_P2 = torch.tensor([place[text] for text in both]).reshape(-1, 2)[order]
        self.score_P = torch.tensor([score for _, _, score in pairs])[order]

    def vectors(self, places: Any) -> Tensor:
        """Return the vectors of some texts, of length 1."""
        maps_EF = torch.cat([self.state_ED, torch.block_diag(*self.word_CPP)], dim=1)
        return normalize(self.read_NF[places] @ maps_EF.T, dim=-1)

    def cosines(self, pair_P2: Tensor) -> Tensor:
        """Return the cosine of each pair."""
        return (self.vectors(pair_P2[:, 0]) * self.vectors(pair_P2[:, 1])).sum(-1)

    @torch.no_grad()
    def quality(self) -> str:
        """Return how near the held-out texts are to the teacher's, and how well held-out pairs are ordered."""
        texts, pairs = (slice(0, max(2, len(values) // HELD_OUT)) for values in (self.read_NF, self.pair_P2))
        near = (self.vectors(texts) * self.taught_NE[texts]).sum(-1).mean()
        order = spearmanr(self.cosines(self.pair_P2[pairs]).numpy(), self.score_P[pairs].numpy()).statistic
        return f"cosine to the teacher {near:.3f}, Spearman correlation on pairs {order:.3f}"

    def run(self, steps: int, rate: float, weight: float, temperature: float) -> None:
        """Fit the maps; texts and pairs are drawn anew for each step."""
        generator = torch.Generator().manual_seed(0)

        def drawn(values: Tensor, count: int) -> Tensor:
            return torch.randint(max(2, len(values) // HELD_OUT), len(values), (count,), generator=generator)

        learnt = [maps for maps in (self.state_ED, self.word_CPP) if maps.requires_grad]
        optimizer = torch.optim.Adam(learnt, lr=rate)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
        with progress(steps, "fit") as advance:
            for _ in range(steps):
                text_B, pair_B = drawn(self.read_NF, _TEXTS), drawn(self.pair_P2, _PAIRS)
                distance = 1 - (self.vectors(text_B) * self.taught_NE[text_B]).sum(-1).mean()
                disorder = cosent(self.cosines(self.pair_P2[pair_B]), self.score_P[pair_B], temperature=temperature)
                optimizer.zero_grad()
                (30 * distance + weight * disorder).backward()
                optimizer.step()
                schedule.step()
                advance(1)

    @torch.no_grad()
    def go_back(self, head: ProjectionHead, share: float) -> None:
        """Keep a share of the change."""
        self.state_ED.copy_(torch.lerp(head.outer.weight, self.state_ED, share))
        self.word_CPP.copy_(torch.lerp(torch.eye(self.word_CPP.shape[1]), self.word_CPP, share))

    @torch.no_grad()
    def store(self, head: ProjectionHead, length: float) -> None:
        """Give a head what was fitted."""
        head.outer.weight.copy_(length * self.state_ED)
        word_EE = length * torch.block_diag(*self.word_CPP)
        if head.tokens is not None:
            head.tokens.weight.copy_(head.tokens.weight @ word_EE.T)
        if head.words is not None and head.words.codes is not None:
            head.words.scales_W.mul_(length)
            head.words.centers_CKP.copy_((head.words.centers_CKP @ self.word_CPP.mT).bfloat16())
        elif head.words is not None:
            words_WE = head.words.vectors(torch.arange(len(head.words.keys_W)))
            head.words.keep(head.words.keys_W.clone(), words_WE @ word_EE.T)


@torch.no_grad()
def features(lm: Any, head: ProjectionHead, texts: Sequence[str]) -> Tensor:
    """Return what a head adds up, ``(N, D + E)``: pooled states, still to be mapped, and the vectors of words."""
    seen: list[tuple[Tensor, Tensor]] = []

    def see(_: Any, inputs: tuple[Tensor, ...], vectors_BE: Tensor) -> None:
        added_BE = torch.zeros_like(vectors_BE) if head.settings.vocabulary is None else head.static(*inputs[1:])
        seen.append((torch.cat([inputs[0], added_BE], dim=1), vectors_BE))

    read_NF = []
    hook = head.register_forward_hook(see)
    order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
    with progress(len(texts), "texts") as advance:
        for start in range(0, len(order), _READ):
            part = [texts[place] for place in order[start : start + _READ]]
            vectors_BE = torch.tensor(lm.encode(part, normalize_embeddings=False, show_progress_bar=False))
            rows_BF, made_BE = (torch.cat(values) for values in zip(*seen, strict=True))
            seen.clear()
            # Texts are encoded by their length: equal vectors say which is which.
            read_NF.append(rows_BF[torch.cdist(vectors_BE, made_BE.float()).argmin(1)])
            advance(len(part))
    hook.remove()
    return torch.cat(read_NF)[torch.argsort(torch.tensor(order))].float()


if __name__ == "__main__":
    main()

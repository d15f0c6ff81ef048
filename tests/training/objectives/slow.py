"""The papers' definitions taken at their word: one text at a time without padding, one position at a time.

Nothing in here uses gerund's masks, batches or losses. ``eager`` is a copy of the model in eager attention.
"""

import torch

from gerund.settings.plan import AttentionPlan
from tests.architectures.slow import SlowModel


def causal(query, key, span):
    return key <= query


def hybrid(query, key, span):
    """MAGNET, section 3.1: a context token sees the context; a span token also its own span so far."""
    if query == key:
        return True
    if span[key] == 0:
        return True
    return span[query] == span[key] and key < query


def states(eager, ids, sees, span=None):
    """Return the last hidden states of one text, ``sees`` asked for every pair of its tokens."""
    n = len(ids)
    mask = torch.full((1, 1, n, n), torch.finfo(torch.float64).min, dtype=torch.float64)
    for query in range(n):
        for key in range(n):
            if sees(query, key, span):
                mask[0, 0, query, key] = 0.0
    return eager.base_model(input_ids=torch.tensor([ids]), attention_mask=mask, use_cache=False).last_hidden_state[0]


def plan_states(eager, ids, plan: AttentionPlan):
    return SlowModel(eager).states(ids, plan)


def surprise(eager, state, token):
    logits = eager.get_output_embeddings()(state)
    return logits.exp().sum().log() - logits[token]


def texts_of(batch):
    """Yield each row of a batch as plain lists, padding taken off."""
    for row in range(len(batch["input_ids"])):
        n = int(batch["real"][row].sum())
        assert batch["real"][row, :n].all()
        yield {name: batch[name][row, :n].tolist() for name in ("input_ids", "labels", "selected", "span", "inside")
               if name in batch}  # fmt: skip


def masked_tokens(eager, batch, predict, sees=hybrid):
    total = 0.0
    for text in texts_of(batch):
        hidden = states(eager, text["input_ids"], sees, text["span"])
        for place, chosen in enumerate(text["selected"]):
            if chosen:
                where = place - 1 if predict == "next" else place
                total = total + surprise(eager, hidden[where], text["labels"][place])
    return total


def spans(eager, batch):
    total = 0.0
    for text in texts_of(batch):
        hidden = states(eager, text["input_ids"], hybrid, text["span"])
        for place, span in enumerate(text["span"]):
            if span > 0:
                total = total + surprise(eager, hidden[place - 1], text["labels"][place])
    return total


def next_tokens(eager, rows):
    total = 0.0
    for ids in rows:
        hidden = states(eager, ids, causal)
        for place in range(1, len(ids)):
            total = total + surprise(eager, hidden[place - 1], ids[place])
    return total


def auto_regression(eager, batch):
    """UniMAE, equation 1."""
    total = 0.0
    for text in texts_of(batch):
        hidden = states(eager, text["input_ids"], causal)
        for place in range(1, len(text["labels"])):
            if text["inside"][place]:
                total = total + surprise(eager, hidden[place - 1], text["labels"][place])
    return total


def reconstruction(eager, decoder, batch):
    """UniMAE, equations 3 to 5: a token is told from h, its place, and the others that its row of ``sees`` shows."""
    total = 0.0
    for row, text in enumerate(texts_of(batch)):
        h = normalised(states(eager, text["input_ids"], causal)[-1])
        original = [token for token, inside in zip(text["labels"], text["inside"], strict=True) if inside]
        table = eager.get_input_embeddings().weight
        others = [normalised(table[token]) + decoder.positions[place] for place, token in enumerate(original)]
        for place, token in enumerate(original):
            seen = [h, *(other for j, other in enumerate(others) if batch["sees"][row, place, 1 + j])]
            total = total + surprise(eager, decoded(decoder, h + decoder.positions[place], seen), token)
    return total


def decoded(decoder, query, seen):
    """Return what one transformer layer and the way to the head make of one query."""
    width = decoder.width // decoder.heads
    parts = []
    for head in range(decoder.heads):
        own = slice(head * width, (head + 1) * width)
        scores = [(decoder.query.weight[own] @ query) @ (decoder.key.weight[own] @ key) / width**0.5 for key in seen]
        weights = torch.stack(scores).exp()
        values = torch.stack([decoder.value.weight[own] @ key for key in seen])
        parts.append((weights / weights.sum()) @ values)
    state = query + decoder.attended.weight @ torch.cat(parts)
    state = state + decoder.feed_forward(decoder.norm(state))
    return decoder.to_head(decoder.final_norm(state))


def normalised(row):
    centred = row - row.mean()
    return centred / (centred.square().mean() + 1e-5).sqrt()


def vector(eager, ids, first, plan, pooling):
    hidden = plan_states(eager, ids, plan)[first:]
    if pooling == "last":
        return hidden[-1]
    if pooling == "first":
        return hidden[0]
    weights = [1.0] * len(hidden) if pooling == "mean" else [float(place + 1) for place in range(len(hidden))]
    return sum(weight * state for weight, state in zip(weights, hidden, strict=True)) / sum(weights)


def contrast(queries, keys, positives, is_excluded, temperature=1.0, similarity="dot"):
    """Return the summed loss and the number of hits; some keys are no negatives of a query, its positive apart."""
    total, hits = 0.0, 0
    for i, query in enumerate(queries):
        right = similar(query, keys[positives[i]], similarity) / temperature
        others = [
            similar(query, key, similarity) / temperature
            for j, key in enumerate(keys)
            if j != positives[i] and not is_excluded(i, j)
        ]
        total = total + torch.logsumexp(torch.stack([right, *others]), 0) - right
        hits += all(right > other for other in others)
    return total, hits


def similar(left, right, similarity):
    dot = (left * right).sum()
    lengths = (left.square().sum() * right.square().sum()).sqrt()
    return dot if similarity == "dot" or lengths == 0 else dot / lengths

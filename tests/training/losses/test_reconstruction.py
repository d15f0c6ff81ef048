"""UniMAE's decoder: who sees whom, and that it cannot copy what it has to rebuild."""

import pytest
import torch
from torch.nn import functional

from gerund.errors import ConfigError
from gerund.training.losses.reconstruction import ReconstructionDecoder, reconstruction_mask

B, T, D = 3, 6, 8
REAL = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]).bool()


def decoder(dtype=torch.float64, width=D, heads=2, max_positions=10):
    torch.manual_seed(0)
    return ReconstructionDecoder(width, heads, max_positions).to(dtype)


def case(seed=1):
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(B, D, generator=generator, dtype=torch.float64)
    return h, torch.randn(B, T, D, generator=generator, dtype=torch.float64)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def slow(module, h_D, embeddings_TD, mask_TS):
    """One text without padding, one query and one head at a time."""
    vector = functional.layer_norm(h_D, (D,))
    keys = [vector] + [
        functional.layer_norm(e, (D,)) + p for e, p in zip(embeddings_TD, module.positions, strict=False)
    ]
    rows, width = [], D // module.heads
    for i in range(len(embeddings_TD)):
        query = vector + module.positions[i]
        parts = []
        for head in range(module.heads):
            own = slice(head * width, (head + 1) * width)
            seen = [key for j, key in enumerate(keys) if mask_TS[i, j]]
            scores = [(module.query(query)[own] * module.key(key)[own]).sum() / width**0.5 for key in seen]
            weights = torch.stack(scores).exp() / torch.stack(scores).exp().sum()
            parts.append(sum(w * module.value(key)[own] for w, key in zip(weights, seen, strict=True)))
        state = query + module.attended(torch.cat(parts))
        rows.append(module.to_head(module.final_norm(state + module.feed_forward(module.norm(state)))))
    return torch.stack(rows)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_equals_one_query_at_a_time(heads):
    module, (h, embeddings) = decoder(heads=heads), case()
    real = torch.ones(B, T).bool()
    mask = reconstruction_mask(real, 0.5, seeded())
    found = module(h, embeddings, real, mask_BTS=mask)
    expected = torch.stack([slow(module, h[b], embeddings[b], mask[b]) for b in range(B)])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    ends = list(module.parameters())
    random = torch.randn_like(found)
    own = torch.autograd.grad((found * random).sum(), ends)
    other = torch.autograd.grad((expected * random).sum(), ends)
    for mine, theirs in zip(own, other, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("p_mrc", [0.0, 0.3, 1.0])
def test_a_token_never_moves_its_own_state(p_mrc):
    module, (h, embeddings) = decoder(), case()
    mask = reconstruction_mask(REAL, p_mrc, seeded())
    before = module(h, embeddings, REAL, mask_BTS=mask)
    for i in range(T):
        changed = embeddings.clone()
        changed[:, i] = torch.randn(B, D, dtype=torch.float64)
        moved = (module(h, changed, REAL, mask_BTS=mask) - before).abs().amax(dim=2) > 1e-9
        assert not moved[:, i].any()
        # Those move that see it, and no others.
        assert torch.equal(moved, mask[:, :, 1 + i])


def test_every_state_depends_on_the_vector():
    module, (h, embeddings) = decoder(), case()
    other = module(h + torch.randn(B, D, dtype=torch.float64), embeddings, REAL, generator=seeded())
    assert ((other - module(h, embeddings, REAL, generator=seeded())).abs().amax(dim=2) > 1e-6).all()


@pytest.mark.parametrize("row, real", [(1, slice(2, 6)), (2, slice(0, 4))])
def test_padding_on_either_side_changes_nothing(row, real):
    module, (h, embeddings) = decoder(), case()
    mask = reconstruction_mask(REAL, 0.5, seeded())
    embeddings[~REAL] = 1e6
    found = module(h, embeddings, REAL, mask_BTS=mask)[row, real]
    columns = [0, *(1 + i for i in range(T)[real])]
    alone = module(
        h[row : row + 1],
        embeddings[row : row + 1, real],
        torch.ones(1, 4).bool(),
        mask_BTS=mask[row : row + 1, real][..., columns],
    )
    torch.testing.assert_close(found, alone[0], rtol=1e-10, atol=1e-10)


def test_scale_and_offset_of_what_goes_in_do_not_matter():
    module, (h, embeddings) = decoder(), case()
    plain = module(h, embeddings, REAL, generator=seeded())
    scaled = module(h * 100 + 3, embeddings * 50, REAL, generator=seeded())
    torch.testing.assert_close(plain, scaled, rtol=1e-4, atol=1e-4)


def test_the_generator_decides():
    module, (h, embeddings) = decoder(), case()
    first = module(h, embeddings, REAL, generator=seeded(3))
    assert torch.equal(first, module(h, embeddings, REAL, generator=seeded(3)))
    assert not torch.equal(first, module(h, embeddings, REAL, generator=seeded(4)))
    mask = reconstruction_mask(REAL, 0.5, seeded(3))
    assert torch.equal(first, module(h, embeddings, REAL, mask_BTS=mask))
    mask = reconstruction_mask(REAL, 0.9, seeded(3))
    kept = module(h, embeddings, REAL, p_mrc=0.9, generator=seeded(3))
    assert torch.equal(kept, module(h, embeddings, REAL, mask_BTS=mask))
    assert not torch.equal(first, kept)


@pytest.mark.parametrize("p_mrc", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_how_often_who_sees_whom(p_mrc):
    n = 4000
    masks = torch.stack([reconstruction_mask(REAL[1:2], p_mrc, seeded(seed))[0] for seed in range(n)])
    rates = masks.double().mean(dim=0)
    real = REAL[1].tolist()
    for i in range(T):
        assert rates[i, 0] == 1
        for j in range(T):
            # Equation 4: let through where B_ij is 1, which it is with probability p_mrc.
            expected = p_mrc if i != j and real[j] else 0.0
            deviation = (expected * (1 - expected) / n) ** 0.5
            assert abs(rates[i, 1 + j].item() - expected) <= 5 * deviation + 1e-12, (i, j)


def test_pairs_are_drawn_apart():
    masks = torch.stack([reconstruction_mask(torch.ones(2, 4), 0.5, seeded(seed)) for seed in range(3000)])
    off = ~torch.eye(4, dtype=torch.bool)
    drawn = masks[..., 1:][:, :, off].flatten(1).double()
    correlation = torch.corrcoef(drawn.T)
    assert (correlation - torch.eye(24, dtype=torch.float64)).abs().max() < 0.1


def test_in_bfloat16_under_autocast():
    module, (h, embeddings) = decoder(torch.float32), case()
    plain = module(h.float(), embeddings.float(), REAL, generator=seeded())
    with torch.autocast("cpu", torch.bfloat16):
        found = module(h.bfloat16(), embeddings.bfloat16(), REAL, generator=seeded())
    torch.testing.assert_close(found.float(), plain, rtol=0.05, atol=0.05)


@pytest.mark.slow
def test_the_vector_is_learned_from():
    # A vector that holds the first half of the text: only those who read it know what is hidden.
    torch.manual_seed(0)
    table = torch.randn(12, 24)
    module = ReconstructionDecoder(24, 2, 4)
    optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)
    real = torch.ones(64, 4).bool()

    def loss(shuffled=False):
        ids = torch.randint(0, 12, (64, 4))
        h = torch.cat([table[ids[:, 0], :12], table[ids[:, 1], 12:]], dim=1)
        states = module(h.roll(1, 0) if shuffled else h, table[ids], real)
        return functional.cross_entropy((states @ table.T).flatten(0, 1), ids.flatten())

    for _ in range(150):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
    with torch.no_grad():
        own, other = (sum(loss(shuffled).item() for _ in range(5)) / 5 for shuffled in (False, True))
    assert own < other - 0.5


def test_bad_settings():
    module, (h, embeddings) = decoder(max_positions=5), case()
    with pytest.raises(ConfigError, match="texts of 6 tokens are longer than the 5 positions of the reconstruction"):
        module(h, embeddings, REAL)
    with pytest.raises(ConfigError, match="3 attention heads do not divide a width of 8"):
        ReconstructionDecoder(8, 3, 4)
    with pytest.raises(ConfigError, match="at least one position, not 0"):
        ReconstructionDecoder(8, 2, 0)
    for p_mrc in (-0.1, 1.1):
        with pytest.raises(ConfigError, match="lies between 0 and 1"):
            reconstruction_mask(REAL, p_mrc)

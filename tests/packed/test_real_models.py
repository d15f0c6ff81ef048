"""Real files compute what transformers computes from their unpacked weights."""

from pathlib import Path

import numpy as np
import pytest

from gerund.packed.network import MASKED, PackedNetwork
from tests.packed import reference

FILES = sorted((Path(__file__).resolve().parents[3] / "real").glob("*.gguf"))
IDS = np.array([[504, 2365, 429, 253, 655, 665, 253, 1165, 30, 198, 429, 253]])

pytestmark = [
    pytest.mark.skipif(not FILES, reason="there are no models in ../real"),
    pytest.mark.timeout(600),
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
@pytest.mark.full
def test_a_real_file(path: Path, tmp_path: Path):
    expected = reference.logits(path, IDS[0])
    exact = PackedNetwork.open(path, threads=1, cache=tmp_path, accuracy=0).run(IDS, outputs=["logits"]).logits[0]
    np.testing.assert_allclose(exact, expected, atol=1e-3)
    network = PackedNetwork.open(path, threads=1, cache=tmp_path)
    rounded = network.run(IDS, outputs=["logits"]).logits[0]
    cosines = (rounded * exact).sum(-1) / np.linalg.norm(rounded, axis=-1) / np.linalg.norm(exact, axis=-1)
    assert cosines.min() > 0.98
    assert cosines.mean() > 0.995
    # Rounding belongs to a token: neighbors in a batch, and padding, change nothing.
    masks, of_layer = network.causal_masks(14, 14, np.zeros(2, np.int64))
    padded = np.pad(IDS.repeat(2, 0), ((0, 0), (0, 2)))
    masks = np.where(np.arange(14) < 12, masks, MASKED)
    batch = network.run(padded, masks_PB1TS=masks, mask_of_layer_L=of_layer, outputs=["logits"]).logits
    np.testing.assert_allclose(batch[:, :12], [rounded, rounded], atol=0.02 * np.abs(rounded).max())

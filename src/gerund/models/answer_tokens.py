"""Answer tokens: trained embeddings behind a text, whose states encode what the frozen model would answer.

LLM2Vec-Gen (BehnamGhader et al., 2026, arXiv 2603.10913). A linear map of what was read makes a few embeddings, after
which the unchanged model writes the answer: so a vector can be read as text.

Shapes: B texts, T tokens, S answer tokens, R of them that are read, D numbers of an embedding, W of a state, E of a
vector.
"""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from gerund.checks import write_json
from gerund.errors import DataError
from gerund.models.heads import read_tensors
from gerund.settings.answers import ANSWERS_FILE, AnswerConfig
from gerund.settings.encoder import FORMAT, read_settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WEIGHTS_FILE = "answers.safetensors"
_EPSILON = 1e-12


class AnswerTokens(nn.Module):
    """The embeddings of the answer tokens, and the map to the embeddings that the model writes the answer after.

    >>> tokens = AnswerTokens(AnswerConfig(4, 2, "states"), embedding=8, state=8, vector=3)
    >>> tokens.prefix(torch.ones(5, 2, 8)).shape
    torch.Size([5, 2, 8])
    """

    def __init__(self, settings: AnswerConfig, *, embedding: int, state: int, vector: int) -> None:
        """Make untrained ones, of the sizes of an embedding, of a state and of a vector."""
        super().__init__()
        self.settings = settings
        self.embeddings = nn.Parameter(torch.zeros(settings.tokens, embedding))
        sizes = (state, embedding) if settings.prefix == "states" else (vector, settings.read * embedding)
        self.map = nn.Linear(*sizes)

    def states(self, model: "PreTrainedModel", ids_BT: Tensor, end_B: Tensor) -> Tensor:
        """Return the last hidden states ``(B, R, W)`` of the tokens that are read, of length 1.

        States are large in some models, and a step of the maps would be too.

        Args:
            model: the language model, which reads causally.
            ids_BT: texts padded on the right, with room for the answer tokens behind each.
            end_B: the length of each text.
        """
        row_B1 = torch.arange(len(ids_BT), device=ids_BT.device)[:, None]
        place_BS = end_B[:, None] + torch.arange(self.settings.tokens, device=ids_BT.device)
        embedded_BTD = model.get_input_embeddings()(ids_BT)
        own_BSD = self.embeddings.to(embedded_BTD).expand(len(ids_BT), -1, -1)
        embedded_BTD = embedded_BTD.index_put((row_B1, place_BS), own_BSD)
        hidden_BTW: Tensor = model.base_model(inputs_embeds=embedded_BTD, use_cache=False).last_hidden_state
        return nn.functional.normalize(hidden_BTW[row_B1, place_BS[:, -self.settings.read :]].float(), dim=-1)

    def prefix(self, given: Tensor) -> Tensor:
        """Return the embeddings ``(B, R, D)`` to write an answer after, of states ``(B, R, W)`` or vectors ``(B, E)``.

        Lengths do not count: a vector says the same normalized.
        """
        given = given.float()
        mapped: Tensor = self.map(given * given.pow(2).mean(-1, keepdim=True).add(_EPSILON).rsqrt())
        return mapped if self.settings.prefix == "states" else mapped.unflatten(-1, (self.settings.read, -1))

    def opening(self, model: "PreTrainedModel", given: Tensor) -> Tensor:
        """Return what the model reads before it writes: special tokens as before every text, and the prefix."""
        prefix_BRD = self.prefix(given).to(model.get_input_embeddings().weight.dtype)
        if not self.settings.before:
            return prefix_BRD
        ids_BK = torch.tensor([self.settings.before], dtype=torch.long, device=prefix_BRD.device).expand(len(given), -1)
        before_BKD = model.get_input_embeddings()(ids_BK)
        return torch.cat([before_BKD, prefix_BRD.to(before_BKD)], dim=1)

    @property
    def fingerprint(self) -> str:
        """Hash of settings and the embeddings, on which vectors depend."""
        settings = json.dumps(self.settings.to_dict(), sort_keys=True).encode()
        values = self.embeddings.detach().float().cpu().contiguous().numpy().tobytes()
        return hashlib.blake2b(settings + values, digest_size=8).hexdigest()

    def save(self, folder: Path) -> None:
        """Write the files into a model's folder."""
        state = {name: tensor.detach().float().cpu().contiguous() for name, tensor in self.state_dict().items()}
        save_file(state, folder / WEIGHTS_FILE)
        write_json(folder / ANSWERS_FILE, {"format": FORMAT, "answers": self.settings.to_dict()})


def embedding_width(model: "PreTrainedModel") -> int:
    """Return the size of an input embedding."""
    embed = model.get_input_embeddings()
    return int(embed(torch.zeros(1, 1, dtype=torch.long, device=embed.weight.device)).shape[-1])


def read_answers(folder: Path, *, embedding: int, state: int, vector: int) -> AnswerTokens:
    """Return the answer tokens in a folder, in evaluation mode.

    Raises:
        DataError: they cannot be read, or are for a model of other sizes.
    """
    settings = AnswerConfig.from_dict(read_settings(folder / ANSWERS_FILE, "answers")["answers"])
    stored = read_tensors(folder / WEIGHTS_FILE)
    tokens = AnswerTokens(settings, embedding=embedding, state=state, vector=vector)
    expected = {name: tuple(tensor.shape) for name, tensor in tokens.state_dict().items()}
    if expected != {name: tuple(tensor.shape) for name, tensor in stored.items()}:
        raise DataError(f"{folder / WEIGHTS_FILE} is for another model than this one, or for another {ANSWERS_FILE}")
    if not all(torch.isfinite(tensor).all() for tensor in stored.values()):
        raise DataError(f"{folder / WEIGHTS_FILE} holds numbers that are not finite (NaN or infinity)")
    tokens.load_state_dict(stored)
    return tokens.float().eval().requires_grad_(False)

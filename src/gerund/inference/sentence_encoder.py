"""``SentenceEncoder``: an embedding model run by sentence-transformers, such as all-MiniLM-L6-v2.

It is a peer in evaluations, and the encoder of an index or a server whose language model is another one.
"""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gerund.checks import check_dimensions
from gerund.errors import MissingDependencyError, ModelError, TextError
from gerund.inference.text_ids import encode_texts
from gerund.models.library_calls import quiet
from gerund.models.sources import SENTENCE_TRANSFORMERS, Source, looks_local
from gerund.models.vectors import unit
from gerund.settings.encoder import EncoderConfig
from gerund.settings.model_spec import ModelSpec
from gerund.settings.plan import AttentionPlan
from gerund.types import EncodeResult

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

# More than half of the sum, since these models are trained on pairs of queries and documents.
_FUSION = 0.7


class SentenceEncoder:
    """A model as sentence-transformers runs it.

    Args:
        name: a folder or a hub id.
        device: ``auto``, ``cpu``, ``cuda``, ...
        max_length: longest text in tokens; None for the model's own limit.

    Raises:
        MissingDependencyError: sentence-transformers is not installed.
        ModelError: there is no such model, or the library cannot open it.
    """

    def __init__(self, name: str, *, device: str = "auto", max_length: int | None = None) -> None:
        self.source = name
        self.model = _load(name, device)
        if max_length is not None:
            self.model.max_seq_length = max_length

    @property
    def name(self) -> str:
        """What messages call it."""
        return SENTENCE_TRANSFORMERS + self.source

    @property
    def spec(self) -> ModelSpec:
        """What loads it again."""
        path = Path(self.source).expanduser()
        return ModelSpec(model=SENTENCE_TRANSFORMERS + (str(path.resolve()) if path.is_dir() else self.source))

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer."""
        return self.model.tokenizer

    @property
    def dimensions(self) -> int:
        """Dimensions of a vector."""
        return int(self.model.get_embedding_dimension() or 0)

    @property
    def max_length(self) -> int | None:
        """Longest text in tokens, special tokens and prompt included; None where there is no limit."""
        return self.model.max_seq_length

    @cached_property
    def encoder(self) -> EncoderConfig:
        """Its prompts, and the weight of its vectors in a hybrid search; attention and pooling are the library's."""
        prompts: dict[str, str] = self.model.prompts
        default = prompts.get(self.model.default_prompt_name or "", "")
        return EncoderConfig(AttentionPlan("bidir"), prompts=prompts, prompt=default, fusion=_FUSION)

    @property
    def fusion_weight(self) -> float:
        """What its vectors count beside words in hybrid search."""
        return _FUSION

    def fingerprint(self, dimensions: int | None = None) -> str:
        """Return a hash of all weights and of how they are used: 16 hexadecimal digits."""
        check_dimensions(dimensions, self.dimensions)
        if dimensions in (None, self.dimensions):
            return self._fingerprint
        return hashlib.blake2b(f"{self._fingerprint} {dimensions}".encode(), digest_size=8).hexdigest()

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.blake2b(f"{self.model} {self.max_length}".encode(), digest_size=8)
        for name, values in self.model.state_dict().items():
            digest.update(f"{name} {values.dtype} {tuple(values.shape)}".encode())
            digest.update(values.detach().float().cpu().numpy().tobytes())
        return digest.hexdigest()

    @property
    def space(self) -> str:
        """Identifies the space of its vectors."""
        return self._fingerprint

    def encode(
        self,
        texts: Sequence[str],
        prompt: str | None = None,
        normalize: bool = False,
        *,
        prompt_name: str | None = None,
        empty: str = "zeros",
        show_progress: bool | None = False,
    ) -> np.ndarray:
        """Return the vectors of texts ``(n, D)`` float32; an empty text has a zero vector, unless it is an error."""
        if empty == "error":
            for index, text in enumerate(texts):
                if not text.strip():
                    raise TextError.about("text", index, "is empty")
        vectors_ND = self.pooled(texts, prompt, prompt_name=prompt_name, show_progress_bar=bool(show_progress))
        vectors_ND[[not text.strip() for text in texts]] = 0
        return unit(vectors_ND) if normalize else vectors_ND

    def encode_counted(
        self,
        texts: Sequence[str],
        prompt: str | None = None,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        empty: str = "error",
        overflow: str = "truncate",
    ) -> EncodeResult:
        """Return vectors of length 1, with each text's tokens.

        Raises:
            TextError: a text is empty, or with ``overflow="error"`` too long.
            ConfigError: there is no prompt of that name, or there are not so many dimensions.
        """
        check_dimensions(dimensions, self.dimensions)
        if prompt is None:
            prompt = self.encoder.prompt_text(prompt_name=prompt_name)
        vectors_ND = self.encode(texts, prompt, True, empty=empty)
        counts = [len(encoded.ids) for encoded in encode_texts(self.tokenizer, [prompt + text for text in texts])]
        limit = self.max_length
        too_long = [limit is not None and count > limit for count in counts]
        if overflow == "error" and True in too_long:
            index = too_long.index(True)
            error = TextError.about("text", index, f"has {counts[index]} tokens, and {self.name} reads {limit}")
            error.exceeds_context = True
            raise error
        kept = [count if limit is None else min(count, limit) for count in counts]
        cut_ND = vectors_ND if dimensions is None else unit(vectors_ND[:, :dimensions])
        return EncodeResult(cut_ND, kept, too_long)

    def pooled(self, texts: Sequence[str], prompt: str | None, **options: Any) -> np.ndarray:
        """Return the vectors ``(n, D)`` float32 as the library gives them."""
        options = {"show_progress_bar": False, **options}
        encoded = self.model.encode(list(texts), prompt=prompt, convert_to_numpy=True, **options)
        return np.asarray(encoded, dtype=np.float32).reshape(len(texts), self.dimensions)


def _load(name: str, device: str) -> "SentenceTransformer":
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise MissingDependencyError(
            f"{SENTENCE_TRANSFORMERS}{name} needs sentence-transformers: pip install 'gerund[st]'"
        ) from error
    from gerund.models.weights import refuse_fetched_code  # which imports torch

    path = Path(name).expanduser()
    if (looks_local(name) or path.exists()) and not (name and path.is_dir()):
        raise ModelError(f"there is no folder {name!r}")
    refuse_fetched_code(Source(name, path if path.is_dir() else None))
    try:
        with quiet():
            return SentenceTransformer(
                str(path) if path.is_dir() else name,
                device=None if device == "auto" else device,
                model_kwargs={"use_safetensors": True},
            )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise ModelError(f"sentence-transformers cannot open {name}: {reason}") from error

"""gerund's encoders inside sentence-transformers.

>>> from gerund.integrations.sentence_transformers import load
>>> model = load("exported/")                                # doctest: +SKIP
>>> model.encode(["a cat", "a dog"]).shape                   # doctest: +SKIP
(2, 288)

Knows: sentence-transformers' modules. Does not know: how folders are written.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gerund.entry import load as load_language_model
from gerund.errors import DataError, MissingDependencyError
from gerund.inference.tokens import InputFormat, Tokens, tokenize
from gerund.language_model import LanguageModel
from gerund.models.pooling import pool

try:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import InputModule, Normalize
except ImportError as error:
    raise MissingDependencyError("this needs sentence-transformers 6 or newer: pip install 'gerund[st]'") from error


class Transformer(InputModule):
    """The first module of a ``SentenceTransformer``: texts in, pooled vectors out, as ``encode`` gives them.

    Every attention plan works, and prompts, padding and over-long texts are treated as gerund treats them. An
    empty text gives a zero vector. For inference only: train with ``gerund train``.

    Attributes:
        lm: the language model.
        model: its Hugging Face module, so that ``to``, ``parameters`` and ``dtype`` reach it.
    """

    save_in_root = True

    def __init__(self, lm: LanguageModel, source: str = "") -> None:
        """Wrap a model.

        Args:
            lm: the language model.
            source: what it was loaded from; without it the module cannot be sent to other processes.
        """
        super().__init__()
        lm.encoder.refuse_methods("sentence-transformers")
        self.lm = lm
        self.model = lm.model
        self.tokenizer = lm.tokenizer
        self.source = source
        self.max_seq_length = lm.max_length

    def __reduce__(self) -> tuple[Any, ...]:
        # Hooks do not travel between processes; the folder does.
        return type(self).load, (self.source,)

    def preprocess(self, inputs: list[str], prompt: str | None = None, **kwargs: Any) -> dict[str, Tensor]:
        """Turn texts into ids.

        Args:
            inputs: texts.
            prompt: put before each.
            **kwargs: not used.

        Returns:
            ``input_ids`` and ``attention_mask`` ``(B, T)``; ``text_from`` and ``specials_before`` ``(B,)``, which
            tell the text's tokens from the prompt's.
        """
        del kwargs
        runtime = self.lm.runtime
        input_format = InputFormat(
            prompt=prompt or "",
            append_eos=runtime.config.append_eos,
            repeat_text=runtime.plan.repeats_text,
            max_length=self.max_seq_length,
            empty="zeros",
        )
        tokens = [item or Tokens([], 0, 0) for item in tokenize(self.tokenizer, inputs, input_format)]
        longest = max(1, *map(len, tokens)) if tokens else 1
        pad = self.tokenizer.pad_token_id or 0
        place_T = torch.arange(longest)
        length_B = torch.tensor([len(item) for item in tokens], dtype=torch.long)
        return {
            "input_ids": torch.tensor([item.ids + [pad] * (longest - len(item)) for item in tokens], dtype=torch.long),
            "attention_mask": (place_T < length_B[:, None]).long(),
            "text_from": torch.tensor([item.text_from for item in tokens], dtype=torch.long),
            "specials_before": torch.tensor([item.specials_before for item in tokens], dtype=torch.long),
        }

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Add ``token_embeddings`` ``(B, T, D)`` and ``sentence_embedding`` ``(B, D)`` to what ``preprocess`` gave."""
        del kwargs
        runtime = self.lm.runtime
        real_BT = features["attention_mask"].bool()
        rows = zip(features["input_ids"], real_BT, features["text_from"], features["specials_before"], strict=True)
        tokens = [Tokens(ids[real].tolist(), int(text), int(before)) for ids, real, text, before in rows]
        full = [row for row, item in enumerate(tokens) if item.ids]
        hidden_BTD = torch.zeros(*real_BT.shape, runtime.state_width, device=real_BT.device)
        if full:
            states_BTD, begin_B = runtime.states([tokens[row] for row in full])
            for row, states_TD, begin in zip(full, states_BTD, begin_B.tolist(), strict=True):
                length = len(tokens[row])
                hidden_BTD[row, :length] = states_TD[begin : begin + length].to(hidden_BTD)
        first_B = torch.tensor([runtime.pool_from(item) for item in tokens], device=real_BT.device)
        place_T = torch.arange(real_BT.shape[1], device=real_BT.device)
        pooled_BT = real_BT & (place_T >= first_B[:, None])
        features["token_embeddings"] = hidden_BTD
        vectors_BD = pool(hidden_BTD, pooled_BT, runtime.config.pooling)
        if runtime.head is not None:
            # An empty text stays a zero vector, which a head with biases would not leave.
            vectors_BD = runtime.head(vectors_BD, features["input_ids"], pooled_BT) * pooled_BT.any(1, keepdim=True)
        features["sentence_embedding"] = vectors_BD
        return features

    def get_embedding_dimension(self) -> int:
        """Return the size of a vector."""
        return self.lm.dimensions

    def get_config_dict(self) -> dict[str, Any]:
        """Return what describes this module in a print-out."""
        return {"source": self.source, "attention": self.lm.encoder.attention.name, "pooling": self.lm.encoder.pooling}

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Write model, tokenizer and ``gerund.json`` into a folder that sentence-transformers has made."""
        del args, safe_serialization, kwargs
        self.lm.save_into(Path(output_path))

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **kwargs: Any) -> "Transformer":
        """Load an exported folder, or any model that ``gerund.load`` loads.

        Args:
            model_name_or_path: the folder, or a hub id.
            subfolder: not used; the module lies in the folder itself.
            **kwargs: ``model_kwargs`` may name a ``dtype``; the rest is not used.
        """
        del subfolder
        dtype = (kwargs.get("model_kwargs") or {}).get("dtype", "auto")
        # As a path it is a folder, whatever its name means elsewhere.
        where = Path(model_name_or_path) if Path(model_name_or_path).is_dir() else model_name_or_path
        lm = load_language_model(where, dtype=str(dtype).removeprefix("torch."), device="cpu")
        return cls(lm, str(model_name_or_path))


def load(folder: str | Path, **options: Any) -> SentenceTransformer:
    """Load a folder that gerund exported, whichever class it needs.

    Args:
        folder: from ``LanguageModel.export(folder, "sentence-transformers")``.
        **options: for ``SentenceTransformer``, such as ``device``, ``truncate_dim``, or
            ``model_kwargs={"dtype": "float32"}``.

    Raises:
        DataError: the folder was not exported for sentence-transformers.
    """
    path = Path(folder)
    modules, settings = path / "modules.json", path / "config_sentence_transformers.json"
    if not modules.is_file() or not settings.is_file():
        raise DataError(f"{path} was not exported for sentence-transformers: it has no modules.json")
    kinds = [item["type"] for item in json.loads(modules.read_text(encoding="utf-8"))]
    if kinds[0] != f"{__name__}.{Transformer.__name__}":
        return SentenceTransformer(str(path), **options)
    stored = json.loads(settings.read_text(encoding="utf-8"))
    first = Transformer.load(str(path), model_kwargs=options.get("model_kwargs"))
    others = [Normalize() for kind in kinds[1:] if kind.endswith(".Normalize")]
    given = {key: stored.get(key) for key in ("default_prompt_name", "similarity_fn_name")}
    prompts = {**stored.get("prompts", {}), **options.pop("prompts", {})}
    return SentenceTransformer(modules=[first, *others], prompts=prompts, **{**given, **options})

"""gerund's encoders inside sentence-transformers.

sentence-transformers imports classes that are not its own only where it is told to trust them, so the plain
``SentenceTransformer(folder)`` refuses a folder of gerund's by the name of this module; ``load`` opens it.

>>> from gerund.integrations.sentence_transformers import load
>>> model = load("exported/")                                # doctest: +SKIP
>>> model.encode(["a cat", "a dog"]).shape                   # doctest: +SKIP
(2, 384)
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gerund.entry import load as load_language_model
from gerund.errors import DataError, MissingDependencyError
from gerund.inference.tokens import InputFormat, Tokens, tokenize
from gerund.language_model import LanguageModel, save_into
from gerund.models.sentence_transformers_folder import MODULES_FILE, OWN_CLASS, SETTINGS_FILE, prompt_settings
from gerund.settings.encoder import CONFIG_FILE

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
        lm.runtime.refuse_answers("sentence-transformers")
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
            follows_sentence_transformers=runtime.config.follows_sentence_transformers,
            normalizes=runtime.config.normalizes_texts,
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
        vectors_BD = torch.zeros(len(tokens), runtime.width, device=real_BT.device)
        if full:
            batch = [tokens[row] for row in full]
            states_BTD, begin_B = runtime.states(batch)
            for row, states_TD, begin in zip(full, states_BTD, begin_B.tolist(), strict=True):
                length = len(tokens[row])
                hidden_BTD[row, :length] = states_TD[begin : begin + length].to(hidden_BTD)
            vectors_BD[full] = torch.from_numpy(runtime.pooled(batch, states_BTD, begin_B)).to(vectors_BD)
        features["token_embeddings"] = hidden_BTD
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
        save_into(self.lm, Path(output_path))

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
    """Load a folder that gerund saved, converted, trained or exported, whichever class it needs.

    Args:
        folder: from ``LanguageModel.save``, ``gerund convert``, a training, or
            ``LanguageModel.export(folder, "sentence-transformers")``.
        **options: for ``SentenceTransformer``, such as ``device``, ``truncate_dim``, or
            ``model_kwargs={"dtype": "float32"}``.

    Raises:
        DataError: the folder is none of gerund's, or its ``modules.json`` cannot be read.
        ConfigError: the encoder has a template, or another method that sentence-transformers has no place for.
    """
    path = Path(folder)
    modules, stored = path / MODULES_FILE, path / SETTINGS_FILE
    is_ours = (path / CONFIG_FILE).is_file()
    kinds = [str(item.get("type")) for item in _read(modules, list)] if modules.is_file() else []
    if not is_ours and not (kinds and stored.is_file()):
        raise DataError(f"{path} is no folder of gerund's: it has neither {CONFIG_FILE} nor {MODULES_FILE}")
    if kinds and kinds[0] != OWN_CLASS:
        return SentenceTransformer(str(path), **options)
    first = Transformer.load(str(path), model_kwargs=options.get("model_kwargs"))
    encoder = first.lm.encoder
    prompts, default = prompt_settings(encoder)
    settings: dict[str, Any] = {
        "prompts": prompts,
        "default_prompt_name": default,
        "similarity_fn_name": encoder.similarity,
    }
    if stored.is_file():
        settings |= {name: value for name, value in _read(stored, dict).items() if name in settings}
    # A folder from before gerund wrote these files is read by what gerund.json says.
    normalizes = any(kind.endswith(".Normalize") for kind in kinds[1:]) if kinds else encoder.normalize
    given = {**settings, **options, "prompts": {**settings["prompts"], **(options.get("prompts") or {})}}
    return SentenceTransformer(modules=[first, *([Normalize()] if normalizes else [])], **given)


def _read(path: Path, kind: type) -> Any:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is no JSON: {error}") from error
    is_kind = isinstance(data, kind)
    if not is_kind or (kind is list and not all(isinstance(item, dict) for item in data)):
        raise DataError(f"{path} does not hold what sentence-transformers writes there")
    return data

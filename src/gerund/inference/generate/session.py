"""Sessions: a prompt or a vector read once, to be continued many times, extended, and saved with its KV cache.

A saved session is a folder::

    FOLDER/
        session.json           format, weights, dtype, text, token ids, a hash of the other file
        session.safetensors    keys and values of each layer, logits of the next token

Loading verifies it: a folder of another model or dtype, or with a single wrong bit, raises an error.
"""

import copy
import hashlib
import inspect
import json
import mmap
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, Self, Unpack

import numpy as np
import torch
from torch import Tensor
from transformers import (
    Cache,
    DynamicCache,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from gerund.attention.layer_state import CACHE
from gerund.checks import check_texts, place
from gerund.errors import ConfigError, DataError, FingerprintError, ResourceError, TextError
from gerund.inference.encode.runtime import EncoderRuntime
from gerund.inference.encode.texts import text_tokens
from gerund.inference.generate.config import GenerationConfig, GenerationKeywords
from gerund.inference.generate.detokenizing import text_behind
from gerund.inference.generate.generation import decode_batch, decoding_of
from gerund.inference.generate.kv_cache import copy_on_write, key_rotations
from gerund.inference.generate.prompts import Prompt, check_prompts, prompt_ids
from gerund.inference.generate.sequence import CancelFlag, Emit
from gerund.inference.generate.streams import AsyncTextStream, TextStream, Work
from gerund.inference.text_ids import prompted
from gerund.inference.tokens import InputFormat, tokenize
from gerund.jobs.files import atomic_folder
from gerund.models.heads import AnswerTokens
from gerund.models.vectors import unit
from gerund.settings.aliases import takes_aliases
from gerund.settings.sampling import Sampling
from gerund.settings.templates import is_template
from gerund.types import Generation

SETTINGS, TENSORS = "session.json", "session.safetensors"
FORMAT = 1
_LOGITS = "logits"


class ReadingModel(Protocol):
    """A model that reads a text once; a ``LanguageModel``."""

    @property
    def model(self) -> PreTrainedModel:
        """The language model."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Its tokenizer."""

    @property
    def weights_hash(self) -> str:
        """Hash of its weights."""

    @property
    def name(self) -> str:
        """Its name in messages."""


@dataclass(frozen=True, eq=False)
class CachedText:
    """A text, its KV cache, and the logits ``(1, V)`` of the next token."""

    text: str
    token_ids: list[int] = field(repr=False)
    _model: PreTrainedModel = field(repr=False)
    _cache: Cache = field(repr=False)
    _logits_BV: Tensor = field(repr=False)
    _weights: Callable[[], str] = field(repr=False)  # the hash of the weights, computed when it is needed

    @property
    def n_bytes(self) -> int:
        """Memory of the KV cache."""
        return sum(tensor.nbytes for tensor in _tensors(self._cache, self._logits_BV).values())

    def save_into(self, folder: Path) -> None:
        """Write a session's files into an existing folder; see ``Session.save``."""
        from safetensors.torch import save_file

        tensors = _tensors(self._cache, self._logits_BV)
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, folder / TENSORS)
        settings = {
            "format": FORMAT,
            "written_by": _model_hash(self._weights(), self._model),
            "model": type(self._model).__name__,
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "digest": _file_hash(folder / TENSORS),
            "lengths": [int(layer.get_seq_length()) for layer in self._cache.layers],
            "text": self.text,
            "token_ids": self.token_ids,
        }
        (folder / SETTINGS).write_text(json.dumps({**settings, "check": _checksum(settings)}), encoding="utf-8")


def load_cached_text(folder: str | Path, lm: ReadingModel) -> CachedText:
    """Load and verify a session's folder; see ``Session.load``."""
    path = place("the folder of a session", folder)
    settings = _load_settings(path)
    model = lm.model
    if settings["written_by"] != _model_hash(lm.weights_hash, model):
        raise FingerprintError(
            f"{path} was saved by another model ({settings['model']}, {settings['dtype']}) than {lm.name} "
            f"({type(model).__name__}, {str(model.dtype).removeprefix('torch.')}). Read the text again."
        )
    try:
        if _file_hash(path / TENSORS) != settings["digest"]:
            raise DataError(f"{path} is damaged: {TENSORS} has changed since it was saved. Read the text again.")
        from safetensors.torch import load_file

        tensors = load_file(path / TENSORS, device=str(model.device))
        cache = _cache_from(model, tensors, settings["lengths"])
    except OSError as error:
        raise DataError(f"Could not read {path}: {error.strerror or error}. Read the text again.") from error
    except (KeyError, ValueError, RuntimeError, IndexError) as error:
        raise DataError(f"{path} is damaged ({error}). Read the text again.") from error
    ids, logits_BV = list(settings["token_ids"]), tensors[_LOGITS]
    return CachedText(settings["text"], ids, model, cache, logits_BV, lambda: lm.weights_hash)


def _load_settings(folder: Path) -> dict[str, Any]:
    try:
        settings: dict[str, Any] = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        check = settings.pop("check")
        types: dict[str, type] = dict.fromkeys(("written_by", "model", "dtype", "digest", "text"), str)
        types |= {"token_ids": list, "lengths": list}
        if settings["format"] != FORMAT or not all(isinstance(settings[name], type_) for name, type_ in types.items()):
            raise DataError(f"{folder} is not a session of this version of gerund. Read the text again.")
        if check != _checksum(settings):
            raise ValueError("it has changed since it was saved")
    except OSError as error:
        raise DataError(f"{folder} contains no session ({error.strerror or error}).") from error
    except (ValueError, KeyError, TypeError, RecursionError, AttributeError) as error:
        raise DataError(f"{folder} is damaged: {SETTINGS} can't be read. Read the text again.") from error
    return settings


def _tensors(cache: Cache, logits_BV: Tensor) -> dict[str, Tensor]:
    require_plain_kv_cache(cache)
    tensors = {_LOGITS: logits_BV}
    for number, layer in enumerate(cache.layers):
        if layer.is_initialized:  # layers that share another one's keys have none
            tensors |= {f"{number}.keys": layer.keys, f"{number}.values": layer.values}
    return tensors


def require_plain_kv_cache(cache: Cache) -> None:
    """Raise ``ConfigError`` where a layer caches more than keys and values, such as recurrent states.

    Some architectures can continue from those by one token only, and would read a longer text as if it were the first.
    """
    for layer in getattr(cache, "layers", [None]):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise ConfigError(
                f"This architecture caches more than keys and values ({type(layer).__name__}). Its sessions can be "
                "continued, but neither saved nor extended."
            )


def _cache_from(model: PreTrainedModel, tensors: Mapping[str, Tensor], lengths: list[int]) -> Cache:
    cache = DynamicCache(config=model.config)
    if len(cache.layers) != len(lengths):
        raise ValueError(f"it has {len(lengths)} layers and the model {len(cache.layers)}")
    for number, (layer, length) in enumerate(zip(cache.layers, lengths, strict=True)):
        if f"{number}.keys" not in tensors:
            continue
        keys, values = tensors[f"{number}.keys"], tensors[f"{number}.values"]
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = int(length)
    return cache


def cache_key(lm: ReadingModel, *ids: list[int]) -> str:
    """Return the key for the KV cache of a text, given the token ids before it, if any, and its own."""
    return _hash(" ".join([_model_hash(lm.weights_hash, lm.model), *map(str, ids)]))


def _model_hash(weights: str, model: PreTrainedModel) -> str:
    """Return a hash of what keys and values depend on besides the token ids: weights, dtype and attention kernel."""
    return _hash("\n".join([weights, str(model.dtype), str(model.config._attn_implementation), type(model).__name__]))


def _checksum(settings: Mapping[str, Any]) -> str:
    return _hash(json.dumps(dict(settings), sort_keys=True))


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _file_hash(path: Path) -> str:
    digest = hashlib.sha256()  # for which processors have instructions
    try:
        with path.open("rb") as file:
            if path.stat().st_size:
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                    digest.update(content)
    except MemoryError as error:
        raise ResourceError(f"{path} does not fit into memory") from error
    return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Session(CachedText):
    """A text that the model has read, ready to be continued any number of times, from several threads too.

    Made by ``LanguageModel.prefill``, ``LanguageModel.encode_and_prefill`` and ``Session.load``. It holds the KV cache
    of the full text until it is dropped.

    Attributes:
        text: the text to continue, after the prompt if there is one; for token ids, what they spell.
        token_ids: its token ids, as ``generate`` would read them.
    """

    _tokenizer: PreTrainedTokenizerBase = field(repr=False)

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Save the session to a folder, in the model's dtype, for ``Session.load`` in this process or another.

        The folder contains the text itself. It is saved atomically.

        Args:
            folder: the folder to create.
            overwrite: replace an existing folder.

        Raises:
            OutputExistsError: the folder exists.
            ConfigError: the architecture caches more than keys and values, which cannot be saved.
            ResourceError: the disk is full; nothing is left behind.
        """
        with atomic_folder(folder, overwrite=overwrite) as work:
            self.save_into(work)

    @classmethod
    def load(cls, folder: str | Path, lm: ReadingModel) -> Self:
        """Load a session saved by ``save``.

        Args:
            folder: the folder.
            lm: the model that saved it.

        Raises:
            FingerprintError: it was saved with other weights, or in another dtype.
            DataError: it is damaged, or not a session.

        >>> import tempfile, gerund
        >>> lm = gerund.load()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     lm.prefill("The old man looked at").save(f"{folder}/kept")
        ...     session = gerund.Session.load(f"{folder}/kept", lm)
        >>> session.generate(4).text == lm.generate("The old man looked at", 4)[0].text
        True
        """
        return cls(**vars(load_cached_text(folder, lm)), _tokenizer=lm.tokenizer)

    def prefill(self, token_ids: Sequence[int]) -> Self:
        """Return a session that has read more tokens; this one does not change.

        Its logits are those of one pass over everything up to rounding, since products of other shapes round otherwise.

        Args:
            token_ids: the tokens that follow the text.

        Raises:
            TextError: there are none, the model does not have one of them, or they do not fit its context.
            ConfigError: the architecture caches more than keys and values.
        """
        require_plain_kv_cache(self._cache)
        try:
            token_ids = [operator.index(token) for token in token_ids]
        except TypeError as error:
            raise TextError(f"`prefill` takes token ids, such as those of a result, not {token_ids!r}.") from error
        if not token_ids:
            raise TextError("There is nothing to read: `token_ids` is empty.")
        ids = prompt_ids(self._model, self._tokenizer, [*self.token_ids, *token_ids], "the text")
        more = ids[len(self.token_ids) :]
        cache, logits_BV, _ = _read(self._model, more, _shallow_copy(self._cache))
        text = self.text + text_behind(self._tokenizer, self.token_ids, more)
        return replace(self, text=text, token_ids=ids, _cache=cache, _logits_BV=logits_BV)

    def tail(self, first: int) -> CachedText:
        """Return the cache from token ``first`` on, for ``with_tail``.

        Raises:
            ConfigError: keys of this architecture cannot be moved to another position.
        """
        key_rotations(self._model)
        cache = _shallow_copy(self._cache)
        for layer in cache.layers:
            layer.keys, layer.values = (tensor[:, :, first:].clone() for tensor in (layer.keys, layer.values))
        ids = self.token_ids[first:]
        text = text_behind(self._tokenizer, self.token_ids[:first], ids)
        return CachedText(text, ids, self._model, cache, self._logits_BV, self._weights)

    def with_tail(self, tail: CachedText, start: int) -> Self:
        """Append the cached tail of another session without reading it again: an approximation.

        Keys are rotated to their new positions. The tail was computed without the text between its own beginning and
        here, so what is generated after it differs from what one pass over everything gives.

        Args:
            tail: a result of ``tail``, of the same model.
            start: how many tokens preceded it.

        Raises:
            ConfigError: keys of this architecture cannot be moved to another position.
            TextError: it does not fit the model's context.
        """
        rotations = key_rotations(self._model)
        ids = prompt_ids(self._model, self._tokenizer, [*self.token_ids, *tail.token_ids], "the text")
        cache, shift = _shallow_copy(self._cache), len(self.token_ids) - start
        for layer, added, rotation in zip(cache.layers, tail._cache.layers, rotations, strict=True):
            layer.update(rotation.apply(added.keys, shift), added.values)
        return replace(self, text=self.text + tail.text, token_ids=ids, _cache=cache, _logits_BV=tail._logits_BV)

    @takes_aliases
    def stream(
        self, max_new_tokens: int = 64, sampling: Sampling | None = None, **options: Unpack[GenerationKeywords]
    ) -> TextStream:
        """Continue the text as ``generate`` does and yield it piece by piece, as ``LanguageModel.stream``."""
        return TextStream(self._work(max_new_tokens, sampling, options))

    @takes_aliases
    def astream(
        self, max_new_tokens: int = 64, sampling: Sampling | None = None, **options: Unpack[GenerationKeywords]
    ) -> AsyncTextStream:
        """Continue the text as ``stream`` does, for ``async for``."""
        return AsyncTextStream(self._work(max_new_tokens, sampling, options))

    @takes_aliases
    def generate(
        self, max_new_tokens: int = 64, sampling: Sampling | None = None, **options: Unpack[GenerationKeywords]
    ) -> Generation:
        """Continue the text without reading it again.

        Every call starts from the end of the text. The result is bit-identical to that of ``LanguageModel.generate``
        for the same text (on a GPU up to rounding for mixtures of experts, which transformers' own loop computes in
        another way there).

        Args:
            max_new_tokens: tokens to generate at most; fewer where the model's context ends first.
            sampling: how tokens are chosen; None is greedy.
            options: stop conditions, output format and log-probabilities, as in ``generate``; all but ``n``.

        Raises:
            ConfigError: a setting is impossible.
        """
        return self._continue(_single(max_new_tokens, sampling, options))

    def _work(self, max_new_tokens: int, sampling: Sampling | None, options: GenerationKeywords) -> Work:
        settings = _single(max_new_tokens, sampling, options)

        def work(emit: Emit, cancelled: CancelFlag) -> None:
            self._continue(settings, emit, cancelled)

        return work

    def _continue(
        self, settings: GenerationConfig, emit: Emit | None = None, cancelled: CancelFlag | None = None
    ) -> Generation:
        [sequence] = decoding_of(self._model, self._tokenizer).sequences([self.token_ids], settings, emit)
        # transformers' own loop would read the text again.
        decode_batch(self._model, self._tokenizer, [sequence], cancelled, self._decode)
        return sequence.result()

    def _decode(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        **_settings: Any,
    ) -> Tensor:
        """Generate greedily from the processed scores; return text and continuation ``(1, T)``."""
        cache = copy_on_write(self._cache)
        logits_BV = self._logits_BV
        while True:
            # Processors may write into what they are given.
            scores_BV = logits_processor(input_ids, logits_BV.to(copy=True, dtype=torch.float32))
            chosen_BT = scores_BV.argmax(dim=-1, keepdim=True)
            input_ids = torch.cat([input_ids, chosen_BT], dim=-1)
            if stopping_criteria(input_ids, None).all():
                return input_ids
            logits_BV = model(input_ids=chosen_BT, use_cache=True, **{CACHE: cache}).logits[:, -1]


def _shallow_copy(cache: Cache) -> Cache:
    """Return a cache that grows on its own; its layers replace the tensors that they share with the original."""
    copied = copy.copy(cache)
    copied.layers = [copy.copy(layer) for layer in cache.layers]
    return copied


def _single(max_new_tokens: int, sampling: Sampling | None, options: GenerationKeywords) -> GenerationConfig:
    settings = GenerationConfig.of(max_new_tokens, sampling, options)
    if settings.n != 1:
        raise ConfigError(f"`n` must be 1, got {settings.n}: a session generates one continuation per call.")
    return settings


def read_prompt(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, weights: Callable[[], str]
) -> Session:
    """Read a prompt once; see ``LanguageModel.prefill``. ``weights`` returns the hash of the model's weights."""
    [checked] = check_prompts([prompt])
    ids = prompt_ids(model, tokenizer, checked, "the text")
    cache, logits_BV, _ = _read(model, ids)
    text = checked if isinstance(checked, str) else tokenizer.decode(ids)
    return Session(str(text), ids, model, cache, logits_BV, weights, tokenizer)


@torch.no_grad()
def sessions_of(
    runtime: EncoderRuntime, given: np.ndarray | str | Sequence[str], weights: Callable[[], str]
) -> list[Session]:
    """Return a session for each vector, or for that of each text; see ``LanguageModel.read_vector``.

    Answer tokens map vectors or states to embeddings, which are those of no token; a session continues the empty text.
    """
    answers, model, tokenizer = runtime.answers, runtime.model, runtime.tokenizer
    if answers is None:
        raise ConfigError("this model has no answer tokens, which vectors are read by; `gerund train gen` trains some")
    read = _states_to_read if not isinstance(given, np.ndarray) else _vectors_to_read
    sessions = []
    for embedded_TD in answers.opening(model, read(runtime, answers, given)):
        output = model(inputs_embeds=embedded_TD[None], use_cache=True)
        ids = [int(tokenizer.eos_token_id or 0)] * len(embedded_TD)
        sessions.append(Session("", ids, model, output[CACHE], output.logits[:, -1].clone(), weights, tokenizer))
    return sessions


def _vectors_to_read(runtime: EncoderRuntime, answers: AnswerTokens, given: Any) -> Tensor:
    """Return vectors ``(B, E)``, checked."""
    if answers.settings.prefix != "vector":
        raise ConfigError(
            "these answer tokens make text of their states, which a vector does not hold; give the texts, or train "
            "with prefix: vector"
        )
    vectors_BE = np.atleast_2d(given)
    if vectors_BE.ndim != 2 or vectors_BE.shape[1] != runtime.width:
        raise TextError(f"vectors to read have {runtime.width} dimensions each, not the shape {np.shape(given)}")
    if vectors_BE.dtype.kind != "f" or not np.isfinite(vectors_BE).all():
        raise TextError("vectors to read are finite numbers, float32 as encode gives them")
    return torch.from_numpy(vectors_BE.astype(np.float32)).to(runtime.device)


def _states_to_read(runtime: EncoderRuntime, answers: AnswerTokens, given: Any) -> Tensor:
    """Return the states ``(B, R, W)`` behind texts, or the vectors ``(B, E)`` where those are read."""
    tokens = [text for text in text_tokens(runtime, check_texts(given)) if text is not None]
    if not tokens:
        raise TextError("there is no vector or text to read")
    states_BRW, begin = runtime.states(tokens)
    if answers.settings.prefix == "states":
        return states_BRW
    return torch.from_numpy(runtime.pooled(tokens, states_BRW, begin)).to(runtime.device)


def read_with_states(
    lm: ReadingModel, token_ids: Sequence[int], session: Session | None = None
) -> tuple[Session, tuple[Tensor, ...]]:
    """Read tokens, after a session if there is one; return the new session and the tokens' states.

    States are those of transformers: the embeddings, each layer's output, and at last the final norm's, each
    ``(1, T, D)``.
    """
    ids, cache = list(token_ids), None
    before: list[int] = []
    if session is not None:
        require_plain_kv_cache(session._cache)
        before, cache = session.token_ids, _shallow_copy(session._cache)
    every = prompt_ids(lm.model, lm.tokenizer, [*before, *ids], "the text")
    output = _pass(lm.model, ids, cache)
    text = lm.tokenizer.decode(every)
    logits_BV = output.logits[:, -1].clone()
    read = Session(text, every, lm.model, output[CACHE], logits_BV, lambda: lm.weights_hash, lm.tokenizer)
    return read, output.hidden_states


def encode_and_prefill(
    runtime: EncoderRuntime, prompt: str, text: str, weights: Callable[[], str]
) -> tuple[np.ndarray, Session]:
    """Read a text once; return its vector ``(D,)`` float32 and its session: ``LanguageModel.encode_and_prefill``."""
    _require_causal_plan(runtime)
    if is_template(prompt):
        raise ConfigError(f"The prompt {prompt!r} has text after the placeholder, so the text can't be continued.")
    if not text.strip():
        raise TextError("The text is empty.")
    ids = prompt_ids(runtime.model, runtime.tokenizer, prompted(runtime.tokenizer, prompt, text), "the text")
    config = runtime.config
    input_format = InputFormat(
        prompt, append_eos=config.append_eos, follows_sentence_transformers=config.follows_sentence_transformers
    )
    [tokens] = tokenize(runtime.tokenizer, [text], input_format)
    assert tokens is not None  # only empty texts have none
    if runtime.max_length is not None and len(tokens) > runtime.max_length:
        raise TextError(
            f"The text has {len(tokens)} tokens; the limit is {runtime.max_length}. Shorten it: a text to be continued "
            "is not truncated."
        )
    if tokens.ids[: len(ids)] != ids:
        raise TextError("This tokenizer ends a text in a way that can't be continued. Use encode and generate.")
    cache, logits_BV, hidden_BTD = _read(runtime.model, ids)
    closing = tokens.ids[len(ids) :]
    if closing:
        # End tokens belong to the vector alone: they are read into a copy, and the session continues from the text.
        closing_BT = torch.tensor([closing], device=runtime.device)
        with torch.no_grad():
            after = runtime.model.base_model(closing_BT, use_cache=True, **{CACHE: copy.deepcopy(cache)})
        hidden_BTD = torch.cat([hidden_BTD, after.last_hidden_state], dim=1)
    [vector] = runtime.pooled([tokens], hidden_BTD, torch.zeros(1, dtype=torch.long, device=hidden_BTD.device))
    if config.normalize:
        vector = unit(vector)
    return vector, Session(prompt + text, ids, runtime.model, cache, logits_BV, weights, runtime.tokenizer)


def _require_causal_plan(runtime: EncoderRuntime) -> None:
    name = runtime.config.plan_label(runtime.n_layers)
    runtime.config.refuse_methods("a pass that generation goes on from")
    runtime.refuse_answers("a pass that generation goes on from")
    if runtime.plan.repeats_text:
        raise ConfigError(f"The plan {name!r} reads the text twice. Load the model with attention='causal'.")
    if not runtime.plan.is_causal:
        raise ConfigError(
            f"The plan {name!r} is not causal, so generation can't continue from its pass. Load the model with "
            "attention='causal' and no skips."
        )


@torch.no_grad()
def _read(model: PreTrainedModel, ids: list[int], cache: Cache | None = None) -> tuple[Cache, Tensor, Tensor]:
    """Return cache, logits ``(1, V)`` of the next token and last hidden states ``(1, T, D)`` of a pass.

    It is the pass with which transformers' ``generate`` begins: logits for the last token alone, since those of a
    larger product may differ in their last bits. A given cache is extended in place.
    """
    output = _pass(model, ids, cache)
    # transformers puts the state after the final norm last, which is the one that the encoder reads.
    return output[CACHE], output.logits[:, -1].clone(), output.hidden_states[-1]


@torch.no_grad()
def _pass(model: PreTrainedModel, ids: list[int], cache: Cache | None) -> Any:
    inputs: dict[str, Any] = {"input_ids": torch.tensor([ids], device=model.device)}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        inputs["logits_to_keep"] = 1
    if cache is not None:
        inputs[CACHE] = cache
    return model(**inputs, use_cache=True, output_hidden_states=True)

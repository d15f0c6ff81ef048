"""Sessions: a prompt read once, to be continued many times, extended, and saved with its KV cache.

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
import threading
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

from gerund.attention.cache_names import CACHE
from gerund.checks import place
from gerund.errors import ConfigError, DataError, FingerprintError, ResourceError, TextError
from gerund.inference.encode.runtime import EncoderRuntime, pooled
from gerund.inference.generate import generation
from gerund.inference.generate.config import GenerationConfig, GenerationKeywords
from gerund.inference.generate.detokenizing import text_behind
from gerund.inference.generate.kv_cache import key_rotations, to_write_on
from gerund.inference.generate.prompts import Prompt, check_prompts, prompt_ids
from gerund.inference.generate.sequence import Emit
from gerund.inference.generate.streams import AsyncTextStream, TextStream, Work
from gerund.inference.tokens import InputFormat, tokenize
from gerund.jobs.files import atomic_folder
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
        """What messages call it."""


@dataclass(frozen=True)
class Kept:
    """What is kept of a text that was read.

    Attributes:
        text: the text.
        token_ids: its token ids.
        cache: keys and values.
        logits_BV: logits ``(1, V)`` of what comes next.
        weights: returns the hash of the weights that read it.
        model: the model.
    """

    text: str
    token_ids: list[int]
    cache: Cache
    logits_BV: Tensor
    weights: Callable[[], str]
    model: PreTrainedModel

    @property
    def n_bytes(self) -> int:
        """What its tensors take."""
        return sum(one.numel() * one.element_size() for one in _tensors(self.cache, self.logits_BV).values())


def written_by(weights: str, model: PreTrainedModel) -> str:
    """Return a hash of what keys and values depend on besides the token ids: weights, dtype and attention kernel."""
    parts = [weights, str(model.dtype), str(model.config._attn_implementation), type(model).__name__]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def cache_key(lm: ReadingModel, *ids: list[int]) -> str:
    """Return the key under which a cache has what a model read of these token ids."""
    whole = " ".join([written_by(lm.weights_hash, lm.model), *map(str, ids)])
    return hashlib.blake2b(whole.encode(), digest_size=16).hexdigest()


def save_session_state(kept: Kept, folder: Path) -> None:
    """Write a session's files into a folder that is there; see ``Session.save``."""
    from safetensors.torch import save_file

    tensors = {name: one.detach().cpu().contiguous() for name, one in _tensors(kept.cache, kept.logits_BV).items()}
    save_file(tensors, folder / TENSORS)
    said = {
        "format": FORMAT,
        "written_by": written_by(kept.weights(), kept.model),
        "model": type(kept.model).__name__,
        "dtype": str(kept.model.dtype).removeprefix("torch."),
        "digest": _digest(folder / TENSORS),
        "lengths": [int(layer.get_seq_length()) for layer in kept.cache.layers],
        "text": kept.text,
        "token_ids": kept.token_ids,
    }
    (folder / SETTINGS).write_text(json.dumps({**said, "check": _check(said)}), encoding="utf-8")


def load_session_state(folder: str | Path, lm: ReadingModel) -> Kept:
    """Read a session's folder; see ``Session.load``."""
    where = place("the folder of a session", folder)
    said = _settings(where)
    model = lm.model
    if said["written_by"] != written_by(lm.weights_hash, model):
        raise FingerprintError(
            f"{where} was written by another model ({said['model']}, {said['dtype']}) than {lm.name} "
            f"({type(model).__name__}, {str(model.dtype).removeprefix('torch.')}); read the text anew"
        )
    try:
        if _digest(where / TENSORS) != said["digest"]:
            raise DataError(f"{where} is damaged: {TENSORS} is not what was written; read the text anew")
        from safetensors.torch import load_file

        tensors = load_file(where / TENSORS, device=str(model.device))
        cache = _cache(model, tensors, said["lengths"])
    except OSError as error:
        raise DataError(f"{where} cannot be read ({error.strerror or error}); read the text anew") from error
    except (KeyError, ValueError, RuntimeError, IndexError) as error:
        raise DataError(f"{where} is damaged ({error}); read the text anew") from error
    return Kept(said["text"], list(said["token_ids"]), cache, tensors[_LOGITS], lambda: lm.weights_hash, model)


def _settings(folder: Path) -> dict[str, Any]:
    try:
        said = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        check = said.pop("check")
        kinds: dict[str, type] = dict.fromkeys(("written_by", "model", "dtype", "digest", "text"), str)
        kinds |= {"token_ids": list, "lengths": list}
        if said["format"] != FORMAT or not all(isinstance(said[name], kind) for name, kind in kinds.items()):
            raise DataError(f"{folder} is no session of this version of gerund; read the text anew")
        if check != _check(said):
            raise ValueError("it is not what was written")
    except OSError as error:
        raise DataError(f"{folder} holds no session ({error.strerror or error})") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{folder} is damaged: {SETTINGS} cannot be read; read the text anew") from error
    return dict(said)


def _tensors(cache: Cache, logits_BV: Tensor) -> dict[str, Tensor]:
    """Return keys and values by layer, and the logits."""
    require_plain_kv_cache(cache)
    found = {_LOGITS: logits_BV}
    for number, layer in enumerate(cache.layers):
        if layer.is_initialized:  # layers that share another one's keys have none
            found |= {f"{number}.keys": layer.keys, f"{number}.values": layer.values}
    return found


def require_plain_kv_cache(cache: Cache) -> None:
    """Refuse what keeps more than keys and values, such as the states of recurrent layers.

    Those of some architectures are read on from by one token alone, and a longer text would be read as if nothing stood
    before it.
    """
    for layer in getattr(cache, "layers", [None]):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise ConfigError(
                f"this architecture keeps more than keys and values ({type(layer).__name__}): its sessions are "
                "continued, but neither saved nor read on from"
            )


def _cache(model: PreTrainedModel, tensors: Mapping[str, Tensor], lengths: list[int]) -> Cache:
    """Return the cache that was written."""
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


def _check(said: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(dict(said), sort_keys=True).encode(), digest_size=16).hexdigest()


def _digest(path: Path) -> str:
    whole = hashlib.sha256()  # for which processors have instructions
    try:
        with path.open("rb") as file:
            if path.stat().st_size:
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                    whole.update(content)
    except MemoryError as error:
        raise ResourceError(f"{path} does not fit into memory") from error
    return whole.hexdigest()


@dataclass(frozen=True)
class Session:
    """A text that the model has read, ready to be continued any number of times, from several threads too.

    Made by ``LanguageModel.read``, ``LanguageModel.encode_and_keep`` and ``Session.load``. It holds keys and values of
    the whole text until it is dropped.

    Attributes:
        text: what is continued: the text, after the prompt where one was given; of what was given as token ids, what
            they spell.
        token_ids: its token ids, as ``generate`` would read them.
    """

    text: str
    token_ids: list[int] = field(repr=False)
    _model: PreTrainedModel = field(repr=False)
    _tokenizer: PreTrainedTokenizerBase = field(repr=False)
    _cache: Cache = field(repr=False)
    _logits_BV: Tensor = field(repr=False)
    _weights: Callable[[], str] = field(repr=False)

    @property
    def n_bytes(self) -> int:
        """What keys and values take."""
        return self._kept().n_bytes

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Keep the session in a folder, in the model's own type, for ``Session.load`` in this process or another.

        The folder holds the text itself. It is written whole or not at all.

        Args:
            folder: where to.
            overwrite: replace what is there.

        Raises:
            OutputExistsError: there is something already.
            ConfigError: the architecture keeps more than keys and values, which cannot be saved.
            ResourceError: the disk is full; nothing is left behind.
        """
        with atomic_folder(folder, overwrite=overwrite) as work:
            self.save_into(work)

    def save_into(self, folder: Path) -> None:
        """Write the files of ``save`` into a folder that is there."""
        save_session_state(self._kept(), folder)

    @classmethod
    def load(cls, folder: str | Path, lm: ReadingModel) -> Self:
        """Open what ``save`` wrote.

        Args:
            folder: the folder.
            lm: the model that wrote it.

        Raises:
            FingerprintError: it was written by other weights, or in another type.
            DataError: it is damaged, or something else.

        >>> import tempfile, gerund
        >>> lm = gerund.load()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     lm.read("The old man looked at").save(f"{folder}/kept")
        ...     session = gerund.Session.load(f"{folder}/kept", lm)
        >>> session.generate(4).text == lm.generate("The old man looked at", 4)[0].text
        True
        """
        found = load_session_state(folder, lm)
        return cls(
            found.text,
            found.token_ids,
            lm.model,
            lm.tokenizer,
            found.cache,
            found.logits_BV,
            lambda: lm.weights_hash,
        )

    def _kept(self) -> Kept:
        return Kept(self.text, self.token_ids, self._cache, self._logits_BV, self._weights, self._model)

    def read(self, token_ids: Sequence[int]) -> Self:
        """Return a session that has read so many tokens more; this one stays as it is.

        Its logits are those of one pass over everything up to rounding, since products of other shapes round otherwise.

        Args:
            token_ids: what follows the text.

        Raises:
            TextError: there is none, one that the model does not have, or no room for them.
            ConfigError: the architecture keeps more than keys and values.
        """
        require_plain_kv_cache(self._cache)
        try:
            token_ids = [operator.index(one) for one in token_ids]
        except TypeError as error:
            raise TextError(f"read takes token ids, such as those of a result, not {token_ids!r}") from error
        if not token_ids:
            raise TextError("there is nothing to read: no token ids were given")
        ids = prompt_ids(self._model, self._tokenizer, [*self.token_ids, *token_ids], "the text")
        more = ids[len(self.token_ids) :]
        cache, logits_BV, _ = _read(self._model, more, _copied(self._cache))
        text = self.text + text_behind(self._tokenizer, self.token_ids, more)
        return replace(self, text=text, token_ids=ids, _cache=cache, _logits_BV=logits_BV)

    def tail(self, first: int) -> Kept:
        """Return what was read from a token on, without what stands before it, for ``with_tail``.

        Args:
            first: how many tokens are left out.

        Raises:
            ConfigError: keys of this architecture cannot be turned to another place.
        """
        key_rotations(self._model)
        cache = _copied(self._cache)
        for layer in cache.layers:
            layer.keys, layer.values = (one[:, :, first:].clone() for one in (layer.keys, layer.values))
        ids = self.token_ids[first:]
        return replace(
            self._kept(), text=text_behind(self._tokenizer, self.token_ids[:first], ids), token_ids=ids, cache=cache
        )

    def with_tail(self, tail: Kept, start: int) -> Self:
        """Return a session at whose end stands what another one has read, without reading it again: an approximation.

        Keys are turned to their new place. What the tail could not see, the text between its own beginning and here,
        has no part in what it holds; so all that is written behind it differs from what one pass over everything gives.

        Args:
            tail: what ``tail`` returned, of this model.
            start: how many tokens stood before it.

        Raises:
            ConfigError: keys of this architecture cannot be turned to another place.
            TextError: there is no room for it.
        """
        turns = key_rotations(self._model)
        ids = prompt_ids(self._model, self._tokenizer, [*self.token_ids, *tail.token_ids], "the text")
        cache, by = _copied(self._cache), len(self.token_ids) - start
        for layer, own, turn in zip(cache.layers, tail.cache.layers, turns, strict=True):
            layer.update(turn.apply(own.keys, by), own.values)
        return replace(self, text=self.text + tail.text, token_ids=ids, _cache=cache, _logits_BV=tail.logits_BV)

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

        Every call starts from the end of the text. The result is that of ``LanguageModel.generate`` for the
        same text, bit for bit (on a GPU up to rounding for mixtures of experts, which transformers' own loop
        computes another way there).

        Args:
            max_new_tokens: how much to write at most; less where the model's context ends first.
            sampling: how tokens are chosen; None is greedy.
            options: what ends the text, which form it has, and what is said of its tokens, as in ``generate``; all
                but ``n``.

        Raises:
            ConfigError: a setting is impossible.
        """
        return self._continued(_one_of(max_new_tokens, sampling, options))

    def _work(self, max_new_tokens: int, sampling: Sampling | None, options: GenerationKeywords) -> Work:
        settings = _one_of(max_new_tokens, sampling, options)

        def work(emit: Emit, stop: threading.Event) -> None:
            self._continued(settings, emit, stop)

        return work

    def _continued(
        self, settings: GenerationConfig, emit: Emit | None = None, cancelled: threading.Event | None = None
    ) -> Generation:
        return generation.continue_read(
            self._model,
            self._tokenizer,
            self.token_ids,
            self._decode,
            settings,
            emit=emit,
            cancelled=cancelled,
        )

    def _decode(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        **_settings: Any,
    ) -> Tensor:
        """Write token by token, greedily among the processed scores; return text and continuation ``(1, T)``."""
        cache = to_write_on(self._cache)
        logits_BV = self._logits_BV
        while True:
            # Processors may write into what they are given.
            scores_BV = logits_processor(input_ids, logits_BV.to(copy=True, dtype=torch.float32))
            chosen_BT = scores_BV.argmax(dim=-1, keepdim=True)
            input_ids = torch.cat([input_ids, chosen_BT], dim=-1)
            if stopping_criteria(input_ids, None).all():
                return input_ids
            logits_BV = model(input_ids=chosen_BT, use_cache=True, **{CACHE: cache}).logits[:, -1]


def _copied(cache: Cache) -> Cache:
    """Return a cache that grows by itself; its layers put new tensors in the place of those that they share so far."""
    own = copy.copy(cache)
    own.layers = [copy.copy(layer) for layer in cache.layers]
    return own


def _one_of(max_new_tokens: int, sampling: Sampling | None, options: GenerationKeywords) -> GenerationConfig:
    settings = GenerationConfig.of(max_new_tokens, sampling, options)
    if settings.n != 1:
        raise ConfigError(f"n={settings.n}: a session continues its text once a call; call it again")
    return settings


def read_prompt(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, weights: Callable[[], str]
) -> Session:
    """Read a prompt once; see ``LanguageModel.read``."""
    [checked] = check_prompts([prompt])
    ids = prompt_ids(model, tokenizer, checked, "the text")
    cache, logits_BV, _ = _read(model, ids)
    text = checked if isinstance(checked, str) else tokenizer.decode(ids)
    return Session(str(text), ids, model, tokenizer, cache, logits_BV, weights)


def encode_and_keep(
    runtime: EncoderRuntime, prompt: str, text: str, weights: Callable[[], str]
) -> tuple[np.ndarray, Session]:
    """Read a text once, in the type of the weights; see ``LanguageModel.encode_and_keep``."""
    _refuse_plan(runtime)
    if is_template(prompt):
        raise ConfigError(f"the prompt {prompt!r} stands around a text, which ends it: nothing can go on from there")
    if not text.strip():
        raise TextError("the text is empty, so there is nothing to encode")
    whole = prompt + text if prompt else text
    ids = prompt_ids(runtime.model, runtime.tokenizer, whole, "the text")
    config = runtime.config
    input_format = InputFormat(
        prompt,
        append_eos=config.append_eos,
        follows_sentence_transformers=config.follows_sentence_transformers,
    )
    [tokens] = tokenize(runtime.tokenizer, [text], input_format)
    assert tokens is not None  # only empty texts have none
    if runtime.max_length is not None and len(tokens) > runtime.max_length:
        raise TextError(
            f"the text has {len(tokens)} tokens and there is room for {runtime.max_length}; shorten it: what is to be "
            "continued is not cut"
        )
    if tokens.ids[: len(ids)] != ids:
        raise TextError("this tokenizer ends a text in a way that cannot be continued; use encode and generate apart")
    kept, logits_BV, hidden_BTD = _read(runtime.model, ids)
    closing = tokens.ids[len(ids) :]
    if closing:
        # End tokens belong to the vector alone: they are read on a copy, and the session goes on from the text.
        closing_BT = torch.tensor([closing], device=runtime.device)
        with torch.no_grad():
            after = runtime.model.base_model(closing_BT, use_cache=True, **{CACHE: copy.deepcopy(kept)})
        hidden_BTD = torch.cat([hidden_BTD, after.last_hidden_state], dim=1)
    [vector] = pooled(runtime, [tokens], hidden_BTD, torch.zeros(1, dtype=torch.long, device=hidden_BTD.device))
    if runtime.config.normalize:
        vector = unit(vector)
    return vector, Session(whole, ids, runtime.model, runtime.tokenizer, kept, logits_BV, weights)


def _refuse_plan(runtime: EncoderRuntime) -> None:
    name = runtime.config.attention.label(runtime.n_layers)
    runtime.config.refuse_methods("a pass that generation goes on from")
    if runtime.plan.repeats_text:
        raise ConfigError(f"the plan {name!r} reads the text twice; load the model with the plan 'causal'")
    if not runtime.plan.is_causal:
        raise ConfigError(
            f"the plan {name!r} is not causal alone, so nothing can be continued from its pass; load the model with "
            "the plan 'causal' and no skips"
        )


@torch.no_grad()
def _read(model: PreTrainedModel, ids: list[int], cache: Cache | None = None) -> tuple[Cache, Tensor, Tensor]:
    """Return cache, logits ``(1, V)`` of what comes next, and last hidden states ``(1, T, D)``, of one pass.

    It is the pass with which transformers' ``generate`` begins: logits for the last token alone, since those of a
    larger product may differ in their last bits.
    """
    inputs: dict[str, Any] = {"input_ids": torch.tensor([ids], device=model.device)}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        inputs["logits_to_keep"] = 1
    if cache is not None:
        inputs[CACHE] = cache
    output = model(**inputs, use_cache=True, output_hidden_states=True)
    # transformers puts the state after the final norm last, which is the one that the encoder reads.
    return output[CACHE], output.logits[:, -1].clone(), output.hidden_states[-1]

"""A tokenizer without transformers, with the methods of ``PreTrainedTokenizerFast`` that gerund uses.

The Rust tokenizer is that of a file's own transformers tokenizer, and so are the special tokens and the chat template.
Both are cached (``tokenizer_cache``), so that transformers is imported once for a file and then no more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from tokenizers import AddedToken, Tokenizer

from gerund.errors import ConfigError
from gerund.gguf_file import read_file
from gerund.models.library_calls import checked_tokenizer
from gerund.models.tokenizer_cache import StoredTokenizer, TokenizerSettings, settings_of

# Put behind a text that is to be continued, to find its end in what a template gives.
_MARK = "CONTINUE_FINAL_MESSAGE "


class LightTokenizer:
    """A tokenizer; its methods do what those of ``PreTrainedTokenizerFast`` do."""

    is_fast = True

    def __init__(self, backend: Tokenizer, settings: TokenizerSettings) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend_tokenizer, self.settings = backend, settings
        self.chat_template = settings.chat_template
        self.model_max_length, self.padding_side = settings.model_max_length, settings.padding_side
        self.special_tokens_map = dict(settings.special)
        self.all_special_tokens = list(dict.fromkeys((*settings.special.values(), *settings.extra)))
        self.split_special_tokens = False

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def __getattr__(self, name: str) -> Any:
        """Return a special token, such as ``eos_token``, or the id of one, such as ``eos_token_id``; None without."""
        token = name.removesuffix("_id")
        if not token.endswith("_token"):
            raise AttributeError(name)
        spelled = self.special_tokens_map.get(token)
        return spelled if token == name or spelled is None else self.backend_tokenizer.token_to_id(spelled)

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of the special tokens."""
        ids = map(self.backend_tokenizer.token_to_id, self.all_special_tokens)
        return [token for token in ids if token is not None]

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Tokens beside those of the vocabulary, by id."""
        return dict(self.backend_tokenizer.get_added_tokens_decoder())

    def get_vocab(self) -> dict[str, int]:
        """Return the ids of all tokens."""
        return dict(self.backend_tokenizer.get_vocab(with_added_tokens=True))

    def num_special_tokens_to_add(self, pair: bool = False) -> int:
        """Return how many special tokens stand around a text, or a pair of texts."""
        return int(self.backend_tokenizer.num_special_tokens_to_add(pair))

    def __call__(
        self,
        texts: list[str],
        *,
        add_special_tokens: bool = True,
        return_offsets_mapping: bool = False,
        **_unused: Any,
    ) -> dict[str, list[Any]]:
        """Return the ids of texts, which of them are special, and the characters of each."""
        encoded = self.backend_tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
        return {
            "input_ids": [item.ids for item in encoded],
            "special_tokens_mask": [item.special_tokens_mask for item in encoded],
            "offset_mapping": [item.offsets for item in encoded] if return_offsets_mapping else [],
        }

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False, **_unused: Any) -> str:
        """Return the text of token ids."""
        return str(self.backend_tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def convert_ids_to_tokens(self, token: int) -> str | None:
        """Return a token as its vocabulary spells it; None for an id that it does not have."""
        spelled: str | None = self.backend_tokenizer.id_to_token(token)
        return spelled

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: None = None,
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = False,
        **variables: Any,
    ) -> str:
        """Return a conversation in the form of the chat template.

        With ``continue_final_message`` it ends with the last message's text, which a mark finds, as in transformers.
        """
        if tokenize:
            raise ConfigError("this tokenizer only renders conversations; load the model with runtime='torch'")
        plain = json.loads(json.dumps([conversation, tools, variables]))
        if continue_final_message:
            if not plain[0] or not isinstance(plain[0][-1].get("content"), str):
                raise ValueError("the last message has no text to continue")
            plain[0][-1]["content"] += _MARK
        text = _compiled(str(self.chat_template)).render(
            messages=plain[0],
            tools=plain[1],
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            **(self.special_tokens_map | plain[2]),
        )
        if not continue_final_message:
            return text
        before, mark, after = text.rpartition(_MARK.strip())
        if not mark:
            raise ValueError("the last message, which is to be continued, is not in what the template gives")
        # A template that strips the mark's space strips that of texts.
        return before if after.startswith(" ") else before.rstrip()


class _SafeNamespace(Namespace):
    """jinja's namespace without names that begin with an underscore, which lead to Python's own."""

    def __init__(*args: Any, **attributes: Any) -> None:
        self, given = args[0], dict(*args[1:], **attributes)
        for name in given:
            _demand_safe(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _demand_safe(name)
        super().__setitem__(name, value)


def _demand_safe(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a chat template sets {name!r}")


class _Generation(Extension):
    """Templates for training mark the model's own turns; here the marks mean nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja's

    def parse(self, parser: Any) -> Any:
        """Return what stands between the marks."""
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


@cache
def _compiled(template: str) -> jinja2.Template:
    """Compile a chat template, with the names that transformers gives to templates."""

    def refuse(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def as_json(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **options})

    def as_dict(*given: Any, **more: Any) -> dict[Any, Any]:
        return dict(*given, **more)  # the class itself would lead a template to Python's own names

    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    sandbox.filters["tojson"] = as_json
    sandbox.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": as_dict,
        "namespace": _SafeNamespace,
    }
    return sandbox.from_string(template)


def read_light_tokenizer(path: Path, folder: Path | None = None) -> LightTokenizer:
    """Return the tokenizer of a GGUF file, from the cache, or made by transformers and cached.

    Raises:
        ModelError: the file has no tokenizer that can be read.
    """
    stored = StoredTokenizer(path, folder)
    cached = stored.read()
    if cached is None:
        from gerund.models import gguf_tokenizer

        file = read_file(path)
        tokenizer, keywords = gguf_tokenizer.made_tokenizer(file)
        settings = settings_of(tokenizer, gguf_tokenizer.ends_of(file, tokenizer), keywords)
        stored.keep(tokenizer.backend_tokenizer, settings)
        cached = tokenizer.backend_tokenizer, settings
    light: Any = LightTokenizer(*cached)
    checked: LightTokenizer = checked_tokenizer(light)
    return checked

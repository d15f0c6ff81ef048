"""``Writes``: the generation methods that torch and packed models share; imports no torch."""

from collections.abc import Iterator, Mapping, Sequence
from threading import Event
from typing import Any, Unpack

from gerund.errors import ConfigError
from gerund.inference.generate.config import GenerationConfig, RankedKeywords, generation_config
from gerund.inference.generate.prompts import Prompt, check_conversation, check_prompts
from gerund.inference.generate.sequence import Emit, Piece
from gerund.inference.generate.streams import AsyncTextStream, TextStream, Work, in_thread
from gerund.inference.generate.tools import ChatKeywords, chat_prompt, chat_settings
from gerund.settings.aliases import takes_aliases
from gerund.settings.sampling import Rerank, Sampling
from gerund.types import Generation


class Writes:
    """What generates; who computes says how, in the methods at the end.

    Attributes:
        tokenizer: the model's.
    """

    tokenizer: Any

    @takes_aliases
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        *,
        rerank: Rerank | None = None,
        batch_size: int = 16,
        **options: Unpack[RankedKeywords],
    ) -> list[Generation]:
        """Continue each prompt with the base model; an encoder-decoder generates a text of its own for it.

        Args:
            prompts: one prompt or many, of any lengths. A prompt is a text, in which control tokens are text unless it
                is a ``Rendered`` one; token ids, which are used unchanged; or the messages of a conversation, as
                in ``chat``. The empty text starts from nothing.
            max_new_tokens: number of new tokens at most; fewer where the model's context ends first.
            sampling: how tokens are chosen; None is greedy, or with ``rerank`` nucleus sampling with p 0.9. A
                completion depends on its prompt and its seed, and on no other prompt of the call (a packed model's,
                on a processor with AVX2 and nothing newer, also on whether it is the only one).
            rerank: generate several completions and return what a scorer ranks highest (RankGen, section 2.3).
                ``best_of=8, rank="consensus"``, say, is short for ``Rerank(samples=8, scorer="consensus")``.
            batch_size: completions per batch; with ``rerank`` it is chosen by how many there are per prompt.
            options: ``n``, the number of completions per prompt, above 1 sampled ones; ``stop`` and
                ``stop_token_ids``, which end the text; ``min_tokens``, ``ignore_eos``, ``bad_words`` and
                ``allowed_token_ids``, which restrict the next tokens; ``logprobs``, to return log-probabilities, and
                how many alternatives; ``schema``, ``regex`` or ``choice``, which constrain the text and need
                llguidance (``gerund.inference.generate.config.GenerationKeywords``). None can be combined with
                ``rerank``. Also the fields of ``Sampling`` instead of ``sampling``: ``temperature``, ``top_p``,
                ``top_k``, ``min_p``, ``seed``, ...; ``do_sample``; ``max_tokens`` for ``max_new_tokens``; and
                ``response_format``, OpenAI's form of ``schema``.

        Returns:
            ``n`` ``Generation`` objects per prompt, those of one prompt together, in the order of the prompts; with
            ``rerank`` one ``Ranked`` per prompt, which also has the score and all candidates.

        Raises:
            TextError: a prompt is not valid, or fills the model's context.
            ConfigError: a setting is impossible or given twice; greedy completions can't be ranked, since they are all
                the same, nor can those of an encoder-decoder, which doesn't continue its prompt.
            ModelError: a conversation is given, and the model has no chat template.

        >>> from gerund import Rerank, Sampling
        >>> settings = Rerank(samples=2, beams=2, every=4, scorer="overlap")
        >>> [story] = gerund.load().generate("The old man", 8, Sampling(temperature=1.0, seed=0), rerank=settings)
        >>> story.rank_score == story.beams[0].rank_score >= story.beams[1].rank_score
        True
        >>> [answer] = gerund.load().generate("To be or not to", 4, stop=[" "], logprobs=0)
        >>> len(answer.logprobs) == len(answer.token_ids), " " in answer.text
        (True, False)
        """
        settings, rerank = generation_config(max_new_tokens, sampling, rerank, options)
        return self._generate(check_prompts(prompts), settings, rerank, batch_size, Event())

    @takes_aliases
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_new_tokens: int = 256,
        sampling: Sampling | None = None,
        *,
        rerank: Rerank | None = None,
        **options: Unpack[ChatKeywords],
    ) -> list[Generation]:
        """Generate the next message of a conversation, in the format of the model's own chat template.

        ``messages`` are dicts with ``role`` (``system``, ``user``, ``assistant`` or ``tool``) and ``content``, a text
        or a list of parts of the form ``{"type": "text", "text": ...}``; a ``name`` where the template uses one.
        Control tokens that somebody typed into a message, such as ``<|im_start|>``, are text. The other arguments are
        those of ``generate``, and ``tools`` that the answer may call (``gerund.inference.generate.tools``). Returns
        ``n`` answers, one by default.

        Raises:
            ModelError: the model has no chat template, or it knows no tools.
            TextError: a message is malformed, or the template doesn't accept the conversation.
            ConfigError: a setting is impossible.
        """
        settings, rerank, of_tools = chat_settings(max_new_tokens, sampling, rerank, options)
        prompt, settings, tools = chat_prompt(self.tokenizer, check_conversation(messages), settings, of_tools)
        answers = self._generate([prompt], settings, rerank, 16, Event())
        return answers if tools is None else list(map(tools.read, answers))

    @takes_aliases
    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        *,
        rerank: Rerank | None = None,
        **options: Unpack[ChatKeywords],
    ) -> TextStream:
        """Continue one prompt or conversation as ``generate`` does, and yield the text piece by piece.

        With ``rerank`` a piece comes as soon as all remaining candidates agree on it. No part of a stop string is ever
        yielded. When the iteration ends, ``result`` is the full ``Generation``. The model generates until then, unless
        the stream is closed: by ``close``, by leaving its ``with`` block, or with its last reference.

        >>> stream = gerund.load().stream("The old man", max_new_tokens=5)
        >>> "".join(stream) == stream.result.text
        True
        """
        return TextStream(self._stream_work(prompt, max_new_tokens, sampling, rerank, options))

    @takes_aliases
    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        *,
        rerank: Rerank | None = None,
        batch_size: int = 16,
        **options: Unpack[RankedKeywords],
    ) -> list[Generation]:
        """``generate`` without blocking the event loop; canceling it stops the model."""
        settings, rerank = generation_config(max_new_tokens, sampling, rerank, options)
        checked = check_prompts(prompts)
        return await in_thread(lambda stop: self._generate(checked, settings, rerank, batch_size, stop))

    @takes_aliases
    async def achat(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_new_tokens: int = 256,
        sampling: Sampling | None = None,
        *,
        rerank: Rerank | None = None,
        **options: Unpack[ChatKeywords],
    ) -> list[Generation]:
        """``chat`` without blocking the event loop."""
        settings, rerank, of_tools = chat_settings(max_new_tokens, sampling, rerank, options)
        prompt, settings, tools = chat_prompt(self.tokenizer, check_conversation(messages), settings, of_tools)
        answers = await in_thread(lambda stop: self._generate([prompt], settings, rerank, 16, stop))
        return answers if tools is None else list(map(tools.read, answers))

    @takes_aliases
    def astream(
        self,
        prompt: Prompt,
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        *,
        rerank: Rerank | None = None,
        **options: Unpack[ChatKeywords],
    ) -> AsyncTextStream:
        """``stream`` for ``async for``; canceling the task stops the model."""
        return AsyncTextStream(self._stream_work(prompt, max_new_tokens, sampling, rerank, options))

    def _generate(
        self, prompts: Sequence[Prompt], settings: GenerationConfig, rerank: Rerank | None, batch_size: int, stop: Event
    ) -> list[Generation]:
        if rerank is None:
            return self._write(prompts, settings, batch_size, stop)
        return self._search(prompts, settings, rerank, stop)

    def _stream_work(
        self,
        prompt: Prompt,
        max_new_tokens: int,
        sampling: Sampling | None,
        rerank: Rerank | None,
        options: ChatKeywords,
    ) -> Work:
        """Return what generates a stream."""
        settings, rerank, of_tools = chat_settings(max_new_tokens, sampling, rerank, options)
        if settings.n != 1:
            raise ConfigError(f"n={settings.n}: a stream is one text; use generate, or several streams")
        [given] = check_prompts([prompt])
        checked, settings, tools = chat_prompt(self.tokenizer, given, settings, of_tools)

        def work(emit: Emit, stop: Event) -> None:
            emit = emit if tools is None else tools.emitting(emit)
            if rerank is None:
                self._write([checked], settings, 1, stop, emit)
                return
            for piece in self._search_streamed(checked, settings, rerank, stop):
                emit(piece)

        return work

    def _write(
        self,
        prompts: Sequence[Prompt],
        settings: GenerationConfig,
        batch_size: int,
        stop: Event,
        emit: Emit | None = None,
    ) -> list[Generation]:
        """Continue prompts, until ``stop`` is set; pieces go to ``emit``."""
        raise NotImplementedError

    def _search(
        self, prompts: Sequence[Prompt], settings: GenerationConfig, rerank: Rerank, stop: Event
    ) -> list[Generation]:
        """Return what a scorer ranks highest."""
        raise NotImplementedError

    def _search_streamed(
        self, prompt: Prompt, settings: GenerationConfig, rerank: Rerank, stop: Event
    ) -> Iterator[Piece]:
        """Yield what a scorer ranks highest in pieces."""
        raise NotImplementedError

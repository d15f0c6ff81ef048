"""``gerund ask``: answer questions from an index or from one document, citing sources."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gerund.cli import options, text_io
from gerund.cli.search import highlighted, open_existing
from gerund.cli.text_io import tell
from gerund.errors import ConfigError, TextError

if TYPE_CHECKING:
    from gerund.retrieval.document_reader import ReadLimits
    from gerund.retrieval.question_answering import QuestionAnswering
    from gerund.settings.model_spec import ModelSpec
    from gerund.types import Answer, Source


@options.takes(
    spec=options.model(
        "model",
        *options.MACHINE,
        helps={
            "model": "Another name of the index's model, or the model that reads the document. [default: the index's "
            "own, or the bundled model]"
        },
    ),
    sampling=options.sampling("temperature", "top_p", "seed"),
    search=options.search(),
    limits=options.read_limits(),
)
def command(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="INDEX [QUESTION]",
            help="An index, unless there is --document, and what is asked; - for standard input. Without a question a "
            "terminal asks for one after the other.",
        ),
    ] = None,
    *,
    spec: "ModelSpec",
    answer_with: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Another model to generate it: a folder, GGUF file, short name or hub id; the index's own model "
            "searches. Both are in memory.",
        ),
    ] = None,
    document: Annotated[
        Path | None, typer.Option(help="Ask this file instead of an index: it is read whole, and kept.")
    ] = None,
    extractive: Annotated[
        bool | None,
        typer.Option(
            "--extractive/--generate",
            help="Quote the best sentence of the documents, or let the model generate an answer from them. "
            "[default: generate if it was trained to chat and has at least 500 million parameters]",
        ),
    ] = None,
    instructions: Annotated[
        str,
        typer.Option(
            metavar="TEXT", help="What a model that generates the answer is told besides how to answer, such as a tone."
        ),
    ] = "",
    context: Annotated[
        str | None,
        typer.Option(
            metavar="WHAT",
            help="What it reads of an index to generate an answer: chunks, or the best sentence alone. [default: the "
            "sentence below 500 million parameters]",
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 256,
    sampling: dict[str, Any],
    k: Annotated[int, typer.Option("--k", "-k", help="Most chunks to read.")] = 8,
    search: dict[str, Any],
    cache: Annotated[
        Path | None,
        typer.Option(
            help="Keep here what was read of a --document, or with --approximate-cache of an index's chunks. "
            "[default: the user's caches]"
        ),
    ] = None,
    language: Annotated[
        str | None, typer.Option(help="Language of a --document: en, zh, de, ... An index has its own. [default: en]")
    ] = None,
    cache_size: Annotated[
        str, typer.Option(help="What is kept takes this much at most; 0 keeps nothing. What is unused longest goes.")
    ] = "2GB",
    approximate_cache: Annotated[
        bool,
        typer.Option(
            "--approximate-cache",
            help="Keep what the model has read of each chunk, so that the next question that finds it starts sooner. "
            "Chunks are then read without seeing each other: the answer is not quite that of reading them together.",
        ),
    ] = False,
    limits: "ReadLimits",
    fallback: Annotated[
        bool,
        typer.Option(
            "--fallback/--no-fallback",
            help="Replace a generated answer that no source supports by the best sentence of the documents.",
        ),
    ] = True,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="A conversation: a question per line, from a terminal or a pipe, each of which may refer to the ones "
            "before. With a query head (gerund index --query-head) the conversation's own states search.",
        ),
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Show how well the sources support each sentence of a generated answer.")
    ] = False,
    sources: Annotated[
        bool,
        typer.Option(
            "--sources", help="Show all sources: what the model read, or the chunks that a sentence was quoted from."
        ),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Answer a question from an index, citing its sources.

    A model that was trained to chat (it has a chat template) and has at least 500 million parameters generates the
    answer from the chunks that fit the question best, as many as its context has room for, and cites them by numbers; a
    number that no source has is taken out and reported. With any other model the answer is the best sentence, quoted as
    it stands in its document; with --generate, a model below that size reads this sentence alone. --extractive,
    --generate and --context choose.

    Each generated sentence is compared with the sources by its words and numbers: those that no source supports are
    reported, and an answer without any supported sentence is replaced by the best sentence of the documents, as is one
    that was generated from a sentence and says more than it. Where nothing in the index is about the question, the
    answer says so, and the exit status is 1.

    Without a question, a terminal takes one per line until Ctrl-D; each may refer to the previous one. Through a pipe
    comes one question.

    With --document there is no index: the model reads the whole file, and what it computed is kept on the disk, so that
    the next question about it starts at once. The kept files hold the document's text.

    For example:

        gerund ask my.index "When was the first railway opened?"

        gerund ask my.index

        gerund ask my.index --chat

        gerund ask my.index "When was the first railway opened?" --answer-with smollm2

        gerund ask my.index "Why do trains need rails?" --generate --instructions "Explain it to a child."

        gerund ask --document contract.pdf "When does it end?" -m ./chat-model
    """
    from gerund.jobs.disk_cache import parse_size
    from gerund.retrieval.open_document import open_document, usual_cache
    from gerund.retrieval.question_answering import Question

    where, question = _divided(words or [], document, as_json=as_json, chat=chat)
    settings: dict[str, Any] = {
        "method": None if extractive is None else "extractive" if extractive else "generate",
        "context": context,
        "max_new_tokens": max_new_tokens,
        "fallback": fallback,
        "instructions": instructions,
        "chat": chat,
        "sampling": options.sampling_of(sampling),
        **search,
    }
    _demand_there(where, document)
    if answer_with is not None and document is not None:
        raise ConfigError("--answer-with is for an index; name the model that reads a --document with -m")
    if instructions and extractive:
        raise ConfigError("--instructions are for generated answers, and --extractive quotes a sentence")
    if language is not None and document is None:
        raise ConfigError("--language is for a --document; an index has the language that it was made with")
    most_bytes = parse_size(cache_size)
    if approximate_cache:
        settings["approximate_cache"] = _chunk_cache(document, cache, most_bytes)
    elif cache is not None and document is None:
        raise ConfigError("--cache is for a --document, or for an index with --approximate-cache")
    # What cannot be asked is refused before any model is loaded.
    Question.of("a question" if question is None else question, k, settings)  # type: ignore[arg-type]
    reader: QuestionAnswering
    if document is None:
        reader = open_existing(where, spec, answer_with)
    else:
        kept = usual_cache(cache, most_bytes) if most_bytes else None
        reader = open_document(document, spec, cache=kept, language=language or "en", limits=limits)
    _warn(reader, settings["method"])
    if question is None:
        _talk(reader, k, settings, every=sources, verify=verify)
        return
    if as_json:
        answer = reader.ask(question, k, **settings)
        typer.echo(json.dumps(answer.to_dict(), ensure_ascii=False))
    else:
        answer = _answered(reader, question, k, settings, every=sources, verify=verify)
    if not answer.found:
        raise typer.Exit(1)


def _divided(words: list[str], document: Path | None, *, as_json: bool, chat: bool) -> tuple[str, str | None]:
    """Return the index, empty where there is a document, and the question; None where a terminal is to ask for it."""
    expected = 1 if document is None else 0
    if len(words) < expected:
        raise ConfigError("name an index, or a file with --document")
    if len(words) > expected + 1:
        raise ConfigError(f"one question at a time, in quotes: {words[expected]!r} {words[expected + 1]!r}")
    where = words[0] if document is None else ""
    question = words[expected] if len(words) > expected else None
    if chat and question is not None:
        raise ConfigError("--chat takes its questions from a terminal or a pipe, one per line; leave QUESTION out")
    if question is None and (chat or sys.stdin.isatty()):
        if as_json:
            raise ConfigError("--json is for one answer; give a question")
        return where, None
    [rows] = text_io.one_text("-" if question is None else question, "question")
    lines = sum(bool(line.strip()) for line in rows.texts[0].splitlines())
    if question is None and lines > 1:
        raise ConfigError(
            f"standard input has {lines} lines; --chat answers each, and - as QUESTION takes all as one question"
        )
    return where, rows.texts[0]


def _demand_there(where: str, document: Path | None) -> None:
    if document is not None:
        from gerund.retrieval.open_document import demand_file

        demand_file(document)
        return
    from gerund.retrieval.index import demand_index

    demand_index(where, opened=False)


def _chunk_cache(document: Path | None, cache: Path | None, most_bytes: int) -> Any:
    if document is not None:
        raise ConfigError("--approximate-cache is for an index; what is read of a --document is kept as it is")
    if not most_bytes:
        raise ConfigError("--cache-size 0 keeps nothing, and --approximate-cache is for keeping")
    from gerund.retrieval.open_document import usual_cache

    return usual_cache(cache, most_bytes)


def _warn(reader: "QuestionAnswering", method: str | None) -> None:
    """Warn that a model that was not trained to answer may make answers up."""
    if method == "generate" and not reader.lm.tokenizer.chat_template:
        tell(
            f"{reader.lm.name} was not trained to answer questions (it has no chat template): its "
            "answers may be made up"
        )


def _answered(
    reader: "QuestionAnswering", question: str, k: int, asked: dict[str, Any], *, every: bool, verify: bool
) -> "Answer":
    """Print the answer as it is generated, then its sources, and how well they support it."""
    from gerund.retrieval.open_document import OpenDocument

    stream = reader.stream(question, k, **asked)
    for piece in stream:
        typer.echo(piece, nl=False)
    answer = stream.result
    assert answer is not None
    shown = [source for source in answer.sources if every or source.number in answer.cited]
    # Of a --document there is usually one source, so there is nothing for a number to tell apart.
    numbered = len(shown) > 1 or not isinstance(reader, OpenDocument)
    quoted = answer.method == "extractive"
    typer.echo("".join(f" [{number}]" for number in answer.cited) if quoted and numbered else "")
    _print_sources(shown, answer.question, reader.chunking.language, numbered=numbered, every=every)
    if verify:
        _print_checks(answer, numbered=numbered)
    if answer.rerank is not None:
        tell(str(answer.rerank))
    _tell_faults(answer, has_instructions=bool(asked["instructions"]))
    return answer


def _tell_faults(answer: "Answer", *, has_instructions: bool) -> None:
    """Say what is wrong with an answer."""
    quoted = answer.method == "extractive"
    if answer.rejected:
        tell("the sources don't support the model's text, so a sentence is quoted; --no-fallback shows that text")
    elif quoted and answer.found and has_instructions:
        tell("this sentence is quoted, so the instructions had no effect; --generate lets the model write the answer")
    if quoted or not answer.found:
        return
    if unsupported := [check.text for check in answer.checks if not check.sources]:
        more = f", and {len(unsupported) - 1} more" if len(unsupported) > 1 else ""
        tell(f"no source supports: {' '.join(unsupported[0].split())}{more}")
    if answer.dropped:
        numbers = "".join(f"[{number}]" for number in answer.dropped)
        tell(f"the model cited {numbers}, which no source has; removed from the answer")
    if not answer.cited:
        tell("the answer cites no source; --sources shows what the model read")
    if not answer.finished:
        tell("the answer was cut off; --max-new-tokens lets it be longer")


def _print_checks(answer: "Answer", *, numbered: bool) -> None:
    for check in answer.checks:
        numbers = "".join(f" [{number}]" for number in check.sources if numbered)
        typer.echo(f"{check.support:11} {check.coverage:.2f}  {' '.join(check.text.split())}{numbers}")
    if not answer.checks:
        tell("a quoted sentence has the words of its source, with single spaces: there is nothing to verify")


def _print_sources(shown: "list[Source]", question: str, language: str, *, numbered: bool, every: bool) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    if shown:
        console.print()
    for source in shown:
        line = Text(f"[{source.number}] " if numbered else "").append(
            f"{source.source}:{source.start}-{source.end}", style="cyan"
        )
        console.print(line.append(f"  {source.heading or source.title}", style="dim"))
        if every:
            console.print(Text("    ").append_text(highlighted(source.text, question, language)))


def _talk(reader: "QuestionAnswering", k: int, asked: dict[str, Any], *, every: bool, verify: bool) -> None:
    """Answer one question after the other until the user ends it; report and skip those that can't be answered."""
    history: list[dict[str, str]] = []
    for question in text_io.typed_lines("Type a question; Ctrl-D ends."):
        try:
            answer = _answered(reader, question, k, {**asked, "history": history}, every=every, verify=verify)
        except TextError as error:
            tell(f"error: {error}")
            continue
        if answer.found:
            history += [{"role": "user", "content": question}, {"role": "assistant", "content": answer.text}]

"""The two files by which sentence-transformers knows a folder: ``modules.json``, and prompts and similarity.

Every folder that has a ``gerund.json`` has them. Without them sentence-transformers would take the folder for a plain
checkpoint, read it from left to right, and say nothing; with them it refuses to, and names the class that reads it.

Knows: these files. Does not know: weights, which class a folder needs.
"""

from pathlib import Path

from gerund.exporting.files import write_json
from gerund.models.sentence_transformers_folder import MODULES_FILE, OWN_CLASS, SETTINGS_FILE
from gerund.settings.encoder import EncoderConfig

_NORMALIZE = "sentence_transformers.models.Normalize"
# The prompts that sentence-transformers looks up by itself.
_JOBS = ("query", "document")
_NEEDS = {
    "gerund": {
        "specifier": ">=0.1",
        "reason": "Its attention plan is gerund's; open it with gerund.integrations.sentence_transformers.load(FOLDER)",
    }
}


def write_own_modules(folder: Path, config: EncoderConfig) -> None:
    """Say that gerund's own class reads this folder."""
    write_modules(folder, config, [("", OWN_CLASS)], needs=_NEEDS)


def write_modules(
    folder: Path,
    config: EncoderConfig,
    modules: list[tuple[str, str]],
    *,
    needs: dict[str, dict[str, str]] | None = None,
) -> None:
    """Write both files.

    Args:
        folder: where to.
        config: prompts, and whether vectors get length 1.
        modules: folder and class of each module but the normalisation, which needs no folder of its own.
        needs: packages without which it is not read: a ``specifier`` of versions, and a ``reason``.
    """
    if config.normalize:
        modules = [*modules, (f"{len(modules)}_Normalize", _NORMALIZE)]
    listed = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(modules)]
    write_json(folder / MODULES_FILE, listed)
    prompts, default = prompt_settings(config)
    settings = {"prompts": prompts, "default_prompt_name": default, "similarity_fn_name": config.similarity}
    required = {"requirements": needs} if needs else {}
    write_json(folder / SETTINGS_FILE, {"model_type": "SentenceTransformer", **settings, **required})


def prompt_settings(config: EncoderConfig) -> tuple[dict[str, str], str | None]:
    """Return the prompts by name, and the name of the default one.

    A default prompt is that of queries and documents too, where these have none of their own: ``encode_query`` and
    ``encode_document`` would otherwise put nothing before a text.

    >>> prompt_settings(EncoderConfig(prompt="Query: ", prompts={"document": "Text: "}))
    ({'default': 'Query: ', 'query': 'Query: ', 'document': 'Text: '}, 'default')
    >>> prompt_settings(EncoderConfig(prompts={"document": "Text: "}))
    ({'document': 'Text: '}, None)
    """
    prompts = dict(config.prompts)
    if not config.prompt:
        return prompts, None
    name = next((name for name, text in prompts.items() if text == config.prompt), None)
    if name is None:
        name = "default" if "default" not in prompts else "gerund-default"
    return {name: config.prompt, **dict.fromkeys(_JOBS, config.prompt), **prompts}, name

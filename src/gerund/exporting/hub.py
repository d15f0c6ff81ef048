"""Upload a model's folder to the Hugging Face hub, in one commit, and verify the sizes of its files there."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gerund.checks import flag, place, read_input, read_json
from gerund.errors import ConfigError, DataError, GerundError, ModelError
from gerund.exporting.model_card import PLACE, adapter_card, with_scores
from gerund.models.adapters import ADAPTER_FILES
from gerund.models.folder_files import demand_readable
from gerund.models.library_calls import guarded
from gerund.models.origin import CARD, card_fields, with_fields
from gerund.models.weights import INDEX, WEIGHTS
from gerund.progress import logger
from gerund.settings.encoder import CONFIG_FILE

# What makes a folder one of a model: as gerund and transformers save it, as PEFT does, or as `gerund export` does.
_MODELS = ("config.json", CONFIG_FILE, ADAPTER_FILES[0], "*.gguf", "model.onnx", "openvino_model.xml")
# Files of the base model, which an upload of the adapters alone leaves out.
_OF_BASE = (WEIGHTS, INDEX, "*.safetensors.index.json", "model-*-of-*.safetensors", "config.json",
            "generation_config.json", "tokenizer*", "special_tokens_map.json", "*.jinja", "*.model", "vocab.*",
            "merges.txt", "modules.json", "config_sentence_transformers.json")  # fmt: skip

# Trained parts that gerund.load takes from a full model's folder only.
_WITH_BASE = ("head.safetensors", "late.safetensors", "scorer.safetensors", "transform.safetensors")


@dataclass(frozen=True)
class Upload:
    """The files that go to the hub.

    Attributes:
        repo_id: the repository.
        files: the content of each file by its name there, as a path or as bytes.
        private: whether the repository is private; None for the hub's default.
    """

    repo_id: str
    files: Mapping[str, Path | bytes]
    private: bool | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each file in bytes."""
        return {
            name: len(content) if isinstance(content, bytes) else content.stat().st_size
            for name, content in self.files.items()
        }

    def __str__(self) -> str:
        nbytes = sum(self.sizes.values())
        seen = {True: " (private)", False: " (public)", None: ""}[self.private]
        return f"{len(self.files)} files, {nbytes / 1e6:,.1f} MB, to {self.repo_id}{seen}"


@dataclass(frozen=True)
class Uploaded:
    """The result of an upload.

    Attributes:
        url: the repository's page.
        commit: the hash of the commit.
        sizes: the size of each file in bytes, as the hub reports it.
    """

    url: str
    commit: str
    sizes: Mapping[str, int]


def prepare(
    folder: str | Path,
    repo_id: str,
    *,
    base: bool | None = None,
    base_model: str | None = None,
    results: str | Path | None = None,
    private: bool | None = None,
) -> Upload:
    """Return what an upload of a folder consists of.

    Args:
        folder: a model's folder.
        repo_id: the repository, as OWNER/NAME or NAME.
        base: for a folder with adapters, whether the base model's weights go along.
        base_model: the base's hub id; None for that of the folder's card.
        results: a report of ``gerund eval``, whose scores of this model go into the card.
        private: whether the repository is private.

    Raises:
        ConfigError: the folder has adapters and ``base`` is None; or the base's hub id is needed and not known.
        ModelError: the folder contains no model, or a file that must not be read.
        DataError: ``results`` is not a report of this model.
    """
    folder = place("the folder to upload", folder)
    _check_repository(repo_id)
    paths = _files_of(folder)
    adapters = [name for name in paths if name.endswith(f"/{ADAPTER_FILES[1]}")]
    weights = [name for name in paths if any(Path(name).match(pattern) for pattern in _OF_BASE) and "/" not in name]
    heavy = sum(paths[name].stat().st_size for name in weights)
    if adapters and heavy and base is None:
        light = sum(paths[name].stat().st_size for name in adapters)
        raise ConfigError(
            f"{folder} has adapters ({light / 1e6:,.1f} MB) and its base model ({heavy / 1e6:,.1f} MB), which training "
            "left as it was; say whether the base goes along: base=True or base=False (--with-base or --adapter-only)"
        )
    if base is False and not adapters:
        raise ConfigError(f"{folder} has no adapter, which could go without its base; remove base=False")
    others = [name for name in _WITH_BASE if name in paths]
    if base is False and others:
        raise ConfigError(f"{folder} also has {others[0]}, which opens only together with its base; take base=True")
    known = base_model or card_fields(folder / CARD).get("base_model")
    files: dict[str, Path | bytes] = dict(paths)
    if base is False:
        if not isinstance(known, str):
            raise ConfigError(f"nothing in {folder} names its base model on the hub; give its id as base_model")
        files = {name: path for name, path in files.items() if name not in weights}
    card = _card(
        folder, repo_id, base_model or (str(known) if base is False else None), alone=base is False, results=results
    )
    return Upload(repo_id, {**files, **({CARD: card.encode()} if card else {})}, private)


def upload(
    prepared: Upload,
    *,
    token: str | bool | None = None,
    commit_message: str | None = None,
    revision: str | None = None,
) -> Uploaded:
    """Create the repository if it does not exist, upload in one commit, and verify the sizes.

    Args:
        prepared: the files.
        token: the access token; None for the stored one.
        commit_message: of the commit.
        revision: the branch, created if it does not exist; None for main.

    Raises:
        ModelError: the hub cannot be reached, refuses the upload, or has other sizes afterwards.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api, repo_id = HfApi(token=token), prepared.repo_id
    what = f"cannot upload to {repo_id}"
    url = _called(what, api.create_repo, repo_id, private=prepared.private, exist_ok=True)
    repo_id = str(url.repo_id)
    if revision is not None:
        _called(what, api.create_branch, repo_id, branch=revision, exist_ok=True)
    done = _called(
        what,
        api.create_commit,
        repo_id,
        [CommitOperationAdd(name, content) for name, content in prepared.files.items()],
        commit_message=commit_message or "Upload a model with gerund",
        revision=revision,
    )
    infos = _called(what, api.get_paths_info, repo_id, list(prepared.files), revision=revision)
    sizes = {item.path: int(item.size) for item in infos}
    if wrong := [name for name, size in prepared.sizes.items() if sizes.get(name) != size]:
        raise ModelError(
            f"{repo_id} has {wrong[0]} with {sizes.get(wrong[0], 'no')} bytes after the upload; upload again"
        )
    return Uploaded(str(url), str(done.oid), sizes)


def push_model(
    save: Callable[..., None],
    repo_id: str,
    *,
    base: bool | None,
    base_model: str | None,
    results: str | Path | None,
    private: bool | None,
    **options: Any,
) -> Uploaded:
    """Save a model into a temporary folder by ``save``, and upload it; see ``LanguageModel.push_to_hub``."""
    _check_repository(repo_id)
    flag("private", private) if private is not None else None
    with tempfile.TemporaryDirectory() as room:
        folder = Path(room) / repo_id.rpartition("/")[2]
        save(folder)
        try:
            prepared = prepare(folder, repo_id, base=base, base_model=base_model, results=results, private=private)
        except GerundError as error:
            raise type(error)(str(error).replace(str(folder), "this model")) from None
        logger.warning("uploading %s", prepared)
        return upload(prepared, **options)


def _check_repository(repo_id: Any) -> None:
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo_id)
    except (HFValidationError, TypeError) as error:
        raise ConfigError(f"{repo_id!r} is no repository on the hub: {str(error).split(': ', 1)[0]}") from error


def _files_of(folder: Path) -> dict[str, Path]:
    """Return the files to upload by their names in the folder; hidden files and folders are left out."""
    if not folder.is_dir() or not any(next(folder.glob(pattern), None) for pattern in _MODELS):
        raise ModelError(f"{folder} holds no model; give a folder of lm.save, or of gerund convert, train or export")
    files = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if any(part.startswith(".") or part == "__pycache__" for part in name.parts):
            continue
        demand_readable(path, folder)
        if path.is_file():
            files[name.as_posix()] = path
    if other := next((name for name in files if name.endswith("/tokenizer.json")), None):
        raise ModelError(f"{folder} holds several models, such as {Path(other).parent}; give the folder of one")
    return files


def _card(folder: Path, repo_id: str, base_model: str | None, *, alone: bool, results: str | Path | None) -> str:
    """Return the model card as it is uploaded."""
    path = folder / CARD
    try:
        text = read_input(path) if path.is_file() else ""
    except ValueError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error
    if alone and base_model is not None:
        text = adapter_card(text, folder, base_model)
    elif base_model is not None:
        text = with_fields(text, {"base_model": base_model})
    if results is not None:
        stored = folder / CONFIG_FILE
        settings = read_json(stored) if stored.is_file() else {}
        fingerprint = settings.get("fingerprint", "") if isinstance(settings, dict) else ""
        text = with_scores(text, place("results", results), str(fingerprint))
    return text.replace(PLACE, repo_id)


def _called(what: str, call: Any, *arguments: Any, **options: Any) -> Any:
    """Call the hub; its failures become one sentence."""
    try:
        return guarded(what, call, *arguments, **options)
    except ModelError as error:
        status = getattr(getattr(error.__cause__, "response", None), "status_code", None)
        if status in (401, 403):
            raise ModelError(
                f"{what}: the hub refuses it with this token; log in by `hf auth login`, or set HF_TOKEN to one that "
                "may write"
            ) from error
        raise

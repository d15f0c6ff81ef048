"""Model cards, and uploads of a model's folder to the Hugging Face hub.

A card is the ``README.md`` in a model's folder, for users of gerund, transformers and sentence-transformers. Its
examples run as they are once ``PLACE`` is the folder or its id on the hub. An upload is one commit, after which the
sizes of the files there are verified.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gerund.checks import flag, place, read_input, read_json
from gerund.errors import ConfigError, DataError, GerundError, ModelError
from gerund.inference.encode.runtime import EncoderRuntime
from gerund.models.adapters import ADAPTER_FILES
from gerund.models.architectures import NoHead
from gerund.models.folder_files import demand_readable
from gerund.models.kinds import is_encoder_decoder
from gerund.models.library_calls import guarded
from gerund.models.origin import CARD, GENERATED, Origin, card_fields, front_matter, origin_of, with_fields
from gerund.models.saved_settings import read_adapters, read_saved
from gerund.models.sentence_transformers_folder import prompt_settings
from gerund.models.sources import find_spec
from gerund.models.weights import INDEX, WEIGHTS
from gerund.progress import logger
from gerund.settings.encoder import CONFIG_FILE, JOBS
from gerund.settings.model_spec import ModelSpec
from gerund.types import UNITS

PLACE = "PATH/TO/THIS/FOLDER"
"""The model's name in the card's examples; replaced by the repository's id on upload."""
_USE, _SETTINGS, _SCORES, _LICENSE = "## Use it with gerund\n", "## Encoder settings\n", "## Scores\n", "## License\n"
_UNKNOWN = (
    "The license of the base model isn't known: its folder has no model card. Find out and state it before you publish "
    "this model.\n"
)


def write_card(folder: Path, runtime: EncoderRuntime, origin: Origin, *, adapters: Sequence[str] = ()) -> None:
    """Write ``README.md`` and the base's license files into a saved model's folder.

    Args:
        folder: the folder.
        runtime: the model.
        origin: the model that it was made from.
        adapters: the jobs that have an adapter.
    """
    for path in origin.files:
        if not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)
    generates = not isinstance(runtime.model.get_output_embeddings(), NoHead)
    does = "a reranker" if runtime.why_no_vectors else "a generator and an encoder" if generates else "an encoder"
    parts = [
        f"# {origin.name or 'A language model'}, as {does}\n",
        _about(runtime, origin, generates=generates),
        _USE,
        _with_gerund(runtime, generates=generates),
        *_with_others(runtime, generates=generates),
        *([] if runtime.why_no_vectors else [_SETTINGS, _settings(runtime, adapters)]),
        *_training(folder),
        _LICENSE,
        _terms(origin),
    ]
    text = front_matter(_fields(runtime, origin, generates=generates)) + "\n" + "\n".join(parts)
    (folder / CARD).write_text(text, encoding="utf-8")


def _fields(runtime: EncoderRuntime, origin: Origin, *, generates: bool) -> dict[str, Any]:
    kinds = ["text-ranking"] if runtime.why_no_vectors else ["feature-extraction", "sentence-similarity"]
    fields: dict[str, Any] = {
        **origin.terms,
        "library_name": "transformers",
        "pipeline_tag": "text-generation" if generates and not runtime.why_no_vectors else kinds[0],
        "tags": [GENERATED, *kinds],
    }
    return fields if origin.base_model is None else {**fields, "base_model": origin.base_model}


def _about(runtime: EncoderRuntime, origin: Origin, *, generates: bool) -> str:
    config = runtime.model.config
    name = f"[{origin.base_model}](https://huggingface.co/{origin.base_model})" if origin.base_model else origin.name
    made = f", made from {name}" if name else ""
    does = "generates text and embeds it" if generates else "embeds text"
    does = f"{does}, in vectors of {runtime.width} dimensions"
    if runtime.why_no_vectors:
        does = "ranks documents for a query"
    return (
        f"A {config.model_type} language model of {runtime.n_layers} layers{made}. With one set of weights "
        f"it {does}. It was saved by gerund (`pip install gerund`).\n"
    )


def _python(*lines: str) -> str:
    return "```python\n" + "\n".join(lines) + "\n```\n"


def _with_gerund(runtime: EncoderRuntime, *, generates: bool) -> str:
    prompts = [name for name, prompt in prompt_settings(runtime.config)[0].items() if prompt]
    load = ["import gerund", "", f'lm = gerund.load("{PLACE}")']
    if runtime.why_no_vectors:
        documents = '["A cat sleeps on the sofa.", "Bread rises because of yeast."]'
        return _python(*load, f'print(lm.rerank("Why does dough rise?", {documents}))')
    lines = [
        *load,
        'vectors = lm.encode(["A cat sleeps on the sofa.", "Bread rises because of yeast."])',
        'print(lm.similarity(vectors, ["Why does dough rise?"]))',
    ]
    lines += [f'queries = lm.encode(["Why does dough rise?"], prompt_name="{prompts[0]}")'] if prompts else []
    lines += ['print(lm.generate("Once upon a time", max_new_tokens=20)[0].text)'] if generates else []
    return _python(*lines)


def adapter_card(text: str, folder: Path, base_model: str) -> str:
    """Return a model's card for a repository that has its adapters alone.

    Args:
        text: the model's card; the empty string without one.
        folder: the model's folder.
        base_model: the base's id on the hub.
    """
    settings, adapters = read_saved(folder), read_adapters(folder)
    given = {name: value for name, value in settings.said().items() if value is not None} if settings else {}
    names = {"encode": "adapter", "infill": "infill_adapter"}
    options = [f'{option}=f"{{folder}}/{adapters[job].name}"' for job, option in names.items() if job in adapters]
    options += [f"{name}={value!r}" for name, value in given.items()]
    use = _python(
        "from pathlib import Path",
        "",
        "import gerund",
        "from huggingface_hub import snapshot_download",
        "",
        f'place = "{PLACE}"',
        "folder = place if Path(place).is_dir() else snapshot_download(place)",
        "lm = gerund.load(",
        f'    "{base_model}",',
        *(f"    {option}," for option in options),
        ")",
        'vectors = lm.encode(["A cat sleeps on the sofa.", "Bread rises because of yeast."])',
    )
    about = f"This repository has only the adapters of [{base_model}](https://huggingface.co/{base_model}).\n\n"
    before, _, rest = text.partition(_USE)
    body = f"{before}{_USE}\n{about}{use}\n{''.join(rest.partition(_SETTINGS)[1:])}"
    return with_fields(body, {"base_model": base_model, "library_name": "peft"})


def _with_others(runtime: EncoderRuntime, *, generates: bool) -> list[str]:
    kind = "AutoModelForSeq2SeqLM" if is_encoder_decoder(runtime.model) else "AutoModelForCausalLM"
    parts = [
        "## Use it with transformers\n",
        "It opens as the plain language model, without the encoder's settings and adapters:\n",
        _python(
            f"from transformers import {kind}, AutoTokenizer",
            "",
            f'model = {kind}.from_pretrained("{PLACE}")',
            f'tokenizer = AutoTokenizer.from_pretrained("{PLACE}")',
            'inputs = tokenizer("Once upon a time", return_tensors="pt")',
            "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=20)[0]))",
        ),
    ]
    others = (
        "For an encoder that plain `SentenceTransformer` opens, `gerund export` the folder as `sentence-transformers`; "
        "that is possible for the plans `causal` and `bidir`.\n"
    )
    if runtime.why_no_vectors:
        return parts if generates else []
    return [
        *(parts if generates else []),
        "## Use it with sentence-transformers\n",
        "sentence-transformers has no attention plans, so it uses gerund's module (`pip install 'gerund[st]'`):\n",
        _python(
            "from gerund.integrations.sentence_transformers import load",
            "",
            f'model = load("{PLACE}")',
            'vectors = model.encode(["A cat sleeps on the sofa.", "Bread rises because of yeast."])',
        ),
        others,
    ]


def _settings(runtime: EncoderRuntime, adapters: Sequence[str]) -> str:
    config = runtime.config
    prompts, default = prompt_settings(config)
    rows = {
        "attention plan": f"`{config.plan_label(runtime.n_layers)}`",
        "pooling": f"`{config.pooling}`",
        "dimensions": runtime.width,
        "normalized": "yes" if config.normalize else "no",
        "compare by": config.similarity,
        "longest text": "no limit" if runtime.max_length is None else f"{runtime.max_length} tokens",
        **{f"prompt `{name}`": f"`{json.dumps(text, ensure_ascii=False)}`" for name, text in prompts.items() if text},
        "default prompt": f"`{default}`" if default else "none",
        **{f"`{name}`": f"`{getattr(config, name)}`" for name in config.methods},
        "adapters": ", ".join(f"to {job}" for job in JOBS if job in adapters) or "none",
    }
    lines = [f"| {name} | {str(value).replace('|', chr(92) + '|')} |" for name, value in rows.items()]
    return "\n".join(["| setting | value |", "|---|---|", *lines]) + f"\n\nThey are stored in `{CONFIG_FILE}`.\n"


def _training(folder: Path) -> list[str]:
    """Return a section about the training, where its record is in the folder."""
    records = sorted(folder.glob("training*.json"))
    if not records:
        return []
    lines = []
    for path in records:
        try:
            record = read_json(path)
            kinds = ", ".join(f"`{objective['kind']}`" for objective in record["recipe"]["objectives"])
            lines.append(f"- [`{path.name}`]({path.name}): {kinds}, {record['steps']} steps\n")
        except (DataError, LookupError, TypeError):
            continue
    return ["## Training\n", "The records have the complete recipe and its result:\n", "".join(lines)] if lines else []


def _terms(origin: Origin) -> str:
    terms = origin.terms
    if not terms.get("license"):
        return _UNKNOWN if origin.name else "No license is stated. State one before you publish this model.\n"
    name = terms.get("license_name") or terms["license"]
    link = terms.get("license_link")
    called = f"[{name}]({link})" if isinstance(link, str) and link.startswith("http") else f"`{name}`"
    files = ", ".join(f"[{path.name}]({path.name})" for path in origin.files)
    return f"That of the base model: {called}.{f' See {files}.' if files else ''}\n"


def with_scores(text: str, report: Path, fingerprint: str) -> str:
    """Return a card with the scores of an evaluation.

    Args:
        text: the card.
        report: the folder of ``gerund eval``, or its results.json.
        fingerprint: the encoder's, by which its scores are found.

    Raises:
        DataError: it is not a report, or it has no scores of this model.
    """
    path = report / "results.json" if report.is_dir() else report
    data = read_json(path)
    try:
        labels = {item["label"]: item["description"].get("fingerprint") for item in data["systems"]}
        label = next((label for label, measured in labels.items() if measured == fingerprint), None)
        rows = [
            (row["task"], row["score"]["main"], _shown(row["score"]["metrics"][row["score"]["main"]], row["unit"]))
            for row in data["scores"]
            if row["system"] == label
        ]
    except (LookupError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is not the results.json of gerund eval") from error
    if not rows:
        measured = ", ".join(f"{name} ({identity})" for name, identity in labels.items()) or "no models"
        raise DataError(f"{path} has no scores of the encoder {fingerprint}; it has {measured}")
    listed = "".join(f"| {task} | {metric} | {value:g} |\n" for task, metric, value in rows)
    section = f"{_SCORES}\nMeasured by `gerund eval`.\n\n| task | metric | score |\n|---|---|---|\n{listed}\n"
    body = re.sub(rf"{_SCORES}.*?(?=^## |\Z)", "", text, flags=re.DOTALL | re.MULTILINE)
    before, license_, after = body.partition(_LICENSE)
    return with_fields(before + section + license_ + after, {}, scores=rows)


def _shown(value: float, unit: str) -> float:
    """Return a score as the tables of a report show it."""
    factor, decimals = UNITS[unit]
    return round(factor * value, decimals)


def add_origin(path: Path, origin: Origin) -> None:
    """Add base model and license to the metadata of an export's README, if they are known."""
    fields = {**origin.terms, **({"base_model": origin.base_model} if origin.base_model else {})}
    if fields and path.is_file():
        path.write_text(with_fields(path.read_text(encoding="utf-8"), fields), encoding="utf-8")


def origin_of_spec(spec: ModelSpec | None) -> Origin:
    """Return where a loaded model comes from; a model in memory comes from nowhere that is known."""
    if spec is None:
        return Origin("")
    try:
        return origin_of(find_spec(spec))
    except GerundError:  # its folder is gone
        return Origin("")


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
    prepared: Upload, *, token: str | bool | None = None, commit_message: str | None = None, revision: str | None = None
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

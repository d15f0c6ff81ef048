"""``gerund convert``: save encoder settings with a checkpoint."""

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gerund.cli import options
from gerund.cli.text_io import tell
from gerund.errors import ConfigError
from gerund.settings.encoder import EncoderConfig
from gerund.settings.templates import NO_TRANSFORM

if TYPE_CHECKING:
    from gerund.language_model import LanguageModel
    from gerund.models.sources import Source
    from gerund.settings.encoder import Job
    from gerund.settings.model_spec import ModelSpec

# How the adapters of the other jobs were trained, beside the encoder's own training.json.
_REPORTS: "dict[Job, str]" = {"infill": "training-infill.json", "score": "training-score.json"}


@options.takes(spec=options.model("MODEL", *options.ENCODER, "infill_adapter", "scorer"))
def command(
    output: options.Output,
    spec: "ModelSpec",
    merge: Annotated[
        bool, typer.Option("--merge", help="Write the adapter into the weights: generation then uses it as well.")
    ] = False,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Make a language model that also encodes, without training.

    OUT gets the model's own files, byte for byte, and gerund.json with the encoder's settings. It still opens as a
    plain language model and generates what the model generated. Before anything is written, a probe verifies that the
    attention plan is applied in every layer.

    Adapters are copied along, and are inactive while the model generates. One can encode, another infill, a third
    score, each trained on its own. With --merge the encoder's goes into the weights instead, and the model
    generates with it too.

    For example:

        gerund convert ./model ./encoder

        gerund convert ./model ./encoder --attention mask0+bidir --k 18 --k0 10 --prompt "Represent this text:"

        gerund convert ./model ./encoder --attention bidir --pooling last --adapter ./lora

        gerund convert ./model ./merged --adapter ./lora --merge

        gerund convert runs/gur/model ./all --infill-adapter runs/magnet/model --scorer runs/rankgen/model
    """
    from gerund.entry import load
    from gerund.exporting.formats import convert
    from gerund.jobs.files import require_new_folder
    from gerund.models import loading
    from gerund.models.sources import find

    if merge and (spec.infill_adapter or spec.scorer):
        raise ConfigError(
            "--merge writes the encoder's adapter into the weights, which no other adapter was trained on"
        )
    require_new_folder(output, overwrite=force)
    source = find(spec.model)
    lm = load(spec, dtype=loading.own_dtype(source))
    if lm.encoder.transform != NO_TRANSFORM and lm.runtime.transform is None:
        raise ConfigError(
            f"the transform {lm.encoder.transform!r} is fitted on texts like those that will be encoded; give a file "
            "of them as --sample"
        )
    if merge and lm.runtime.adapter is None:
        raise ConfigError("--merge writes an adapter into the weights and this model has none; give --adapter FOLDER")
    if spec.without_auto().adapter is None:
        _warn_of_plan(source, lm)
    if merge:
        identity = lm.export(output, "merged", overwrite=force).fingerprint
        warn_of_merging(lm)
    else:
        identity = lm.fingerprint()
        reports = _reports(spec.infill_adapter, spec.scorer)
        convert(source, lm, output, more=reports, without=_outdated(source, lm), overwrite=force)
    _tell(lm, output, identity, as_json)


def warn_of_merging(lm: "LanguageModel") -> None:
    """Warn of what a merged folder lacks: what was trained with the adapter on the original weights."""
    left = {
        "its infilling adapter": lm.adapters.hash("infill") not in ("", lm.adapters.hash("encode")),
        "its scorer": lm.scorer is not None and lm.scorer.has_own_config,
        "its reranker": lm.adapters.hash("rerank") not in ("", lm.adapters.hash("encode")),
    }
    names = [name for name, is_left in left.items() if is_left]
    if names:
        those = f"{' and '.join(names)} {'fit' if names[1:] else 'fits'} the weights of before"
        tell(
            f"warning: {those} and {'are' if names[1:] else 'is'} left out; the model now generates with the "
            "adapter that encodes, which may spoil its texts"
        )


def _warn_of_plan(source: "Source", lm: "LanguageModel") -> None:
    """Say that the model's own adapter is to be read otherwise than it was trained."""
    from gerund.models.loading import settings_folder
    from gerund.models.saved_settings import read_saved

    settings = settings_folder(source)
    saved = None if settings is None else read_saved(settings)
    if saved is None or lm.runtime.adapter is None:
        return
    plan = saved.applied_to(EncoderConfig()).with_defaults(lm.n_layers).attention
    if plan != lm.encoder.with_defaults(lm.n_layers).attention:
        tell(f"warning: the adapter was trained under {plan.name}; --adapter none leaves it aside")


def _outdated(source: "Source", lm: "LanguageModel") -> set[str]:
    """Return the names of the reports about adapters that the new folder does not have."""
    from gerund.models.adapters import Adapters
    from gerund.models.loading import settings_folder
    from gerund.models.saved_settings import read_adapters

    settings = settings_folder(source)
    if settings is None:
        return set()
    before = Adapters(read_adapters(settings))
    reports: dict[Job, str] = {"encode": "training.json", **_REPORTS, "rerank": "training-rerank.json"}
    gone = (job for job in before.folders if before.hash(job) != lm.adapters.hash(job))
    return {reports[job] for job in gone}


def _reports(infill_adapter: str | None, scorer: str | None) -> dict[str, Path]:
    """Return how the other adapters were trained, by the names that these reports get beside the model's own."""
    from gerund.models.folder_files import demand_readable

    folders = {"infill": infill_adapter, "score": scorer}
    reports = {name: where for job, name in _REPORTS.items() if (where := folders[job])}
    paths = {name: Path(where).expanduser() / "training.json" for name, where in reports.items()}
    there = {name: path for name, path in paths.items() if path.is_file()}
    for path in there.values():
        demand_readable(path, path.parent)
    return there


def _tell(lm: "LanguageModel", output: Path, identity: str, as_json: bool) -> None:
    plan = lm.encoder.with_defaults(lm.n_layers).attention
    numbers: dict[str, Any] = {"k": plan.k, "k0": plan.k0, "skips": plan.skips}
    plan_settings = {name: value for name, value in numbers.items() if value is not None}
    if as_json:
        about = {"attention": plan.name, **plan_settings, "pooling": lm.encoder.pooling, "fingerprint": identity}
        typer.echo(json.dumps({"folder": str(output), **about}))
        return
    which = "".join(f" {name}={value}" for name, value in plan_settings.items())
    what = f"{lm.model.config.model_type}, {lm.n_layers} layers"
    typer.echo(f"{output}: {what}, {plan.name}{which}, {lm.encoder.pooling} pooling")
    typer.echo(f"try: gerund embed texts.txt -m {shlex.quote(str(output))} -o vectors.parquet")

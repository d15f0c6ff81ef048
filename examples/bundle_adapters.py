"""Make a folder of adapters that comes with gerund from what a training saved: without weights, config and tokenizer.

    python examples/bundle_adapters.py runs/mine/model BASE src/gerund/assets/smollm2

BASE is the model that was trained from: a folder, or a GGUF file. The folder of adapters says by which sample of its
weights the base is recognized, in any form. What was trained is stored in bfloat16, at most 12 MB a file.
"""

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from gerund.models.bundled import BASE, SAMPLE, WeightSample, numbers_of
from gerund.models.heads import ProjectionHead, read_head
from gerund.models.loading import read_config, read_skeleton, read_tokenizer
from gerund.models.sources import find
from gerund.models.weights import weight_files

MOST_BYTES = 12_000_000
FILES = ("scorer.json", "scorer.safetensors", "training*.json")
OTHER_JOBS = ("infill", "score")
TEXT = "Naïve cafés — 12,345 µm of snow; def f(x): return x['key'] \n\t日本語 <|end|>"


def main() -> None:
    """Read the arguments and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("saved", type=Path, help="the folder that a training or gerund convert wrote")
    parser.add_argument("base", help="the model that it was trained from: a folder or a GGUF file")
    parser.add_argument("folder", type=Path, help="the folder to write; files that are there stay")
    given = parser.parse_args()
    settings = json.loads((given.saved / "gerund.json").read_text(encoding="utf-8"))
    # An adapter to encode with would be active for the other jobs too.
    settings["adapters"] = {job: settings.get("adapters", {}).get(job) for job in OTHER_JOBS}
    places = {settings["encoder"]["adapter"], *settings["adapters"].values()} - {None}
    given.folder.mkdir(parents=True, exist_ok=True)
    for place in sorted(places):
        copy_adapter(given.saved / place, given.folder / place)
    for path in (path for pattern in FILES for path in given.saved.glob(pattern)):
        shutil.copyfile(path, given.folder / path.name)
    if (head := read_head(given.saved)) is not None:
        round_to_bfloat16(head)
        head.save(given.folder)
        check_size(given.folder / "head.safetensors")
    (given.folder / "gerund.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", "utf-8")
    source = find(given.base)
    config = read_config(source)
    tokenizer = read_skeleton(source.gguf, config)[1] if source.gguf is not None else read_tokenizer(source)
    write_base(given.folder, config, tokenizer, weight_files(source))


def write_base(folder: Path, config: Any, tokenizer: Any, files: Sequence[Path]) -> None:
    """Write how the base is recognized: by numbers of its config, the tokens of a text, and a sample of its weights."""
    sample = WeightSample.of(files, config.num_hidden_layers)
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    base = {"numbers": numbers_of(config), "text": TEXT, "ids": ids, "sample": sample.rows}
    (folder / BASE).write_text(json.dumps(base, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    save_file(
        {name: torch.from_numpy(rows).half().contiguous() for name, rows in sample.tensors.items()}, folder / SAMPLE
    )


def round_to_bfloat16(head: ProjectionHead) -> None:
    """Round a head's trained weights, which are then stored in two bytes each."""
    for parameter in head.parameters():
        parameter.data = parameter.data.bfloat16().float()


def copy_adapter(source: Path, target: Path) -> None:
    """Copy a PEFT folder, its weights in bfloat16."""
    target.mkdir(exist_ok=True)
    shutil.copyfile(source / "adapter_config.json", target / "adapter_config.json")
    tensors = load_file(source / "adapter_model.safetensors")
    path = target / "adapter_model.safetensors"
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    check_size(path)


def check_size(path: Path) -> None:
    """End the program for a file that is too large to come with gerund."""
    if path.stat().st_size > MOST_BYTES:
        raise SystemExit(f"{path} has {path.stat().st_size / 1e6:.1f} MB; at most {MOST_BYTES / 1e6:.0f} MB are meant")


if __name__ == "__main__":
    main()

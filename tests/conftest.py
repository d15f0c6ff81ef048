"""What all tests share."""

import gc
import os
import random
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch

# Before any library looks: no test may reach for the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
torch.set_num_threads(1)
# To search for garbage in all that libraries make while they are imported takes as long as to import them.
gc.disable()

# Which cases of a sweep `make test` and `make check` run; another number takes others.
SEED = os.environ.get("SWEEP_SEED", "0")
SHARED = Path(__file__).resolve().parents[2] / "shared"
STORIES = SHARED / "models" / "stories260k"


@pytest.hookimpl(tryfirst=True)  # before the marks are looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave ``quick`` cases of each sweep to ``make test`` and ``check`` of them to ``make check``; mark the others."""
    sweeps: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sweep") is not None:
            sweeps[str(item.path), item.nodeid.partition("[")[0]].append(item)
    for (_, name), cases in sweeps.items():
        mark = cases[0].get_closest_marker("sweep")
        assert mark is not None
        quick, check = mark.kwargs["quick"], mark.kwargs.get("check")
        eligible = [item for item in cases if item.get_closest_marker("full") is None]
        chosen = sample(eligible, check or quick, random.Random(f"{SEED} {name}"))
        for item in cases:
            if item not in chosen[:quick]:
                item.add_marker(pytest.mark.slow)
            if check and item not in chosen:
                item.add_marker(pytest.mark.full)


def sample(cases: list[pytest.Item], size: int, chance: random.Random) -> list[pytest.Item]:
    """Choose cases that show each value of each parameter about equally often, as every beginning of them does."""
    rest = chance.sample(cases, len(cases))
    seen: Counter[tuple[str, int]] = Counter()
    chosen = []
    for _ in range(min(size, len(rest))):
        item = min(rest, key=lambda item: sum(seen[value] for value in values_of(item)))
        rest.remove(item)
        seen.update(values_of(item))
        chosen.append(item)
    return chosen


def values_of(case: pytest.Item) -> list[tuple[str, int]]:
    """Return the values of a case's parameters, each as the object that all cases with it share."""
    return [(name, id(value)) for name, value in case.callspec.params.items()]


def pytest_collection_finish() -> None:
    """Search for garbage from here on, in what tests make."""
    gc.enable()
    gc.freeze()


@pytest.fixture(scope="session")
def stories_folder() -> Path:
    """Folder of a real pretrained model of 260k parameters; the test is skipped without it."""
    if not STORIES.is_dir():
        pytest.skip("needs ../shared/models/stories260k")
    return STORIES


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Folder of real evaluation data; the test is skipped without it."""
    if not (SHARED / "data").is_dir():
        pytest.skip("needs ../shared/data")
    return SHARED / "data"


@pytest.fixture(scope="session")
def bundled():
    """The bundled model as it is loaded by default, which no test may change; the test is skipped without it."""
    import gerund
    from gerund.entry import load  # not gerund.load, in whose place a test may have put this fixture

    if not (Path(gerund.__file__).parent / "assets" / "default" / "config.json").is_file():
        pytest.skip("the bundled model is not in this checkout")
    return load()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Llama with a byte-level tokenizer, as transformers saves it (float32)."""
    from tests.tiny import save_tiny

    return save_tiny(tmp_path_factory.mktemp("models") / "tiny-llama")

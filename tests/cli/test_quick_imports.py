"""What short commands leave out at their start is there as soon as something asks for it."""

import json

import pytest

from tests.cli.helpers import run_python

SCRIPT = """
import sys
from gerund.cli import quick_imports
quick_imports.prepare(["gerund", "search"])
import gerund
lm = gerund.load()
vector = lm.encode("the cat")
left_out = ("scipy", "pandas", "sympy.core", "torch._dynamo.eval_frame", "torch.distributed.tensor",
            "gerund.exporting.gguf")
print([name for name in left_out if name in sys.modules])
import torch
from torch._dynamo.exc import Unsupported
import torch.distributed.tensor
assert isinstance(sys.modules["torch._dynamo"].config, object) and torch._dynamo.exc.Unsupported is Unsupported
assert type(torch._dynamo).__name__ == "module"
assert torch.distributed.tensor.DTensor.__module__ != "gerund.cli.quick_imports"
import scipy.optimize
import pandas
assert pandas.DataFrame({"a": [1]}).shape == (1, 1)
with torch.device("meta"):
    assert torch.arange(2).tolist() == [0, 1] and torch.arange(2, device="meta").device.type == "meta"
double = torch.compile(lambda x: 2 * x, backend="eager")
assert double(torch.ones(2)).tolist() == [2, 2]
assert (lm.encode("the cat") == vector).all()
"""


@pytest.mark.slow
def test_what_is_left_out_comes_when_it_is_asked_for(bundled) -> None:
    assert run_python("-c", SCRIPT).stdout == "[]\n"


def test_the_list_of_models_is_what_transformers_reads() -> None:
    from transformers.models import __path__ as folder
    from transformers.utils.import_utils import create_import_structure_from_path

    from gerund.cli.quick_imports import _lists, _structure

    structure = create_import_structure_from_path(folder[0])
    assert _structure(json.loads(json.dumps(_lists(structure)))) == structure
    assert create_import_structure_from_path(f"{folder[0]}/__init__.py") == structure

"""Export trained token vectors as a folder that sentence-transformers' ``MultiVectorEncoder`` loads.

It needs a causal or fully bidirectional encoder. Where sentence-transformers is installed, the folder is loaded and its
scores are compared with gerund's before it is saved.
"""

import importlib.util
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from gerund.errors import ConfigError, ModelError
from gerund.exporting.sentence_transformers import obstacle_in_attention, write_body
from gerund.exporting.shared import Export, silence
from gerund.inference.encode.multi import TokenReader
from gerund.inference.encode.runtime import EncoderRuntime
from gerund.models import loading
from gerund.models.late_head import LateHead
from gerund.models.sentence_transformers_folder import (
    MODULE_FILE,
    MODULE_WEIGHTS,
    MODULES_FILE,
    SETTINGS_FILE,
    write_json,
)
from gerund.scoring.late_interaction import maxsim
from gerund.settings.templates import LAST_LAYER

_BASE, _MULTI = "sentence_transformers.base.modules", "sentence_transformers.multi_vector_encoder.modules"
_QUERY, _DOCUMENTS = "how to bake bread", ("Trains run on rails.", "Bread is baked, of flour and water.")
# How far a mean cosine may be off; half precision rounds more.
_NEAR, _NEAR_HALF = 1e-4, 2e-3


def write(runtime: EncoderRuntime, work: Path, folder: Path, *, late: LateHead | None) -> Export:
    """Fill ``work`` for ``MultiVectorEncoder``.

    Raises:
        ConfigError: token vectors were not trained, or aren't those that sentence-transformers would make.
        ModelError: sentence-transformers computes other scores.
    """
    why_not = _obstacle(runtime, late)
    if late is None or why_not:
        raise ConfigError(f"sentence-transformers can't make these token vectors: {why_not}")
    limits = {"query_length": late.config.query_length, "document_length": late.config.document_length}
    write_body(runtime, work, {name: value for name, value in limits.items() if value is not None})
    dimensions, width = late.projection_ED.shape
    layer = {"in_features": width, "out_features": dimensions, "bias": False}
    layer["activation_function"] = "torch.nn.modules.linear.Identity"
    states = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
    configs = {
        "1_Dense": (f"{_BASE}.dense.Dense", {**layer, **states}),
        "2_MultiVectorMask": (
            f"{_MULTI}.multi_vector_mask.MultiVectorMask",
            {"skiplist_words": list(late.config.skipped), "skiplist_tasks": ["document"]},
        ),
        "3_Normalize": (f"{_BASE}.normalize.Normalize", states),
    }
    listed = [{"idx": 0, "name": "0", "path": "", "type": f"{_BASE}.transformer.Transformer"}]
    for number, (name, (kind, config)) in enumerate(configs.items(), start=1):
        (work / name).mkdir()
        write_json(work / name / MODULE_FILE, config)
        listed.append({"idx": number, "name": str(number), "path": name, "type": kind})
    weight = torch.from_numpy(np.ascontiguousarray(late.projection_ED))
    save_file({"linear.weight": weight}, work / "1_Dense" / MODULE_WEIGHTS)
    write_json(work / MODULES_FILE, listed)
    prompts = {"query": late.config.query, "document": late.config.document}
    settings = {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "meanmaxsim"}
    write_json(work / SETTINGS_FILE, {"model_type": "MultiVectorEncoder", **settings})
    (work / "README.md").write_text(_readme(runtime, dimensions), encoding="utf-8")
    if importlib.util.find_spec("sentence_transformers") is not None:
        _compare(TokenReader(runtime.in_own_type(), late.config, late), work)
    return Export(folder, f"sentence_transformers.MultiVectorEncoder({str(folder)!r})", "")


def _obstacle(runtime: EncoderRuntime, late: LateHead | None) -> str:
    if late is None:
        return "they were not trained; `gerund train relevance` trains them"
    if late.config.counts != "all":
        return "only the text's own tokens have vectors; train them with objectives.late.counts=all"
    if late.config.layers != LAST_LAYER:
        return f"they are states of the layers {late.config.layers}, and not of the last"
    return obstacle_in_attention(runtime)


def _compare(reader: TokenReader, folder: Path) -> None:
    """Refuse a folder of which sentence-transformers makes other scores."""
    from sentence_transformers import MultiVectorEncoder

    with silence("sentence_transformers"), loading.quiet():
        model = MultiVectorEncoder(str(folder), device="cpu", local_files_only=True)
        asked = model.encode_query([_QUERY], show_progress_bar=False)
        offered = model.encode_document(list(_DOCUMENTS), show_progress_bar=False)
        theirs = model.similarity(asked, offered)[0].float().numpy()
    [query_QE] = reader.vectors(reader.tokens([_QUERY], is_query=True))
    documents = reader.vectors(reader.tokens(list(_DOCUMENTS), is_query=False))
    ours = np.array([maxsim(query_QE, document_TE) for document_TE in documents])
    near = _NEAR if reader.runtime.model.dtype in (torch.float32, torch.float64) else _NEAR_HALF
    if (apart := float(np.abs(ours - theirs).max())) > near:
        raise ModelError(
            f"sentence-transformers makes other scores of the exported folder (they differ by {apart:.1g})"
        )


def _readme(runtime: EncoderRuntime, dimensions: int) -> str:
    tags = (
        "library_name: sentence-transformers\npipeline_tag: sentence-similarity\ntags: [gerund, multi-vector, ColBERT]"
    )
    return (
        f"---\n{tags}\n---\n\n# Token vectors exported by gerund\n\n"
        f"A language model ({runtime.model.config.model_type}, {runtime.n_layers} layers) that makes a vector of "
        f"{dimensions} dimensions for each token, for late interaction (MaxSim).\n\n"
        "```python\nfrom sentence_transformers import MultiVectorEncoder\n\n"
        'model = MultiVectorEncoder("PATH/TO/THIS/FOLDER")\nquery = model.encode_query(["a question"])\n'
        'documents = model.encode_document(["a text", "another one"])\n'
        "print(model.similarity(query, documents))\n```\n\n"
        "It needs sentence-transformers 6 or newer; gerund is not needed.\n"
    )

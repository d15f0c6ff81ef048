"""Export an encoder as a folder that sentence-transformers loads.

A causal or fully bidirectional encoder needs only sentence-transformers' own modules: a body, a pooling and a
normalization. Such a folder is loaded and compared with gerund before it is saved. For every other encoder the folder
names ``gerund.integrations.sentence_transformers.Transformer``.

Trained token vectors of such an encoder become a folder for ``MultiVectorEncoder``.
"""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from gerund.attention.recurrent import recurrent_modules
from gerund.errors import ConfigError, ModelError
from gerund.exporting.shared import (
    TEXTS,
    Export,
    change_json,
    doubled_start,
    is_fused,
    keeps_normalization,
    plain_tokenizer,
    sample_texts,
    sample_tokens,
    silence,
    write_merged,
)
from gerund.inference.encode.batches import encode, encode_tokens
from gerund.inference.encode.multi import TokenReader
from gerund.inference.encode.runtime import EncoderRuntime, smallest_cosine
from gerund.models import loading
from gerund.models.adapters import merged_state
from gerund.models.architectures import is_bidirectional
from gerund.models.heads import LateHead, ProjectionHead
from gerund.models.sentence_transformers_folder import (
    MODULE_FILE,
    MODULE_WEIGHTS,
    MODULES_FILE,
    OWN_CLASS,
    SETTINGS_FILE,
    prompt_settings,
    write_json,
    write_modules,
)
from gerund.poolings import SWITCHES, pooling_parts
from gerund.scoring.late_interaction import maxsim
from gerund.settings.plan import Direction, View
from gerund.settings.templates import LAST_LAYER

# Largest cosine distance between the exported encoder and gerund's; half precision rounds more.
_NEAR = {torch.float32: 1e-4, torch.float64: 1e-4}
_NEAR_HALF = 2e-3


def write(runtime: EncoderRuntime, work: Path, folder: Path) -> Export:
    """Fill ``work`` for sentence-transformers; if its own modules don't suffice, for gerund's class."""
    why_custom = obstacle(runtime)
    if not why_custom:
        write_plain(runtime, work)
        why_custom = _difference(runtime, work)
    if why_custom:
        for path in sorted(work.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        write_merged(runtime, work)
    keeps = bool(why_custom) or keeps_normalization(runtime, work)
    (work / "README.md").write_text(_readme(runtime, why_custom, keeps_normalization=keeps), encoding="utf-8")
    loader = "gerund.integrations.sentence_transformers.load"
    if not why_custom:
        loader = "sentence_transformers.SentenceTransformer"
    return Export(folder, f"{loader}({str(folder)!r})", why_custom)


def obstacle(runtime: EncoderRuntime) -> str:
    """Return why plain sentence-transformers can't read this encoder; the empty string if it can."""
    if runtime.head is not None and runtime.head.settings.modules is None:
        return "sentence-transformers has no such projection head"
    return obstacle_in_attention(runtime) or _obstacle_in_pooling(runtime)


def obstacle_in_attention(runtime: EncoderRuntime) -> str:
    """Return why plain sentence-transformers can't read this attention; the empty string if it can."""
    bidirectional = _is_bidirectional(runtime)
    by_config = is_bidirectional(runtime.model.config)
    if by_config and not bidirectional:
        return "the model's config.json lets it attend in both directions"
    if not bidirectional and (not runtime.plan.is_causal or runtime.plan.repeats_text):
        return f"sentence-transformers has no attention plan {runtime.config.attention.name!r}"
    if runtime.plan.skips:
        return "sentence-transformers has no residual connections across layers (skips)"
    # The config of a model that is made for both directions has a window that transformers counts as gerund does.
    window = None if by_config else _window(runtime)
    if bidirectional and window is not None and (runtime.max_length is None or runtime.max_length > window):
        return (
            f"transformers counts a sliding window of {window} tokens differently in bidirectional layers "
            f"(max_length={window} or less would avoid it)"
        )
    return ""


def _obstacle_in_pooling(runtime: EncoderRuntime) -> str:
    config = runtime.config
    if config.append_eos and not runtime.tokenizer.is_fast:
        return "only fast tokenizers can be told to append an end token"
    poolings = pooling_parts(config.pooling)
    if any(pooling.sentence_transformers is None for pooling in poolings):
        return f"sentence-transformers has no pooling {config.pooling}"
    if [pooling.sentence_transformers for pooling in poolings] != _modes_on(config.pooling):
        return f"sentence-transformers concatenates the poolings {config.pooling} in another order"
    return "" if config.pool_prompt or config.follows_sentence_transformers else _obstacle_in_prompts(runtime)


def _obstacle_in_prompts(runtime: EncoderRuntime) -> str:
    """Return why sentence-transformers would pool other tokens than gerund for a prompt that is not pooled."""
    prompts = [prompt for prompt in prompt_settings(runtime.config)[0].values() if prompt]
    if prompts and any(part.depends_on_places for part in pooling_parts(runtime.config.pooling)):
        return "sentence-transformers counts the prompt's tokens in the weights of a weighted mean"
    fused = next((prompt for prompt in prompts if is_fused(runtime, prompt)), None)
    if fused is None:
        return ""
    return doubled_start(runtime, fused) or (
        f"the last token of the prompt {fused!r} can reach into the text, and sentence-transformers would not pool "
        "that token (a prompt that does not end in a space avoids it)"
    )


def write_plain(runtime: EncoderRuntime, folder: Path) -> None:
    """Write body, tokenizer, pooling and normalization for sentence-transformers' own modules."""
    config = runtime.config
    write_body(runtime, folder)
    # The names of version 2 to 5, which version 6 reads as well.
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    (folder / "1_Pooling").mkdir()
    modes = {switch: switch in _modes_on(config.pooling) for switch in SWITCHES}
    pooling = {"word_embedding_dimension": runtime.state_width, **modes, "include_prompt": config.pool_prompt}
    write_json(folder / "1_Pooling" / "config.json", pooling)
    modules += _write_layers(runtime.head, folder, len(modules))
    older = {"specifier": ">=5.2", "reason": "older versions ignore is_causal and read from left to right"}
    needs = {"transformers": older} if _is_bidirectional(runtime) else None
    write_modules(
        folder, config, [(path, f"sentence_transformers.models.{name}") for path, name in modules], needs=needs
    )


def write_body(runtime: EncoderRuntime, folder: Path, more: Mapping[str, Any] | None = None) -> None:
    """Write body and tokenizer, and the settings of the module that runs them; ``more`` are further ones."""
    model = runtime.model
    body, prefix = model.base_model, f"{model.base_model_prefix}."
    state = merged_state(model, runtime.adapter)
    if body is not model:
        state = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
    loading.save_model(body, plain_tokenizer(runtime), state, folder)
    if _is_bidirectional(runtime) and not is_bidirectional(model.config):
        change_json(folder / "config.json", is_causal=False)
    limit = {} if runtime.max_length is None else {"max_seq_length": runtime.max_length}
    # The dtype that is verified, which other versions of transformers would not choose.
    held = {"model_args": {"dtype": str(model.dtype).removeprefix("torch.")}}
    write_json(folder / "sentence_bert_config.json", {**limit, "do_lower_case": False, **held, **(more or {})})


def _modes_on(pooling: str) -> list[str]:
    """Return a pooling's switches in the order in which sentence-transformers concatenates them."""
    on = {part.sentence_transformers for part in pooling_parts(pooling)}
    return [switch for switch in SWITCHES if switch in on]


def _write_layers(head: ProjectionHead | None, folder: Path, place: int) -> list[tuple[str, str]]:
    """Write the layers after the pooling, and return the folder and the class of each."""
    if head is None:
        return []
    listed = []
    for number, module in enumerate(head.settings.modules or ()):
        name = f"{place + number}_{module.kind}"
        listed.append((name, module.kind))
        (folder / name).mkdir()
        config: dict[str, Any] = {"dimension": module.width}
        if module.kind == "Dense":
            path = "linear" if module.activation == "Identity" else "activation"
            config = {"in_features": module.width, "out_features": module.dimensions, "bias": module.bias}
            config["activation_function"] = f"torch.nn.modules.{path}.{module.activation}"
            config |= {"use_residual": True} if module.residual else {}
        write_json(folder / name / MODULE_FILE, {} if module.kind == "Normalize" else config)
        if weights := head.weights_of(number):
            save_file(weights, folder / name / MODULE_WEIGHTS)
    return listed


def _is_bidirectional(runtime: EncoderRuntime) -> bool:
    views = runtime.plan.views
    both_ways = all(view == View(Direction.BIDIRECTIONAL) for view in views)
    # With recurrent layers, each architecture in transformers treats is_causal=False in its own way.
    return both_ways and runtime.plan.stream is None and not recurrent_modules(runtime.model)


def _window(runtime: EncoderRuntime) -> int | None:
    config = runtime.model.config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None)
    if types is not None and "sliding_attention" not in types:
        return None
    return getattr(config, "sliding_window", None)


def _difference(runtime: EncoderRuntime, folder: Path) -> str:
    """Verify the written folder; return how its vectors differ from gerund's, the empty string if they don't."""
    near = _NEAR.get(runtime.model.dtype, _NEAR_HALF)
    try:
        with silence("sentence_transformers"), loading.quiet():
            distance = _distance(runtime, folder)
    except Exception as error:
        return f"sentence-transformers fails on the plain folder ({' '.join(str(error).split())[:200]})"
    if not distance <= near:
        return f"sentence-transformers reads the plain folder differently (cosine distance {distance:.1g})"
    return ""


def _distance(runtime: EncoderRuntime, folder: Path) -> float:
    """Return the largest cosine distance between the folder's vectors and gerund's."""
    if importlib.util.find_spec("sentence_transformers") is None:
        return _distance_of_bodies(runtime, folder)
    from sentence_transformers import SentenceTransformer

    model, texts, worst = (
        SentenceTransformer(str(folder), device="cpu", local_files_only=True),
        sample_texts(runtime),
        0.0,
    )
    for prompt in ("", *prompt_settings(runtime.config)[0].values()):
        expected_ND = encode(runtime.in_own_type(), sample_tokens(runtime, texts, prompt), show=False)
        actual_ND = model.encode(texts, prompt=prompt, show_progress_bar=False)
        worst = max(worst, 1 - smallest_cosine(expected_ND, np.asarray(actual_ND, dtype=np.float32)))
    return worst


def _distance_of_bodies(runtime: EncoderRuntime, folder: Path) -> float:
    """Compare the mean of each text's states, which needs no sentence-transformers."""
    from transformers import AutoModel, AutoTokenizer

    body = AutoModel.from_pretrained(folder, local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    cut = {} if runtime.max_length is None else {"truncation": True, "max_length": runtime.max_length}
    batch = tokenizer(list(TEXTS), padding=True, return_tensors="pt", **cut)
    real_BT = batch["attention_mask"][..., None]
    with torch.no_grad():
        hidden_BTD = body(**batch, use_cache=False).last_hidden_state.float()
    actual_ND = ((hidden_BTD * real_BT).sum(1) / real_BT.sum(1)).numpy()
    states = encode_tokens(runtime.in_own_type(), sample_tokens(runtime, TEXTS, ""), show=False)
    return 1 - smallest_cosine(np.stack([item.mean(axis=0) for item in states]), actual_ND)


def _readme(runtime: EncoderRuntime, why_custom: str, *, keeps_normalization: bool) -> str:
    config = runtime.config
    plan = config.plan_label(runtime.n_layers)
    pooling = f"{config.pooling} pooling"
    about = f"{runtime.model.config.model_type}, {runtime.n_layers} layers, {runtime.width} dimensions"
    if why_custom:
        load = 'from gerund.integrations.sentence_transformers import load\n\nmodel = load("PATH/TO/THIS/FOLDER")'
        note = (
            f"It needs gerund (`pip install 'gerund[st]'`): {why_custom}.\n\n"
            "Plain `SentenceTransformer(folder)` refuses it and offers a flag, which lets it use a class that is not "
            f"its own: `{OWN_CLASS}` of the installed package. `load` needs no flag. The folder itself holds no code."
        )
    else:
        load = "from sentence_transformers import SentenceTransformer\n\n"
        load += 'model = SentenceTransformer("PATH/TO/THIS/FOLDER")'
        note = "Plain sentence-transformers loads it; gerund is not needed."
        if _is_bidirectional(runtime):
            note += " transformers must be 5.2 or newer: older ones ignore `is_causal` and read from left to right."
        if not keeps_normalization:
            note += " Normalize texts to NFKC without invisible characters first, as gerund does; this tokenizer can't."
        if not config.pool_prompt:
            note += " End a prompt of your own in no space: the last token could reach into the text and be left out."
    tags = "library_name: sentence-transformers\npipeline_tag: sentence-similarity\ntags: [gerund]"
    return (
        f"---\n{tags}\n---\n\n# A text encoder exported by gerund\n\n"
        f"A language model ({about}) read as an encoder: attention plan `{plan}`, {pooling}.\n\n"
        f'```python\n{load}\nvectors = model.encode(["a text", "another one"])\n```\n\n{note}\n'
    )


_BASE, _MULTI = "sentence_transformers.base.modules", "sentence_transformers.multi_vector_encoder.modules"
_QUERY, _DOCUMENTS = "how to bake bread", ("Trains run on rails.", "Bread is baked, of flour and water.")
# How far a mean cosine may be off; half precision rounds more.
_NEAR_SCORE, _NEAR_SCORE_HALF = 1e-4, 2e-3


def write_multi_vector(runtime: EncoderRuntime, work: Path, folder: Path, *, late: LateHead | None) -> Export:
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
    (work / "README.md").write_text(_readme_of_tokens(runtime, dimensions), encoding="utf-8")
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
    near = _NEAR_SCORE if reader.runtime.model.dtype in (torch.float32, torch.float64) else _NEAR_SCORE_HALF
    if (apart := float(np.abs(ours - theirs).max())) > near:
        raise ModelError(
            f"sentence-transformers makes other scores of the exported folder (they differ by {apart:.1g})"
        )


def _readme_of_tokens(runtime: EncoderRuntime, dimensions: int) -> str:
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

"""Recipes of every objective, small enough that two processes carry all of them out."""

import pytest

# Those of the recipes below without chance in them.
SAME = ("causal", "hybrid", "unimae", "rankgen", "gur")
# A step is tried by these. Other second passes than a parallel one, which trains sscl too, and another objective of a
# T5 than gur are left to `make check-all`.
ALIKE = [pytest.param(name, marks=pytest.mark.full) for name in ("sscl", "span", "stack", "extend")]
STEPS = [*SAME, "distill", "parallel", *ALIKE]
TEXTS = {"sources": ["a"], "batch_size": 4, "micro_batch_size": 1, "length": 24}
TEXTS_ALONE = {name: value for name, value in TEXTS.items() if name != "sources"}
PAIRS = {"files": ["pairs.jsonl"]}
T5 = {"num_layers": 2, "num_decoder_layers": 1, "dropout_rate": 0.0}


def names_asked(request):
    """Return the recipes that the chosen tests of this module name; other modules have names of their own."""
    chosen = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    return {item.callspec.params["name"] for item in chosen if "name" in item.callspec.params}


def recipes(corpus, base, cache):
    """Return the recipes of this file by name, as plain data without an output."""
    common = {
        "data": {
            "folder": str(corpus),
            "cache": str(cache),
            "sources": [
                {"name": "a", "files": ["a.train.jsonl"], "validation": ["a.valid.jsonl"], "weight": 2},
                {"name": "b", "files": ["b.train.jsonl"]},
            ],
            "validation_tokens": 128,
        },
        # With Adam's usual epsilon a rounding error of a small gradient becomes a whole step.
        "optimizer": {"learning_rate": 0.01, "epsilon": 0.01, "max_grad_norm": 0.5},
        "steps": 4,
        "precision": "fp32",
        "log_steps": 1,
        "save_steps": 2,
        "eval_steps": 2,
    }
    llama = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    scratch = {"config": {"model_type": "llama", "max_position_embeddings": 64, "tie_word_embeddings": True, **llama}}
    adapter = {"base": str(base), "lora": {"rank": 4, "alpha": 8}}
    causal = {"kind": "causal", "length": 16, "batch_size": 8, "micro_batch_size": 2, "decay_length": 32}
    contrastive = {"kind": "contrastive", "batch_size": 4, "micro_batch_size": 1, "length": 24, "pairs": PAIRS}
    simcse = {"kind": "simcse", **TEXTS, "unit": "sentences"}
    end_token = {"attention": "causal", "pooling": "last", "append_eos": True}
    return {
        "causal": {
            **common,
            "model": scratch,
            "tokenizer": {"vocab_size": 320, "max_length": 64},
            "objectives": [causal],
            "schedule": {"name": "wsd", "warmup_steps": 1, "decay_steps": 2},
        },
        "hybrid": {
            **common,
            "model": {**adapter, "gradient_checkpointing": True},
            "objectives": [
                {"kind": "mntp", **TEXTS, "weight": [[0, 1], [3, 0]]},
                {"kind": "msg", **TEXTS, "longest": 8, "weight": [[0, 0.5], [3, 0]]},
                {**simcse, "dropout": 0.0, "weight": [[0, 0], [1, 1]]},
                {**causal, "decay_length": None, "weight": [[0, 1], [1, 0], [3, 1]]},
            ],
        },
        "unimae": {
            **common,
            "model": adapter,
            "encoder": end_token,
            "objectives": [
                {"kind": "unimae", **TEXTS, "weight": [[0, 1], [2, 0]]},
                {**contrastive, "hard_negatives": 2, "projection": 8, "weight": [[0, 0], [1, 1]]},
            ],
        },
        "rankgen": {
            **common,
            "model": adapter,
            "encoder": end_token,
            "objectives": [
                {"kind": "rankgen", "passages": ["passages.jsonl"], "continuation_length": 16, **TEXTS_ALONE}
            ],
        },
        "gur": {
            **common,
            "model": {"config": {"model_type": "t5", "d_model": 16, "d_kv": 8, "num_heads": 2, "d_ff": 32, **T5}},
            "tokenizer": {"vocab_size": 400, "max_length": 64},
            "objectives": [
                {
                    "kind": "gur",
                    "pairs": {**PAIRS, "query": "query", "positive": "positive"},
                    **TEXTS_ALONE,
                    "title_fraction": 0.5,
                }
            ],
        },
        "dropout": {
            **common,
            "model": {**adapter, "lora": {"rank": 4, "alpha": 8, "dropout": 0.1}, "gradient_checkpointing": True},
            "encoder": end_token,
            "objectives": [
                {"kind": "unimae", **TEXTS, "weight": [[0, 1], [3, 0.2]]},
                {**simcse, "dropout": 0.3, "weight": [[0, 0], [1, 1]]},
            ],
        },
    }


def steps_of(corpus, base, cache, teacher):
    """Return recipes without chance in them that take every objective together through one step."""
    found = {name: content for name, content in recipes(corpus, base, cache).items() if name in SAME}
    # Two processes add in another order than one, and a temperature of 0.05 multiplies what that rounds by twenty.
    milder = [{**own, "temperature": 1.0} if own["kind"] == "simcse" else own for own in found["hybrid"]["objectives"]]
    found["hybrid"] = {**found["hybrid"], "objectives": milder}
    adapter = found["unimae"]
    looking = {"attention": "bidir", "pooling": "mean"}
    found["sscl"] = {**adapter, "encoder": looking, "objectives": [{"kind": "sscl", **TEXTS, "projection": 8}]}
    distill = {"kind": "distill", "teacher": str(teacher), **TEXTS, "layers": [1], "token_vectors": True}
    cosent = {"kind": "cosent", "pairs": {"files": ["scored.jsonl"]}, **TEXTS_ALONE}
    found["distill"] = {**adapter, "encoder": looking, "objectives": [distill, cosent]}
    found["span"] = {**found["gur"], "objectives": [{"kind": "span_corruption", **TEXTS}]}
    # Plans that run a layer twice, within its own pass and as a stream beside it, with states computed anew.
    for name, attention in (("parallel", "inter-bidir"), ("stack", "extra-bidir"), ("extend", "extend-bidir")):
        found[name] = {
            **adapter,
            "model": {**adapter["model"], "gradient_checkpointing": True},
            "encoder": {"attention": attention, "k": 2, "pooling": "mean"},
            "objectives": [{"kind": "sscl", **TEXTS}],
        }
    return found

"""What a plan adds to a forward pass beyond what its mask costs in plain SDPA.

    python benchmarks/plan_overhead.py [--rounds 30]

The same model, the same padded batch: once plain transformers in SDPA with the explicit 4-D mask that the plan amounts
to, once gerund's attention function with the plan. Checks first that both give the same states, then times them
in turn. Then hybrid models: the same plan with recurrent layers causal and both ways, beside the untouched model.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

import harness
from gerund.attention.bound_plan import BoundPlan
from gerund.attention.interface import attach
from gerund.attention.layouts import attach_streams, decoder_layers
from gerund.attention.masks import visible
from gerund.settings.plan import AttentionPlan, ResolvedPlan
from inputs import random_llama
from results import Column, Table

EXPLICIT, PLANNED = "SDPA with a 4-D mask", "gerund"


def models(layers: int) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """Return two models with the same random weights, the second attached to gerund's functions."""
    sizes = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": layers, "num_attention_heads": 6}
    plain, ours = random_llama(**sizes), random_llama(**sizes)
    attach(ours)
    return plain, ours


UNTOUCHED, CAUSAL, BOTH = "untouched", "recurrent=causal", "recurrent=both"
# Three of four layers are recurrent, as in what is published.
_TYPES = {"qwen3_5_text": ["linear_attention"] * 3 + ["full_attention"], "lfm2": ["conv"] * 3 + ["full_attention"]}


def hybrid(kind: str, layers: int) -> PreTrainedModel:
    """Return a hybrid model with random weights, attached to gerund's functions."""
    torch.manual_seed(0)
    own = {"head_dim": 64, "linear_num_key_heads": 6, "linear_num_value_heads": 6, "linear_key_head_dim": 64,
           "linear_value_head_dim": 64} if kind != "lfm2" else {"block_auto_adjust_ff_dim": False}  # fmt: skip
    config = AutoConfig.for_model(
        kind, vocab_size=4096, hidden_size=384, intermediate_size=1024, num_hidden_layers=layers,
        num_attention_heads=6, num_key_value_heads=6, layer_types=(_TYPES[kind] * layers)[:layers], **own,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    attach(model)
    attach_streams(decoder_layers(model))
    return model


@torch.no_grad()
def both_against_causal(layers: int, shapes: str, rounds: int) -> Table:
    """Time a pass of hybrid models with recurrent layers causal and both ways."""
    rows = []
    for kind in _TYPES:
        model = hybrid(kind, layers)
        plans = {name: AttentionPlan("bidir", recurrent=way).resolve(layers)
                 for name, way in ((CAUSAL, "causal"), (BOTH, "both"))}  # fmt: skip
        for shape in shapes.split(","):
            texts, length = map(int, shape.split("x"))
            ids_BT = torch.randint(0, 4096, (texts, length), generator=torch.Generator().manual_seed(1))
            real_BT = torch.ones_like(ids_BT)
            real_BT[1:, -length // 8 :] = 0

            def untouched(model: PreTrainedModel = model, ids: torch.Tensor = ids_BT) -> torch.Tensor:
                return model.base_model(ids, use_cache=False).last_hidden_state

            def planned(
                name: str, model: PreTrainedModel = model, ids: torch.Tensor = ids_BT, real: torch.Tensor = real_BT,
                plans: dict[str, ResolvedPlan] = plans,
            ) -> torch.Tensor:  # fmt: skip
                bound = BoundPlan(plans[name], real)
                return model.base_model(ids, use_cache=False, attention_plan=bound).last_hidden_state

            work = {UNTOUCHED: untouched, CAUSAL: lambda run=planned: run(CAUSAL), BOTH: lambda run=planned: run(BOTH)}
            spent = harness.alternate(work, rounds)
            for name in work:
                ratio = {**spent.times_as_fast(CAUSAL, BOTH), "rounds": rounds} if name == BOTH else None
                rows.append({"model": kind, "batch": f"{texts} x {length} tokens", "system": name,
                             "cpu": spent.cpu(name, 1000), "wall": spent.wall(name, 1000), "ratio": ratio})  # fmt: skip
    columns = [
        Column("model", "model"), Column("batch", "batch"), Column("system", "recurrent layers"),
        Column("cpu", "processor time", "ms", 2), Column("wall", "wall time", "ms", 2),
        Column("ratio", "times a pass with causal ones", "", 2),
    ]  # fmt: skip
    caption = (
        f"A forward pass of hybrid models with {layers} layers of width 384, three of four recurrent, under `bidir` "
        "with recurrent layers causal and both ways."
    )
    return Table("recurrent", caption, columns, rows)


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    """Compare both at three shapes of a batch."""
    parser = harness.parser(__doc__, rounds=30)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--shapes", default="32x64,8x256,2x1024", help="texts x tokens, with commas")
    options = harness.parse(parser, argv, quick={"layers": 2, "shapes": "4x32", "rounds": 3})
    plain, ours = models(options.layers)
    plan = AttentionPlan("mask0-bidir", k=options.layers).resolve(options.layers)
    rows, apart = [], 0.0
    for shape in options.shapes.split(","):
        texts, length = map(int, shape.split("x"))
        ids_BT = torch.randint(0, plain.config.vocab_size, (texts, length))
        real_BT = torch.ones_like(ids_BT)
        real_BT[1:, -length // 8 :] = 0

        def explicit(ids_BT: torch.Tensor = ids_BT, real_BT: torch.Tensor = real_BT) -> torch.Tensor:
            mask = visible(plan.views[0], ids_BT.shape[1], real_BT=real_BT)
            return plain.model(ids_BT, attention_mask=mask, use_cache=False).last_hidden_state

        def planned(ids_BT: torch.Tensor = ids_BT, real_BT: torch.Tensor = real_BT) -> torch.Tensor:
            bound = BoundPlan(plan, real_BT)
            return ours.model(ids_BT, use_cache=False, attention_plan=bound).last_hidden_state

        real = real_BT.bool()
        apart = max(apart, harness.largest_difference(explicit()[real], planned()[real]))
        rounds = harness.alternate({EXPLICIT: explicit, PLANNED: planned}, options.rounds)
        slower = rounds.times_as_fast(EXPLICIT, PLANNED)
        overhead = {key: 100 * (slower[key] - 1) for key in ("median", "min", "max")} | {"rounds": options.rounds}
        for name in (EXPLICIT, PLANNED):
            times = {"cpu": rounds.cpu(name, 1000), "wall": rounds.wall(name, 1000)}
            row = {"batch": f"{texts} x {length} tokens", "system": name, **times}
            rows.append({**row, "overhead": overhead if name == PLANNED else None})
    check = harness.require("largest difference of the states", apart, 1e-5)
    columns = [
        Column("batch", "batch"), Column("system", "system"), Column("cpu", "processor time", "ms", 2),
        Column("wall", "wall time", "ms", 2), Column("overhead", "beyond plain SDPA with that mask", "%", 1),
    ]  # fmt: skip
    caption = (
        f"A forward pass with `mask0-bidir` in all {options.layers} layers of width 384 beside the same mask in SDPA."
    )
    recurrent = both_against_causal(max(4, options.layers), options.shapes, options.rounds)
    harness.report(options, __file__, [Table("overhead", caption, columns, rows, checks=[check]), recurrent])


if __name__ == "__main__":
    main()

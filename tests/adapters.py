"""Adapters with weights that matter, made by PEFT itself."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

# What PEFT itself does that transformers or PEFT warn of.
PEFT_WARNINGS = (
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
    "ignore:Setting `save_embedding_layers` to `True`:UserWarning",
    "ignore:fan_in_fan_out is set to False but the target module is `Conv1D`:UserWarning",
    "ignore:Model has `tie_word_embeddings=True` and a tied layer:UserWarning",
    "ignore:.*LoRA tensor.s. have invalid shape.*lora_B.bias:UserWarning",
    "ignore:`lora_bias=True` was passed but:UserWarning",
)


def make_adapter(base: Path, folder: Path, **settings: object) -> Path:
    """Save a PEFT LoRA adapter whose every weight is random, for the model in ``base``."""
    from peft import LoraConfig, get_peft_model

    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], **settings}
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), LoraConfig(**config))
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "magnitude" in name:
            parameter.data.mul_(1 + torch.rand_like(parameter))
        elif any(part in name for part in ("lora_B", "lora_embedding_A", "modules_to_save", "bias")):
            parameter.data.normal_(0, 0.3)
    model.save_pretrained(folder)
    return folder

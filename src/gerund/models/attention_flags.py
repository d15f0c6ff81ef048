"""Flags in a config that let a decoder attend in both directions: set aside in memory, written again when it is saved.

In memory every model is a plain causal one, and an attention plan alone says who sees whom. What transformers makes of
the flags differs by architecture and version: ``is_causal`` false is obeyed by most from 5.2 on, and
``use_bidirectional_attention`` by Gemma 3 alone; others ignore it without a word. The windows are those that
transformers gives to each: under ``is_causal`` false a window counts its own distance too, and Gemma 3 halves its
window under the other flag, which its config class has done by now.

Knows: configs, as they are on the disk and in memory. Does not know: plans, models.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from gerund.checks import read_json

IS_CAUSAL = "is_causal"
BIDIRECTIONAL = "use_bidirectional_attention"
_WINDOW = "sliding_window"
_TEXT = "text_config"
# Where a config in memory keeps what the one on the disk says.
_KEPT = "gerund_flags"


def set_aside(config: PreTrainedConfig, stored: Mapping[str, Any]) -> None:
    """Make a config that lets a decoder attend in both directions a plain causal one, and note what it said.

    Args:
        config: the config in memory, which is changed.
        stored: the same config as it is on the disk.
    """
    part: Any = config.get_text_config(decoder=True)
    text = stored.get(_TEXT)
    own = text if part is not config and isinstance(text, Mapping) else stored
    flags = {}
    if getattr(part, IS_CAUSAL, True) is False:
        flags[IS_CAUSAL] = False
        setattr(part, IS_CAUSAL, True)
        if isinstance(getattr(part, _WINDOW, None), int):
            setattr(part, _WINDOW, getattr(part, _WINDOW) + 1)
    if getattr(part, BIDIRECTIONAL, None) is True:
        flags[BIDIRECTIONAL] = True
        setattr(part, BIDIRECTIONAL, False)
    if flags:
        flags |= {_WINDOW: own[_WINDOW]} if _WINDOW in own else {}
        setattr(config, _KEPT, {"part": _TEXT if own is text else "", "stored": flags})


def is_bidirectional(config: PreTrainedConfig) -> bool:
    """Whether the config on the disk lets the decoder attend in both directions."""
    return getattr(config, _KEPT, None) is not None


def restore(config: PreTrainedConfig, path: Path, **changes: Any) -> None:
    """Write what was set aside into a ``config.json`` that transformers has just written.

    Args:
        config: of the model that was saved.
        path: the file.
        **changes: what else is to stand there.
    """
    kept = getattr(config, _KEPT, None)
    if kept is None and not changes:
        return
    data = read_json(path)
    data.pop(_KEPT, None)
    if kept is not None:
        data.get(kept["part"], data).update(kept["stored"])
    path.write_text(json.dumps({**data, **changes}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

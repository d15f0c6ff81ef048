"""docs/models.md: every architecture with what can be done with it, as a survey has found it out."""

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

import transformers

from tests.architectures.survey import Found

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"

_TITLES = {
    "exact": "Exact",
    "recurrent": "Exact, with recurrent layers causal or both ways",
    "causal": "Causal encoding only",
    "refused": "Refused",
    "untried": "Not tried",
}
_TEXTS = {
    "exact": """Attention plans are exact. A plan that has no meaning in an architecture, or that a layer of it does not
        obey, is refused when the model is loaded; the table names those, and says why. Encoders (BERT and its kin) are
        tried as the decoders that their configs can ask for (`is_decoder`), encoder-decoders (BART and its kin) by
        their decoders alone; the usual checkpoints of both are refused with what they are.""",
    "recurrent": """Some or all layers are recurrent: linear attention, state spaces, convolutions. Attention layers are
        converted as everywhere. Converted recurrent layers stay causal (`recurrent="causal"`) or also run on the text
        reversed (`recurrent="both"`); a name with `both` below means the latter. [Hybrid
        models](explanation/attention-plans.md#hybrid-models-recurrent-layers-among-attention-layers) says more.""",
    "causal": """Encoding with `attention="causal"` and generating work; no other plan does, for the reason given.""",
    "refused": """These are not loaded, and the message says why.""",
    "untried": """No tiny model of these could be tried: most read or write something else than text, or need another
        part.""",
}
_HEAD = """All {count} architectures that transformers {version} reads causal language models of, each tried on a tiny
    random model with every kind of its layers. Hidden states under seven plans, of texts in batches that are padded on
    either side, are compared with those of each text alone in eager attention under masks that are written out token by
    token; recurrent layers with their own modules, called on the text and on the text reversed. Generation has to be
    bit-equal to plain transformers. {works} are exact, and none is silently causal."""
_HOW = """`gerund doctor MODEL` says the same of one model. `python -m tests.architectures` makes this page anew from a
    checkout; with `--transformers FOLDER` it compares another installation of transformers, such as its development
    head, with it."""
# Found by `--transformers`, on 2026-11-26.
_NEWER = """With transformers 5.24.0, which reads seven more, 173 of 196 are exact: all of the 168, `apertus1p5_text`,
    `exaone`, `sarvam_mla`, `sarvam_moe`, and `lara_mini` with recurrent layers. `dory` and `inkling2_loop_text`, whose
    layers run in loops, are refused. None is silently causal."""
_GAPS = "Filling gaps"
_GAPS_TEXT = """Under MAGNET's hybrid mask, {filled} of the {works} predict every token of a gap, written one by one
    with a cache and in padded batches, as a whole text in eager attention does under that mask written out. The others
    refuse, and say why."""
_NARROW = ["architecture", "why"]


def wrapped(text: str) -> list[str]:
    """Return a paragraph in lines."""
    return textwrap.wrap(" ".join(text.split()), 132, break_long_words=False, break_on_hyphens=False)


def sections(text: str) -> dict[str, list[str]]:
    """Return the architectures that a page names under each of its headings."""
    found = {}
    for part in text.split("\n## ")[1:]:
        title, _, body = part.partition("\n")
        if title == _GAPS:
            continue
        lists = re.findall(r"^`[^|]*?\.$", body, re.MULTILINE | re.DOTALL)
        rows = re.findall(r"^\| `([\w-]+)` \|", body, re.MULTILINE)
        found[title] = [*re.findall(r"`([\w-]+)`", " ".join(lists)), *rows]
    return found


def without_gaps(text: str) -> set[str]:
    """Return the architectures of which a page says that they fill no gaps."""
    _, _, body = text.partition(f"\n## {_GAPS}\n")
    return {kind for row in re.findall(r"^\| .* \|$", body, re.MULTILINE) for kind in re.findall(r"`([\w-]+)`", row)}


def _counted(number: int) -> str:
    return f"{number} architecture{'' if number == 1 else 's'}"


def _gaps(found: Sequence[Found]) -> list[str]:
    """Return the section on filling gaps."""
    works = [one for one in found if one.verdict in ("exact", "recurrent")]
    reasons: dict[str, list[str]] = {}
    for one in works:
        if one.gaps:
            reasons.setdefault(re.sub(r"\bthis \S+ model\b", "this model", one.gaps), []).append(one.kind)
    filled = sum(not one.gaps for one in works)
    lines = [f"## {_GAPS}", "", *wrapped(_GAPS_TEXT.format(filled=filled, works=len(works))), ""]
    if reasons:
        lines += ["| why | architectures |", "|---|---|"]
    for why, kinds in sorted(reasons.items(), key=lambda own: (-len(own[1]), own[0])):
        named = ", ".join(f"`{kind}`" for kind in sorted(kinds))
        lines.append("| {} | {} |".format(why.replace("|", "\\|").replace("`", "'"), named))
    return [*lines, ""]


def page(found: Sequence[Found], version: str = transformers.__version__) -> str:
    """Return the whole page."""
    counts = {verdict: [one for one in found if one.verdict == verdict] for verdict in _TITLES}
    works = len(counts["exact"]) + len(counts["recurrent"])
    lines = [
        "# Models",
        "",
        *wrapped(_HEAD.format(count=len(found), version=version, works=works)),
        "",
        *wrapped(_HOW),
        "",
        *wrapped(_NEWER),
        "",
    ]
    for verdict, title in _TITLES.items():
        rows = sorted(counts[verdict], key=lambda one: one.kind)
        if not rows:
            continue
        lines += [f"## {title}", "", *wrapped(f"{_counted(len(rows))}. {_TEXTS[verdict]}"), ""]
        plain = [one for one in rows if not one.why]
        if plain:
            lines += [*wrapped(", ".join(f"`{one.kind}`" for one in plain) + "."), ""]
        if len(plain) < len(rows):
            titles = ["architecture", "refused plans", "why"] if verdict in ("exact", "recurrent") else _NARROW
            lines += [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
        for one in (one for one in rows if one.why):
            cells = [f"`{one.kind}`", one.why.replace("|", "\\|")]
            if verdict in ("exact", "recurrent"):
                cells.insert(1, ", ".join(f"`{name}`" for name in one.without))
            lines.append(f"| {' | '.join(cells)} |")
        lines += [""] if len(plain) < len(rows) else []
    lines += _gaps(found)
    return "\n".join(lines).rstrip() + "\n"

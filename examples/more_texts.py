"""Texts of other kinds than articles and books, to distil a sentence encoder on.

Three kinds, each of which a teacher's vectors need no labels for: the texts of labeled sets (news, questions and
commands to assistants, medical questions, abstracts, descriptions of scenes), passages about science, and what people
read and ask about software: Debian's one-line descriptions of packages, and the first sentences of docstrings of the
Python packages that are installed here, many as questions. SmolLM2's encoder learned on from such texts.

    python examples/more_texts.py DATA -o more.jsonl
"""

import argparse
import ast
import json
import random
import re
import subprocess
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from gerund.data.corpus import read_documents
from gerund.errors import DataError
from gerund.evaluation.data_files import read_json_lines, read_tab_lines

SENTENCES = re.compile(r"(?<=[.?!])\s+(?=[A-Z])")
SCIENCE = re.compile(
    r"\b(proteins?|patients|diseases?|cells?|enzymes?|equations?|species|temperatures?|bacteri\w+|clinical|theory|molecul\w+|"
    r"genes?|physics|chemical|therapy|syndrome|infections?|pressure|flow|velocity|experiment\w*|hypothesis|neurons?|tissue|"
    r"acids?|hormones?|surgery|library|libraries|information|indexing|documents)\b",
    re.IGNORECASE,
)
MARKUP = re.compile(r"[{}<>|\\]|:param|===|---")
ROLES = re.compile(r":\w+:`~?([^`]*)`")
DEBIAN_SECTIONS_LEFT_OUT = {
    "libdevel", "debug", "localization", "metapackages", "oldlibs", "libs", "introspection", "fonts", "games", "kernel",
}  # fmt: skip
VERBS = frozenset(
    re.findall(
        r"\w+",
        """
        get set return create compute convert load save read write parse split join list find check remove add
        update open close run start stop send draw plot sort filter format print show make build copy move delete
        calculate count extract select insert replace generate apply wrap encode decode compile test validate
        download upload connect call fit transform evaluate estimate initialize register resolve iterate merge
        group index search match render
        """,
    )
)
ABOUT_PACKAGES = (
    "{0}",
    "{0}",
    "{1}: {0}",
    "How to use {1}, {0}?",
    "error when installing {1} ({0})",
    "What is the best {0}?",
)
ABOUT_TASKS = (
    "How to {0} in {1}?", "how to {0} with {1}", "How do I {0} in {1}", "{1}: {0}", "{0} using {1}",
    "Is there a way to {0} in {1}?", "{1} - how can I {0}?", "Why can't I {0} in {1}?",
)  # fmt: skip
FILES_A_PACKAGE, DOCSTRINGS_A_PACKAGE, PACKAGES_A_SECTION = 150, 90, 700


def passage(text: str, rng: random.Random) -> str:
    """Return two to five sentences of a text."""
    sentences = SENTENCES.split(text)
    length = rng.randint(2, 5)
    start = rng.randrange(max(1, len(sentences) - length + 1))
    return " ".join(sentences[start : start + length])


def of_sets(data: Path, rng: random.Random) -> Iterator[str]:
    """Yield the texts of labeled sets: training parts alone, except where a set isn't used to measure encoders."""
    for row in read_tab_lines(data / "sts/stsb.train.tsv", ("score", "sentence1", "sentence2")):
        yield from (row.text("sentence1"), row.text("sentence2"))
    for row in read_json_lines(data / "classification/hwu64/train.jsonl"):
        yield row.text("text")
    for row in read_json_lines(data / "pairs/mqp.jsonl"):
        yield from (row.text("text1"), row.text("text2"))
    for row in read_json_lines(data / "classification/chemprot/train.jsonl"):
        # The two names that the label relates are marked.
        yield re.sub(r"\s+([,.;)])", r"\1", re.sub(r"<<|>>|\[\[|\]\]", "", row.text("text")))
    for row in read_json_lines(data / "classification/pubmedqa/train.jsonl"):
        question, *sentences = SENTENCES.split(row.text("text"))
        yield question
        yield from rng.sample(sentences, min(6, len(sentences)))
        yield from (passage(row.text("text"), rng) for _ in range(3))
    for row in read_json_lines(data / "suffix/hellaswag.jsonl"):
        activity, _, scene = row.text("prefix").partition(": ")
        yield activity
        yield rng.choice(SENTENCES.split(scene) or [activity])


def of_science(data: Path, rng: random.Random) -> Iterator[str]:
    """Yield passages of articles in which several words of science stand."""
    for name in ("wiki.train", "wiki.more"):
        for article in read_documents([data / f"lm/{name}.jsonl.xz"]):
            # Articles may be long, and their first paragraphs say what they are about.
            for paragraph in article.text[:3000].split("\n"):
                part = passage(paragraph, rng)
                if len(part.split()) >= 20 and len({word.lower() for word in SCIENCE.findall(part)}) >= 2:
                    yield part


def of_debian(rng: random.Random) -> Iterator[str]:
    """Yield descriptions of Debian's packages, some as questions; none where there is no ``apt-cache``."""
    try:
        listing = subprocess.run(["apt-cache", "dumpavail"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return
    counts: dict[str, int] = {}
    packages = listing.split("\n\n")
    rng.shuffle(packages)
    for package in packages:
        fields = dict(re.findall(r"^(Package|Section|Description(?:-en)?): (.*)$", package, re.MULTILINE))
        text = fields.get("Description") or fields.get("Description-en")
        section = fields.get("Section", "").rpartition("/")[2]
        counts[section] = counts.get(section, 0) + 1
        if text and section not in DEBIAN_SECTIONS_LEFT_OUT and counts[section] <= PACKAGES_A_SECTION:
            name = re.sub(
                r"^(lib|python3?-|golang-|ruby-|node-|r-cran-|php-)|-(dev|perl|java|doc|ocaml)$", "", fields["Package"]
            )
            yield rng.choice(ABOUT_PACKAGES).format(text, name)


def of_docstrings(rng: random.Random) -> Iterator[str]:
    """Yield the first sentences of docstrings of installed packages, some of those that say what to do as questions."""
    packages = sorted(path for path in Path(sysconfig.get_path("purelib")).iterdir() if path.is_dir())
    rng.shuffle(packages)
    for package in packages:
        files = sorted(file for file in package.rglob("*.py") if "test" not in str(file.relative_to(package)))
        sentences = set()
        for file in rng.sample(files, min(FILES_A_PACKAGE, len(files))):
            try:
                tree = ast.parse(file.read_text("utf-8"))
            except (SyntaxError, ValueError):
                continue
            for node in ast.walk(tree):
                if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)) and (text := ast.get_docstring(node)):
                    first = ROLES.sub(r"\1", re.split(r"(?<=[.?!])\s+|\n\s*\n", text.strip())[0]).replace("`", "")
                    if not MARKUP.search(first):
                        sentences.add(" ".join(first.split()))
        for sentence in rng.sample(sorted(sentences), min(DOCSTRINGS_A_PACKAGE, len(sentences))):
            verb, _, rest = sentence.rstrip(".").partition(" ")
            verb = verb.lower() if verb.lower() in VERBS else verb.lower().removesuffix("s")
            if verb in VERBS and rest and rng.random() < 0.6:
                yield rng.choice(ABOUT_TASKS).format(f"{verb} {rest}", package.name)
            else:
                yield sentence


def main() -> None:
    """Write the texts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="holds the folders sts, classification, pairs, suffix and lm")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--most", type=int, default=15_000, help="of each kind")
    options = parser.parse_args()
    rng = random.Random(9)
    texts: dict[str, str] = {}
    kinds = {
        "sets": of_sets(options.data, rng),
        "science": islice(of_science(options.data, rng), 2 * options.most),
        "packages": islice(of_debian(rng), 2 * options.most),
        "docstrings": islice(of_docstrings(rng), 2 * options.most),
    }
    for kind, found in kinds.items():
        try:
            cleaned = [" ".join(text.split()) for text in found]
        except DataError as error:
            parser.error(str(error))
        new = [text for text in dict.fromkeys(cleaned) if 3 <= len(text.split()) <= 120 and text.lower() not in texts]
        taken = rng.sample(new, min(options.most, len(new)))
        texts.update((text.lower(), text) for text in taken)
        print(f"{kind}: {len(taken)} of {len(new)} texts")
    mixed = [text if rng.random() < 0.9 else text.lower() for text in texts.values()]
    rng.shuffle(mixed)
    with options.output.open("w", encoding="utf-8") as file:
        for text in mixed:
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

"""The slow, literal version of the miner's rule: every substring, every pair."""

from itertools import combinations

from gerund.data.mining.candidates import SHORT_WEIGHT, Rule
from gerund.data.mining.substrings import SymbolWeights

Row = tuple[int, int, str, int]


def heaviest(a: str, b: str, weights: SymbolWeights) -> tuple[int, str]:
    """Return weight and text of the heaviest common substring, the leftmost in ``a``."""
    each = [weights.of_text(symbol) for symbol in a]
    best, found = 0, ""
    for start in range(len(a)):
        if a[start] == " ":
            continue  # nothing begins or ends with a space
        for other in [place for place, symbol in enumerate(b) if symbol == a[start]]:
            length = total = 0
            while start + length < len(a) and other + length < len(b) and a[start + length] == b[other + length]:
                total += each[start + length]
                length += 1
                if total > best and a[start + length - 1] != " ":
                    best, found = total, a[start : start + length]
    return best, found


def pairs(sentences: list[str], rule: Rule) -> list[Row]:
    """Return every pair of normalised sentences with span and weight."""
    found = []
    for i, j in combinations(range(len(sentences)), 2):
        weight, span = heaviest(sentences[i], sentences[j], rule.weights)
        if rule.short_characters is None:
            short = min(map(rule.weights.of_text, (sentences[i], sentences[j]))) <= SHORT_WEIGHT
        else:
            short = max(len(sentences[i]), len(sentences[j])) < rule.short_characters
        least = rule.short_threshold if short and rule.short_threshold is not None else rule.threshold
        if weight >= least:
            found.append((i, j, span, weight))
    return found


def limited(rows: list[Row], max_uses: int) -> list[Row]:
    """Return the pairs that remain when each sentence is used at most so often."""
    used: dict[int, int] = {}
    found = []
    for row in rows:
        if all(used.get(one, 0) < max_uses for one in row[:2]):
            for one in row[:2]:
                used[one] = used.get(one, 0) + 1
            found.append(row)
    return found

"""Training pairs mined from raw documents: sentences that share a long substring (GUR, section III-B)."""

from gerund.data.corpus import BadDocument
from gerund.data.mining.candidates import Match, Mined, MiningConfig, matching_pairs
from gerund.data.mining.job import mine
from gerund.data.mining.substrings import SymbolWeights

__all__ = ["BadDocument", "Match", "Mined", "MiningConfig", "SymbolWeights", "matching_pairs", "mine"]

"""Keywords of ``infill`` and ``expand`` besides their own: sampling, and an alias for the number of tokens.

Knows: names. Does not know: models.
"""

from typing import Annotated

from gerund.errors import unknown_name
from gerund.settings.aliases import Alias, names_of
from gerund.settings.sampling import GREEDY, Sampling, SamplingKeywords, sampling_from


class InfillKeywords(SamplingKeywords, total=False):
    """The fields of ``Sampling`` in the place of ``sampling``, and ``max_new_tokens`` for ``max_tokens``."""

    max_new_tokens: Annotated[int | None, Alias("max_tokens")]


_OPTIONS = names_of(InfillKeywords)


def infill_sampling(given: Sampling | None, options: InfillKeywords, default: Sampling = GREEDY) -> Sampling:
    """Return how tokens are chosen; see ``sampling_from``.

    Raises:
        ConfigError: a setting is unknown, impossible, or given twice.
    """
    for name in options:
        if name not in _OPTIONS:
            raise unknown_name("setting", name, _OPTIONS)
    return sampling_from(given, options, default)

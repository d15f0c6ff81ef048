"""Encode in several threads while another one writes, all on one set of weights.

    python examples/threads.py [--model MODEL]

The text is the same as without the encoders, and the vectors are the same as without the writer: a plan belongs to a
call, not to the model. Only so many threads help as there are cores; the point is that none disturbs another, as in a
server that answers both kinds of requests.
"""

import argparse
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import gerund

TEXTS = [
    "Swallows build their nests of mud under the roofs of barns.",
    "The first railway with steam engines was opened in 1825.",
    "Bread is made of flour, water, salt and yeast.",
]
PROMPT = "Once upon a time"


def main() -> None:
    """Do both alone, then together, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder or hub id; left out, the bundled model")
    lm = gerund.load(parser.parse_args().model)

    [alone] = lm.generate(PROMPT, max_new_tokens=30)
    vectors = lm.encode(TEXTS)

    with ThreadPoolExecutor(4) as pool:
        written = pool.submit(lm.generate, PROMPT, max_new_tokens=30)
        encoded = [pool.submit(lm.encode, TEXTS) for _ in range(30)]
        [together] = written.result()
        same = sum(np.array_equal(job.result(), vectors) for job in encoded)

    print(PROMPT + together.text)
    print(f"the same text as alone: {together.token_ids == alone.token_ids}")
    print(f"the same vectors as alone: {same} of {len(encoded)} times")


if __name__ == "__main__":
    main()

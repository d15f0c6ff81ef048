"""Two readings of one model and its generation at a time, each compared with what it gives alone."""

import threading


def wrong_in_threads(one, other, texts):
    """Return the calls that gave something else while six threads called them, five times each."""
    wanted = one.encode(texts), other.encode(texts), one.generate("a dog", 4)[0].text
    wrong = []

    def check(call, expected, equal):
        for _ in range(5):
            if not equal(call(), expected):
                wrong.append(call)

    near = lambda found, expected: abs(found - expected).max() < 1e-6  # noqa: E731
    jobs = [
        (lambda: one.encode(texts), wanted[0], near),
        (lambda: other.encode(texts), wanted[1], near),
        (lambda: one.generate("a dog", 4)[0].text, wanted[2], lambda a, b: a == b),
    ]
    threads = [threading.Thread(target=check, args=job) for job in jobs * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong

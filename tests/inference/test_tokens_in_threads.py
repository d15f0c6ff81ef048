"""Cutting over-long texts in one thread leaves the texts of other threads whole."""

import threading

import pytest

from gerund.inference.tokens import InputFormat, tokenize
from tests.tiny import byte_tokenizer

SHORT = ["the cat sat", "a dog"]
LONG = ["the cat sat on the mat " * 30, "x"]
WORK = [
    (SHORT, InputFormat(max_length=64)),
    (LONG, InputFormat(max_length=64)),
    (LONG, InputFormat()),
    (LONG, InputFormat("Q: ")),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*were cut:UserWarning")
def test_many_lengths_at_once() -> None:
    tokenizer = byte_tokenizer()
    wanted = [tokenize(tokenizer, texts, input_format) for texts, input_format in WORK]
    wrong: list[object] = []
    barrier = threading.Barrier(2 * len(WORK))

    def work(place: int) -> None:
        barrier.wait()
        for _ in range(150):
            found = tokenize(tokenizer, *WORK[place])
            if found != wanted[place]:
                wrong.append(place)

    threads = [threading.Thread(target=work, args=(i % len(WORK),)) for i in range(2 * len(WORK))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_tokenizer_keeps_no_trace_of_it() -> None:
    tokenizer = byte_tokenizer()
    before = tokenizer.backend_tokenizer.to_str()
    with pytest.warns(UserWarning, match="1 of 2 texts were longer than 10 tokens"):
        tokenize(tokenizer, LONG, InputFormat(max_length=10))
    assert tokenizer.backend_tokenizer.to_str() == before


@pytest.mark.parametrize("append_eos", [True, False])
def test_a_tokenizer_that_ends_texts_by_itself_uses_all_the_room(append_eos: bool) -> None:
    from tokenizers import processors

    tokenizer = byte_tokenizer()
    ends = processors.TemplateProcessing(single="<s> $A </s>", pair="$A $B", special_tokens=[("<s>", 1), ("</s>", 2)])
    tokenizer.backend_tokenizer.post_processor = ends
    with pytest.warns(UserWarning, match="were cut"):
        [long, short] = tokenize(tokenizer, LONG, InputFormat(max_length=10, append_eos=append_eos))
    assert long is not None
    assert short is not None
    assert len(long) == 10
    assert (long.ids[0], long.ids[-1]) == (short.ids[0], short.ids[-1]) == (1, 2)
    assert long.ids == tokenizer(LONG[0], truncation=True, max_length=10).input_ids

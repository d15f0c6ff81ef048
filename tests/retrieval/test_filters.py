"""Filters: read to their end, refused at the place of the mistake, and the same in every store."""

import numpy as np
import pytest

from gerund.errors import ConfigError
from gerund.retrieval.documents import Chunk
from gerund.retrieval.filters import check_filter
from gerund.retrieval.lance_store import LanceStore
from gerund.retrieval.memory_store import MemoryStore, _is_like
from gerund.retrieval.store import KeywordQuery
from tests.retrieval.helpers import ABOUT

SOURCES = [
    "a",
    "A",
    "notes/it's",
    "notes/50%",
    "notes/5_%",
    "b\\c",
    "Größe",
    "GRÖSSE",
    "日本語",
    "line\nend",
    'say "x"',
    "",
]


def chunk_of(number: int, source: str) -> Chunk:
    title = source.upper() if number % 2 else ""
    return Chunk(
        source, 10 * number, 10 * number + 9, f"steam {source}", 0, number - 1, title, "One > Two", "f.txt", "d"
    )


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    chunks = [chunk_of(number, source) for number, source in enumerate(SOURCES)]
    both = LanceStore(tmp_path_factory.mktemp("filters") / "my.index"), MemoryStore()
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(len(chunks), ABOUT.dimensions)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    for one in both:
        one.create(ABOUT)
        one.replace([chunk.source for chunk in chunks], chunks, vectors)
    return both


RIGHT = {
    "source = 'a'": {"a"},
    "SOURCE = 'a' -- a comment": {"a"},
    "\"source\" = 'a'": {"a"},
    "source = 'notes/it''s'": {"notes/it's"},
    "source LIKE 'a'": {"a"},
    "source ILIKE 'a'": {"a", "A"},
    "source LIKE 'notes/%'": {"notes/it's", "notes/50%", "notes/5_%"},
    "source LIKE 'notes/%' AND source NOT LIKE '%''s'": {"notes/50%", "notes/5_%"},
    r"source LIKE '%\%'": {"notes/50%", "notes/5_%"},
    r"source LIKE '%\_%'": {"notes/5_%"},
    r"source LIKE 'b\\c'": {"b\\c"},
    "source LIKE '___'": {"b\\c", "日本語"},
    "source LIKE 'line%end'": {"line\nend"},
    "source LIKE '%n_t%s%''s'": {"notes/it's"},
    "source LIKE 'n%t%t%''s'": {"notes/it's"},
    "source LIKE 'n%t%t%t%s'": set(),
    "source LIKE '%notes/5%%%'": {"notes/50%", "notes/5_%"},
    "source LIKE 'a%a'": set(),
    "source LIKE ''": {""},
    "source ILIKE 'grö%'": {"Größe", "GRÖSSE"},
    "lower(source) = 'größe'": {"Größe"},
    "upper(source) = 'GRÖSSE'": {"Größe", "GRÖSSE"},
    "length(source) = 3": {"b\\c", "日本語"},
    "starts_with(source, 'GR') OR ends_with(source, '語') OR contains(source, '\"')": {"GRÖSSE", "日本語", 'say "x"'},
    "source IN ('a', 'A', 'nobody')": {"a", "A"},
    "source NOT IN ('a') AND tokens < 2": {"A", "notes/it's"},
    "tokens BETWEEN 0 AND 1": {"A", "notes/it's"},
    "NOT tokens BETWEEN 0 AND 99": {"a"},
    "tokens = -1": {"a"},
    "tokens >= 1e1": {""},
    "stop - start > 8 AND start + 5 < 11": {"a"},
    "source > '日'": {"日本語"},
    "source < 'B' OR source = 'b\\c'": {"A", "", "b\\c"},
    "source IS NULL": set(),
    "title IS NOT NULL AND title <> '' AND start != 10 AND tokens <= 2": {"notes/50%"},
    "title = 'A' OR (title = '' AND (tokens < 0 OR tokens = 9)) AND NOT file = 'x'": {"A", "a", 'say "x"'},
    "heading = 'One > Two' AND text = 'steam a'": {"a"},
    "TRUE AND NOT FALSE AND tokens < 0": {"a"},
    "1 = 2": set(),
    " OR ".join(f"tokens = {number}" for number in range(-1, 1500)): set(SOURCES),
    f"tokens IN ({', '.join(map(str, range(5000)))})": set(SOURCES) - {"a"},
    "NOT " * 17 + "tokens >= 0": {"a"},
    "(" * 40 + "tokens < 0" + ")" * 40: {"a"},
}


@pytest.mark.parametrize("where", RIGHT, ids=range(len(RIGHT)))
def test_both_stores_leave_the_same(stores, where):
    sql = check_filter(where)
    for store in stores:
        found = store.vectors(np.ones(ABOUT.dimensions, dtype=np.float32), 99, sql)
        assert {chunk.source for chunk, _ in found} == RIGHT[where], store.name
        assert {chunk.source for chunk, _ in store.words(KeywordQuery("steam"), 99, sql)} == RIGHT[where], store.name


def test_a_pattern_of_many_parts_takes_no_time():
    assert not _is_like("%a" * 200 + "%b", "a" * 2000)
    assert _is_like("%a" * 200 + "%", "a" * 2000)


@pytest.mark.parametrize(
    ("where", "place", "reason"),
    [
        ("source = 'a' ADN tokens > 1000", 14, "'ADN' is not expected there"),
        ("tokens > 5; tokens < 3", 11, "without a semicolon"),
        ("1); DROP TABLE chunks; --", 3, "without a semicolon"),
        ("1) OR (1", 2, "')' is not expected"),
        ("tokens > 5 LIMIT 3", 12, "'LIMIT' is not expected"),
        ("source =", 9, "something is missing there"),
        ("source = 'a", 10, "does not end"),
        ("source = 'a' /* b", 14, "does not end"),
        ("nope = 3", 1, "there is no column nope"),
        ("source = bread", 10, "there is no column bread; texts stand in single quotes"),
        ("source = bread.txt", 10, "bread.txt is not possible in a filter; texts stand in single quotes"),
        ("vector = 3", 1, "there is no column vector"),
        ('source = "a"', 10, "texts stand in single quotes"),
        ("chunks.source = 'a'", 1, "not possible"),
        ("tokens", 1, "tokens is a number where a condition is needed"),
        ("tokens = '5'", 10, "'5' is a text where a number is needed"),
        ("tokens BETWEEN 1 AND 'a'", 22, "a text where a number"),
        ("(tokens = 1) = TRUE", 2, "a condition where"),
        ("tokens > 99999999999999999999", 10, "too large a number"),
        ("tokens > 8.5", 10, "not a whole number"),
        ("tokens > 9007199254740993", 10, "too large a number"),
        ("tokens / 0 > 1", 1, "not possible"),
        ("tokens IN (SELECT 1)", 1, "not possible"),
        ("tokens IN ()", 1, "IN needs a list"),
        ("source LIKE file", 13, "LIKE needs a text"),
        ("source LIKE 'a' ESCAPE '!'", 1, "not possible"),
        ("source LIKE 'a\\'", 13, "ends in a backslash"),
        ("tokens BETWEEN SYMMETRIC 5 AND 1", 1, "not possible"),
        ("title IS TRUE", 1, "IS is for NULL alone"),
        ("load_extension('x') = 'a'", 1, "there is no function load_extension"),
        ("lower(source, 'b') = 'a'", 18, "is not expected"),
        ("starts_with(source) ", 20, "something is missing"),
        ("length(tokens) = 1", 8, "a number where a text"),
        ("source = 'a\0b'", 12, "a NUL character"),
        ("NOT " * 30 + "tokens >= 0", 121, "nested too deep"),
    ],
)
def test_a_mistake_is_shown_at_its_place(where, place, reason):
    with pytest.raises(ConfigError) as caught:
        check_filter(where)
    assert reason in str(caught.value)
    assert f"at character {place}: " in str(caught.value)


@pytest.mark.parametrize(
    "where", ["", " ", "-- a", 3, b"a", "(" * 3000 + "1=1" + ")" * 3000, "source = NULL", "source = ?"]
)
def test_what_is_no_condition_is_refused(where):
    with pytest.raises(ConfigError, match="filter"):
        check_filter(where)

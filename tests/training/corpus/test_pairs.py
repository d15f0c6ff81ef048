"""Pairs and triples out of files of every format, and the order in which they are sampled."""

import csv
import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gerund.errors import DataError
from gerund.training.corpus.pairs import Example, Examples, MinedPair, SameTaskExamples, read_examples, read_pairs
from gerund.training.corpus.texts import Mixture

ROWS = [
    {"query": "how tall is it", "positive": "It is 3 m\thigh, “roughly”.", "negatives": "Blue."},
    {"query": "who, exactly", "positive": 'She said "me".', "negatives": ""},
    {"query": "日本", "positive": "Japan", "negatives": "Jupiter"},
]
EXPECTED = [Example(r["query"], r["positive"], tuple(filter(None, [r["negatives"]]))) for r in ROWS]


def written(path, rows, names=None):
    names = names or list(rows[0])
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".tsv":
        lines = ["\t".join(names), *("\t".join(row[name].replace("\t", " ") for name in names) for row in rows)]
        path.write_text("\n".join(lines) + "\n", "utf-8")
    else:
        text = "".join(json.dumps(row) + "\n\n" for row in rows)  # blank lines are passed over
        path.write_text(text, "utf-8")
    return path


@pytest.mark.parametrize("ending", ["jsonl", "csv", "tsv", "parquet"])
def test_every_format_gives_the_same(tmp_path, ending):
    found = read_examples([written(tmp_path / f"a.{ending}", ROWS)])
    tabs = " " if ending == "tsv" else "\t"
    assert found == [Example(e.query, e.positive.replace("\t", tabs), e.negatives) for e in EXPECTED]


@pytest.mark.parametrize("ending", ["jsonl", "csv", "tsv", "parquet"])
def test_columns_by_name_and_without_negatives(tmp_path, ending):
    rows = [{"left": "a", "other": "x", "right": "b"}, {"left": "c", "other": "y", "right": "d"}]
    found = read_examples([written(tmp_path / f"a.{ending}", rows)], query="left", positive="right")
    assert found == [Example("a", "b", ()), Example("c", "d", ())]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_lists_as_in_bge(tmp_path, ending):
    rows = [{"query": "q", "pos": ["p", "more"], "neg": ["n", "m"]}, {"query": "r", "pos": ["s"], "neg": []}]
    found = read_examples([written(tmp_path / f"a.{ending}", rows)], positive="pos", negatives="neg")
    assert found == [Example("q", "p", ("n", "m")), Example("r", "s", ())]


def test_several_files_in_order_compressed_and_with_a_byte_order_mark(tmp_path):
    packed = tmp_path / "a.jsonl.gz"
    with gzip.open(packed, "wt", encoding="utf-8") as file:
        file.write("\ufeff" + json.dumps({"query": "a", "positive": "b", "negatives": None}) + "\n")
    table = tmp_path / "b.csv"
    table.write_text('\ufeffquery,positive\nc,"d\ne"\n', "utf-8")
    assert read_examples([packed, str(table)]) == [Example("a", "b", ()), Example("c", "d\ne", ())]


def test_the_same_column_for_both(tmp_path):
    path = written(tmp_path / "a.csv", [{"text": "a"}])
    assert read_examples([path], query="text", positive="text") == [Example("a", "a", ())]


def test_a_blank_first_line_hides_no_column(tmp_path):
    (tmp_path / "a.csv").write_text("\nquery,positive,negatives\na,b,c\n", "utf-8")
    assert read_examples([tmp_path / "a.csv"]) == [Example("a", "b", ("c",))]


@pytest.mark.parametrize("ending", ["jsonl", "csv", "tsv", "parquet"])
def test_instructions_and_tasks(tmp_path, ending):
    rows = [
        {"query": "a", "positive": "b", "prompt": "Find it.", "type": "x"},
        {"query": "c", "positive": "d", "prompt": "", "type": "y"},
    ]
    path = written(tmp_path / f"a.{ending}", rows)
    found = read_examples([path], instruction="prompt", task="type")
    assert found == [Example("a", "b", (), "Find it.", "x"), Example("c", "d", (), "", "y")]
    with pytest.raises(DataError, match=r"no (field|column) 'task'"):
        read_examples([path], task="task")
    with pytest.raises(DataError, match=r"no (field|column) 'instruct'"):
        read_examples([path], instruction="instruct")


@pytest.mark.parametrize("ending", ["jsonl", "csv", "tsv", "parquet"])
def test_mined_pairs(tmp_path, ending):
    rows = [
        {"text_a": "a", "text_b": "b", "weight": 30, "opening": "b. c."},
        {"text_a": "d", "text_b": "e", "weight": 31, "opening": None},
    ]
    if ending in ("csv", "tsv"):
        rows = [{**row, "weight": str(row["weight"]), "opening": row["opening"] or ""} for row in rows]
    path = written(tmp_path / f"a.{ending}", rows)
    assert read_pairs([path]) == [MinedPair("a", "b", "b. c.", 30), MinedPair("d", "e", None, 31)]
    plain = written(tmp_path / f"b.{ending}", [{"left": "a", "right": "b"}])
    assert read_pairs([plain], query="left", positive="right") == [MinedPair("a", "b", None, None)]


@pytest.mark.parametrize("weight", ['"heavy"', "1.5", "true", "[]"])
def test_weights_are_whole_numbers(tmp_path, weight):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text_a": "a", "text_b": "b", "weight": {weight}}}\n', "utf-8")
    with pytest.raises(DataError, match=r"a\.jsonl, line 1: 'weight' is a whole number, not"):
        read_pairs([path])


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"positive": "b"}', "line 2: no field 'query'; present are: positive"),
        ('{"query": "a", "positive": ""}', "line 2: 'positive' is empty"),
        ('{"query": "a", "positive": []}', "line 2: 'positive' is empty"),
        ('{"query": "a", "positive": ["b", 3]}', "line 2: 'positive' is not a text but int"),
        ('{"query": ["a"], "positive": "b"}', "line 2: 'query' is not a text but list"),
        ('{"query": "a", "positive": "b", "negatives": ["c", " "]}', "line 2: 'negatives' is empty"),
        ('{"query": "a", "positive": "b", "negatives": {"c": 1}}', "line 2: 'negatives' is not a text but dict"),
    ],
)
def test_what_is_wrong_in_a_line_is_said_with_the_line(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text('{"query": "a", "positive": "b"}\n' + line + "\n", "utf-8")
    with pytest.raises(DataError) as caught:
        read_examples([path])
    assert str(caught.value).startswith(f"{path}, {message}")


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.csv", "query,positive\na,b\n,d\n", ", line 3: 'query' is empty"),
        ("a.csv", "query,answer\na,b\n", ", line 1: no column 'positive'; present are: query, answer"),
        ("a.jsonl", "\n", ": no examples in there"),
        ("a.csv", "query,positive\n", ": no examples in there"),
        ("a.csv", "", ": no examples in there"),
        ("a.txt", "one\n", ": a txt file has no columns; valid formats are: jsonl, csv, tsv, parquet"),
    ],
)
def test_mistakes_in_files(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_text(content, "utf-8")
    with pytest.raises(DataError) as caught:
        read_examples([path])
    assert str(caught.value).startswith(f"{path}{message}")


def test_mistakes_in_parquet(tmp_path):
    path = written(tmp_path / "a.parquet", [{"query": "a", "positive": "b"}, {"query": "c", "positive": "  "}])
    with pytest.raises(DataError, match=r"a\.parquet, row 2: 'positive' is empty"):
        read_examples([path])
    with pytest.raises(DataError, match=r"a\.parquet: no column 'pos'; present are: query, positive"):
        read_examples([path], positive="pos")
    binary = written(tmp_path / "b.parquet", [{"query": b"a", "positive": "b"}])
    with pytest.raises(DataError, match=r"b\.parquet, row 1: 'query' is not a text but bytes"):
        read_examples([binary])
    with pytest.raises(DataError, match="no such file"):
        read_examples([tmp_path / "absent.jsonl"])


def example(number, negatives=3):
    return Example(f"q{number}", f"p{number}", tuple(f"n{number}.{i}" for i in range(negatives)))


def test_rows_come_in_shuffled_epochs():
    listed = [example(number) for number in range(20)]
    data = Examples(listed, seed=4)
    order = Mixture([20], [1.0], seed=4)
    rows = [data.row(number) for number in range(60)]
    assert [row.query for row in rows] == [f"q{order.sample(number).item}" for number in range(60)]
    for epoch in range(3):
        assert {row.query for row in rows[20 * epoch : 20 * epoch + 20]} == {one.query for one in listed}
    assert all(row.negatives == () for row in rows)
    assert all(row.positive == row.query.replace("q", "p") for row in rows)
    assert len(data) == 20


def test_negatives_depend_on_seed_and_number_only():
    listed = [example(number, 10) for number in range(5)]
    one, again, other = (Examples(listed, seed=seed, hard_negatives=3) for seed in (0, 0, 1))
    rows = [one.row(number) for number in range(100)]
    for number in (99, 7, 50, 7):
        assert again.row(number) == rows[number]
    assert [other.row(number) for number in range(100)] != rows
    for row in rows:
        assert len(set(row.negatives)) == 3
        assert all(negative.startswith(row.query.replace("q", "n")) for negative in row.negatives)
    # All of them get their turn, in every place.
    assert {row.negatives[0][3:] for row in rows} == set("0123456789")


@pytest.mark.parametrize("there, wanted, counts", [(1, 3, [3]), (2, 3, [1, 2]), (3, 3, [1, 1, 1]), (2, 4, [2, 2])])
def test_too_few_negatives_are_repeated_evenly(there, wanted, counts):
    row = Examples([example(0, there)], seed=0, hard_negatives=wanted).row(5)
    assert sorted(map(row.negatives.count, set(row.negatives))) == counts


def test_examples_without_negatives_where_they_are_wanted():
    with pytest.raises(DataError, match=r"hard_negatives=2 needs negatives, and 1 of 2 examples .* number 2, 'q1'"):
        Examples([example(0), example(1, 0)], seed=0, hard_negatives=2)
    with pytest.raises(DataError, match="no examples"):
        Examples([], seed=0)


SIZES = {"a": 10, "b": 7, "c": 2}


class TestSameTask:
    def examples(self, **more):
        found = [
            Example(f"{task}{number}", "p", ("n1", "n2"), "", task)
            for task, size in SIZES.items()
            for number in range(size)
        ]
        return SameTaskExamples(found, seed=3, batch_size=3, **more)

    def test_every_batch_is_of_one_task(self):
        examples = self.examples()
        assert len(examples) == 19
        batches = [[examples.row(3 * step + place) for place in range(3)] for step in range(60)]
        assert all(len({row.task for row in batch}) == 1 for batch in batches)
        tasks = [batch[0].task for batch in batches]
        # An epoch has as many batches of a task as it has examples for, and at least one.
        for epoch in range(10):
            assert sorted(tasks[6 * epoch : 6 * epoch + 6]) == ["a", "a", "a", "b", "b", "c"]
        assert len({tuple(tasks[6 * epoch : 6 * epoch + 6]) for epoch in range(10)}) > 3

    def test_each_example_as_often_as_any_other_of_its_task(self):
        examples = self.examples()
        read = [examples.row(number).query for number in range(60 * 3)]
        for task, size in SIZES.items():
            counts = [read.count(f"{task}{number}") for number in range(size)]
            assert max(counts) - min(counts) <= 1
            assert min(counts) > 0

    def test_a_row_depends_on_seed_and_number_alone(self):
        one, other = self.examples(), self.examples()
        numbers = [41, 3, 170, 0, 41, 100]
        assert [one.row(number) for number in numbers] == [other.row(number) for number in reversed(numbers)][::-1]

    def test_negatives_are_sampled(self):
        assert {len(self.examples(hard_negatives=1).row(number).negatives) for number in range(9)} == {1}
        with pytest.raises(DataError, match="needs negatives"):
            SameTaskExamples([Example("a", "b", ())], seed=0, batch_size=2, hard_negatives=1)

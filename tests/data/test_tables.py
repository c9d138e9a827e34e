from __future__ import annotations

import os

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from latte_convert.data.columns import cell
from latte_convert.data.decode import BadSample
from latte_convert.data.tables import open_table
from latte_convert.errors import DataError


def test_rows_are_numbered_by_their_first_line(tmp_path):
    table = tmp_path / "t.csv"
    table.write_text('\ufeffname, text\n"a","two\nlines"\n\nb,"x, y"\n', encoding="utf-8")
    assert list(open_table(table).rows()) == [
        (f"{table}:2", {"name": "a", "text": "two\nlines"}),
        (f"{table}:5", {"name": "b", "text": "x, y"}),
    ]
    lines = tmp_path / "t.jsonl"
    lines.write_text('{"a": 1}\n\n{"a": 2}\n')
    assert list(open_table(lines).rows()) == [(f"{lines}:1", {"a": 1}), (f"{lines}:3", {"a": 2})]
    columns = tmp_path / "t.parquet"
    pandas.DataFrame({"a": [5, 6]}).to_parquet(columns)
    assert list(open_table(columns).rows()) == [(f"{columns}:0", {"a": 5}), (f"{columns}:1", {"a": 6})]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", "a,b\n1,2\n3\n", "t.csv:3: 1 columns where the header names 2"),
        ("t.csv", "text,label\na,1\nHello, world,1\n", "t.csv:3: 3 columns where the header names 2"),
        ("t.csv", "a,b,a\n1,2,3\n", "t.csv:1: two columns are called 'a'"),
        ("t.jsonl", '{"a": 1}\n{"a"\n', "t.jsonl:2: not valid JSON"),
        ("t.jsonl", "[1]\n", "t.jsonl:1: JSON list where an object should be"),
        ("t.xml", "<a/>", "rows are read from .csv, .tsv, .jsonl, .parquet files, not from '.xml'"),
        ("t.parquet", "no", "not a readable parquet file"),
    ],
)
def test_bad_rows_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        list(open_table(tmp_path / name).rows())


def test_cells():
    assert cell({"Score ": " 3 "}, ("score", "label"), "f:1") == "3"
    with pytest.raises(DataError, match=r"f:1: no column 'score' \(also known: label\); it has text"):
        cell({"text": "x"}, ("score", "label"), "f:1")
    with pytest.raises(DataError, match="f:1: 'label' is empty"):
        cell({"label": "  "}, ("score", "label"), "f:1")


def test_empty_fields_at_the_ends_of_a_row(tmp_path):
    path = tmp_path / "t.tsv"
    path.write_text("a\tb\n1\t\n\t2\n")
    assert list(open_table(path).rows()) == [(f"{path}:2", {"a": "1", "b": ""}), (f"{path}:3", {"a": "", "b": "2"})]


def test_a_file_without_a_header_gets_its_names(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text('one\ttwo\tmore\n\nthree\tfo"ur\n')
    table = open_table(path, headless=lambda first: ["a", "b"], marks="|\t")
    assert list(table.rows()) == [(f"{path}:1", {"a": "one", "b": "two"}), (f"{path}:3", {"a": "three", "b": 'fo"ur'})]
    assert [table.cell(index, "b") for index in range(len(table))] == ["two", 'fo"ur']


@pytest.mark.parametrize("rows_a_group", [1, 3, 100])
def test_a_cell_of_a_parquet_file_is_that_of_its_row(tmp_path, rows_a_group):
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"a": range(7), "b": [str(i) * 100 for i in range(7)]}), path, row_group_size=rows_a_group)
    table = open_table(path)
    assert [row for _, row in table.rows()] == [{c: table.cell(i, c) for c in "ab"} for i in range(7)]
    assert [table.cell(i, "a") for i in (6, 0, 3)] == [6, 0, 3]


def test_a_cell_that_is_not_utf8_spoils_its_own_row(tmp_path):
    path = tmp_path / "t.parquet"
    raw = pa.array([b"good", b"\xff\xfe", b"fine"]).view(pa.string())
    pq.write_table(pa.table({"text": raw}), path)
    table = open_table(path)
    assert [table.cell(i, "text") for i in (0, 2)] == ["good", "fine"]
    with pytest.raises(BadSample, match=r"not a valid cell: .*0xff"):
        table.cell(1, "text")
    with pytest.raises(DataError, match=r"t.parquet:1: not a valid cell: .*0xff"):
        list(table.rows())


@pytest.mark.parametrize("nested", [False, True])
def test_repeated_cells_are_not_unpacked(tmp_path, nested):
    cell = "a" * 1_000_000
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"image": [{"path": cell} if nested else cell] * 200}), path)
    assert path.stat().st_size < 200_000
    pool = pa.proxy_memory_pool(pa.default_memory_pool())
    default = pa.default_memory_pool()
    pa.set_memory_pool(pool)
    try:
        assert open_table(path).cell(150, "image") == ({"path": cell} if nested else cell)
    finally:
        pa.set_memory_pool(default)
    assert 0 < pool.max_memory() < 20_000_000


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet", ".tsv"])
def test_a_pipe_is_not_waited_for(tmp_path, suffix):
    os.mkfifo(tmp_path / f"t{suffix}")
    with pytest.raises(DataError, match="it is a device or a pipe"):
        open_table(tmp_path / f"t{suffix}")


def test_a_row_of_many_megabytes_is_not_read(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": "' + b"x" * (17 << 20) + b'"}\n{"a": 3}\n')
    table = open_table(path)
    assert [table.cell(index, "a") for index in (0, 2)] == [1, 3]
    assert table.number(2) == 3
    with pytest.raises(BadSample, match="18 MB in one row"):
        table.cell(1, "a")

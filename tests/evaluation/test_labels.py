from __future__ import annotations

import pandas
import pytest
from PIL import Image

from latte_convert.errors import DataError, InputError
from latte_convert.evaluation import labels


def image(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), "red").save(path)


def test_a_folder_a_class(tmp_path):
    for name in ("b/2.png", "a/1.png", "a/deep/3.png"):
        image(tmp_path / name)
    examples, classes = labels.class_folder(tmp_path)
    assert classes == ["a", "b"]
    assert [(e.id, e.target) for e in examples] == [("a/1.png", 0), ("a/deep/3.png", 0), ("b/2.png", 1)]
    assert examples[0].load().size == (8, 8)


def test_an_image_without_a_class_and_one_of_an_unknown_class(tmp_path):
    image(tmp_path / "shoes" / "1.png")
    with pytest.raises(DataError, match=r"shoes/1.png: 'shoes' is none of the 2 classes \(nearest: shoe\)"):
        labels.class_folder(tmp_path, ["hat", "shoe"])
    image(tmp_path / "loose.png")
    with pytest.raises(DataError, match=r"loose.png has no label"):
        labels.class_folder(tmp_path)


def test_rows_are_numbered_by_their_first_line(tmp_path):
    table = tmp_path / "t.csv"
    table.write_text('\ufeffname, text\n"a","two\nlines"\n\nb,"x, y"\n', encoding="utf-8")
    assert list(labels.rows(table)) == [
        (f"{table}:2", {"name": "a", "text": "two\nlines"}),
        (f"{table}:5", {"name": "b", "text": "x, y"}),
    ]
    lines = tmp_path / "t.jsonl"
    lines.write_text('{"a": 1}\n\n{"a": 2}\n')
    assert list(labels.rows(lines)) == [(f"{lines}:1", {"a": 1}), (f"{lines}:3", {"a": 2})]
    columns = tmp_path / "t.parquet"
    pandas.DataFrame({"a": [5, 6]}).to_parquet(columns)
    assert list(labels.rows(columns)) == [(f"{columns}:1", {"a": 5}), (f"{columns}:2", {"a": 6})]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", "a,b\n1,2\n3\n", "t.csv:3: 1 columns, the header names 2"),
        ("t.jsonl", '{"a": 1}\n{"a"\n', "t.jsonl:2: not valid JSON"),
        ("t.jsonl", "[1]\n", "t.jsonl:1: JSON list where an object should be"),
        ("t.xml", "<a/>", "rows are read from .csv, .tsv, .jsonl, .parquet files, not from '.xml'"),
        ("t.parquet", "no", "not a readable parquet file"),
    ],
)
def test_bad_rows_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        list(labels.rows(tmp_path / name))


def test_cells():
    assert labels.cell({"Score ": " 3 "}, ("score", "label"), "f:1") == "3"
    with pytest.raises(DataError, match=r"f:1: no column 'score' \(also known: label\); it has text"):
        labels.cell({"text": "x"}, ("score", "label"), "f:1")
    with pytest.raises(DataError, match="f:1: 'label' is empty"):
        labels.cell({"label": "  "}, ("score", "label"), "f:1")


def test_files_that_rows_name(tmp_path):
    image(tmp_path / "one.png")
    assert labels.named_file(tmp_path, "one.png", "image", "f:1") == tmp_path / "one.png"
    with pytest.raises(DataError, match=r"f:1: no such file.*nearest: one.png"):
        labels.named_file(tmp_path, "ones.png", "image", "f:1")
    with pytest.raises(DataError, match=r"f:2: one.png is not one of audio"):
        labels.named_file(tmp_path, "one.png", "audio", "f:2")
    with pytest.raises(DataError, match=r"f:3: no such file"):
        labels.named_file(tmp_path, "x" * 300 + ".png", "image", "f:3")
    with pytest.raises(DataError, match="f:3: 7 is not the name of a file"):
        labels.named_file(tmp_path, 7, "image", "f:3")


def test_a_choice_keeps_the_order_and_does_not_depend_on_the_others():
    names = [f"{i:02}" for i in range(30)]
    some = labels.choose(names, 10, 0, str)
    assert len(some) == 10
    assert some == sorted(some)
    assert labels.choose(names, 10, 1, str) != some
    assert set(labels.choose([n for n in names if n in some or n < "10"], 10, 0, str)) <= {*some, *names[:10]}
    assert labels.choose(names, None, 0, str) == names
    assert labels.choose(names, 30, 0, str) == names


def test_a_missing_library_names_the_extra():
    with pytest.raises(InputError, match=r'needs no_such_library.*pip install "latte-convert\[eval\]"'):
        labels.need("no_such_library.part")

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latte_convert.data.json_file import JsonFile, field
from latte_convert.errors import DataError

TEXT = """{"info": {"images": [1, "}]{["]},
 "images" : [ {"id": 1},

  {"name": "a \\" ] }",
   "id": 2}
 ],"empty": []
}"""


def test_lines_of_entries(tmp_path):
    path = tmp_path / "labels.json"
    path.write_text(TEXT)
    document = JsonFile(path)
    assert [where.removeprefix(str(path)) for where, _ in document.list_of("images")] == [
        ":2 (images[0])",
        ":4 (images[1])",
    ]
    assert document.list_of("empty") == []
    with pytest.raises(DataError, match="no list 'info'"):
        document.list_of("info")
    with pytest.raises(DataError, match=r"labels.json:2 \(images\): JSON list where an object"):
        document.entries()


def test_a_file_that_changes_is_what_was_read(tmp_path):
    path = tmp_path / "labels.json"
    path.write_text(TEXT)
    document = JsonFile(path)
    path.write_text("{}")
    assert len(document.list_of("images")) == 2


# Strings without line breaks inside, so that the expected lines can be told from the text by a pattern.
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='ab"\\{}[],:\u20ac'),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet="x]}"), inner, max_size=3),
    max_leaves=8,
)


@given(entries=st.lists(st.dictionaries(st.just("value"), _VALUES, min_size=1), max_size=5), indent=st.integers(0, 3))
def test_lines_by_what_the_writer_marks(entries, indent, tmp_path_factory):
    """Every entry begins with a key that occurs nowhere else: the line before it is that of its brace."""
    path = tmp_path_factory.mktemp("json") / "labels.json"
    marked = [{"__begin__": i, **entry} for i, entry in enumerate(entries)]
    path.write_text(json.dumps({"before": entries, "list": marked}, indent=indent, ensure_ascii=False))
    text = path.read_text().splitlines()
    wanted = [number for number, line in enumerate(text, start=0) if re.match(r'\s*"__begin__"', line)]
    found = JsonFile(path).list_of("list")
    assert [int(where.rsplit(" ", 1)[0].rsplit(":", 1)[1]) for where, _ in found] == wanted
    assert [entry for _, entry in found] == marked


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({}, "x: no 'id'; it has nothing"),
        ({"id": " "}, "x: 'id' is empty"),
        ({"id": None}, "x: 'id' is empty"),
        ({"id": True}, "x: 'id' is True, not int or str"),
        ({"id": [1]}, r"x: 'id' is \[1\], not int or str"),
    ],
)
def test_a_member_of_another_kind(entry, message):
    with pytest.raises(DataError, match=message):
        field(entry, "id", (int, str), "x")


def test_members():
    assert field({"id": 0}, "id", int, "x") == 0
    assert field({"id": " a "}, "id", str, "x") == "a"

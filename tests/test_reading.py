from __future__ import annotations

import json
import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latte_convert.errors import CheckpointError, DataError, IntegrityError
from latte_convert.reading import Unreadable, parse_json, parse_yaml, read_bytes, read_json, read_text

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(_JSON)
def test_what_a_writer_writes_is_read(value):
    text = json.dumps(value)
    assert parse_json(text) == value
    assert parse_json(b"\xef\xbb\xbf" + text.encode()) == value


@pytest.mark.parametrize(
    ("content", "line", "reason"),
    [
        (b"", 1, "Expecting value"),
        (b'{"a": 1,\n "b": }', 2, "Expecting value"),
        (b'{"a": 1}\n{"b": 2}', 2, "Extra data"),
        (b'["a",\n "\xff"]', 2, "not UTF-8: byte 0xff"),
        (b'{"a": NaN}', None, "NaN is no JSON number"),
        (b"[-Infinity]", None, "-Infinity is no JSON number"),
        (b'{"a": {"b": 1, "b": 1}}', None, "the key 'b' is there twice"),
        (b"[" * 200_000, None, "nested too deeply"),
        (b"[" + b"9" * 5_000 + b"]", None, "thousands of digits"),
    ],
)
def test_what_is_no_document(content, line, reason, tmp_path):
    with pytest.raises(Unreadable, match=reason) as caught:
        parse_json(content)
    assert caught.value.line == line
    path = tmp_path / "x.json"
    path.write_bytes(content)
    for kind in (DataError, CheckpointError, IntegrityError):
        with pytest.raises(kind, match=reason) as error:
            read_json(path, kind, advice="Do this.")
        assert str(error.value).startswith(f"{path}:{line}: " if line else f"{path}: ")
        assert str(error.value).endswith(". Do this.")


def test_lenient_as_the_libraries_are():
    assert parse_json('{"a": 1, "a": [2, Infinity]}', lenient=True) == {"a": [2, math.inf]}


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    (tmp_path / "big").write_bytes(b"123")
    for name, reason in (("pipe", "device or a pipe"), ("link", "device or a pipe"), (".", "folder"), ("\0", "null")):
        with pytest.raises(Unreadable, match=reason):
            read_bytes(tmp_path / name)
    with pytest.raises(Unreadable, match="at most"):
        read_bytes(tmp_path / "big", most=2)
    assert read_bytes(tmp_path / "big", most=3) == b"123"
    (tmp_path / "latin").write_bytes(b"a\n\xff")
    with pytest.raises(Unreadable, match="not UTF-8: byte 0xff"):
        read_text(tmp_path / "latin")
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "absent")
    with pytest.raises(DataError, match="no file"):
        read_json(tmp_path / "absent")
    with pytest.raises(DataError, match=r"Write one\.$"):
        read_json(tmp_path / "absent", absent="Write one.")


@pytest.mark.parametrize(
    "text", ["kernel: " + "[" * 10_000 + "]" * 10_000, "".join(" " * i + "a:\n" for i in range(2_000))]
)
def test_yaml_that_is_nested_too_deeply(text):
    with pytest.raises(Unreadable, match="nested too deeply"):
        parse_yaml(text)

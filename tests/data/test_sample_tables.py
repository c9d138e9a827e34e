"""Samples from lines of text and rows of tables."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from data.making import (
    encoded,
    everything,
    fill,
    picture,
    put,
    reasons,
    texts,
)

from latte_convert.data.samples import open_samples
from latte_convert.errors import DataError


def test_lines_of_a_text_file(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbffirst\r\n\r\n   \nsecond \xc3\xa9\nbad \xff\xfe\nsecond \xc3\xa9\nlast"
    found = everything(put(tmp_path / "t.txt", content), "text")
    values = texts(found)
    assert values.pop("t.txt:1") == "first"
    assert values.pop("t.txt:7") == "last"
    assert list(values.values()) == ["second é"]  # of lines 4 and 6
    assert reasons(found)["t.txt:5"] == "not UTF-8: byte 0xff at position 4"
    assert "same content as t.txt:" in (reasons(found).get("t.txt:4") or reasons(found)["t.txt:6"])
    assert found[0].sha256 == hashlib.sha256(str(found[0].value).encode()).hexdigest()


def test_files_of_a_text_folder(tmp_path: Path) -> None:
    put(tmp_path / "a.txt", b"\xef\xbb\xbfone\r\ntwo\r\n")
    put(tmp_path / "blank.txt", b" \n\n")
    put(tmp_path / "latin.txt", "é".encode("latin-1"))
    put(tmp_path / "wide.txt", "wide".encode("utf-16-le"))
    found = everything(tmp_path, "text")
    assert texts(found) == {"a.txt": "one\ntwo"}
    assert found[0].sha256 == hashlib.sha256(b"\xef\xbb\xbfone\r\ntwo\r\n").hexdigest()
    assert reasons(found) == {
        "blank.txt": "no text in it",
        "latin.txt": "not UTF-8: byte 0xe9 at position 0",
        "wide.txt": "binary data or UTF-16, not UTF-8 text",
    }


@pytest.mark.parametrize("suffix", [".txt", ".csv", ".jsonl"])
@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf", b"\r\n\n  \n"])
def test_file_without_lines(tmp_path: Path, suffix: str, content: bytes) -> None:
    with pytest.raises(DataError, match="is empty"):
        open_samples(put(tmp_path / f"t{suffix}", content), "text", samples=1)


def test_bad_lines_of_jsonl_are_skipped_by_line(tmp_path: Path) -> None:
    lines = [
        '\ufeff{"text": "one"}',
        "",
        '{"text": "two", "caption": "not this"}',
        '{"txt": "wrong key"}',
        '{"text": "cut',
        '["a list"]',
        '{"text": 5}',
        '{"text": null}',
        '{"text": "\\ud800"}',
        "[" * 100_000,
    ]
    found = everything(put(tmp_path / "d.jsonl", "\r\n".join(lines).encode()), "text")
    assert texts(found) == {"d.jsonl:1": "one", "d.jsonl:3": "two"}
    why = reasons(found)
    assert sorted(why) == ["d.jsonl:10", *(f"d.jsonl:{n}" for n in range(4, 10))]
    assert why["d.jsonl:4"] == "no key 'text'; it has 'txt'"
    assert "not valid JSON" in why["d.jsonl:5"]
    assert why["d.jsonl:7"] == "int where text should be"
    with pytest.raises(DataError, match=r"d\.jsonl:\d+: "):
        open_samples(tmp_path / "d.jsonl", "text", samples=9, strict=True)


def test_wrong_key_on_all_lines_names_those_found(tmp_path: Path) -> None:
    path = put(tmp_path / "d.jsonl", b'{"headline": "a", "n": 1}\n{"headline": "b", "m": 2}\n')
    with pytest.raises(DataError, match=r"it has 'headline', 'n', 'm'\. Rename one to 'text'"):
        open_samples(path, "text", samples=1)
    with pytest.raises(DataError, match=r"no line holds a JSON object .*d\.jsonl:1: not valid JSON"):
        open_samples(put(tmp_path / "d.jsonl", b"hello\nthere\n"), "text", samples=1)


@pytest.mark.parametrize(
    ("header", "column"),
    [("id,Text", 1), ("caption,sentence", 1), (" transcript ,label", 0), ("s1,s2,score", 0)],
)
def test_csv_column_choice(tmp_path: Path, header: str, column: int) -> None:
    rows = [f"x{n},y{n},3"[: 5 if header.count(",") == 1 else 7] for n in range(2)]
    path = put(tmp_path / "d.csv", "\n".join([header, *rows]).encode())
    assert texts(everything(path, "text")) == {f"d.csv:{n + 2}": f"{'xy'[column]}{n}" for n in range(2)}


def test_csv_without_header_reads_the_first_column(tmp_path: Path) -> None:
    path = put(tmp_path / "d.csv", b'"One, two.",b,2.5\nthree,d,1\n')
    assert texts(everything(path, "text")) == {"d.csv:1": "One, two.", "d.csv:2": "three"}
    path = put(tmp_path / "d.csv", b"a girl is brushing\nshort\n")
    assert texts(everything(path, "text")) == {"d.csv:1": "a girl is brushing", "d.csv:2": "short"}


def test_csv_with_unknown_header_names_the_columns(tmp_path: Path) -> None:
    path = put(tmp_path / "d.csv", b"headline,label\na,b\n")
    with pytest.raises(DataError, match="it has 'headline', 'label'"):
        open_samples(path, "text", samples=1)
    with pytest.raises(DataError, match="a header and no rows"):
        open_samples(put(tmp_path / "d.csv", b"text,label\n"), "text", samples=1)


def test_csv_rows_with_quotes_line_ends_and_dirt(tmp_path: Path) -> None:
    content = (
        b'\xef\xbb\xbflabel,text\r\n1,"comma, and ""quotes"""\r\n2,"two\r\nlines"\r\n\r\n'
        b'3\r\n4,\xff\r\n5,  \r\n6,5" disk\r\n7,line\xe2\x80\xa8separator\r\n8,"never closed\r\n9,lost\r\n'
    )
    found = everything(put(tmp_path / "d.csv", content), "text")
    assert texts(found) == {
        "d.csv:2": 'comma, and "quotes"',
        "d.csv:3": "two\nlines",
        "d.csv:9": '5" disk',
        "d.csv:10": "line\u2028separator",
    }
    why = reasons(found)
    assert why["d.csv:6"] == "1 columns where the header names 2"
    assert "not UTF-8: byte 0xff" in why["d.csv:7"]
    assert why["d.csv:8"] == "no text in it"
    assert "not a valid CSV row" in why["d.csv:11"]


def test_csv_goes_on_after_an_endless_field(tmp_path: Path) -> None:
    path = put(tmp_path / "d.csv", b"text\nbefore\n" + b"x" * 200_000 + b"\nafter\n")
    found = everything(path, "text")
    assert texts(found) == {"d.csv:2": "before", "d.csv:4": "after"}
    assert "field larger than field limit" in reasons(found)["d.csv:3"]


@pytest.mark.parametrize("column", ["image", "file_name", "path"])
@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_tables_name_files_relative_to_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: str, suffix: str
) -> None:
    fill(tmp_path / "img", 2)
    names = ["img/000.png", "img/001.png", "img/gone.png", ""]
    if suffix == ".csv":
        content = f"{column},label\n" + "".join(f"{name},1\n" for name in names)
    else:
        content = "".join(json.dumps({column: name}) + "\n" for name in names)
    put(tmp_path / f"d{suffix}", content.encode())
    monkeypatch.chdir(tmp_path / "img")
    found = everything(f"../d{suffix}", "image")
    first = 2 if suffix == ".csv" else 1
    assert sorted(found.ids) == [f"d{suffix}:{first}", f"d{suffix}:{first + 1}"]
    expected = hashlib.sha256((tmp_path / "img" / "000.png").read_bytes()).hexdigest()
    assert {s.id: s.sha256 for s in found}[f"d{suffix}:{first}"] == expected
    why = reasons(found)
    assert "cannot read gone.png: No such file" in why[f"d{suffix}:{first + 2}"]
    assert "names no file" in why[f"d{suffix}:{first + 3}"]


def test_parquet_of_images(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    fill(tmp_path / "img", 7)
    cells: list[object] = [{"bytes": encoded(picture(n)), "path": f"{n}.png"} for n in range(6)]
    cells += [{"bytes": None, "path": "img/006.png"}, {"bytes": b"", "path": "x.png"}, None]
    pq.write_table(pa.table({"label": list(range(9)), "image": cells}), tmp_path / "d.parquet", row_group_size=4)
    found = everything(tmp_path / "d.parquet", "image")
    assert sorted(found.ids) == [f"d.parquet:{n}" for n in range(7)]
    for sample in found:
        np.testing.assert_array_equal(np.asarray(sample.value), np.asarray(picture(int(sample.id[-1]))))
    assert reasons(found) == {"d.parquet:7": "empty file", "d.parquet:8": "None names no file"}


def test_parquet_of_text_and_damaged_parquet(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"caption": [f"t{n}" for n in range(300)]}), tmp_path / "d.parquet")
    assert texts(everything(tmp_path / "d.parquet", "text")) == {f"d.parquet:{n}": f"t{n}" for n in range(300)}
    with pytest.raises(DataError, match="it has 'caption'"):
        open_samples(tmp_path / "d.parquet", "image", samples=1)
    with pytest.raises(DataError, match="not a readable parquet"):
        open_samples(put(tmp_path / "bad.parquet", b"PAR1 no"), "text", samples=1)
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "none.parquet")
    with pytest.raises(DataError, match="has no rows"):
        open_samples(tmp_path / "none.parquet", "text", samples=1)

"""Rows of a dataset of the Hub, streamed once through ``datasets`` into a temporary file."""

from __future__ import annotations

import itertools
import os
import re
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from latte_convert.compat import require
from latte_convert.data.columns import cell_content, choose_column
from latte_convert.data.decode import BadSample, Modality
from latte_convert.data.sources import looks_like_path
from latte_convert.errors import DataError, nearest

PREFIX = "hf:"
_ROWS_PER_SAMPLE = 4


class HubRows:
    """A window of the rows of one split, ``hf:NAME[:SPLIT[:SLICE]]``.

    Without SPLIT it is ``train``, or the first where there is none of that name. SLICE is ``start:stop``;
    without a stop, four rows are streamed for each sample asked for, which leaves a choice and spares. Their
    encoded bytes lie in a nameless temporary file: another iteration needs no network and no memory.
    """

    def __init__(self, spec: str, modality: Modality, samples: int) -> None:
        name, self._split, self._start, stop = _parse(spec)
        stop = self._start + _ROWS_PER_SAMPLE * samples if stop is None else stop
        self._places: list[tuple[int, int] | BadSample] = []
        self._text = modality == "text"
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this object
        weakref.finalize(self, self._file.close)
        try:
            self._split, rows = _stream(name, self._split)
            self._spool(itertools.islice(rows, self._start, stop), modality, spec)
        except DataError:
            raise
        except Exception as error:  # the loaders' failures (network, scripts, formats) share no base class
            raise DataError(
                f"cannot read {spec}: {type(error).__name__}: {error}. Check the name, the connection and "
                "HF_HUB_OFFLINE, or give a local folder or file"
            ) from error
        if not self._places:
            raise DataError(f"{spec}: split '{self._split}' has no rows there; choose another slice")

    def __len__(self) -> int:
        return len(self._places)

    def id(self, index: int) -> str:
        """Split and row, counted from 0."""
        return f"{self._split}:{self._start + index}"

    def read(self, index: int) -> bytes | str:
        """Content of one row, from the temporary file."""
        place = self._places[index]
        if isinstance(place, BadSample):
            raise place
        offset, size = place
        self._file.seek(offset)
        content = self._file.read(size)
        return content.decode("utf-8") if self._text else content

    def _spool(self, rows: Iterator[Mapping[str, object]], modality: Modality, spec: str) -> None:
        column = None
        for row in rows:
            column = column or choose_column(row, modality, spec)
            try:
                content = cell_content(row.get(column), modality, _read_remote)
            except BadSample as error:
                self._places.append(error)
                continue
            raw = content.encode("utf-8") if isinstance(content, str) else content
            self._places.append((self._file.tell(), len(raw)))
            self._file.write(raw)


def _parse(spec: str) -> tuple[str, str | None, int, int | None]:
    name, _, rest = spec.removeprefix(PREFIX).partition(":")
    split, _, window = rest.partition(":")
    if not name or looks_like_path(name):
        raise DataError(f"{spec}: '{name}' is not the name of a Hub dataset; give a local path without {PREFIX}")
    if os.path.exists(name):
        raise DataError(f"{spec}: '{name}' is a local path here; give it without {PREFIX}")
    bounds = re.fullmatch(r"(\d*):(\d*)", window or ":")
    if bounds is None:
        raise DataError(f"{spec}: the slice '{window}' is not of the form start:stop, such as 0:100")
    start = int(bounds[1] or 0)
    stop = int(bounds[2]) if bounds[2] else None
    if stop is not None and stop <= start:
        raise DataError(f"{spec}: the slice '{window}' holds no rows; it must end after it starts")
    return name, split or None, start, stop


def _stream(name: str, split: str | None) -> tuple[str, Iterator[Mapping[str, Any]]]:
    """Name of the split and its rows, images and audio left encoded."""
    datasets = require("datasets", "datasets")
    splits = datasets.load_dataset(name, streaming=True)
    if split is None:
        split = "train" if "train" in splits else next(iter(splits))
    if split not in splits:
        raise DataError(f"{name} has no split '{split}' ({nearest(split, splits)})")
    rows = splits[split]
    if rows.features is not None:  # where they are not known beforehand, nothing is decoded either
        rows = rows.decode(False)
    return split, iter(rows)


def _read_remote(path: str) -> bytes:
    import fsspec  # type: ignore[import-untyped]

    try:
        with fsspec.open(path, "rb") as file:
            content: bytes = file.read()
    except (OSError, ValueError) as error:
        raise BadSample(f"cannot read {path}: {error}") from error
    return content

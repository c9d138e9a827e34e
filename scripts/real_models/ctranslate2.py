"""Reader for CTranslate2's binary model layout (``model.bin``, binary version 6)."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from real_models.download import FetchError

if TYPE_CHECKING:
    import numpy as np

DTYPES = ("float32", "int8", "int16", "int32", "float16")
VERSION = 6


class _Cursor:
    """Little-endian values read one after another."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, size: int) -> bytes:
        piece = self.data[self.at : self.at + size]
        if len(piece) != size:
            raise FetchError(f"model.bin ends at byte {len(self.data)} inside a value: it is damaged")
        self.at += size
        return piece

    def integer(self, code: str) -> int:
        value: int = struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]
        return value

    def text(self) -> str:
        return self.take(self.integer("H")).rstrip(b"\0").decode("utf-8")


def read_variables(data: bytes) -> tuple[str, dict[str, np.ndarray]]:
    """Name of the specification and every variable, aliases included.

    The layout: u32 binary version; text name; u32 revision; u32 count; then for each variable text name,
    u8 rank, u32 dimensions, u8 data type, u32 bytes, data; then u32 count of aliases, each text alias,
    text name. A text is a u16 length, closing zero byte counted, and its bytes. Source: ``model_spec.py``
    of CTranslate2.

    Raises:
        FetchError: Another binary version, an unknown data type, or bytes missing or left over.
    """
    import numpy as np

    cursor = _Cursor(data)
    version = cursor.integer("I")
    if version != VERSION:
        raise FetchError(f"model.bin has binary version {version}; this reader knows version {VERSION}")
    spec = cursor.text()
    cursor.integer("I")  # the specification's revision
    variables: dict[str, np.ndarray] = {}
    for _ in range(cursor.integer("I")):
        name = cursor.text()
        shape = [cursor.integer("I") for _ in range(cursor.integer("B"))]
        dtype = cursor.integer("B")
        if dtype >= len(DTYPES):
            raise FetchError(f"variable {name} of model.bin has unknown data type {dtype}")
        raw = cursor.take(cursor.integer("I"))
        variables[name] = np.frombuffer(raw, dtype=DTYPES[dtype]).reshape(shape)
    for _ in range(cursor.integer("I")):
        alias, name = cursor.text(), cursor.text()
        variables[alias] = variables[name]
    if cursor.at != len(data):
        raise FetchError(f"model.bin has {len(data) - cursor.at} bytes after its last variable")
    return spec, variables

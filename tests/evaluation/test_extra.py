from __future__ import annotations

import pytest

from latte_convert.errors import InputError
from latte_convert.evaluation.extra import need


def test_a_missing_library_names_the_extra():
    with pytest.raises(InputError, match=r'needs no_such_library.*pip install "latte-convert\[eval\]"'):
        need("no_such_library.part")

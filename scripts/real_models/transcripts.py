"""Error rates of transcripts that are full of spelled words and numbers (the AN4 corpus)."""

from __future__ import annotations

import re
from collections.abc import Sequence

UNITS = "ZERO ONE TWO THREE FOUR FIVE SIX SEVEN EIGHT NINE TEN ELEVEN TWELVE"
TEENS = "THIRTEEN FOURTEEN FIFTEEN SIXTEEN SEVENTEEN EIGHTEEN NINETEEN"
NUMBERS = {"OH": "0", **{word: str(i) for i, word in enumerate(f"{UNITS} {TEENS}".split())}}
TENS_WORDS = "TWENTY THIRTY FORTY FIFTY SIXTY SEVENTY EIGHTY NINETY"
TENS = {word: str(i) for i, word in enumerate(TENS_WORDS.split(), 2)}


def words(text: str) -> list[str]:
    """Upper-case runs of letters and digits; everything else separates."""
    return re.findall(r"[A-Z0-9]+", text.upper())


def characters(text: str) -> str:
    """Letters and digits without spaces, number words as digits: ``"ENTER FIFTY FOUR J"`` -> ``"ENTER54J"``.

    A speaker spells ``J P E G`` and a recogniser writes ``JPEG`` or ``J-P-E-G``: none of these is an error.
    """
    spelled = words(text)
    out = []
    for i, word in enumerate(spelled):
        if word in TENS:
            after = NUMBERS.get(spelled[i + 1], "") if i + 1 < len(spelled) else ""
            out.append(TENS[word] if len(after) == 1 and after != "0" else TENS[word] + "0")
        else:
            out.append(NUMBERS.get(word, word))
    return "".join(out)


def edit_distance(a: Sequence[str], b: Sequence[str]) -> int:
    """Levenshtein distance: insertions, deletions and substitutions that turn ``a`` into ``b``."""
    row = list(range(len(b) + 1))
    for i, left in enumerate(a, 1):
        previous, row = row, [i]
        for j, right in enumerate(b, 1):
            row.append(min(previous[j] + 1, row[-1] + 1, previous[j - 1] + (left != right)))
    return row[-1]


def error_rates(references: list[str], hypotheses: list[str]) -> tuple[float, float]:
    """Word error rate as written, and character error rate on :func:`characters`, both over the whole set."""
    pairs = list(zip(references, hypotheses, strict=True))
    rates = []
    for units in (words, characters):
        wrong = sum(edit_distance(units(reference), units(heard)) for reference, heard in pairs)
        rates.append(wrong / sum(len(units(reference)) for reference, _ in pairs))
    return rates[0], rates[1]

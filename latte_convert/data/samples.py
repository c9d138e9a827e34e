"""Calibration samples: found, checked and ordered once, then decoded anew each time they are looked at."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from latte_convert.data.choice import seeded_order
from latte_convert.data.decode import BadSample, Modality, Value, decode
from latte_convert.data.hub import PREFIX, HubRows
from latte_convert.data.sources import Source, missing_path, open_local
from latte_convert.errors import DataError, UsageError
from latte_convert.wording import some

__all__ = ["Modality", "Sample", "SampleSet", "Skipped", "open_samples"]

logger = logging.getLogger("latte_convert")


@dataclass(frozen=True)
class Sample:
    """One decoded sample.

    Attributes:
        id: Path relative to the folder, ``file.csv:LINE``, member of the archive, or
            ``split:ROW`` of a Hub dataset.
        sha256: Hex digest of the bytes of the file, or of the text in UTF-8.
        value: Upright RGB image; text; or float32 mono waveform of shape ``(frames,)``.
    """

    id: str
    sha256: str
    value: Value


@dataclass(frozen=True)
class Skipped:
    """A candidate that was looked at and not used, and why."""

    id: str
    reason: str


@dataclass(frozen=True)
class _Entry:
    index: int
    id: str
    sha256: str


class SampleSet:
    """Usable samples in seeded order. In memory are their ids and hashes; each look decodes anew.

    Attributes:
        modality: What the samples are.
        source: Where they come from, as the user wrote it.
        requested: How many were asked for when the source was opened.
        skipped: What was passed over on the way. Both parts of a split keep this and ``requested``.
    """

    def __init__(
        self,
        reader: Source,
        entries: tuple[_Entry, ...],
        *,
        modality: Modality,
        source: str,
        requested: int,
        skipped: tuple[Skipped, ...],
        sampling_rate: int | None,
    ) -> None:
        self.modality, self.source = modality, source
        self.requested, self.skipped = requested, skipped
        self._reader, self._entries, self._sampling_rate = reader, entries, sampling_rate

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sample]:
        return map(self._sample, self._entries)

    def __getitem__(self, index: int) -> Sample:
        return self._sample(self._entries[index])

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids in seeded order."""
        return tuple(entry.id for entry in self._entries)

    def fingerprint(self) -> str:
        """Hex SHA-256 over the sorted pairs of id and content hash: the same for any order of the samples."""
        digest = hashlib.sha256()
        for name, content in sorted((entry.id, entry.sha256) for entry in self._entries):
            digest.update(f"{name}\0{content}\n".encode())
        return digest.hexdigest()

    def split(self, holdout: int) -> tuple[SampleSet, SampleSet]:
        """All but the last ``holdout`` samples of the seeded order, and those.

        Raises:
            UsageError: ``holdout`` is negative.
            DataError: Nothing would be left to calibrate on.
        """
        if holdout < 0:
            raise UsageError(f"holdout must be 0 or more, not {holdout}")
        kept = len(self) - holdout
        if kept < 1:
            raise DataError(
                f"{self.source}: {len(self)} usable samples, {holdout} of them to hold out, leaves none to "
                f"calibrate on; hold out at most {len(self) - 1} or give more samples"
            )
        return self._part(self._entries[:kept]), self._part(self._entries[kept:])

    def _part(self, entries: tuple[_Entry, ...]) -> SampleSet:
        return SampleSet(
            self._reader,
            entries,
            modality=self.modality,
            source=self.source,
            requested=self.requested,
            skipped=self.skipped,
            sampling_rate=self._sampling_rate,
        )

    def _sample(self, entry: _Entry) -> Sample:
        try:
            raw = self._reader.read(entry.index)
            if _sha256(raw) != entry.sha256:
                raise BadSample("its content is another")
            return Sample(entry.id, entry.sha256, decode(raw, self.modality, self._sampling_rate))
        except BadSample as error:
            raise DataError(
                f"{self.source}: {entry.id} has changed since the data was opened ({error}); "
                "run again on data that nothing else writes to"
            ) from error


def open_samples(
    source: str | Path,
    modality: Modality,
    *,
    samples: int,
    seed: int = 0,
    strict: bool = False,
    min_samples: int = 1,
    sampling_rate: int | None = None,
) -> SampleSet:
    """Find ``samples`` usable samples, each decoded once to prove it.

    The order is that of a hash of seed and id: it depends on neither the disk nor a generator's version, and
    a file that comes or goes leaves the others where they are. Of equal contents just the first counts, so
    that what is held out is never calibrated on; that is no fault, even where ``strict``.

    Args:
        source: Folder; ``.txt``, ``.jsonl``, ``.csv``, ``.parquet`` or ``.tar`` file; or
            ``hf:NAME[:SPLIT[:SLICE]]``. An existing path always wins.
        modality: What the model takes.
        samples: How many to look for.
        seed: Chooses the order.
        strict: Fail on the first damaged sample instead of skipping it.
        min_samples: Fewer usable ones are an error.
        sampling_rate: Rate of the waveforms in Hz; None keeps each file's own.

    Returns:
        Between ``min_samples`` and ``samples`` of them; a warning is logged where some are wanting.

    Raises:
        UsageError: A number makes no sense.
        DataError: No such source, one of another modality, or too little usable in it.
    """
    if not 1 <= min_samples <= samples:
        raise UsageError(f"need 1 <= min_samples <= samples, not min_samples={min_samples}, samples={samples}")
    if sampling_rate is not None and sampling_rate < 1:
        raise UsageError(f"sampling_rate must be in Hz and positive, not {sampling_rate}")
    reader = _open(source, modality, samples)
    name = str(source)
    entries: dict[str, _Entry] = {}
    skipped: list[Skipped] = []
    for index in seeded_order(len(reader), partial(_identity, reader), seed):
        if len(entries) == samples:
            break
        identity = _identity(reader, index)
        try:
            raw = reader.read(index)
            digest = _sha256(raw)
            if digest in entries:
                skipped.append(Skipped(identity, f"same content as {entries[digest].id}"))
                continue
            decode(raw, modality, sampling_rate)
        except BadSample as error:
            if strict:
                raise DataError(f"{name}: {identity}: {error}; mend or remove it, or do without strict") from error
            skipped.append(Skipped(identity, str(error)))
            continue
        entries[digest] = _Entry(index, identity, digest)
    _check_enough(name, len(entries), samples, min_samples, skipped)
    return SampleSet(
        reader,
        tuple(entries.values()),
        modality=modality,
        source=name,
        requested=samples,
        skipped=tuple(skipped),
        sampling_rate=sampling_rate,
    )


def _open(source: str | Path, modality: Modality, samples: int) -> Source:
    text = os.fspath(source)
    if not text:
        raise UsageError("no data given: name a folder, a file, or hf:NAME")
    path = text if os.path.exists(text) else os.path.expanduser(text)
    if os.path.exists(path):
        return open_local(Path(path), modality)
    if isinstance(source, str) and source.startswith(PREFIX):
        return HubRows(source, modality, samples)
    raise missing_path(path)


def _identity(reader: Source, index: int) -> str:
    """Id of a candidate; a part of a file name that is not Unicode is escaped, so that JSON can hold it."""
    return reader.id(index).encode("utf-8", "backslashreplace").decode("utf-8")


def _sha256(raw: bytes | str) -> str:
    return hashlib.sha256(raw.encode("utf-8") if isinstance(raw, str) else raw).hexdigest()


def _check_enough(source: str, usable: int, asked: int, least: int, skipped: list[Skipped]) -> None:
    if usable == asked:
        return
    counts = f"{asked} asked, {usable} usable, {len(skipped)} skipped"
    if usable < least:
        first = some((f"{item.id}: {item.reason}" for item in skipped), separator="; ")
        raise DataError(
            f"{source}: {counts} of {usable + len(skipped)} tried, at least {least} needed"
            + (f" ({first})" if first else "")
            + "; add samples"
            + (" or lower min_samples" if usable else "")
        )
    logger.warning("%s: %s", source, counts)


def fingerprint(sets: Sequence[SampleSet]) -> str:
    """SHA-256 of what samples were read: of the one set, or over those of several; empty without any."""
    prints = [each.fingerprint() for each in sets]
    return prints[0] if len(prints) == 1 else hashlib.sha256("".join(prints).encode()).hexdigest() if prints else ""

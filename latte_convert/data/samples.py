"""Calibration samples: found, checked and ordered once, then decoded anew each time they are looked at."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path

from latte_convert.data.choice import seeded_order
from latte_convert.data.decode import BadSample, Modality, Value, decode
from latte_convert.data.hub import PREFIX, HubRows
from latte_convert.data.likeness import alike, content, held_out, look
from latte_convert.data.sources import Source, missing_path, open_local
from latte_convert.errors import CheckpointError, DataError, UsageError
from latte_convert.reading import is_utf8
from latte_convert.wording import some

__all__ = ["Modality", "Sample", "SampleSet", "Skipped", "open_samples"]

logger = logging.getLogger("latte_convert")

_TRIES = 8
"""Samples that a model is tried on before it is taken to refuse them all."""


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
    look: bytes


class _Search:
    """The way through a source in seeded order: gives usable samples one by one, and notes what it passes over."""

    def __init__(
        self, reader: Source, source: str, modality: Modality, seed: int, strict: bool, sampling_rate: int | None
    ) -> None:
        self.source, self.modality, self.strict = source, modality, strict
        self.skipped: list[Skipped] = []
        self._reader, self._sampling_rate = reader, sampling_rate
        self._found = self._walk(seed)

    def __iter__(self) -> Iterator[_Entry]:
        return self

    def __next__(self) -> _Entry:
        return next(self._found)

    def _walk(self, seed: int) -> Iterator[_Entry]:
        seen: dict[str, str] = {}
        for index in seeded_order(len(self._reader), partial(_identity, self._reader), seed):
            name = _identity(self._reader, index)
            try:
                entry, digest = self._entry(index, name)
            except BadSample as error:
                self.pass_over(name, error)
                continue
            if digest in seen:
                self.skipped.append(Skipped(name, f"same content as {seen[digest]}"))
                continue
            seen[digest] = name
            yield entry

    def _entry(self, index: int, name: str) -> tuple[_Entry, str]:
        """A candidate that can be decoded, and a hash of what comes out."""
        raw = self._reader.read(index)
        value = decode(raw, self.modality, self._sampling_rate)
        return _Entry(index, name, _sha256(raw), look(value)), content(value)

    def pass_over(self, name: str, reason: BadSample) -> None:
        """Note a sample that cannot be used.

        Raises:
            DataError: None may be.
        """
        if self.strict:
            raise DataError(f"{self.source}: {name}: {reason}; fix or remove the file, or omit --strict") from reason
        self.skipped.append(Skipped(name, str(reason)))

    def sample(self, entry: _Entry) -> Sample:
        """Decode a sample anew.

        Raises:
            DataError: Its content has changed.
        """
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


class SampleSet:
    """Usable samples in seeded order. In memory are their ids, hashes and thumbnails; each look decodes anew.

    Attributes:
        modality: What the samples are.
        source: Where they come from, as the user wrote it.
        requested: How many were asked for when the source was opened.
    """

    def __init__(self, search: _Search, entries: Sequence[_Entry], requested: int, least: int) -> None:
        self.modality, self.source, self.requested = search.modality, search.source, requested
        self._search, self._entries, self._least = search, tuple(entries), least

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sample]:
        return map(self._search.sample, self._entries)

    def __getitem__(self, index: int) -> Sample:
        return self._search.sample(self._entries[index])

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids in seeded order."""
        return tuple(entry.id for entry in self._entries)

    @property
    def digests(self) -> tuple[str, ...]:
        """SHA-256 of the content of each sample, in seeded order."""
        return tuple(entry.sha256 for entry in self._entries)

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """What was passed over on the way, by whichever part of a split."""
        return tuple(self._search.skipped)

    @property
    def copies(self) -> list[list[str]]:
        """Ids of samples that are copies of each other, such as one photograph in two sizes or qualities."""
        groups = alike([entry.look for entry in self._entries])
        return [[self._entries[i].id for i in group] for group in groups if len(group) > 1]

    def fingerprint(self) -> str:
        """Hex SHA-256 over the sorted pairs of id and content hash: the same for any order of the samples."""
        digest = hashlib.sha256()
        for name, content_hash in sorted((entry.id, entry.sha256) for entry in self._entries):
            digest.update(f"{name}\0{content_hash}\n".encode())
        return digest.hexdigest()

    def tried(self, take: Callable[[Sample], object]) -> SampleSet:
        """The samples that can be used; for each that cannot, the next one of the seeded order is tried.

        Args:
            take: Uses a sample; raises BadSample where that cannot be done.

        Raises:
            CheckpointError: None of the first few can be used: it is not for the samples.
            DataError: Too few are left, or one cannot be used and ``strict`` is on.
        """
        kept: list[_Entry] = []
        refused: list[str] = []
        for entry in chain(self._entries, self._search):
            try:
                take(self._search.sample(entry))
            except BadSample as error:
                refused.append(f"{entry.id}: {error}")
                if not kept and len(refused) == min(_TRIES, self.requested):
                    raise CheckpointError(
                        f"the model cannot be run on samples of {self.source}. {len(refused)} were tried: "
                        f"{some(refused, separator='; ')}."
                    ) from error
                self._search.pass_over(entry.id, error)
                continue
            kept.append(entry)
            if len(kept) == self.requested:
                break
        if refused:
            _check_enough(self._search, len(kept), self.requested, self._least)
        return SampleSet(self._search, kept, self.requested, self._least)

    def split(self, holdout: int) -> tuple[SampleSet, SampleSet]:
        """All but the last ``holdout`` samples of the seeded order, and those; copies stay on one side if they can.

        Raises:
            UsageError: ``holdout`` is negative.
            DataError: Nothing would be left to calibrate on.
        """
        if holdout < 0:
            raise UsageError(f"holdout must be 0 or more, not {holdout}")
        if len(self) - holdout < 1:
            raise DataError(
                f"{self.source}: {len(self)} usable samples, {holdout} of them to hold out, leaves none to "
                f"calibrate on; hold out at most {len(self) - 1} or give more samples"
            )
        held = held_out([entry.look for entry in self._entries], holdout)
        parts = ([entry for i, entry in enumerate(self._entries) if (i in held) == side] for side in (False, True))
        fitted, kept = (SampleSet(self._search, part, self.requested, self._least) for part in parts)
        return fitted, kept


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
        source: Folder; ``.txt``, ``.jsonl``, ``.csv``, ``.tsv``, ``.parquet`` or ``.tar`` file; or
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
    search = _Search(reader, str(source), modality, seed, strict, sampling_rate)
    entries = list(islice(search, samples))
    _check_enough(search, len(entries), samples, min_samples)
    return SampleSet(search, entries, samples, min_samples)


def _open(source: str | Path, modality: Modality, samples: int) -> Source:
    text = os.fspath(source)
    if not text:
        raise UsageError("no data given: name a folder, a file, or hf:NAME")
    if not is_utf8(text):
        raise DataError(f"the name {text!a} is not UTF-8, and no report can hold it: rename it")
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


def _check_enough(search: _Search, usable: int, asked: int, least: int) -> None:
    if usable == asked:
        return
    skipped = search.skipped
    counts = f"{asked} asked, {usable} usable, {len(skipped)} skipped"
    if usable < least:
        first = some((f"{item.id}: {item.reason}" for item in skipped), separator="; ")
        raise DataError(
            f"{search.source}: {counts} of {usable + len(skipped)} tried, at least {least} needed"
            + (f" ({first})" if first else "")
            + "; add samples"
            + (" or lower min_samples" if usable else "")
        )
    logger.warning("%s: %s", search.source, counts)


def fingerprint(sets: Sequence[SampleSet]) -> str:
    """SHA-256 of what samples were read: of the one set, or over those of several; empty without any."""
    prints = [each.fingerprint() for each in sets]
    return prints[0] if len(prints) == 1 else hashlib.sha256("".join(prints).encode()).hexdigest() if prints else ""

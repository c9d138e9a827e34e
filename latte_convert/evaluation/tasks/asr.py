"""``asr``: word error rate of transcripts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from latte_convert import compat
from latte_convert.checkpoints.quiet import quiet_transformers
from latte_convert.compat import require
from latte_convert.data.choice import choose
from latte_convert.data.columns import cell, find_column, text_cell
from latte_convert.data.decode import SUFFIXES, BadSample, Value
from latte_convert.data.examples import Example, file_loader, named_file
from latte_convert.data.feed import Inputs
from latte_convert.data.tables import open_table
from latte_convert.errors import CheckpointError, DataError, first_line
from latte_convert.evaluation.tasks.base import Metric, Task, require_two
from latte_convert.reading import Unreadable, read_text

if TYPE_CHECKING:
    from torch import nn

    from latte_convert.checkpoints.base import Checkpoint

SILENCE = 1e-4
"""Largest amplitude (of full scale, -80 dB) that counts as silence: a recogniser makes words up for it."""

_NAME = ("file_name", "path", "audio", "file", "wav")
_TEXT = ("text", "transcript", "transcription", "sentence", "normalized_text")
_TABLES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")


class AsrTask(Task):
    """Transcribes greedily, normalises both sides as Whisper's paper does, and counts with jiwer.

    Data: a folder with ``metadata.csv`` (or ``.jsonl``) of ``file_name`` and ``text``; that table itself; or a folder
    in the layout of LibriSpeech (``*.trans.txt``, one utterance a line, beside the files).
    """

    name = "asr"
    metrics = (Metric("wer", lower_is_better=True),)
    note = "Retention of the word error rate is that of word accuracy, (1 - hybrid) / (1 - original)."

    @staticmethod
    def fits(source: Checkpoint) -> str | None:
        """It must write text for audio."""
        if "audio" not in source.modalities:
            return f"it takes {' and '.join(source.modalities)}, not audio"
        if not source.model_class.endswith(("ForConditionalGeneration", "ForSpeechSeq2Seq")):
            return "it writes no text"
        return None

    def open(self) -> list[Example]:
        """One example an utterance; its transcript is the target."""
        self._tokenizer: Any = self.setting.source.processor("text").apply
        self._generation = _generation_config(self.setting.source)
        self._normalise = _normaliser(self._tokenizer, getattr(self._generation, "language", None))
        place = self.setting.place
        rows = choose(list(_utterances(place)), self.setting.samples, self.setting.seed, lambda row: row[0])
        require_two(len(rows), str(place))
        rate = self.setting.processor("audio").sampling_rate
        return [
            Example(f"{where} ({path.name})", "audio", partial(self._audible, where, path, rate, text), text)
            for where, path, text in rows
        ]

    def _audible(self, where: str, path: Path, rate: int | None, text: str) -> Value:
        """Decode an utterance.

        Raises:
            BadSample: It is damaged or silent, or its transcript has no word.
        """
        if not any(map(str.isalnum, self._normalise(text))):
            raise BadSample(f"no word is left of the transcript {text!r} after normalisation")
        wave = file_loader(path, "audio", rate)()
        if np.abs(wave).max() < SILENCE:  # type: ignore[arg-type]
            raise BadSample("it is silent, though it has a transcript")
        return wave

    def prepare(self, example: Example, value: Value, model: nn.Module) -> Inputs:
        """Features of the whole utterance."""
        extractor: Any = getattr(self.setting.processor("audio"), "apply")  # noqa: B009 - not every processor has it
        limit = getattr(extractor, "n_samples", None)
        if limit is not None and len(value) > limit:  # type: ignore[arg-type]
            seconds = len(value) / extractor.sampling_rate  # type: ignore[arg-type]
            raise BadSample(f"{seconds:.1f} s long, the model takes {limit / extractor.sampling_rate:g} s: cut it")
        return Inputs(dict(extractor(value, sampling_rate=extractor.sampling_rate, return_tensors="pt")))

    def predict(self, model: nn.Module, inputs: Inputs, examples: Sequence[Example]) -> list[str]:
        """Transcripts, by greedy decoding."""
        speech: Any = model
        with quiet_transformers():
            tokens = speech.generate(**inputs.kwargs, generation_config=self._generation, do_sample=False)
        texts: list[str] = self._tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return texts

    def records(self, examples: Sequence[Example], predictions: Sequence[Any]) -> Any:
        """Word errors (substituted, deleted, inserted) and words of every utterance, ``(N, 2)``."""
        jiwer = require("jiwer", "eval")
        counts = []
        for example, heard in zip(examples, predictions, strict=True):
            out = jiwer.process_words(self._normalise(example.target), self._normalise(heard))
            counts.append((out.substitutions + out.deletions + out.insertions, len(out.references[0])))
        return np.array(counts, dtype=np.float64).reshape(-1, 2)

    def score(self, records: Sequence[Any]) -> dict[str, float]:
        """All errors over all words."""
        errors, words = np.asarray(records).sum(0)
        return {"wer": float(errors / words)}


def _generation_config(source: Checkpoint) -> Any:
    """The checkpoint's own settings of decoding, such as its longest transcript; None where it has none."""
    import transformers

    if not (source.path / "generation_config.json").is_file():
        return None
    try:
        return transformers.GenerationConfig.from_pretrained(source.path)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{source.path / 'generation_config.json'}: {first_line(error)}") from None


def _normaliser(tokenizer: Any, language: str | None) -> Any:
    """Whisper's normaliser: the English one, or the basic one for a checkpoint that is set to another language."""
    if language not in (None, "en", "english", "<|en|>"):
        return compat.OTHER_LANGUAGES.require()()
    return compat.ENGLISH.require()(getattr(tokenizer, "english_spelling_normalizer", None) or {})


def _utterances(place: Path) -> Iterator[tuple[str, Path, str]]:
    """``FILE:LINE``, audio file and transcript of every utterance.

    Raises:
        DataError: There is no table, or a row lacks its file or its text.
    """
    transcripts = sorted(place.rglob("*.trans.txt")) if place.is_dir() else []
    if transcripts:
        for path in transcripts:
            yield from _librispeech(path)
        return
    tables = [place] if place.is_file() else [place / name for name in _TABLES if (place / name).is_file()]
    if not tables:
        raise DataError(f"{place} has no transcripts: add {_TABLES[0]} with the columns file_name and text.")
    for where, row in open_table(tables[0]).rows():
        name = cell(row, _NAME, where)
        column = find_column(row, _TEXT)
        blank = column is not None and not str(row[column] or "").strip()  # it is skipped by name, with others like it
        text = "" if blank else text_cell(row, _TEXT, where)
        yield where, named_file(tables[0].parent, name, "audio", where), text


def _librispeech(path: Path) -> Iterator[tuple[str, Path, str]]:
    try:
        lines = read_text(path).splitlines()
    except (FileNotFoundError, Unreadable) as error:
        raise DataError(f"{path} cannot be read: {error}.") from error
    for number, line in enumerate(lines, start=1):
        name, _, text = line.strip().partition(" ")
        if not name:
            continue
        where = f"{path}:{number}"
        files = [path.parent / f"{name}{suffix}" for suffix in sorted(SUFFIXES["audio"])]
        found = next((file for file in files if file.is_file()), None)
        if found is None:
            raise DataError(f"{where}: there is no audio file {name}.* beside it.")
        yield where, found, text

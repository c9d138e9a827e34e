from __future__ import annotations

import csv
import shutil

import jiwer
import numpy as np
import pytest
import soundfile
import torch
import transformers
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

from latte_convert.data.examples import Example
from latte_convert.errors import DataError
from latte_convert.evaluation.evaluate import evaluate
from latte_convert.evaluation.tasks.asr import AsrTask, _normaliser, _utterances


@pytest.fixture
def spoken(speech, tmp_path):
    """Three sentences with their transcripts, to be changed."""
    return shutil.copytree(speech, tmp_path / "spoken")


@torch.no_grad()
def test_whisper_by_the_library_and_jiwer(whisper_artifact, models_dir, speech):
    report = evaluate(whisper_artifact, "asr", [speech])
    source = models_dir / "whisper-tiny.en"
    model = transformers.WhisperForConditionalGeneration.from_pretrained(source).eval()
    extractor = transformers.AutoFeatureExtractor.from_pretrained(source)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    normalise = EnglishTextNormalizer({})
    wanted, heard = [], []
    with (speech / "metadata.csv").open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    for name, text in rows:
        wave, rate = soundfile.read(speech / name, dtype="float32")
        features = extractor(wave, sampling_rate=rate, return_tensors="pt")["input_features"]
        tokens = model.generate(features, do_sample=False)
        wanted.append(normalise(text))
        heard.append(normalise(tokenizer.batch_decode(tokens, skip_special_tokens=True)[0]))
    found = report.metrics["wer"]
    assert found.original == pytest.approx(jiwer.wer(wanted, heard))
    assert 0 < found.original < 1  # it hears 'world' for 'boat'
    assert report.samples == 3
    assert found.retention == pytest.approx(max(0.0, 1 - found.hybrid) / (1 - found.original))


def test_word_errors_of_known_strings():
    task = object.__new__(AsrTask)
    task._normalise = _normaliser(None, None)
    pairs = [
        ("The cat sat on the mat.", "the cat sat on a mat", 1, 6),
        ("It's TWENTY-ONE, Mr. Smith", "it is 21 mister smith", 0, 5),
        ("HELLO WORLD", "", 2, 2),
        ("A dog", "a dog barks loudly", 2, 2),
    ]
    examples = [Example(str(i), "audio", lambda: "", reference) for i, (reference, *_) in enumerate(pairs)]
    records = task.records(examples, [heard for _, heard, *_ in pairs])
    assert records.tolist() == [[errors, words] for *_, errors, words in pairs]
    assert task.score(records) == {"wer": pytest.approx(5 / 15)}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("gone.wav,HELLO", r"metadata.csv:5: no such file or folder: .*gone.wav"),
        (",HELLO", r"metadata.csv:5: 'file_name' is empty"),
    ],
)
def test_bad_rows_are_named(whisper_artifact, spoken, line, message):
    present = next(spoken.glob("*.wav")).name
    with (spoken / "metadata.csv").open("a") as file:
        file.write(line.replace("PLACE", present) + "\n")
    with pytest.raises(DataError, match=message):
        evaluate(whisper_artifact, "asr", [spoken])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("PLACE,", "no word is left of the transcript ''"),
        ("PLACE,[noise] !!", "no word is left of the transcript '[noise] !!'"),
        ("PLACE,...", "no word is left of the transcript '...'"),
        ("zero.wav,NOTHING", "it is silent, though it has a transcript"),
    ],
)
def test_an_utterance_without_words_or_sound_is_skipped_by_name(whisper_artifact, spoken, line, reason):
    soundfile.write(spoken / "zero.wav", np.zeros(16_000, dtype=np.float32), 16_000)
    name = line.replace("PLACE", next(path.name for path in spoken.glob("*.wav") if path.name != "zero.wav"))
    with (spoken / "metadata.csv").open("a") as file:
        file.write(name + "\n")
    report = evaluate(whisper_artifact, "asr", [spoken])
    assert report.samples == 3
    (skipped,) = report.skipped
    assert skipped.id.startswith(f"{spoken / 'metadata.csv'}:5 (")
    assert skipped.reason == reason + (" after normalisation" if "word" in reason else "")


def test_long_speech_is_skipped_and_one_utterance_is_too_few(whisper_artifact, spoken):
    for path in spoken.glob("*.wav"):
        soundfile.write(path, np.full(16_000 * 31, 0.1, dtype=np.float32), 16_000)
    with pytest.raises(DataError, match="0 usable samples"):
        evaluate(whisper_artifact, "asr", [spoken])
    (spoken / "metadata.csv").write_text("file_name,text\n" + next(spoken.glob("*.wav")).name + ",HELLO\n")
    with pytest.raises(DataError, match="1 usable sample"):
        evaluate(whisper_artifact, "asr", [spoken])


def test_librispeech_layout(tmp_path):
    chapter = tmp_path / "84" / "121"
    chapter.mkdir(parents=True)
    (chapter / "84-121-0000.flac").write_bytes(b"x")
    table = chapter / "84-121.trans.txt"
    table.write_text("84-121-0000 GO ON\n")
    assert list(_utterances(tmp_path)) == [(f"{table}:1", chapter / "84-121-0000.flac", "GO ON")]
    table.write_text("84-121-0000 GO ON\n84-121-0001 STOP\n")
    with pytest.raises(DataError, match=r"84-121.trans.txt:2: there is no audio file 84-121-0001"):
        list(_utterances(tmp_path))
    table.write_bytes(b"84-121-0000 caf\xe9\n")
    with pytest.raises(DataError, match=r"84-121.trans.txt cannot be read"):
        list(_utterances(tmp_path))


def test_a_folder_without_transcripts(tmp_path):
    with pytest.raises(DataError, match=r"has no transcripts: add metadata.csv with the columns file_name and text"):
        list(_utterances(tmp_path))

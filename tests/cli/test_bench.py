"""``latte bench`` on the command line: streams, documents, exit codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from bench.artifacts import EVERY_SECOND, make_artifact

from latte_convert.artifact.manifest import read_manifest
from latte_convert.artifact.verify import verify
from latte_convert.bench import run as bench_run
from latte_convert.bench.result import BenchReport, Crossover

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tiny_dino: Path, photos: Path, tmp_path_factory) -> Path:
    return make_artifact(tiny_dino, photos, tmp_path_factory.mktemp("bench") / "dino", EVERY_SECOND)


@pytest.fixture
def artifact(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "dino")


@pytest.fixture
def crossing_at(monkeypatch):
    """Let the crossover be where a test wants it; times on a test machine are not to be relied on."""

    def set_to(tokens: int | None) -> None:
        monkeypatch.setattr(bench_run, "find_crossover", lambda _: Crossover(tokens=tokens, bracketed=False))

    return set_to


QUICK = ("--no-compile", "--rounds", 1)


def test_figures_go_to_stderr_and_statements_to_stdout(latte, artifact):
    manifest = (artifact / "latte.json").read_bytes()
    code, out, err = latte("bench", artifact, "--resolutions", "56,84", *QUICK)
    assert code == 0
    assert out.splitlines()
    assert all("exact" in line or "tokens" in line or "length" in line for line in out.splitlines())
    for heading in ("attention ms", "forward ms", "peak MB", "FLOPs", "counted", "cosine"):
        assert heading in err
    assert "56 px" in err
    assert "84 px" in err
    assert "original: SDPA: " in err
    assert "inputs are synthetic" in err
    assert "\x1b" not in err
    assert (artifact / "latte.json").read_bytes() == manifest
    assert not (artifact / "bench.json").exists()


def test_json_is_one_document_of_the_schema(latte, artifact):
    code, out, _ = latte("bench", artifact, "--resolutions", "56", "--json", *QUICK)
    assert code == 0
    report = BenchReport.model_validate(json.loads(out))
    assert [length.tokens for length in report.lengths] == [17]
    assert report.min_tokens_written is None


def test_write_stores_the_crossover(latte, artifact, crossing_at):
    crossing_at(30)
    code, out, err = latte("bench", artifact, "--resolutions", "56,84", "--write", "--json", *QUICK)
    assert code == 0
    report = BenchReport.model_validate(json.loads(out))
    assert report.min_tokens_written == read_manifest(artifact).min_tokens == 30
    assert [(check.tokens, check.identical) for check in report.guard] == [(17, True)]  # 37 tokens are not below
    assert "min_tokens = 30 is stored" in err
    assert verify(artifact).probe_difference == 0


def test_write_is_offered(latte, artifact, crossing_at):
    crossing_at(30)
    _, _, err = latte("bench", artifact, "--resolutions", "84", *QUICK)
    assert "--write stores min_tokens = 30" in err
    assert read_manifest(artifact).min_tokens == 0


def test_without_a_crossover_nothing_is_stored_and_that_is_said(latte, artifact, crossing_at):
    crossing_at(None)
    code, out, err = latte("bench", artifact, "--resolutions", "56", "--write", "--json", *QUICK)
    assert code == 0
    assert json.loads(out)["min_tokens_written"] is None
    assert "nothing was stored" in err
    assert read_manifest(artifact).min_tokens == 0


def test_save_keeps_the_figures(latte, artifact):
    code, out, _ = latte("bench", artifact, "--resolutions", "56", "--save", "--json", *QUICK)
    assert code == 0
    assert json.loads((artifact / "bench.json").read_text()) == json.loads(out)


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--resolutions", "60"), 3, "nearest: 56"),
        (("--tokens", "16"), 2, "give --resolutions"),
        (("--tokens", "16", "--resolutions", "56"), 2, "give one of them"),
        (("--resolutions", "56,large"), 2, "separated by commas"),
        (("--resolutions", "0"), 2, "positive"),
        (("--resolutions", "56", "--data", "nowhere"), 3, "nowhere"),
        (("--resolutions", "56", "--device", "tpu"), 2, "tpu"),
    ],
)
def test_bad_input_has_its_exit_code(latte, artifact, options, code, said):
    got, out, err = latte("bench", artifact, *options)
    assert (got, out) == (code, "")
    assert said in err
    assert "Traceback" not in err


def test_what_is_no_artifact_is_refused(latte, tiny_dino, tmp_path):
    code, _, err = latte("bench", tmp_path / "missing")
    assert code == 3
    assert "there is no artifact" in err
    code, _, err = latte("bench", tiny_dino)
    assert code == 5
    assert "is not an artifact of latte" in err

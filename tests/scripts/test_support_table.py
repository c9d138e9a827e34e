"""scripts/support_table.py: what docs/support.md says is supported is what the tables of the adapter tests expect."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import transformers

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests" / "adapters")]

import plain_models  # noqa: E402
import support_table  # noqa: E402
import vision_language_models  # noqa: E402
from support_table import BEGIN, END, Row, main, render, rows  # noqa: E402
from tiny_models import BIASED, FAMILIES, NOT_CONVERTIBLE, Family, Sites  # noqa: E402

from latte_convert.adapters.host import Host  # noqa: E402

SUPPORT = ROOT / "docs" / "support.md"


@pytest.fixture(scope="module")
def table() -> list[Row]:
    return rows(support_table.models())


def kinds(sites: list[Sites], biased: bool) -> set[str]:
    notes = " (bias)" if biased else ""
    return {f"{s.tower} {s.kind}{' (causal)' if s.causal else notes}" for s in sites} or {"none"}


def test_the_page_is_up_to_date(table: list[Row]) -> None:
    text = SUPPORT.read_text(encoding="utf-8")
    assert text.partition(BEGIN)[2].partition(END)[0].strip() == render(table)


@pytest.mark.parametrize("family", [*FAMILIES, *BIASED, *NOT_CONVERTIBLE], ids=lambda family: family.name)
def test_every_family_has_a_row_that_says_what_its_test_expects(family: Family, table: list[Row]) -> None:
    """From the sites worked out by hand, where the script asks the adapter."""
    expected = kinds([site for site in family.sites if site.reason is None], family in BIASED)
    reasons = [site.reason for site in family.sites if site.reason]
    name = type(family.build()).__name__
    assert [
        row
        for row in table
        if row.library == "transformers"
        and name in row.classes
        and set(row.converted.split(", ")) == expected
        and all(reason in row.kept for reason in reasons)
        and (bool(reasons) or row.kept == "none")
    ]


def test_every_library_is_in_it(table: list[Row]) -> None:
    assert list(dict.fromkeys(row.library for row in table)) == [
        "transformers", "timm", "open_clip", "torchvision", "torch", "diffusers", "x-transformers",
    ]  # fmt: skip


def test_every_vision_language_model_is_in_it(table: list[Row]) -> None:
    names = {type(row.build()).__name__ for row in vision_language_models.MODELS.values()}
    found = {name for row in table if "vision self" in row.converted for name in row.classes}
    assert names <= found


def test_every_plain_model_shown_is_in_it(table: list[Row]) -> None:
    assert set(plain_models.SHOWN) <= {name for row in table for name in row.architectures}


@pytest.mark.parametrize("module", ["timm_models", "open_clip_models"])
def test_every_model_of_the_other_tables_is_in_it(module: str, table: list[Row]) -> None:
    names = set(sys.modules[module].MODELS)
    assert names
    assert names <= {name for row in table if row.library != "transformers" for name in row.architectures}


def test_a_row(table: list[Row]) -> None:
    assert (
        "| whisper | transformers | `WhisperModel`, `WhisperForConditionalGeneration` "
        "| encoder self, decoder self (causal), decoder cross | none |"
    ) in render(table).splitlines()


@pytest.fixture
def document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    config = transformers.ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    with torch.device("meta"):
        model = transformers.ViTModel(config)
    monkeypatch.setattr(support_table, "models", lambda: [("vit", Host.of(model)), ("another", Host.of(model))])
    path = tmp_path / "support.md"
    path.write_text(f"# Title\n\n{BEGIN}\nold\n{END}\n\nThe end.\n", encoding="utf-8")
    return path


def test_write_replaces_the_block_and_nothing_else(document: Path) -> None:
    assert main(["--check", str(document)]) == 1
    assert "old" in document.read_text(encoding="utf-8")
    assert main(["--write", str(document)]) == 0
    assert document.read_text(encoding="utf-8") == (
        f"# Title\n\n{BEGIN}\n"
        "| Architecture | Library | Classes | Converted | Kept exact, and why |\n"
        "| --- | --- | --- | --- | --- |\n"
        "| vit | transformers | `ViTModel` | vision self | none |\n"
        f"{END}\n\nThe end.\n"
    )
    assert main(["--check", str(document)]) == 0


def test_stale_table_says_how_to_renew_it(document: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", str(document)]) == 1
    assert f"support_table.py --write {document}" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["no markers", f"{BEGIN} not closed", f"{END} {BEGIN}"])
def test_missing_markers_are_named(text: str, document: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document.write_text(text, encoding="utf-8")
    assert main(["--write", str(document)]) == 1
    assert document.read_text(encoding="utf-8") == text
    assert f"{BEGIN} and {END}" in capsys.readouterr().err


def test_absent_document(tmp_path: Path, document: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", str(tmp_path / "absent.md")]) == 1
    assert "absent.md" in capsys.readouterr().err

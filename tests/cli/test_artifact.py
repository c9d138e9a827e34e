"""``latte inspect``, ``verify``, ``restore`` and ``schema``."""

from __future__ import annotations

import json
import shutil

import pytest

pytestmark = pytest.mark.slow


def test_inspect_verify_restore(latte, artifact, tmp_path):
    code, stdout, _ = latte("inspect", artifact)
    assert code == 0
    assert "converted    4 sites" in stdout
    assert stdout.count("  4 x 4 + 1 prefix  ") == 4
    code, stdout, _ = latte("inspect", artifact, "--json")
    assert set(json.loads(stdout)) == {"manifest", "parameters", "report"}
    code, stdout, _ = latte("verify", artifact, "--json")
    assert (code, json.loads(stdout)["ok"]) == (0, True)
    code, stdout, _ = latte("restore", artifact, "--out", tmp_path / "original")
    assert (code, stdout) == (0, f"{tmp_path / 'original'}\n")
    assert (tmp_path / "original" / "config.json").is_file()


def test_inspect_needs_no_report_and_names_a_damaged_one(latte, artifact, tmp_path):
    copy = shutil.copytree(artifact, tmp_path / "hybrid")
    (copy / "report.json").unlink()
    code, stdout, _ = latte("inspect", copy, "--json")
    assert (code, json.loads(stdout)["report"]) == (0, None)
    (copy / "report.json").write_text("{")
    code, stdout, stderr = latte("inspect", copy)
    assert (code, stdout) == (3, "")
    assert f"{copy / 'report.json'}:1: not valid JSON" in stderr


@pytest.mark.parametrize("which", ["report", "manifest", "recipe"])
def test_schema_is_a_valid_json_schema(latte, which):
    import jsonschema

    code, stdout, _ = latte("schema", which)
    assert code == 0
    jsonschema.Draft202012Validator.check_schema(json.loads(stdout))


def test_integrity_errors_exit_5(latte, artifact, tmp_path):
    broken = shutil.copytree(artifact, tmp_path / "broken")
    with (broken / "config.json").open("a") as file:
        file.write("\n")
    code, stdout, stderr = latte("verify", broken)
    assert (code, stdout) == (5, "")
    assert "'config.json' is not the file that was saved" in stderr

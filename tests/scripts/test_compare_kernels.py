"""scripts/compare_kernels.py: it measures what it says, keeps what was measured, and judges the bars rightly."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

pytest.importorskip("sklearn", reason="scikit-learn is not installed: pip install 'latte-convert[demo]'")
import compare_kernels  # noqa: E402
from comparison.cases import CASES, TOKENS, long_pairs, long_texts  # noqa: E402
from comparison.kernels import ENTRIES, RIVALS, only  # noqa: E402
from comparison.rendering import CLS, PATCHES, bars, markdown, plot  # noqa: E402

from latte_convert.kernels.registry import get_kernel, kernel_names  # noqa: E402

pytestmark = pytest.mark.slow

LATTE, OURS = compare_kernels.QUICK


def made_row(label: str, name: str, share: float, cosine: float, sites: int = 8, **more: Any) -> dict[str, Any]:
    """A row as the JSON holds it."""
    cosines = {CLS: cosine - 0.1, PATCHES: cosine}
    figures = {"cosine": cosine, "relative_error": 0.5, "cosines": cosines, "task": 0.25, "flops_share": share}
    about = {"kernel": label, "name": name, "table": "main", "variant": "", "sites": sites, "of": 12, "held_out": 4}
    return about | figures | {"fit_error": 0.125} | more


def made_results(*rows: dict[str, Any]) -> dict[str, Any]:
    case = {"about": "a model; data", "metric": "score", "real": True, "original_task": 1.0, "rows": list(rows)}
    return {"cases": {"dinov2-392": case}}


def test_every_kernel_is_there_and_every_line_can_be_built() -> None:
    assert len({entry.label for entry in ENTRIES}) == len(ENTRIES)
    assert {entry.kernel for entry in ENTRIES if entry.table == "main"} == set(kernel_names()) - {"exact", "near_past"}
    for entry in ENTRIES:
        candidate = entry.candidate(64)
        built = get_kernel(candidate.kernel)(2, 8, **candidate.options)
        assert {**built.options, **{k: v for k, v in candidate.options.items() if v is not False}} == built.options


def test_the_paper_is_the_paper_and_far_keys_follow_the_tokens() -> None:
    by_label = {entry.label: entry for entry in ENTRIES}
    paper = by_label["latte (paper)"].candidate(784).options
    assert {name: paper.get(name, False) for name in only()} == only("sigma")
    assert paper["granularity"] == "layer"
    assert by_label["near_far 8/2, 1/8, 2 steps"].candidate(784).options["clusters"] == 98
    assert by_label["near_far 8/2, 1/8, 2 steps"].candidate(4).options["clusters"] == 1
    assert all(by_label[name].candidate(784).options["sigma"] for name in RIVALS)


def test_a_quick_run_on_the_tiny_models_and_what_is_made_of_it(tmp_path: Path) -> None:
    path = tmp_path / "comparison.json"
    compare_kernels.main(["--quick", "--case", "tiny-clip", "--json", str(path)])
    case = json.loads(path.read_text())["cases"]["tiny-clip"]
    rows = case["rows"]
    assert [(row["kernel"], row["sites"]) for row in rows] == [(k, n) for k in (LATTE, OURS) for n in (1, 3, 4)]
    assert all(set(row["converted"]) <= set(rows[2]["converted"]) for row in rows)  # all four, whatever is chosen
    assert all("vision" in name for name in rows[2]["converted"])
    # 65 tokens are enough for latte; near_far with these windows is softmax there, and its row says so.
    assert {(row["exact_share"], row["task_exact_share"]) for row in rows[:3]} == {(0.0, 0.0)}
    assert {(row["exact_share"], row["task_exact_share"], row["flops_share"]) for row in rows[3:]} == {(1.0, 1.0, 1.0)}
    # The most robust site alone keeps more than all of them.
    assert 0.999 > rows[0]["cosine"] > rows[2]["cosine"]
    # By hand, per head of 32 channels and 65 tokens: 32 x 33 features and value sums for keys and as many for
    # queries, a query's own norm sum apart, against two products of 65 x 65 x 32.
    exact = 2 * 65 * 65 * 2 * 32
    low, high = 2 * (2 * 65 * 32 * 32) / exact, 2 * (2 * 65 * 33 * 34) / exact
    assert low <= rows[0]["flops_share"] <= high
    # Another kernel later: what is there stays, what is measured again is replaced.
    relu = ["--quick", "--case", "tiny-clip", "--json", str(path), "--kernel", "relu", "--kernel", LATTE]
    compare_kernels.main(relu)
    merged = json.loads(path.read_text())["cases"]["tiny-clip"]["rows"]
    assert [row["kernel"] for row in merged] == [k for k in (LATTE, "relu", OURS) for _ in range(3)]
    assert [row["cosine"] for row in merged if row["kernel"] == LATTE] == [row["cosine"] for row in rows[:3]]
    # Nothing left to do: the model is not even loaded.
    before = path.stat().st_mtime_ns
    compare_kernels.main([*relu, "--resume"])
    assert path.stat().st_mtime_ns == before


def test_timings_go_beside_the_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = CASES["tiny-clip"]
    monkeypatch.setitem(CASES, "tiny-clip", lambda *where: replace(load(*where), without=("relu",)))
    path, tables, picture = (tmp_path / name for name in ("c.json", "c.md", "c.png"))
    what = ["--quick", "--case", "tiny-clip", "--json", str(path), "--kernel", LATTE, "--kernel", "relu"]
    compare_kernels.main(what)
    compare_kernels.main([*what, "--timings"])
    found = json.loads(path.read_text())
    assert {row["name"] for row in found["cases"]["tiny-clip"]["rows"]} == {"latte"}
    timings = found["cases"]["tiny-clip"]["timings"]
    assert set(timings) == {"exact", LATTE}
    assert timings["exact"]["of_exact"] == 1
    assert all(each["ms"] > 0 and each["peak_bytes"] >= 65 * 128 * 4 for each in timings.values())  # its output
    assert found["machine"]["dtype"] == "float32"
    capsys.readouterr()
    compare_kernels.main(["--render", "--json", str(path), "--markdown", str(tables), "--plot", str(picture)])
    assert capsys.readouterr().out.strip() == tables.read_text().strip()
    assert f"| {LATTE} |" in tables.read_text()
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("ours", "holds"), [(0.95, True), (0.9, False)])
def test_monarch_is_beaten_at_equal_flops_only(ours: float, holds: bool) -> None:
    results = made_results(
        made_row("monarch, 1 step", "monarch", 0.10, 0.9),
        made_row("near_far 2/1, 1/20, 3 steps", "near_far", 0.10, ours),
        made_row("near_far", "near_far", 0.40, 0.99),  # better, and dearer: does not count
    )
    (line,) = (text for text in bars(results) if "monarch" in text)
    assert line.startswith("- yes" if holds else "- **no**")
    assert "0.9900" not in line


@pytest.mark.parametrize(("latte", "rival", "needed"), [(0.9, True, True), (0.84, False, False)])
def test_latte_against_its_best_rival_and_the_cls_token(latte: float, rival: bool, needed: bool) -> None:
    results = made_results(
        made_row("latte (all free)", "latte", 0.1, latte),
        made_row("elu", "elu", 0.1, 0.2),
        made_row("relu", "relu", 0.1, 0.85),
    )
    against, cls = bars(results)
    assert "relu 0.8500" in against
    assert against.startswith("- yes") is rival
    assert cls.startswith("- yes") is needed  # CLS is 0.1 below the cosine: 0.8 and 0.74


def test_a_broken_output_is_shown_and_loses(tmp_path: Path) -> None:
    broken = made_row("latte (all free)", "latte", 0.1, 0.5) | {"cosine": None, "cosines": {CLS: None, PATCHES: None}}
    results = made_results(broken, made_row("relu", "relu", 0.1, -0.2))
    assert all(line.startswith("- **no**") for line in bars(results))
    assert "| latte (all free) | 10.0% | - | - | -, - |" in markdown(results)
    plot(results, tmp_path / "picture.png")
    with Image.open(tmp_path / "picture.png") as picture:
        assert picture.convert("L").getextrema() == (0, 255)  # axes and ground


def test_ablations_have_tables_of_their_own() -> None:
    results = made_results(
        made_row("latte (paper)", "latte", 0.1, 0.7, variant="TTE and JPN"),
        made_row("latte: TTE", "latte", 0.1, 0.6, table="tte_jpn", variant="TTE"),
        made_row("relu: both", "relu", 0.1, 0.5, table="extras", variant="both"),
        made_row("latte: both", "latte", 0.1, 0.8, table="extras", variant="both"),
        made_row("latte: all", "latte", 0.1, 0.9, table="extras", variant="all"),
    )
    text = markdown(results)
    assert "| TTE and JPN | 0.125 | 0.600, 0.700 |" in text
    assert "| TTE | 0.125 | 0.500, 0.600 |" in text
    assert "| kernel | both | all |" in text
    assert "| relu | 0.400, 0.500 | - |" in text
    assert "| latte | 0.700, 0.800 | 0.800, 0.900 |" in text


def test_long_texts_share_no_sentence_and_need_no_padding(models_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models_dir / "minilm-l6")
    texts = list(long_texts([f"sentence {'one two three '} number {i} ." for i in range(150)], tokenizer))
    # Eight tokens a sentence, at least: 150 of them fill four texts, and the rest is left out.
    assert len(texts) >= 4
    assert {tuple(batch["input_ids"].shape) for batch in texts} == {(1, 256)}
    heads = [tokenizer.decode(batch["input_ids"][0][:12]) for batch in texts]
    assert len(set(heads)) == len(texts)


def test_long_pairs_are_long_enough_and_scored_by_what_they_are_joined_from(models_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models_dir / "minilm-l6")
    pairs = [(f"{i} is one of many good numbers", f"one of the many numbers is {i}", str(i / 40)) for i in range(200)]
    found = long_pairs(pairs, tokenizer, 5)
    for first, second, score in found:
        assert min(len(tokenizer(text).input_ids) for text in (first, second)) >= TOKENS
        numbers = [[int(word) for word in text.split() if word.isdigit()] for text in (first, second)]
        assert numbers[0] == numbers[1]
        assert score == pytest.approx(sum(numbers[0]) / len(numbers[0]) / 40)
    scores = [score for *_, score in found]
    assert scores == sorted(scores)
    assert scores[0] < 1
    assert scores[-1] > 4


def test_what_is_wrong_on_the_command_line_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, said in ((["--render"], "--render needs --json"), (["--case", "minilm"], "give --models and --data")):
        with pytest.raises(SystemExit):
            compare_kernels.main(argv)
        assert said in capsys.readouterr().err
    assert set(compare_kernels.ABLATED_CASES) <= set(CASES)


@pytest.mark.parametrize(("patches", "holds"), [(0.994, True), (0.992, False)])
def test_a_bar_wants_all_its_figures_within_the_flops(patches: float, holds: bool) -> None:
    row = made_row("near_far 8/2, 1/8, 2 steps", "near_far", 0.30, patches, task=0.996)
    row["cosines"][CLS] = 0.997
    dear = made_row("near_far", "near_far", 0.35, 1.0, task=1.0)
    (line,) = (text for text in bars(made_results(row, dear)) if "at most 33%" in text and "8 layers" in text)
    assert line.startswith("- yes" if holds else "- **no**")
    assert f"patches {patches:.4f} (bar 0.993)" in line

from __future__ import annotations

import csv
import json

import pytest
import torch
from scipy import stats

import latte_convert
from latte_convert.errors import CheckpointError, DataError
from latte_convert.evaluation.evaluate import evaluate
from latte_convert.evaluation.tasks.sts import _pairs, _pooling


@torch.no_grad()
def spearman(model, tokenizer, pairs) -> float:
    """The other way: a padded batch, the masked mean, scipy."""
    cosines = []
    for first, second, _ in pairs:
        batch = tokenizer([first, second], padding=True, return_tensors="pt")
        tokens = model(**batch).last_hidden_state
        mask = batch["attention_mask"][..., None].float()
        vectors = (tokens * mask).sum(1) / mask.sum(1)
        cosines.append(float(torch.cosine_similarity(vectors[0], vectors[1], dim=0)))
    return float(stats.spearmanr(cosines, [float(score) for *_, score in pairs]).statistic)


def test_minilm_by_other_means(minilm_artifact, models_dir, sentences):
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(models_dir / "minilm-l6")
    original = transformers.AutoModel.from_pretrained(models_dir / "minilm-l6").eval()
    with sentences.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    report = evaluate(minilm_artifact, "sts", [sentences], batch_size=8)
    assert report.samples == 20
    found = report.metrics["spearman"]
    assert found.original == pytest.approx(spearman(original, tokenizer, rows), abs=1e-6)
    assert found.hybrid == pytest.approx(spearman(latte_convert.load(minilm_artifact), tokenizer, rows), abs=1e-6)
    assert found.retention == pytest.approx(found.hybrid / found.original)
    low, high = found.interval
    assert low < found.retention < high + 1e-9


def test_layouts(tmp_path):
    expected = [('A "man" runs', "Someone, running", 4.5), ("A cat", "A dog", 0.5)]
    quoted = '"A ""man"" runs","Someone, running",4.5\nA cat,A dog,0.5\n'
    (tmp_path / "bare.csv").write_text(quoted)
    (tmp_path / "named.csv").write_text("sentence1,sentence2,score\n" + quoted)
    fields = [["main-news", "f", "2012", str(i), str(score), a, b] for i, (a, b, score) in enumerate(expected)]
    (tmp_path / "benchmark.csv").write_text("".join("\t".join(row) + "\n" for row in fields))
    glue = ["genre\tindex\tscore\tsentence1\tsentence2", *(f"g\t1\t{s}\t{a}\t{b}" for a, b, s in expected)]
    (tmp_path / "glue.tsv").write_text("\n".join(glue) + "\n")
    rows = [json.dumps({"text1": a, "text2": b, "label": s}) for a, b, s in expected]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    for name in ("bare.csv", "named.csv", "benchmark.csv", "glue.tsv", "rows.jsonl"):
        assert [(a, b, s) for _, a, b, s in _pairs(tmp_path / name)] == expected, name


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("s1,s2,score\na b,c d,\n", r"p.csv:2: 'score' is empty"),
        ("s1,s2,score\na b,c d,1\nx y,,2\n", r"p.csv:3: 's2' is empty"),
        ("a b,c d,1\ne f,g h,high\n", r"p.csv:2: the score 'high' is not a number"),
        ("a b,c d,nan\ne f,g h,1\n", r"p.csv:1: the score 'nan' is not a number"),
        ("a b,c d,1\ne f\n", r"p.csv:2: 1 columns where 3 are expected"),
        ("a,b\nc,d\n", r"p.csv:2: no column 's1' .*; it has a, b"),
        ("s1,s2,score\na,a,1\nb,b,2\n", "of the original is undefined on these 2 samples"),
        ("s1,s2,score\na,b,1\n", r"1 usable sample; a metric needs at least 2"),
    ],
)
def test_bad_pairs_are_named(minilm_artifact, tmp_path, content, message):
    (tmp_path / "p.csv").write_text(content)
    with pytest.raises(DataError, match=message):
        evaluate(minilm_artifact, "sts", [tmp_path / "p.csv"])


@pytest.mark.parametrize(
    "row",
    [
        '["a"], "s2": "b", "score": 1',
        '"a", "s2": "b", "score": true',
        '5, "s2": "b", "score": 1',
        '"a", "s2": "b", "score": 1' + "0" * 400,
    ],
)
def test_bad_rows_are_named(tmp_path, row):
    path = tmp_path / "p.jsonl"
    path.write_text(f'{{"s1": {row}}}\n')
    with pytest.raises(DataError, match=r"p.jsonl:1: ('s1' is .*, not a text|the score .* is not a number)"):
        list(_pairs(path))


def test_pooling_is_the_checkpoint_s_own(minilm_artifact, tmp_path):
    class Source:
        path = tmp_path

    assert (minilm_artifact / "1_Pooling" / "config.json").is_file()
    assert _pooling(Source) == "mean"
    (tmp_path / "1_Pooling").mkdir()
    settings = {"word_embedding_dimension": 4, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    assert _pooling(Source) == "cls"
    settings["pooling_mode_max_tokens"] = True
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match="pooling cls_token and max_tokens is not supported"):
        _pooling(Source)

from __future__ import annotations

import json

import pytest

from latte_convert.data.captions import read_captions

PAIRS = [("a.jpg", "A dog, running."), ("a.jpg", "One dog"), ("b.jpg", 'A "cat"')]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("captions.txt", 'image,caption\na.jpg,"A dog, running."\na.jpg,One dog\nb.jpg,"A ""cat"""\n'),
        (
            "results.csv",
            'image_name| comment_number| comment\na.jpg| 0| A dog, running.\na.jpg|1|One dog\nb.jpg|0|A "cat"\n',
        ),
        ("results.txt", 'a.jpg\t0\tA dog, running.\na.jpg\t1\tOne dog\nb.jpg\t0\tA "cat"\n'),
        ("results.token", 'a.jpg#0\tA dog, running.\na.jpg#1\tOne dog\nb.jpg#0\tA "cat"\n'),
        (
            "rows.jsonl",
            '{"image": "a.jpg", "caption": "A dog, running."}\n{"image": "a.jpg", "caption": "One dog"}\n'
            '{"image": "b.jpg", "caption": "A \\"cat\\""}\n',
        ),
        (
            "dataset_flickr8k.json",
            json.dumps(
                {
                    "images": [
                        {"filename": "a.jpg", "split": "test", "sentences": [{"raw": t} for _, t in PAIRS[:2]]},
                        {"filename": "c.jpg", "split": "train", "sentences": [{"raw": "Not this one"}]},
                        {"filename": "b.jpg", "split": "test", "sentences": [{"raw": PAIRS[2][1]}]},
                    ]
                }
            ),
        ),
    ],
)
def test_layouts(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    assert [(caption.image, caption.text) for caption in read_captions(tmp_path / name)] == PAIRS

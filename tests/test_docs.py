"""What the pages in docs show does run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image, ImageOps

from latte_convert import Recipe, convert, evaluate, load
from latte_convert.errors import IntegrityError, UsageError
from latte_convert.evaluation import tasks
from latte_convert.kernels import register_kernel, registry

pytestmark = pytest.mark.slow

DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_your_own_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The page's kernel converts, is fitted, saved and loaded; without it, loading asks for it."""
    monkeypatch.setattr(registry.KERNELS, "registered", {})
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "your_own_kernel.md").read_text(encoding="utf-8"), re.DOTALL)
    page: dict[str, Any] = {"__name__": "your_own_kernel"}
    for block in blocks:
        exec(block, page)
    result, inputs = page["result"], page["batches"][0]
    site = result.plan.converted[0].name
    kernel = result.model.get_submodule(f"{site}.latte")
    assert isinstance(kernel, page["CosineKernel"])
    assert set(kernel.share.flatten().tolist()) <= {0.25, 0.5, 0.75, 1.0}
    assert len(result.plan.converted) == 2

    result.save(tmp_path / "hybrid")
    monkeypatch.setattr(registry.KERNELS, "registered", {})
    with pytest.raises(IntegrityError, match=r"kernel 'cosine' is unknown here.*Install the package that offers it"):
        load(tmp_path / "hybrid")
    register_kernel(page["CosineKernel"])
    with torch.no_grad():
        expected = result.model(**inputs).last_hidden_state
        assert torch.equal(load(tmp_path / "hybrid")(**inputs).last_hidden_state, expected)


def test_your_own_task(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_dino: Path, photos: Path) -> None:
    """The page's task goes by its name in ``evaluate``; its metric is right where the answer is known."""
    monkeypatch.setattr(tasks.TASKS, "registered", {})
    recipe = Recipe(kernel="latte", samples=4, k=1)
    artifact = convert(tiny_dino, photos, recipe=recipe).save(tmp_path / "hybrid")
    (block,) = re.findall(r"```python\n(.*?)```", (DOCS / "your_own_task.md").read_text(encoding="utf-8"), re.DOTALL)
    exec(block, {"__name__": "your_own_task"})
    report = evaluate(artifact, "mirror", [photos], samples=6)
    assert report.samples == 6
    metric = report.metrics["cosine"]
    model = load(artifact)
    images = [Image.open(photos / name).convert("RGB") for name in sorted(p.name for p in photos.glob("*.jpg"))]
    assert -1 <= metric.hybrid < metric.original + 1
    with torch.no_grad():
        processor = transformers.AutoImageProcessor.from_pretrained(artifact)
        pairs = [
            [model(**processor(each, return_tensors="pt")).pooler_output[0] for each in (image, ImageOps.mirror(image))]
            for image in images
        ]
    cosines = [float(torch.nn.functional.cosine_similarity(a, b, dim=0)) for a, b in pairs]
    assert min(cosines) - 0.05 <= metric.hybrid <= max(cosines) + 0.05
    with pytest.raises(UsageError, match=r"unknown task 'miror' \(nearest: mirror"):
        evaluate(artifact, "miror", [photos])

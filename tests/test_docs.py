"""What the pages in docs show does run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from latte_convert import load
from latte_convert.errors import IntegrityError
from latte_convert.kernels import register_kernel, registry

DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_your_own_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The page's kernel converts, is fitted, saved and loaded; without it, loading asks for it."""
    monkeypatch.setattr(registry, "_registered", {})
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
    monkeypatch.setattr(registry, "_registered", {})
    with pytest.raises(IntegrityError, match=r"kernel 'cosine' is unknown here.*Install the package that offers it"):
        load(tmp_path / "hybrid")
    register_kernel(page["CosineKernel"])
    with torch.no_grad():
        expected = result.model(**inputs).last_hidden_state
        assert torch.equal(load(tmp_path / "hybrid")(**inputs).last_hidden_state, expected)

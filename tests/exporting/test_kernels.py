"""Every kernel as a graph: each format, each batch size, and what only one number of tokens holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from latte_convert.adapters.host import Host
from latte_convert.attention import AttentionCall, CallShape, TokenLayout
from latte_convert.errors import UsageError
from latte_convert.exporting import operators
from latte_convert.exporting.check import differences
from latte_convert.exporting.formats import Format, Onnx, TorchExport, TorchScript
from latte_convert.exporting.graph import capture
from latte_convert.exporting.inputs import Sound
from latte_convert.exporting.parts import Part, Size, make_parts
from latte_convert.exporting.subject import Subject, open_subject
from latte_convert.kernels.base import Kernel
from latte_convert.kernels.near_far import clustering
from latte_convert.kernels.registry import get_kernel, kernel_names

NEAR_FAR: dict[str, Any] = {"window": 3, "halo": 1, "clusters": 12}
BLOCKS: dict[str, Any] = {"window": 16, "region": 32, "blocks": 8, "opened": 2}
EXTRAS: dict[str, Any] = {"exact_prefix": True, "key_shift": True, "input_map": True, "output_map": True, "bias": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in kernel_names() if name not in ("near_far", "blocks", "near_past")},
    "blocks": ("blocks", BLOCKS),
    "latte with extras": ("latte", EXTRAS),
    "monarch, 2 steps": ("monarch", {"steps": 2}),
    "near_far": ("near_far", NEAR_FAR),
    "near_far, pooled": ("near_far", {**NEAR_FAR, "far": "pooled"}),
    "near_far, 4 views": ("near_far", {**NEAR_FAR, "views": 4, "steps": 2}),
    "near_far without windows": ("near_far", {**NEAR_FAR, "window": 0}),
}


def _subject(path: Path, kernel: str, options: dict[str, Any], resolution: int | None = None) -> Subject:
    """A checkpoint with an unfitted kernel, its parameters away from where they start, in its first layer."""
    subject = open_subject(path, resolution=resolution)
    host = Host.of(subject.model)
    site = host.sites()[0]
    made = _away(get_kernel(kernel)(site.heads, site.head_dim, **options))
    host.convert({site.name: made})
    return Subject(subject.source, subject.model, {site.name: made}, {site.name: site.tower}, resolution=resolution)


def _worst(part: Part, form: Format, folder: Path, program: Any = None) -> float:
    file = folder / f"model{form.suffix}"
    form.write(program or capture(part), part, file)
    return max(each.value for each in differences(part, form.open(file, part)))


class _Site(nn.Module):
    """A kernel on an image of 12 x 12 tokens behind one of a prefix, perhaps with a bias."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> dict[str, Tensor]:
        layout = TokenLayout(1, (12, 12))
        return {"out": self.kernel(AttentionCall(query, key, value, 0.3, layout=layout, bias=bias))}


def _site(kernel: str, options: dict[str, Any], *, biased: bool = False) -> Part:
    example = {name: 2 * torch.randn(1, 2, 145, 12) for name in ("query", "key", "value")}
    if biased:
        example["bias"] = 3 * torch.randn(1, 2, 145, 145)
    model = _Site(_away(get_kernel(kernel)(2, 12, **options)))
    shape = CallShape(145, 145, 2, 12, 12, layout=TokenLayout(1, (12, 12)))
    assert not model.kernel.is_softmax(model.kernel.inner(shape))
    return Part("", model, Sound(example), lambda module, tensors: module(**tensors))


def _away(kernel: Kernel) -> Kernel:
    """A kernel with its parameters away from where they start."""
    with torch.no_grad():
        for parameter in kernel.parameters():
            parameter.add_(0.1 * torch.rand_like(parameter))
    return kernel


FORMS = [("near_far", TorchExport()), *((case, form) for case in CASES for form in (Onnx(), TorchScript()))]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "form"), FORMS)
def test_every_kernel_at_every_batch_size(case: str, form: Format, tmp_path: Path) -> None:
    assert _worst(_site(*CASES[case]), form, tmp_path) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case, (name, _) in CASES.items() if get_kernel(name).takes_bias])
def test_a_bias(case: str, tmp_path: Path) -> None:
    assert _worst(_site(*CASES[case], biased=True), Onnx(), tmp_path) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case, (name, _) in CASES.items() if name in ("near_far", "blocks")])
def test_inputs_that_are_worked_on_in_pieces(case: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(clustering, "BLOCK", 1 << 8)
    assert _worst(_site(*CASES[case]), TorchExport(), tmp_path) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [name for name in kernel_names() if not get_kernel(name).mixes_queries])
def test_padded_texts_of_any_length_in_pytorch(kernel: str, bert: Path, tmp_path: Path) -> None:
    (part,) = make_parts(_subject(bert, kernel, {}), [], Size())
    program = capture(part)
    for form in (TorchExport(), TorchScript()):
        assert _worst(part, form, tmp_path, program) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["latte"])
def test_padded_texts_of_any_length_in_onnx_runtime(kernel: str, bert: Path, tmp_path: Path) -> None:
    assert _worst(*make_parts(_subject(bert, kernel, {}), [], Size()), Onnx(), tmp_path) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["near_far"])
def test_texts_of_one_length_where_a_kernel_groups_tokens(kernel: str, bert: Path, tmp_path: Path, caplog) -> None:
    options = {"window": 2, "halo": 1, "clusters": 6} if kernel == "near_far" else {}
    subject = _subject(bert, kernel, options)
    with pytest.raises(UsageError, match=f"{kernel} groups the tokens .* with --tokens, up to 80"):
        make_parts(subject, [], Size())
    assert _worst(*make_parts(subject, [], Size(tokens=48)), Onnx(), tmp_path) < 1e-4
    assert "every text has 48 tokens and no padding, so that there is no attention_mask" in caplog.text
    (part,) = make_parts(subject, [], Size(tokens=48))
    assert "attention_mask" not in part.inputs.example


def test_images_of_one_size_where_a_kernel_groups_tokens(dino: Path, caplog) -> None:
    (part,) = make_parts(_subject(dino, *CASES["near_far"]), [], Size())
    assert part.inputs.sizes() == [(56, 56)]
    assert "images have 56 x 56 px: near_far groups the tokens" in caplog.text
    assert "--resolution exports another size" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("resolution", [None, 56], ids=["open", "fixed"])
def test_softmax_attention_holds_some_logits_at_a_time(resolution, dino: Path, tmp_path: Path, monkeypatch) -> None:
    import onnx

    monkeypatch.setattr(operators, "LOGITS", 1 << 8)
    subject = open_subject(dino, resolution=resolution)
    (part,) = make_parts(subject, [], Size(images=resolution is not None))
    assert len(part.inputs.sizes()) == (2 if resolution is None else 1)
    assert _worst(part, Onnx(), tmp_path) < 1e-4
    nodes = onnx.load(tmp_path / "model.onnx").graph.node
    sites = Host.of(subject.model).sites()
    assert sum(node.op_type == "Softmax" for node in nodes) >= 2 * len(sites)

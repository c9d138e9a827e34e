"""Commands on a saved artifact: inspect, verify, restore, merge, push."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from latte_convert.cli import console, options
from latte_convert.wording import rounded_down


def inspect(directory: options.Directory, json: options.Json = False) -> None:
    """Show what an artifact records: sites, kernels, parameters, provenance. Runs no model."""
    from latte_convert.artifact.check import artifact_directory
    from latte_convert.artifact.manifest import read_manifest
    from latte_convert.artifact.read import site_parameters
    from latte_convert.names import REPORT
    from latte_convert.report.read import read_report

    directory = artifact_directory(directory)
    manifest = read_manifest(directory)
    report = read_report(directory / REPORT) if (directory / REPORT).exists() else None
    parameters = site_parameters(directory, manifest)
    if json:
        console.document(
            {
                "manifest": manifest.model_dump(mode="json"),
                "parameters": parameters,
                "report": report.model_dump(mode="json") if report else None,
            }
        )
        return
    source = manifest.source
    console.result(f"source       {source.id}" + (f" @ {source.revision}" if source.revision else ""))
    if manifest.base is not None:
        console.result("adapter      of the source: 'latte merge' puts them together")
    console.result(f"class        {source.library}.{source.model_class}")
    console.result(f"made with    latte_convert {manifest.tool_version}")
    console.result(f"min_tokens   {manifest.min_tokens}")
    console.result(f"calibration  {manifest.calibration.used} samples, {manifest.calibration.held_out} held out")
    if report is not None and report.fidelity is not None:
        primary, least = report.fidelity.primary, report.fidelity.least
        shown = f"{rounded_down(least.alike)} {least.measure}"
        console.result(f"fidelity     {shown} of {primary} on {report.fidelity.samples} held-out samples")
    console.result(f"converted    {len(manifest.sites)} sites")
    if manifest.merges:
        left = min(merge.share for merge in manifest.merges)
        console.result(f"merging      {len(manifest.merges)} blocks, the last on {left:.0%} of its tokens")
    layouts = {site.name: site.layout for site in report.sites} if report is not None else {}
    for site in manifest.sites:
        values = ", ".join(f"{name} {text}" for name, text in parameters[site.name].items())
        tokens = layouts.get(site.name) or "layout not recorded"
        console.result(f"  {site.name}  {site.kernel}  {site.heads}x{site.head_dim}  {tokens}  {values}")


def verify(
    directory: options.Directory,
    trust_remote_code: options.Remote = False,
    allow_import: options.AllowImport = False,
    model_factory: Annotated[
        str | None,
        typer.Option(
            "--model-factory",
            metavar="MODULE:FUNCTION",
            rich_help_panel=options.MODEL,
            help="Import and call another function that builds the artifact's model.",
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Check hashes, strict reload and parity of an artifact; exit code 5 if one of them fails. For CI."""
    from latte_convert.artifact.verify import verify as check

    module = None
    if model_factory is not None:
        from latte_convert.checkpoints.module import build_module

        module = build_module(model_factory)
    found = check(directory, model=module, trust_remote_code=trust_remote_code, allow_import=allow_import)
    if json:
        console.document({"ok": True, **found.__dict__})
        return
    console.result(f"{found.files} files of the checkpoint and {found.results} of results have the recorded hashes")
    console.result(f"the original's tensors are intact ({found.tensors_sha256[:12]}…)")
    if found.probe_difference is not None:
        console.result(
            f"reload answers the probe as recorded (difference {found.probe_difference:.1e} of the output's scale)"
        )


def restore(
    directory: options.Directory,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="ORIG", help="Directory to create.")],
    overwrite: options.Overwrite = False,
    json: options.Json = False,
) -> None:
    """Write the exact original of an artifact back."""
    from latte_convert.artifact.verify import restore as write

    path = write(directory, out, overwrite=overwrite)
    if json:
        console.document({"restored": str(path)})
    else:
        console.result(str(path))


def merge(
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="What 'latte convert --adapter' wrote.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Artifact to create.")],
    base: Annotated[
        str | None,
        typer.Option(
            "--base", metavar="MODEL", rich_help_panel=options.MODEL, help="Another copy of the model it belongs to."
        ),
    ] = None,
    overwrite: options.Overwrite = False,
    trust_remote_code: options.Remote = False,
    json: options.Json = False,
) -> None:
    """Put an adapter and its base together: the artifact that a conversion without --adapter had written."""
    from latte_convert.report.merge import merge as write

    path = write(adapter, out, base=base, overwrite=overwrite, trust_remote_code=trust_remote_code)
    if json:
        console.document({"merged": str(path)})
    else:
        console.result(str(path))


def push(
    directory: options.Directory,
    repo: Annotated[str, typer.Argument(metavar="REPO", help="Hub repository, OWNER/NAME; made if it is not there.")],
    private: Annotated[
        bool, typer.Option("--private", rich_help_panel=options.OUTPUT, help="Hide a new repository from others.")
    ] = False,
    branch: Annotated[
        str | None,
        typer.Option("--branch", rich_help_panel=options.OUTPUT, help="Branch to write to; the main one if not given."),
    ] = None,
    message: Annotated[
        str | None, typer.Option("--message", "-m", rich_help_panel=options.OUTPUT, help="Of the commit.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Upload an artifact to the Hub, whole or adapter, with its model card; needs a token ('hf auth login')."""
    from latte_convert.artifact.push import push as upload

    with console.log_to_stderr():
        address = upload(directory, repo, private=private, revision=branch, message=message)
    if json:
        console.document({"pushed": address})
    else:
        console.result(address)

"""The contract of the command line: streams, exit codes, and sentences a person can act on."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import transformers


@pytest.fixture(scope="module")
def photos(photos: Path, tmp_path_factory) -> Path:
    """Eight of the photographs: fewer than some commands ask for."""
    folder = tmp_path_factory.mktemp("eight")
    for path in sorted(photos.iterdir())[:8]:
        shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def artifact(tiny_dino: Path, photos: Path, tmp_path_factory) -> Path:
    import latte_convert

    result = latte_convert.convert(tiny_dino, photos, recipe=latte_convert.Recipe(kernel="latte", samples=4))
    return result.save(tmp_path_factory.mktemp("cli") / "hybrid")


def test_convert_writes_an_artifact_and_prints_its_path(latte, tiny_dino, photos, tmp_path):
    out = tmp_path / "hybrid"
    code, stdout, stderr = latte("convert", tiny_dino, "--calib", photos, "--samples", 4, "--out", out)
    assert (code, stdout) == (0, f"{out}\n")
    assert "\x1b" not in stderr
    assert "█" in stderr
    assert "held-out samples (4 sites converted)" in stderr
    assert sorted(p.name for p in out.iterdir()) == [
        "config.json",
        "latte.json",
        "model.safetensors",
        "preprocessor_config.json",
        "report.html",
        "report.json",
    ]


def test_json_is_one_document_and_nothing_else(latte, tiny_dino, photos, tmp_path):
    code, stdout, _ = latte(
        "convert", tiny_dino, "--calib", photos, "--samples", 4, "-k", 2, "--out", tmp_path / "o", "--json"
    )
    report = json.loads(stdout)
    assert code == 0
    assert len(report["converted"]) == 2
    assert report == json.loads((tmp_path / "o" / "report.json").read_text())


def test_score_prints_the_sites_to_convert_and_writes_no_model(latte, tiny_dino, photos, tmp_path):
    page = tmp_path / "scores.html"
    code, stdout, stderr = latte("score", tiny_dino, "--calib", photos, "--samples", 4, "--out", page)
    assert code == 0
    assert len(stdout.splitlines()) == 4
    assert all(line.startswith("encoder.layer.") for line in stdout.splitlines())
    assert "nothing was converted" in stderr
    assert [p.name for p in tmp_path.iterdir()] == ["scores.html"]


def test_dry_run_writes_nothing(latte, tiny_dino, photos, tmp_path):
    out = tmp_path / "o"
    code, stdout, _ = latte(
        "convert", tiny_dino, "--calib", photos, "--samples", 4, "--out", out, "--dry-run", "--json"
    )
    assert code == 0
    assert json.loads(stdout)["fidelity"] is None
    assert not list(tmp_path.iterdir())


def test_inspect_verify_restore(latte, artifact, tmp_path):
    code, stdout, _ = latte("inspect", artifact)
    assert code == 0
    assert "converted    4 sites" in stdout
    code, stdout, _ = latte("inspect", artifact, "--json")
    assert set(json.loads(stdout)) == {"manifest", "parameters", "report"}
    code, stdout, _ = latte("verify", artifact, "--json")
    assert (code, json.loads(stdout)["ok"]) == (0, True)
    code, stdout, _ = latte("restore", artifact, "--out", tmp_path / "original")
    assert (code, stdout) == (0, f"{tmp_path / 'original'}\n")
    assert (tmp_path / "original" / "config.json").is_file()


def test_inspect_needs_no_report_and_names_a_damaged_one(latte, artifact, tmp_path):
    copy = shutil.copytree(artifact, tmp_path / "hybrid")
    (copy / "report.json").unlink()
    code, stdout, _ = latte("inspect", copy, "--json")
    assert (code, json.loads(stdout)["report"]) == (0, None)
    (copy / "report.json").write_text("{")
    code, stdout, stderr = latte("inspect", copy)
    assert (code, stdout) == (3, "")
    assert f"{copy / 'report.json'}:1: not valid JSON" in stderr


@pytest.mark.parametrize("which", ["report", "manifest", "recipe"])
def test_schema_is_a_valid_json_schema(latte, which):
    import jsonschema

    code, stdout, _ = latte("schema", which)
    assert code == 0
    jsonschema.Draft202012Validator.check_schema(json.loads(stdout))


@pytest.mark.parametrize(
    ("extra", "code", "message"),
    [
        (["--ratio", "1.5"], 3, "ratio: Input should be less than or equal to 1"),
        (["-k", "99"], 3, "k is 99, but only 6 of 6 sites are eligible"),
        (["--exclude", "layer.77"], 3, "exclude pattern 'layer.77' matches no attention site"),
        (["--kernel", "latte", "--min-fidelity", "1.0", "--ratio", "1"], 4, "held-out fidelity is"),
        (["--max-flops", "0.5", "--ratio", "0.5"], 3, "ratio and max_flops are both given: a plan is made for one"),
        (["--max-flops", "0.5"], 4, "at most 50% of the exact attention FLOPs; the nearest: 0 sites converted"),
        (["--kernel", "auto", "--scorer", "paper"], 3, "set scorer to isolated or greedy"),
        (["--kernel", "nearfar"], 3, "unknown kernel 'nearfar' (nearest: near_far"),
        (["--option", "bad"], 2, "--option takes KEY=VALUE, such as clusters=64, not 'bad'"),
        (["--option", "window=["], 2, "--option window: '[' is not a value"),
        (["--option", "windows=2"], 3, "kernel 'near_far' has no option 'windows' (nearest: window"),
        (["--option", "window=-1"], 3, "`window` is -1: set it to a whole number, 0 to 1024"),
        (["--option", "steps=1000000000000"], 3, "`steps` is 1000000000000: set it to a whole number, 1 to 100"),
        (["--kernel", "monarch", "--option", "steps=1000000000000"], 3, "`steps` is 1000000000000"),
        (["--kernel", "performer", "--option", "features=100000000000"], 3, "`features` is 100000000000"),
        (["--kernel", "fitted", "--option", "features=100000000000"], 3, "`features` is 100000000000"),
        (["--kernel", "performer", "--option", "seed=-1"], 3, "`seed` is -1"),
        (["--option", "window=wide"], 3, "option 'window' of kernel 'near_far' is 'wide'"),
        (["--kernel", "latte", "--option", "window=2"], 3, "kernel 'latte' has no option 'window'"),
        (["--scorer", "gready"], 2, "gready"),
        (["--samples", "5", "--min-samples", "20"], 3, "min_samples (20) is more than samples (5)"),
        (["--samples", "50", "--min-samples", "20"], 3, "8"),
        (["--device", "quantum"], 2, "device 'quantum' is not one of auto, cpu, cuda"),
        (["--granularity", "channel"], 2, "channel"),
        (["--nonsense"], 2, "No such option"),
    ],
)
def test_bad_settings(latte, tiny_dino, photos, tmp_path, extra, code, message):
    given = ["convert", tiny_dino, "--calib", photos, "--out", tmp_path / "o"]
    if "--samples" not in extra:
        given += ["--samples", "4"]
    found, stdout, stderr = latte(*given, *extra)
    assert (found, stdout) == (code, "")
    assert message in " ".join(stderr.replace("│", " ").split())
    assert "Traceback" not in stderr
    assert not list(tmp_path.iterdir())


def test_no_output_is_a_usage_error(latte, tiny_dino, photos):
    code, _, stderr = latte("convert", tiny_dino, "--calib", photos)
    assert code == 2
    assert "--out DIR" in stderr


def test_recipe_file_with_an_unknown_key(latte, tiny_dino, photos, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("ratoi: 0.5\n")
    code, _, stderr = latte("convert", tiny_dino, "--calib", photos, "--out", tmp_path / "o", "--config", recipe)
    assert code == 3
    assert "unknown key 'ratoi' (nearest: ratio" in stderr


def test_options_win_over_the_recipe_file(latte, tiny_dino, photos, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("k: 5\nsamples: 4\n")
    code, stdout, _ = latte("score", tiny_dino, "--calib", photos, "-c", recipe, "--ratio", "0.5")
    assert code == 0
    assert len(stdout.splitlines()) == 3


def test_options_of_every_candidate(latte, tiny_dino, photos):
    arguments = ("score", tiny_dino, "--calib", photos, "--samples", 4, "-k", 1, "--kernel", "auto", "--json")
    code, stdout, _ = latte(*arguments, "--option", "window=2", "--option", "far=pooled")
    report = json.loads(stdout)
    assert code == 0
    assert report["recipe"]["options"] == {"window": 2, "far": "pooled"}
    assert len(report["converted"]) == 1
    fits = [site["fit"] for site in report["sites"] if site["fit"]["kernel"] == "near_far"]
    assert fits
    for fit in fits:
        assert (fit["options"]["window"], fit["options"]["far"]) == (2, "pooled")


def test_a_budget_wins_over_another_in_the_file(latte, tiny_dino, photos, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("ratio: 0.5\nsamples: 4\nkernel: latte\n")
    arguments = ("convert", tiny_dino, "--calib", photos, "-c", recipe, "--dry-run", "--json")
    code, stdout, _ = latte(*arguments, "--min-fidelity", "0.1")
    assert (code, len(json.loads(stdout)["converted"])) == (0, 3)  # a gate is no other budget
    code, stdout, _ = latte(*arguments, "--max-flops", "1")
    settings = json.loads(stdout)["recipe"]
    assert (code, settings["ratio"], settings["max_flops"]) == (0, None, 1.0)


def bad_models(tmp_path: Path, tiny_dino: Path) -> dict[str, tuple[Path | str, str]]:
    """Checkpoints that cannot be used, and what the message must say."""
    for name in ("empty", "bare", "pickle", "alien", "broken", "text"):
        (tmp_path / name).mkdir()
    config = (tiny_dino / "config.json").read_text()
    for name in ("bare", "pickle", "broken"):
        (tmp_path / name / "config.json").write_text(config)
    shutil.copy(tiny_dino / "preprocessor_config.json", tmp_path / "broken")
    torch.save({}, tmp_path / "pickle" / "pytorch_model.bin")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"not safetensors")
    (tmp_path / "alien" / "config.json").write_text('{"model_type": "dinov9"}')
    shutil.copy(tiny_dino / "model.safetensors", tmp_path / "alien")
    transformers.BertModel(
        transformers.BertConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=30
        )
    ).save_pretrained(tmp_path / "text")
    no_processor = tmp_path / "no-processor"
    shutil.copytree(tiny_dino, no_processor, ignore=lambda *_: ["preprocessor_config.json"])
    missing_tensor = tmp_path / "missing-tensor"
    shutil.copytree(tiny_dino, missing_tensor)
    from safetensors.torch import load_file, save_file

    tensors = load_file(tiny_dino / "model.safetensors")
    del tensors["layernorm.weight"]
    save_file(tensors, missing_tensor / "model.safetensors", metadata={"format": "pt"})
    return {
        "absent": (tmp_path / "tiny-dinoo", "there is no model at"),
        "absent relative": ("./nowhere", "there is no model at './nowhere'"),
        "empty directory": (tmp_path / "empty", "has no config.json"),
        "no weights": (tmp_path / "bare", "has no model.safetensors"),
        "pickle only": (tmp_path / "pickle", "--allow-pickle"),
        "unknown type": (tmp_path / "alien", "does not know the model type 'dinov9' (nearest: dinov2"),
        "damaged": (tmp_path / "broken", "is damaged"),
        "no tokenizer": (tmp_path / "text", "has no usable tokenizer"),
        "no processor": (no_processor, "has no usable image processor"),
        "incomplete": (missing_tensor, "1 tensors missing (layernorm.weight)"),
        "not a hub id": ("a b", "neither an existing path nor a Hub id"),
        "offline": ("someone/some-model", "cannot be reached"),
        "unknown timm model": ("timm:vit_small", "has no model 'vit_small' (nearest: vit_small_"),
    }


def test_bad_models(latte, tiny_dino, photos, tmp_path):
    for name, (model, message) in bad_models(tmp_path, tiny_dino).items():
        code, stdout, stderr = latte("convert", model, "--calib", photos, "--samples", 4, "--out", tmp_path / "o")
        assert code == 3, f"{name}: {stderr}"
        assert stdout == "", name
        assert message in stderr, f"{name}: {stderr}"
        assert "Traceback" not in stderr, name
        assert not (tmp_path / "o").exists(), name


def test_bad_data_is_found_before_the_weights_load(latte, tiny_dino, tmp_path, speech):
    """The weights are damaged: whoever reads them first would say so."""
    model = shutil.copytree(tiny_dino, tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"damaged")
    (tmp_path / "empty").mkdir()
    (tmp_path / "corrupt").mkdir()
    (tmp_path / "corrupt" / "a.jpg").write_bytes(b"\xff\xd8\xff not a photo")
    for data, message in (
        (tmp_path / "absent", "absent"),
        (tmp_path / "empty", "empty"),
        (tmp_path / "corrupt", "a.jpg"),
        (speech, "this model takes images"),
    ):
        code, stdout, stderr = latte("convert", model, "--calib", data, "--out", tmp_path / "o")
        assert (code, stdout) == (3, ""), stderr
        assert message in stderr
        assert "damaged" not in stderr


def test_skipped_files_are_named_and_counted(latte, tiny_dino, photos, tmp_path):
    dirty = shutil.copytree(photos, tmp_path / "dirty")
    (dirty / "broken.JPG").write_bytes(b"")
    (dirty / ".DS_Store").write_bytes(b"x")
    code, _, stderr = latte("convert", tiny_dino, "--calib", dirty, "--samples", 20, "--out", tmp_path / "o")
    assert code == 0
    assert "20 asked, 6 fitted, 2 held out, 1 skipped" in stderr
    skipped = json.loads((tmp_path / "o" / "report.json").read_text())["calibration"]["skipped"]
    assert [s["id"] for s in skipped] == ["broken.JPG"]
    code, _, stderr = latte(
        "convert", tiny_dino, "--calib", dirty, "--samples", 20, "--strict", "--out", tmp_path / "p"
    )
    assert code == 3
    assert "broken.JPG" in stderr


def test_pickle_is_read_on_request_and_weights_only(latte, tiny_dino, photos, tmp_path):
    from safetensors.torch import load_file

    model = shutil.copytree(tiny_dino, tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    torch.save(tensors, model / "pytorch_model.bin")
    arguments = ("convert", model, "--calib", photos, "--samples", 4, "--allow-pickle", "--out")
    assert latte(*arguments, tmp_path / "o")[0] == 0
    back = load_file(tmp_path / "o" / "model.safetensors")
    assert all(torch.equal(back[key], tensor) for key, tensor in tensors.items())

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "pwned"),)

    torch.save({"x": Evil()}, model / "pytorch_model.bin")
    code, _, stderr = latte(*arguments, tmp_path / "p")
    assert code == 3
    assert "weights-only" in stderr
    assert not (tmp_path / "pwned").exists()


def test_existing_output_is_refused_before_the_work(latte, tiny_dino, photos, tmp_path):
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "mine.txt").write_text("keep")
    started = time.monotonic()
    code, _, stderr = latte("convert", tiny_dino, "--calib", photos, "--out", tmp_path / "o")
    assert code == 3
    assert "--overwrite" in stderr
    assert "Calibrating" not in stderr
    assert time.monotonic() - started < 60
    assert (tmp_path / "o" / "mine.txt").read_text() == "keep"


def test_integrity_errors_exit_5(latte, artifact, tmp_path):
    broken = shutil.copytree(artifact, tmp_path / "broken")
    with (broken / "config.json").open("a") as file:
        file.write("\n")
    code, stdout, stderr = latte("verify", broken)
    assert (code, stdout) == (5, "")
    assert "'config.json' is not the file that was saved" in stderr


def test_an_internal_error_is_one_line_unless_debug(latte, tiny_dino, photos, tmp_path, monkeypatch):
    def bug(*_args, **_kwargs):
        raise ZeroDivisionError("boom")

    monkeypatch.setattr("latte_convert.conversion.convert", bug)
    arguments = ("convert", tiny_dino, "--calib", photos, "--out", tmp_path / "o")
    code, _, stderr = latte(*arguments)
    assert code == 1
    assert stderr.splitlines()[-1].startswith("latte: internal error: ZeroDivisionError: boom")
    assert "Traceback" not in stderr
    code, _, stderr = latte(*arguments, "--debug")
    assert code == 1
    assert "Traceback" in stderr


# --- as a real process ------------------------------------------------------------------------------------------


def process(*args: object, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "latte_convert.cli.app", *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        **options,
    )


def test_help_imports_nothing_heavy():
    code = (
        "import sys; sys.argv = ['latte', '--help']\n"
        "from latte_convert.cli.app import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'datasets', 'numpy', 'PIL', 'jinja2', 'safetensors'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "convert" in done.stdout


def test_import_is_light():
    code = "import sys, latte_convert; sys.exit(str({'torch', 'transformers', 'numpy'} & set(sys.modules) or ''))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 or done.stderr.strip() == "", done.stderr


@pytest.mark.parametrize("command", ["score", "convert", "inspect", "verify", "restore", "schema"])
def test_every_command_has_help(latte, command):
    code, stdout, _ = latte(command, "--help")
    assert code == 0
    assert "Usage" in stdout


def test_ctrl_c_exits_130_and_leaves_nothing(tiny_dino, photos, tmp_path):
    running = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "latte_convert.cli.app",
            "convert",
            str(tiny_dino),
            "--calib",
            str(photos),
            "--samples",
            "8",
            "--kernel",
            "latte",
            "--propagate-error",
            "--out",
            str(tmp_path / "o"),
        ],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert running.stderr is not None
    for line in running.stderr:
        if line.startswith("Calibrating"):
            break
    running.send_signal(signal.SIGINT)
    stdout, stderr = running.communicate(timeout=60)
    assert running.returncode == 130
    assert stdout == ""
    assert "interrupted" in stderr
    assert not list(tmp_path.iterdir())


def test_an_interrupt_that_ends_as_another_error_is_an_interrupt(latte, monkeypatch, tmp_path):
    from latte_convert.cli import console

    def swallowed(*_: object) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            console.interrupt()
        raise ModuleNotFoundError("could not be imported")  # as Transformers has it

    monkeypatch.setattr(console, "_INTERRUPTED", threading.Event())
    monkeypatch.setattr("latte_convert.artifact.manifest.read_manifest", swallowed)
    assert latte("inspect", tmp_path) == (130, "", "latte: interrupted.\n")


def test_a_swallowed_interrupt_stops_the_next_step(capsys, monkeypatch):
    from latte_convert.cli import console

    monkeypatch.setattr(console, "_INTERRUPTED", threading.Event())
    with console.progress() as progress:
        advance = progress("Calibrating", 3)
        advance()
        with contextlib.suppress(KeyboardInterrupt):  # as a finaliser would
            console.interrupt()
        with pytest.raises(KeyboardInterrupt):
            advance()


def test_offline_opens_no_socket(tiny_dino, photos, tmp_path):
    """The whole conversion with sockets removed from Python."""
    code = (
        "import socket, sys\n"
        "def no(*a, **k): raise RuntimeError('a socket was opened')\n"
        "socket.socket.connect = no; socket.create_connection = no; socket.getaddrinfo = no\n"
        f"sys.argv = ['latte', 'convert', {str(tiny_dino)!r}, '--calib', {str(photos)!r}, '--samples', '4',\n"
        f"            '--out', {str(tmp_path / 'o')!r}]\n"
        "from latte_convert.cli.app import main; main()"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "o" / "latte.json").is_file()

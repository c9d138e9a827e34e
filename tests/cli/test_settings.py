"""Settings from options and recipe files: which wins, and what is said of those that do not fit."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("extra", "code", "message"),
    [
        (["--ratio", "1.5"], 3, "ratio: Input should be less than or equal to 1"),
        (["-k", "99"], 3, "k is 99, but only 6 of 6 sites are eligible"),
        (["--exclude", "layer.77"], 3, "exclude pattern 'layer.77' matches no attention site"),
        (["--kernel", "latte", "--min-fidelity", "1.0", "--ratio", "1"], 4, "held-out fidelity is"),
        (["--max-flops", "0.5", "--ratio", "0.5"], 3, "ratio and max_flops are both given: a plan is made for one"),
        (
            ["--max-flops", "0.5"],
            4,
            "at most 50% of the exact attention FLOPs: no kernel needs fewer FLOPs",
        ),
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
        (["--samples", "50", "--min-samples", "20"], 3, "8 usable"),
        (["--device", "quantum"], 2, "device 'quantum' is not one of auto, cpu, cuda"),
        (["--granularity", "head"], 3, "write options: {granularity: head} (--option granularity=head)"),
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
    recipe.write_text("k: 5\nsamples: 4\nkernel: latte\n")
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
    recipe.write_text("ratio: 0.5\nsamples: 4\nkernel: latte\nresolution: 112\n")
    arguments = ("convert", tiny_dino, "--calib", photos, "-c", recipe, "--dry-run", "--json")
    code, stdout, _ = latte(*arguments, "--min-fidelity", "0.1")
    assert (code, len(json.loads(stdout)["converted"])) == (0, 3)  # a gate is no other budget
    code, stdout, _ = latte(*arguments, "--max-flops", "0.9")
    settings = json.loads(stdout)["recipe"]
    assert (code, settings["ratio"], settings["max_flops"]) == (0, None, 0.9)

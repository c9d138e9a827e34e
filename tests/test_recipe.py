from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import yaml

from latte_convert.errors import RecipeError
from latte_convert.recipe import AUTO, Candidate, Recipe

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"
sys.path.insert(0, str(ROOT / "scripts"))

import write_configs  # noqa: E402


def test_default_yaml_is_the_default_and_up_to_date():
    """``python scripts/write_configs.py`` makes it so."""
    text = (CONFIGS / "default.yaml").read_text(encoding="utf-8")
    assert Recipe.from_yaml(CONFIGS / "default.yaml") == Recipe()
    assert list(yaml.safe_load(text)) == list(Recipe.model_fields)
    assert text == write_configs.render()


@pytest.mark.parametrize(
    ("given", "ratio"),
    [({}, 0.67), ({"ratio": 0.5}, 0.5), ({"k": 3}, None), ({"max_flops": 0.5}, None), ({"min_fidelity": 0.9}, None)],
)
def test_resolved_says_the_ratio_that_is_applied(given, ratio):
    assert Recipe(**given).resolved() == Recipe(**{**given, "kernel": "near_far", "ratio": ratio})


def test_every_setting_is_explained():
    fields = Recipe.model_json_schema()["properties"]
    assert [name for name, field in fields.items() if not field["description"].endswith(".")] == []
    assert all(field["group"] for field in fields.values())


def test_a_recipe_of_ours_goes_by_its_name_and_a_file_of_that_name_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Recipe.from_yaml("paper") == Recipe.from_yaml(CONFIGS / "paper.yaml")
    (tmp_path / "paper").write_text("k: 3\n")
    assert Recipe.from_yaml("paper") == Recipe(k=3)
    with pytest.raises(RecipeError, match="Give a YAML file, or one of default, linear, paper"):
        Recipe.from_yaml("papers")


def test_paper_yaml_is_the_method_as_published():
    recipe = Recipe.from_yaml(CONFIGS / "paper.yaml")
    assert (recipe.kernel, recipe.scorer, recipe.mse_weight, recipe.ratio) == ("latte", "paper", 10.0, 0.67)
    assert not recipe.propagate_error
    (kernel,) = recipe.kernels()
    on = {"tte", "jpn", "sigma"}
    off = {"exact_prefix", "key_shift", "input_map", "bias", "output_map"}
    assert kernel.options == {"granularity": "layer", **dict.fromkeys(on, True), **dict.fromkeys(off, False)}


def test_an_option_wins_over_the_file():
    assert Recipe.from_yaml(CONFIGS / "paper.yaml", ratio=0.5).ratio == 0.5


def test_options_of_the_kernel_win_one_by_one_and_go_with_their_kernel():
    file = Recipe.from_yaml("paper").options
    assert Recipe.from_yaml("paper", options={"granularity": "head"}).options == file | {"granularity": "head"}
    assert Recipe.from_yaml("paper", kernel="latte").options == file
    assert Recipe.from_yaml("paper", kernel="near_far", options={"views": 2}).options == {"views": 2}


def test_auto_has_our_list_or_the_recipes():
    assert [each.kernel for each in Recipe(kernel="auto").kernels()] == [each.kernel for each in AUTO]
    own = (Candidate(kernel="elu"), Candidate(kernel="latte", options={"jpn": False}))
    chosen = Recipe(kernel="auto", candidates=own, options={"sigma": False, "granularity": "head"}).kernels()
    assert [each.kernel for each in chosen] == ["elu", "latte"]
    assert chosen[0].options == {"sigma": False}
    assert chosen[1].options == {"sigma": False, "granularity": "head", "jpn": False, "exact_prefix": True}
    with pytest.raises(RecipeError, match="kernel 'elu' has no option 'views'"):  # nor has latte
        Recipe(kernel="auto", candidates=own, options={"views": 2}).kernels()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ratoi": 0.5}, "unknown key 'ratoi' (nearest: ratio"),
        ({"ratio": 1.5}, "ratio: Input should be less than or equal to 1"),
        ({"sigma": True}, "'sigma' is an option of the kernel: write options: {sigma: true} (--option sigma=true)"),
        (
            {"granularity": "head"},
            "'granularity' is an option of kernel latte, taylor2: write options: {granularity: head}",
        ),
        ({"bias": None}, "'bias' is an option of the kernel: leave it out for what the kernel recommends"),
        ({"halo": 4}, "'halo' is an option of kernel near_far, near_past: write options: {halo: 4}"),
        ({"candidates": [{"kernel": "elu", "sigma": False}]}, "write options: {sigma: false}"),
        ({"samples": 4, "min_samples": 8}, "min_samples (8) is more than samples (4)"),
        ({"ratio": 0.5, "k": 3}, "ratio and k are both given"),
        ({"k": 3, "max_flops": 0.5}, "k and max_flops are both given"),
        ({"max_flops": 1.0}, "max_flops: Input should be less than 1"),
        ({"target_speedup": 1.0}, "target_speedup: Input should be greater than 1"),
        ({"candidates": [{"kernel": "elu"}]}, "candidates go with kernel: auto"),
        ({"kernel": "auto", "scorer": "paper"}, "set scorer to isolated or greedy"),
        ({"scorer": "papers"}, "scorer: Input should be 'paper', 'isolated' or 'greedy'"),
        ({"holdout": 0}, "holdout: Input should be greater than 0"),
        ({"ratio": float("nan")}, "ratio"),
    ],
)
def test_bad_values_are_named(values, message):
    with pytest.raises(RecipeError) as error:
        Recipe.build(values)
    assert message in str(error.value)
    assert error.value.exit_code == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"ratio: [", "not valid YAML"),
        (b"ratio: 0.5\nkernel: latte\nratio: 0.5\n", "'ratio' is given on line 1 and again on line 3"),
        (b"options:\n  window: 1\n  'window': 2\n", "'window' is given on line 2 and again on line 3"),
        (b"{k: 1, k: 2}\n", "'k' is given on line 1 and again on line 1"),
        (b"options: " + b"[" * 3000 + b"]" * 3000, "nested too deeply"),
        (b"k: " + b"9" * 5000, "not valid YAML"),
        (b"- 1\n- 2\n", "must be a mapping"),
        (b"1: 2\n", "must be a mapping"),
        (b"\xff\xfe\x00", "not UTF-8"),
    ],
)
def test_bad_files_are_named(tmp_path, content, message):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    with pytest.raises(RecipeError, match=message) as error:
        Recipe.from_yaml(path)
    assert error.value.exit_code == 3


def test_a_key_may_stand_in_several_mappings_and_win_over_a_merged_one(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "kernel: auto\n"
        "candidates:\n"
        "- {kernel: latte, options: &near {window: 1, halo: 2}}\n"
        "- {kernel: near_far, options: {<<: *near, window: 3}}\n"
    )
    assert [each.options for each in Recipe.from_yaml(path).candidates] == [
        {"window": 1, "halo": 2},
        {"window": 3, "halo": 2},
    ]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(RecipeError, match="cannot be read"):
        Recipe.from_yaml(tmp_path / "absent.yaml")


def test_what_is_no_file_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    (tmp_path / "large.yaml").write_text("#" * (2 << 20))
    for name, reason in (("pipe", "a device or a pipe"), ("zero", "a device or a pipe"), ("large", "at most 1 MB")):
        with pytest.raises(RecipeError, match=reason):
            Recipe.from_yaml(tmp_path / f"{name}.yaml")


def test_of_many_faults_the_first_are_told(tmp_path):
    (tmp_path / "many.yaml").write_text("".join(f"key{i}: 1\n" for i in range(500)))
    with pytest.raises(RecipeError, match=r"unknown key 'key7' .*; …$") as caught:
        Recipe.from_yaml(tmp_path / "many.yaml")
    assert "key8" not in str(caught.value)


def test_an_empty_file_is_the_default_and_a_bom_is_fine(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"")
    assert Recipe.from_yaml(path) == Recipe()
    path.write_bytes(b"\xef\xbb\xbfratio: 0.5\n")
    assert Recipe.from_yaml(path).ratio == 0.5

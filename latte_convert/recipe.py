"""The recipe: every setting of a conversion, validated once, before anything is read or loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from latte_convert.errors import RecipeError, nearest

DEFAULT_RATIO = 0.67
"""Share of the eligible sites that is converted where a recipe sets no budget."""


BUDGETS = ("ratio", "k", "max_flops", "target_speedup")
"""The keys that say how much is converted; a recipe has at most one of them."""


class Candidate(BaseModel):
    """A kernel with its options.

    Attributes:
        kernel: Name of the kernel.
        options: Keyword arguments of its constructor.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    kernel: str
    options: dict[str, Any] = {}


class Recipe(BaseModel):
    """Settings of a conversion; ``configs/default.yaml`` explains every key beside its default.

    Attributes:
        kernel: Sub-quadratic operator that replaces softmax attention; ``auto`` chooses one per site.
        options: Options of the kernel, such as ``window`` of near_far; what is not given has the kernel's default.
        candidates: The kernels that ``auto`` chooses from; empty means the tool's own list.
        tte: Fit the anchor alpha (tunable Taylor expansion) of latte; off fixes it at 0.
        jpn: Normalise the features of latte after squaring (joint post-squaring normalisation).
        granularity: One set of kernel scalars per ``layer`` or per ``head``.
        exact_prefix: Queries of prefix tokens (CLS, registers) attend by softmax. This and the next five: None
            is what helped the kernel on held-out samples.
        key_shift: Subtract each head's mean key.
        input_map: Fit a matrix per head for the queries and one for the keys, by gradient descent.
        sigma: Fit a diagonal scale on the input of the output projection.
        bias: Fit a constant on the input of the output projection.
        output_map: Fit a matrix per head on the attention output, shrunk toward the identity; takes sigma's place.
        min_tokens: With fewer keys than this, a converted site runs its exact branch.
        scorer: How sensitivity is measured.
        mse_weight: Weight of the squared error in the paper's score (its lambda).
        ratio: Share of the eligible sites to convert. At most one of this and the next three is given; with none,
            as many sites are converted as keep ``min_fidelity``, or two thirds of them.
        k: Number of sites to convert.
        max_flops: Highest share of the exact attention FLOPs of the eligible sites that the hybrid may need.
        target_speedup: Speed of the hybrid relative to the original, end to end, that a plan must reach.
        towers: Towers to convert (vision, text, audio, encoder, decoder); empty means all.
        include: Patterns of site names; only these are candidates. Empty means all.
        exclude: Patterns of site names that stay exact.
        propagate_error: Refit the chosen sites one after another on the inputs they get from converted ones.
        samples: Number of samples asked for, held-out ones included.
        holdout: Share of the samples kept for measuring, never used in a fit.
        min_samples: Fewer usable samples than this is an error.
        resolution: Height and width of images in pixels, where the checkpoint's own is not wanted.
        seed: Seed of the choice of samples and tokens.
        strict: The first unusable sample is an error.
        min_fidelity: Lowest mean cosine of the held-out final output that is accepted.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    kernel: str = "near_far"
    options: dict[str, Any] = {}
    candidates: tuple[Candidate, ...] = ()
    tte: bool = True
    jpn: bool = True
    granularity: Literal["layer", "head"] = "layer"
    exact_prefix: bool | None = None
    key_shift: bool | None = None
    input_map: bool | None = None
    sigma: bool | None = None
    bias: bool | None = None
    output_map: bool | None = None
    min_tokens: int = Field(0, ge=0)
    scorer: Literal["paper", "isolated", "greedy"] = "isolated"
    mse_weight: float = Field(10.0, ge=0)
    ratio: float | None = Field(None, ge=0, le=1)
    k: int | None = Field(None, ge=0)
    max_flops: float | None = Field(None, gt=0, le=1)
    target_speedup: float | None = Field(None, gt=0)
    towers: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    propagate_error: bool = False
    samples: int = Field(32, ge=2)
    holdout: float = Field(0.25, gt=0, lt=1)
    min_samples: int = Field(2, ge=2)
    resolution: int | None = Field(None, ge=1)
    seed: int = Field(0, ge=0, lt=2**31)
    strict: bool = False
    min_fidelity: float | None = Field(None, ge=-1, le=1)

    @model_validator(mode="after")
    def _samples_suffice(self) -> Recipe:
        if self.min_samples > self.samples:
            raise ValueError(f"min_samples ({self.min_samples}) is more than samples ({self.samples})")
        return self

    @model_validator(mode="after")
    def _one_budget(self) -> Recipe:
        given = [name for name in BUDGETS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are both given: a plan is made for one of them")
        if self.candidates and self.kernel != "auto":
            raise ValueError("candidates go with kernel: auto")
        if self.kernel == "auto" and self.scorer == "paper":
            raise ValueError("kernel: auto compares kernels by the final output: set scorer to isolated or greedy")
        return self

    @classmethod
    def build(cls, values: dict[str, Any], *, origin: str = "recipe") -> Recipe:
        """Validate a mapping.

        Args:
            values: Keys and values of a recipe.
            origin: Where they come from, for the error message.

        Raises:
            RecipeError: A key is unknown or a value is out of range.
        """
        try:
            return cls(**values)
        except ValidationError as error:
            raise RecipeError(f"{origin}: " + "; ".join(_explain(e) for e in error.errors())) from None

    @classmethod
    def from_yaml(cls, path: Path, **overrides: Any) -> Recipe:
        """Read a YAML file; ``overrides`` win over what it says.

        Raises:
            RecipeError: The file is absent, is not YAML, or does not validate.
        """
        return cls.build({**_read_yaml(path), **overrides}, origin=str(path))


class _Loader(yaml.SafeLoader):
    """Reads what ``safe_load`` does, but refuses a key that is given twice, as YAML asks: there the last one wins."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping of a node; see PyYAML."""
        lines: dict[str, int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            line = key.start_mark.line + 1
            if key.value in lines:
                raise yaml.YAMLError(
                    f"'{key.value}' is given on line {lines[key.value]} and again on line {line}. Keep one of them."
                )
            lines[key.value] = line
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise RecipeError(f"recipe {path} cannot be read: {reason}. configs/default.yaml is a start.") from None
    try:
        values = yaml.load(text, _Loader)  # noqa: S506 (it is a SafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a huge number, or no such date
        raise RecipeError(f"recipe {path} is not valid YAML: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise RecipeError(f"recipe {path} must be a mapping of settings, such as 'ratio: 0.5'.")
    return values


def _explain(error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"unknown key '{where}' ({nearest(where, Recipe.model_fields)})"
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{where}: {message}" if where else message

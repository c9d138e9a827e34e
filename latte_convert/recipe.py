"""The recipe: every setting of a conversion, validated once, before anything is read or loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.config import JsonDict

from latte_convert.errors import RecipeError, nearest
from latte_convert.reading import Unreadable, parse_yaml, read_text
from latte_convert.wording import some

DEFAULT_KERNEL, FASTEST_KERNEL = "near_far", "blocks"
"""What replaces softmax where a recipe does not say, and where it asks for a speed."""
DEFAULT_RATIO = 0.67
"""Share of the eligible sites that is converted where a recipe sets no budget."""


CONFIGS = Path(__file__).parent / "configs"
"""Recipes that come with the tool."""

BUDGETS = ("ratio", "k", "max_flops", "target_speedup")
"""The keys that say how much is converted; a recipe has at most one of them."""
_MOST_BYTES, _MOST_ERRORS = 1 << 20, 8


class Candidate(BaseModel):
    """A kernel with its options.

    Attributes:
        kernel: Name of the kernel.
        options: Keyword arguments of its constructor.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)

    kernel: str
    options: dict[str, Any] = {}


AUTO = (
    Candidate(kernel="latte"),
    Candidate(kernel="near_far", options={"window": 4, "halo": 1, "clusters": 32, "steps": 2}),
    Candidate(kernel="near_far", options={"window": 4, "halo": 2, "clusters": 64, "steps": 2}),
    Candidate(kernel="near_far", options={"window": 8, "halo": 2, "clusters": 128, "steps": 2}),
    Candidate(kernel="near_far", options={"window": 8, "halo": 2, "clusters": 256, "steps": 2, "views": 8}),
)
"""What ``kernel: auto`` chooses from, from cheap to faithful; latte is the only one for causal sites."""

_KERNEL: JsonDict = {"group": "What replaces softmax"}
_SELECTION: JsonDict = {"group": "Which sites are converted"}
_CALIBRATION: JsonDict = {"group": "Calibration"}
_GATE: JsonDict = {"group": "Quality gate"}


class Recipe(BaseModel):
    """Settings of a conversion.

    The description of a field is the only one: the command line's help and ``configs/default.yaml`` are made from it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)

    kernel: str | None = Field(
        None,
        description="Operator that replaces softmax attention, such as near_far or latte; auto: the cheapest per site "
        "that keeps the budget. Where it is not set: near_far, or blocks with target_speedup.",
        json_schema_extra=_KERNEL,
    )
    options: dict[str, Any] = Field(
        {},
        description="Options of the kernel, such as clusters and views of near_far or sigma of any; the others are as "
        "the kernel has or recommends them.",
        json_schema_extra=_KERNEL,
    )
    candidates: tuple[Candidate, ...] = Field(
        (),
        description="Kernels that auto chooses from, such as {kernel: near_far, options: {clusters: 64}}; empty: the "
        "tool's own list.",
        json_schema_extra=_KERNEL,
    )
    min_tokens: int = Field(
        0,
        ge=0,
        description="With fewer keys than this, a converted site runs exact attention, bit for bit.",
        json_schema_extra=_KERNEL,
    )
    scorer: Literal["paper", "isolated", "greedy"] = Field(
        "isolated",
        description="How sensitivity is measured. isolated: change of the final output with one site converted; "
        "greedy: the same behind the sites chosen before; paper: change of block outputs with all sites converted.",
        json_schema_extra=_SELECTION,
    )
    mse_weight: float = Field(
        10.0,
        ge=0,
        description="Weight of the squared error in the paper's score, its lambda: (1 - cosine) + mse_weight * mse.",
        json_schema_extra=_SELECTION,
    )
    ratio: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Share of the eligible sites to convert, the most robust first; 0.67 where no budget is set.",
        json_schema_extra=_SELECTION,
    )
    k: int | None = Field(
        None, ge=0, description="Number of sites to convert, in place of ratio.", json_schema_extra=_SELECTION
    )
    max_flops: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Convert the sites that lose least, until attention needs this share of the exact FLOPs.",
        json_schema_extra=_SELECTION,
    )
    target_speedup: float | None = Field(
        None,
        gt=1,
        description="Convert the sites that lose least, until the model is this many times faster, measured here.",
        json_schema_extra=_SELECTION,
    )
    merge: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Merge alike tokens between the blocks of a vision or audio tower, until its last block works on "
        "this share of them; 1: never. Where it is not set, target_speedup merges as far as it takes.",
        json_schema_extra=_SELECTION,
    )
    towers: tuple[str, ...] = Field(
        (),
        description="Convert only these towers: vision, text, audio, encoder, decoder; empty: all.",
        json_schema_extra=_SELECTION,
    )
    include: tuple[str, ...] = Field(
        (),
        description="Convert only sites that match: whole dotted parts with shell wildcards, such as layer.1 or "
        "vision_*; empty: all.",
        json_schema_extra=_SELECTION,
    )
    exclude: tuple[str, ...] = Field(
        (), description="Sites that stay exact, by patterns as in include.", json_schema_extra=_SELECTION
    )
    samples: int = Field(
        32, ge=2, description="Number of samples to use, held-out ones included.", json_schema_extra=_CALIBRATION
    )
    score_samples: int | None = Field(
        None,
        ge=1,
        description="Number of the samples behind fits that scores are measured on, of each kind where there are two; "
        "all of them where it is not set. Scores take most of the time, which grows with it.",
        json_schema_extra=_CALIBRATION,
    )
    holdout: float = Field(
        0.25,
        gt=0,
        lt=1,
        description="Share of the samples kept for measuring, never used in a fit.",
        json_schema_extra=_CALIBRATION,
    )
    min_samples: int = Field(
        2, ge=2, description="Fewer usable samples than this are an error.", json_schema_extra=_CALIBRATION
    )
    resolution: int | None = Field(
        None,
        ge=1,
        description="Height and width of images in pixels, in place of the checkpoint's own; positions are "
        "interpolated.",
        json_schema_extra=_CALIBRATION,
    )
    grid: str | None = Field(
        None,
        pattern=r"^[1-9]\d{0,5}(x[1-9]\d{0,5}){1,2}$",
        description="Of a module that no library knows: rows and columns of its tokens, such as 64x64, or frames, rows "
        "and columns, 8x14x14. Where it is not set, its convolutions tell.",
        json_schema_extra=_CALIBRATION,
    )
    prefix: int | None = Field(
        None,
        ge=0,
        description="Of a module that no library knows: how many tokens stand before those of the grid.",
        json_schema_extra=_CALIBRATION,
    )
    seed: int = Field(
        0, ge=0, lt=2**31, description="Seed of the choice of samples and tokens.", json_schema_extra=_CALIBRATION
    )
    strict: bool = Field(False, description="The first unusable sample is an error.", json_schema_extra=_CALIBRATION)
    propagate_error: bool = Field(
        False,
        description="Refit the chosen sites one after another on the inputs they get from converted ones; slower.",
        json_schema_extra=_CALIBRATION,
    )
    require_faster: bool = Field(
        False,
        description="Write nothing, exit code 4, where the hybrid is not faster than the original on the held-out "
        "samples.",
        json_schema_extra=_GATE,
    )
    min_fidelity: float | None = Field(
        None,
        ge=-1,
        le=1,
        description="Lowest likeness to the original to accept on held-out samples, of the worst final output: mean "
        "cosine, probability given to the same classes, overlap of boxes. Below it nothing is written, exit code 4. "
        "Without another budget: convert as much as keeps it.",
        json_schema_extra=_GATE,
    )

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

    @property
    def sides(self) -> tuple[int, ...] | None:
        """``grid`` in numbers."""
        return None if self.grid is None else tuple(map(int, self.grid.split("x")))

    def resolved(self) -> Recipe:
        """The recipe that does the same with everything said: the kernel, and the ratio where nothing sets a budget."""
        said: dict[str, Any] = {"kernel": self.kernel or (FASTEST_KERNEL if self.target_speedup else DEFAULT_KERNEL)}
        if self.min_fidelity is None and all(getattr(self, name) is None for name in BUDGETS):
            said["ratio"] = DEFAULT_RATIO
        return self.model_copy(update=said)

    def kernels(self) -> tuple[Candidate, ...]:
        """The kernels that are fitted to every site, with all their options.

        Of several, each gets those of ``options`` that it has.

        Raises:
            RecipeError: A kernel does not exist, or an option does not fit it.
        """
        from latte_convert.kernels.options import options_of, resolve_options
        from latte_convert.kernels.registry import get_kernel

        kernel = self.resolved().kernel
        assert kernel is not None
        wanted = self.candidates or AUTO if kernel == "auto" else (Candidate(kernel=kernel),)
        known = {each.kernel: options_of(get_kernel(each.kernel)) for each in wanted}
        anywhere = set().union(*known.values())

        def resolved(each: Candidate) -> Candidate:
            foreign = anywhere - known[each.kernel].keys()
            given = {name: value for name, value in self.options.items() if name not in foreign}
            return Candidate(kernel=each.kernel, options=resolve_options(each.kernel, {**each.options, **given}))

        return tuple(map(resolved, wanted))

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
            told = [_explain(each) for each in error.errors()[: _MOST_ERRORS + 1]]
            raise RecipeError(f"{origin}: {some(told, _MOST_ERRORS, separator='; ')}") from None

    @classmethod
    def from_yaml(cls, path: str | Path, **overrides: Any) -> Recipe:
        """Read a YAML file; ``overrides`` win over what it says, options of the kernel one by one.

        The file's options are those of its kernel: with another ``kernel`` among the overrides they do not count.

        Args:
            path: The file, or the name of a recipe that comes with the tool, such as ``linear``; a file wins.
            overrides: Settings.

        Raises:
            RecipeError: The file is absent, is not YAML, or does not validate.
        """
        values = _read_yaml(_place(path))
        own = values.get("options")
        if isinstance(own, dict) and overrides.get("kernel") in (None, values.get("kernel") or DEFAULT_KERNEL):
            overrides["options"] = {**own, **overrides.get("options", {})}
        elif "kernel" in overrides:
            values.pop("options", None)
        return cls.build({**values, **overrides}, origin=str(path))


def _place(path: str | Path) -> Path:
    """The file that a path or the name of one of our recipes stands for."""
    own = {file.stem: file for file in CONFIGS.glob("*.yaml")}
    if Path(path).exists() or str(path) not in own:
        return Path(path)
    return own[str(path)]


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = read_text(path, _MOST_BYTES)
    except (FileNotFoundError, Unreadable) as error:
        reason = getattr(error, "strerror", None) or error
        names = ", ".join(sorted(file.stem for file in CONFIGS.glob("*.yaml")))
        raise RecipeError(f"recipe {path} cannot be read: {reason}. Give a YAML file, or one of {names}.") from None
    try:
        values = parse_yaml(text)
    except Unreadable as error:
        raise RecipeError(f"recipe {path} is {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise RecipeError(f"recipe {path} must be a mapping of settings, such as 'ratio: 0.5'.")
    return values


def _explain(error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return _unknown(where, str(error["loc"][-1]), error["input"])
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{where}: {message}" if where else message


def _unknown(where: str, key: str, value: Any) -> str:
    """What to write in the place of a key that a recipe does not have: it may be an option of a kernel."""
    from latte_convert.kernels.options import kernels_with
    from latte_convert.kernels.registry import kernel_names

    if not (owners := kernels_with(key)):
        return f"unknown key '{where}' ({nearest(where, Recipe.model_fields)})"
    kernel = "the kernel" if len(owners) == len(kernel_names()) else f"kernel {some(owners)}"
    if value is None:
        return f"'{key}' is an option of {kernel}: leave it out for what the kernel recommends"
    written = yaml.safe_dump({key: value}, default_flow_style=True).strip()
    return f"'{key}' is an option of {kernel}: write options: {written} (--option {written[1:-1].replace(': ', '=')})"

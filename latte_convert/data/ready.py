"""Ready batches: what a loaded model is given to calibrate on, checked before anything runs."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from latte_convert import compat
from latte_convert.data.feed import different
from latte_convert.data.processor import Batch
from latte_convert.errors import DataError, first_line
from latte_convert.wording import some

_WANTED = (
    "a loaded model takes an iterable of dictionaries, one for each sample, from the names of its forward's arguments "
    "to tensors, such as [{'pixel_values': images[:1]}, {'pixel_values': images[1:2]}]"
)


def ready_batches(given: Any, least: int) -> list[Batch]:
    """The batches as dictionaries, without repetitions.

    Args:
        given: Whatever the caller has given.
        least: How many different ones there must be.

    Raises:
        DataError: It is something else, or there are fewer.
    """
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping) or hasattr(given, "__array__"):
        raise DataError(f"the samples are {_kind(given)}; {_WANTED}.")
    batches = different([_batch(item, place) for place, item in enumerate(given, 1)])
    if len(batches) < least:
        raise DataError(
            f"{len(batches)} different batches given, {least} at least are needed: some to fit to, others to measure; "
            f"{_WANTED}."
        )
    return batches


@contextmanager
def record_calls(model: nn.Module, every: int = 1) -> Iterator[list[Batch]]:
    """Collect what a module is called with while something else runs it, such as a pipeline its transformer.

    Args:
        model: The module.
        every: Keep each so-manyth call only, the first among them.

    Yields:
        A list that grows by the arguments of each call that is kept, by name: what ``convert`` takes for the module.
    """
    batches: list[Batch] = []
    calls = count()
    signature = inspect.signature(model.forward)

    def record(_module: nn.Module, args: Any, kwargs: Any) -> None:
        if next(calls) % every == 0:
            bound = dict(signature.bind_partial(*args).arguments) | kwargs
            batches.append(compat.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, bound))

    hook = model.register_forward_pre_hook(record, with_kwargs=True)
    try:
        yield batches
    finally:
        hook.remove()


def read_batches(places: Sequence[str | Path]) -> list[Batch]:
    """Ready batches from safetensors files, each the tensors of one call by the names of its arguments.

    Args:
        places: Such files, and folders of them, which are read by name.

    Raises:
        DataError: There are none, or one cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files: list[Path] = []
    for place in map(Path, places):
        inside = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
        if not inside or not all(file.suffix == ".safetensors" and file.is_file() for file in inside):
            raise DataError(
                f"{place} holds no ready batches: a module of a factory has no preprocessing, and takes a folder of "
                ".safetensors files, each with the tensors of one call by the names of its forward's arguments."
            )
        files += inside
    try:
        return [load_file(file, backend="pread") for file in files]
    except (SafetensorError, OSError) as error:
        raise DataError(f"a ready batch among {some(map(str, files))} cannot be read: {first_line(error)}.") from None


def _batch(item: Any, place: int) -> Batch:
    """One batch as a plain dictionary."""
    if not isinstance(item, Mapping):
        raise DataError(f"batch {place} is {_kind(item)}; {_WANTED}.")
    batch: Batch = dict(item)
    array = next((name for name, v in batch.items() if hasattr(v, "__array__") and not isinstance(v, Tensor)), None)
    if array is not None:
        raise DataError(f"{array!r} of batch {place} is an array: torch.from_numpy makes a tensor of it.")
    if not all(isinstance(name, str) for name in batch) or not any(isinstance(v, Tensor) for v in batch.values()):
        raise DataError(f"batch {place} is {_kind(item)}; {_WANTED}.")
    return batch


def _kind(value: Any) -> str:
    """What something is, in a few words: never its contents."""
    name = type(value).__qualname__
    if hasattr(value, "shape"):
        return f"one {name} of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        items = some(f"{key!r}: {type(item).__qualname__}" for key, item in value.items())
        return f"a {name} of {{{items}}}"
    if isinstance(value, list | tuple):
        return f"a {name} of {', '.join(sorted({type(item).__qualname__ for item in value})) or 'nothing'}"
    return f"of the type {name}"

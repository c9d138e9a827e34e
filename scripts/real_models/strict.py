"""Loading that accepts no missing, unexpected or reshaped tensor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from real_models.download import FetchError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def strict_load(folder: Path) -> PreTrainedModel:
    """The model of the class that ``config.json`` names, in eval mode.

    Raises:
        FetchError: A tensor is missing, unexpected or of another shape.
    """
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    cls = getattr(transformers, config.architectures[0])
    model, info = cls.from_pretrained(folder, output_loading_info=True)
    wrong = {kind: sorted(map(str, keys)) for kind, keys in info.items() if keys}
    if wrong:
        raise FetchError(f"{folder.name} does not load strictly into {cls.__name__}: {wrong}")
    loaded: PreTrainedModel = model.eval()
    return loaded

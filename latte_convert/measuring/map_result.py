"""Attention maps as a report keeps them. Imports no PyTorch, so that a report is read without it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Heatmap(_Model):
    """An attention matrix of one head, summed over blocks of keys and averaged over blocks of queries."""

    levels: str = Field(
        description="Base64 of one byte per cell, row by row: the share of the queries' attention that goes to the "
        "keys of the cell is peak * (byte / 255)^2."
    )
    peak: float = Field(description="The share that byte 255 stands for; equal for both maps of a head.")
    columns: list[int] = Field(description="Cells of the column stripes: keys that queries in general attend to.")
    rows: list[int] = Field(description="Cells of the row stripes: queries that attend to at least half of the keys.")


class HeadShares(_Model):
    """Stripes of a head in its maps, and how far the maps are apart."""

    exact_columns: float = Field(description="Share of the attention mass in the column stripes, exact attention.")
    exact_rows: float = Field(description="Share of the attention mass in the row stripes, exact attention.")
    converted_columns: float = Field(description="The same of the kernel's attention.")
    converted_rows: float = Field(description="The same of the kernel's attention.")
    moved: float = Field(description="Share of the attention that goes to other cells than before, 0 to 1.")


class AttentionMap(_Model):
    """What a converted site attends to on one held-out sample, by softmax and by its kernel.

    It holds attention only, nothing of the sample.
    """

    site: str
    kernel: str
    queries: int = Field(description="Number of query tokens, before they were put into cells.")
    keys: int = Field(description="Number of key tokens.")
    prefix: int = Field(description="Leading tokens (CLS, registers) with a cell of their own.")
    shape: tuple[int, int] = Field(description="Cells: rows (queries) and columns (keys).")
    heads: list[HeadShares]
    head: int = Field(description="The head that is drawn: the one that moved most.")
    exact: Heatmap
    converted: Heatmap

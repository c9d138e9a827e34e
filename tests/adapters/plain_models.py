"""Small modules that no library knows, with inputs and what observation is to find in them, worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

from latte_convert.attention import TokenLayout


def heads_of(layer: nn.Linear, x: Tensor, heads: int) -> Tensor:
    """Queries, keys and values ``(3, B, H, N, d)``."""
    return layer(x).reshape(*x.shape[:2], 3, heads, -1).permute(2, 0, 3, 1, 4)


class CausalSelfAttention(nn.Module):
    """As nanoGPT has it, fused and written out."""

    def __init__(self, width: int = 32, heads: int = 4, block: int = 64, *, flash: bool) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attn_dropout = nn.Dropout(0.1)
        self.heads, self.flash = heads, flash
        self.register_buffer("bias", torch.tril(torch.ones(block, block)).view(1, 1, block, block))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        k = k.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        q = q.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        v = v.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        if self.flash:
            p = 0.1 if self.training else 0
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=p, is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
            att = F.softmax(att, dim=-1)
            att = self.attn_dropout(att)
            y = att @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class GPT(nn.Module):
    def __init__(self, *, flash: bool) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(50, 32), nn.Embedding(64, 32)
        self.h = nn.ModuleList(nn.ModuleDict({
            "ln_1": nn.LayerNorm(32), "attn": CausalSelfAttention(flash=flash), "ln_2": nn.LayerNorm(32),
            "mlp": nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)),
        }) for _ in range(2))  # fmt: skip
        self.lm_head = nn.Linear(32, 50, bias=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = x + block["attn"](block["ln_1"](x))
            x = x + block["mlp"](block["ln_2"](x))
        logits = self.lm_head(x)
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Attention(nn.Module):
    """As DINOv2 has it in its authors' repository."""

    def __init__(self, dim: int = 32, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, dim * 3), nn.Linear(dim, dim)
        self.attn_drop = nn.Dropout(0.0)

    def forward(self, x: Tensor, attn_bias: Any = None) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0] * self.scale, qkv[1], qkv[2]
        attn = q @ k.transpose(-2, -1)
        attn = attn.softmax(dim=-1)
        attn = self.attn_drop(attn)
        x = (attn @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj(x)


class MemEffAttention(Attention):
    """Without xFormers it is the class above."""

    def forward(self, x: Tensor, attn_bias: Any = None) -> Tensor:
        return super().forward(x)


class Dino(nn.Module):
    """Patches, a class token and registers, blocks with layer scales."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 32, 8, 8)
        self.tokens = nn.Parameter(torch.randn(1, 5, 32))
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(32), "attn": MemEffAttention()}) for _ in range(3)
        )
        self.gamma = nn.Parameter(torch.full((32,), 0.5))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.tokens.expand(len(x), -1, -1), x], 1)
        for block in self.blocks:
            x = x + self.gamma * block["attn"](block["norm"](x))
        return {"x_norm_clstoken": x[:, 0], "x_norm_patchtokens": x[:, 5:]}


class Geometry(nn.Module):
    """Attention within frames and over all of them in turns, as VGGT has it; the frames have a camera token each."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.attn = nn.LayerNorm(32), Geometry.Attention()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.attn(self.norm(x))

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)
            self.q_norm, self.k_norm = nn.LayerNorm(8), nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = heads_of(self.qkv, x, 4).unbind(0)
            x = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, dropout_p=0.0)
            return self.proj(x.transpose(1, 2).flatten(2))

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 32, 8, 8)
        self.camera = nn.Parameter(torch.randn(1, 1, 32))
        self.frame_blocks = nn.ModuleList(Geometry.Block() for _ in range(2))
        self.global_blocks = nn.ModuleList(Geometry.Block() for _ in range(2))

    def forward(self, images: Tensor) -> Tensor:
        B, S = images.shape[:2]
        x = self.patch_embed(images.flatten(0, 1)).flatten(2).transpose(1, 2)
        x = torch.cat([self.camera.expand(B * S, -1, -1), x], 1)
        P = x.shape[1]
        for frame, all_of_them in zip(self.frame_blocks, self.global_blocks, strict=True):
            x = frame(x.reshape(B * S, P, -1))
            x = all_of_them(x.reshape(B, S * P, -1))
        return x.reshape(B, S, P, -1)


class Twice(nn.Module):
    """One module that attends to itself and to a context, with a part in it that has attention of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention()
        self.qkv, self.out, self.kv = nn.Linear(32, 96), nn.Linear(32, 32), nn.Linear(16, 64)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = heads_of(self.qkv, x, 4).unbind(0)
        x = x + self.out((q @ k.mT / 8**0.5).softmax(-1).matmul(v).transpose(1, 2).flatten(2))
        x = x + self.inner(x)
        k, v = self.kv(context).reshape(len(x), -1, 2, 4, 8).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Forms(nn.Module):
    """Attention as it is written elsewhere: what ``attend`` does with queries, keys and values ``(B, H, N, d)``."""

    class Layer(nn.Module):
        def __init__(self, attend: Callable[..., Tensor], **tensors: Tensor) -> None:
            super().__init__()
            self.qkv, self.out, self.attend = nn.Linear(32, 96), nn.Linear(32, 32), attend
            self.extra = nn.ParameterDict(tensors)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = heads_of(self.qkv, x, 4).unbind(0)
            return x + self.out(self.attend(q, k, v, *self.extra.values()).transpose(1, 2).flatten(2))

    def __init__(self, attend: Callable[..., Tensor], **tensors: Tensor) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Forms.Layer(attend, **tensors) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.einsum("b h i d, b h j d -> b h i j", q, k).mul_(8**-0.5).softmax(-1, dtype=torch.float32)
    return torch.einsum("b h i j, b h j d -> b i h d", weights, v).transpose(1, 2)


def with_folded_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    B, H, N, d = q.shape
    q, k, v = (x.reshape(B * H, N, d) for x in (q, k, v))
    logits = torch.baddbmm(torch.empty(B * H, N, N), q, k.transpose(1, 2), beta=0, alpha=d**-0.5)
    logits = logits.view(B, H, N, N) + torch.zeros(B, 1, 1, N)
    return torch.bmm(torch.softmax(logits.view(B * H, N, N), dim=-1), v).view(B, H, N, d)


def multi_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = torch.einsum("...hid,...jd->...hij", q, k[:, 0])
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    logits = torch.where(mask, logits, torch.finfo(logits.dtype).min)
    return torch.einsum("...hij,...jd->...hid", logits.softmax(-1), v[:, 0])


def with_a_temperature(q: Tensor, k: Tensor, v: Tensor, temperature: Tensor) -> Tensor:
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    return ((q @ k.mT) * temperature.exp()).softmax(-1) @ v


def with_a_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.mT + bias).softmax(-1) @ v


def with_a_cap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (5 * torch.tanh(q @ k.mT / 5)).softmax(-1) @ v


def with_talking_heads(q: Tensor, k: Tensor, v: Tensor, mix: Tensor) -> Tensor:
    return torch.einsum("bhij,gh->bgij", q @ k.mT, mix).softmax(-1) @ v


def with_dropout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True)


def in_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.unflatten(2, (-1, 4)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2, 3)


def changed_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q * 1
    logits = q @ k.mT
    q.mul_(2)
    return logits.softmax(-1) @ v


@dataclass(frozen=True)
class Row:
    """A module.

    Attributes:
        build: Makes it.
        inputs: What its forward takes, batch size 2.
        sites: Its sites, each with the layer that reads its output, or None.
        causal: Whether they are causal.
        layout: How the tokens of the first one lie.
        heads: Heads and channels of the first one.
        kept: Why they stay exact, where they do: a part of the reason.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]
    sites: dict[str, str | None]
    causal: bool = False
    layout: TokenLayout = field(default_factory=TokenLayout)
    heads: tuple[int, int] = (4, 8)
    kept: str | None = None


def _images(name: str, *shape: int) -> Callable[[], dict[str, Tensor]]:
    return lambda: {name: torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))}


def _ids() -> dict[str, Tensor]:
    return {"idx": torch.randint(0, 50, (2, 24), generator=torch.Generator().manual_seed(1))}


def _vit() -> nn.Module:
    model = torchvision.models.VisionTransformer(32, 8, 2, 4, 32, 48, num_classes=5)
    nn.init.normal_(model.heads.head.weight)  # it is zero at first
    return model


def _maxvit() -> nn.Module:
    return torchvision.models.MaxVit((64, 64), 8, 4, [16], [1], 8, 0.0, num_classes=5)


def _form(
    attend: Callable[..., Tensor], heads: tuple[int, int] = (4, 8), kept: str | None = None, **tensors: Tensor
) -> Row:
    return Row(
        lambda: Forms(attend, **tensors), _images("x", 12, 32),
        {f"layers.{i}": f"layers.{i}.out" if heads[0] > 1 and not kept else None for i in range(2)},
        heads=heads, kept=kept,
    )  # fmt: skip


_GPT = {f"h.{i}.attn": f"h.{i}.attn.c_proj" for i in range(2)}
_FRAMES = {f"{kind}_blocks.{i}.attn": f"{kind}_blocks.{i}.attn.proj" for kind in ("frame", "global") for i in range(2)}
_GRID = "layers.MaxVitLayer_0.layers"

MODELS: dict[str, Row] = {
    "torchvision vit": Row(
        _vit, _images("x", 3, 32, 32),
        {f"encoder.layers.encoder_layer_{i}.self_attention": f"encoder.layers.encoder_layer_{i}.self_attention.out_proj"
         for i in range(2)},
        layout=TokenLayout(1, (4, 4)),
    ),
    "nanoGPT": Row(lambda: GPT(flash=True), _ids, _GPT, causal=True),
    "nanoGPT written out": Row(lambda: GPT(flash=False), _ids, _GPT, causal=True),
    "DINOv2's MemEffAttention": Row(
        Dino, _images("x", 3, 32, 48), {f"blocks.{i}.attn": f"blocks.{i}.attn.proj" for i in range(3)},
        layout=TokenLayout(5, (4, 6)),
    ),
    "VGGT's frame and global attention": Row(
        Geometry, _images("images", 3, 3, 32, 32), _FRAMES, layout=TokenLayout(1, (4, 4))
    ),
    "several in one module": Row(
        Twice, lambda: {**_images("x", 12, 32)(), **_images("context", 7, 16)()},
        {"inner": "inner.proj", "call_0": "out", "call_1": None},
    ),
    "einsum": _form(by_einsum),
    "folded heads": _form(with_folded_heads, (1, 8)),
    "multi-query": _form(multi_query),
    "cosine with a temperature": _form(with_a_temperature, temperature=torch.linspace(0, 1, 4)[:, None, None]),
}  # fmt: skip
"""What is converted."""
KEPT: dict[str, Row] = {
    "torchvision maxvit": Row(
        _maxvit, _images("x", 3, 64, 64), {}, kept="attention inside blocks of tokens", heads=(2, 8)
    ),
    "relative-position bias": _form(with_a_bias, kept="carries a bias", bias=torch.randn(4, 12, 12)),
    "soft cap": _form(with_a_cap, kept="'tanh' on its attention logits"),
    "talking heads": _form(with_talking_heads, kept="'einsum' on its attention logits", mix=torch.eye(4) + 0.1),
    "dropout in eval mode": _form(with_dropout, kept="attention dropout of 0.1 in eval mode"),
    "grouped queries": _form(grouped, kept="grouped-query attention"),
    "blocks": _form(in_blocks, kept="attention inside blocks of tokens"),
    "changed in place": _form(changed_in_place, kept="its queries or keys are changed in place"),
}
"""What is listed with the reason."""


def build(name: str) -> nn.Module:
    """The module of a name, in eval mode, with seeded weights."""
    torch.manual_seed(0)
    return (MODELS | KEPT)[name].build().eval()

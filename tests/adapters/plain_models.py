"""Small modules that no library knows, with inputs and what observation is to find in them, worked out by hand."""

from __future__ import annotations

import math
import warnings
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


def with_a_fused_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


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
        settings: Of the recipe.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    sites: dict[str, str | None]
    causal: bool = False
    layout: TokenLayout = field(default_factory=TokenLayout)
    heads: tuple[int, int] = (4, 8)
    kept: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)


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
    attend: Callable[..., Tensor],
    heads: tuple[int, int] = (4, 8),
    kept: str | None = None,
    settings: dict[str, Any] | None = None,
    **tensors: Tensor,
) -> Row:
    return Row(
        lambda: Forms(attend, **tensors), _images("x", 12, 32),
        {f"layers.{i}": f"layers.{i}.out" if heads[0] > 1 and not kept else None for i in range(2)},
        heads=heads, kept=kept, settings=settings or {},
    )  # fmt: skip


_GPT = {f"h.{i}.attn": f"h.{i}.attn.c_proj" for i in range(2)}
_FRAMES = {f"{kind}_blocks.{i}.attn": f"{kind}_blocks.{i}.attn.proj" for kind in ("frame", "global") for i in range(2)}
NEAR_FAR = {"kernel": "near_far", "options": {"window": 1, "halo": 0, "clusters": 2}}

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
    "grouped queries": _form(grouped),
    "relative-position bias": _form(with_a_bias, settings=NEAR_FAR, bias=torch.linspace(-4, 4, 576).reshape(4, 12, 12)),
    "relative-position bias, fused": _form(
        with_a_fused_bias, settings=NEAR_FAR, bias=torch.linspace(-4, 4, 144).reshape(12, 12)
    ),
}  # fmt: skip
"""What is converted."""
KEPT: dict[str, Row] = {
    "torchvision maxvit": Row(
        _maxvit, _images("x", 3, 64, 64), {}, kept="attention inside blocks of tokens", heads=(2, 8)
    ),
    "soft cap": _form(with_a_cap, kept="'tanh' on its attention logits"),
    "talking heads": _form(with_talking_heads, kept="'einsum' on its attention logits", mix=torch.eye(4) + 0.1),
    "dropout in eval mode": _form(with_dropout, kept="attention dropout of 0.1 in eval mode"),
    "blocks": _form(in_blocks, kept="attention inside blocks of tokens"),
    "changed in place": _form(changed_in_place, kept="its queries or keys are changed in place"),
}
"""What is listed with the reason."""


# -- Models of libraries that no adapter is for ----------------------------------------------------------------------


def _diffusers(kind: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import diffusers

        return getattr(diffusers, kind)(**settings)

    return build


def _x_transformers(layers: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # it scripts a function
            import x_transformers

        layers_of_it = getattr(x_transformers, layers)(dim=32, depth=2, heads=4, attn_dim_head=8, **settings)
        return x_transformers.TransformerWrapper(num_tokens=50, max_seq_len=64, attn_layers=layers_of_it)

    return build


def _latents(*shape: int, text: bool = True, **more: Any) -> Callable[[], dict[str, Any]]:
    """Two latents at two timesteps, with seven tokens of a text."""

    def inputs() -> dict[str, Any]:
        torch.manual_seed(1)
        told = {"encoder_hidden_states": torch.randn(2, 7, 16)} if text else {}
        return {"hidden_states": torch.randn(2, *shape), "timestep": torch.tensor([5, 7]), **told, **more}

    return inputs


def _positions() -> dict[str, Tensor]:
    """Of the image and the text tokens of Flux."""
    rows, columns = torch.meshgrid(torch.arange(4.0), torch.arange(6.0), indexing="ij")
    return {
        "img_ids": torch.stack([torch.zeros(4, 6), rows, columns], -1).reshape(24, 3), "txt_ids": torch.zeros(7, 3),
    }  # fmt: skip


_HEADS = {"num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2, "out_channels": 4}
_JOINT = {"joint_attention_dim": 16, "pooled_projection_dim": 8}
_UNET = (
    "down_blocks.0.attentions.0", "up_blocks.1.attentions.0", "up_blocks.1.attentions.1", "mid_block.attentions.0",
)  # fmt: skip


def _to_out(*sites: str) -> dict[str, str | None]:
    return {site: f"{site}.to_out.0" for site in sites}


MODELS |= {
    "diffusers DiT": Row(
        _diffusers("DiTTransformer2DModel", **_HEADS, norm_num_groups=4, sample_size=16, num_embeds_ada_norm=10),
        _latents(4, 16, 16, text=False, class_labels=torch.tensor([1, 2])),
        _to_out(*(f"transformer_blocks.{i}.attn1" for i in range(2))), layout=TokenLayout(0, (8, 8)),
    ),
    "diffusers PixArt": Row(
        _diffusers(
            "PixArtTransformer2DModel", **_HEADS, norm_num_groups=4, sample_size=16, cross_attention_dim=32,
            caption_channels=16, use_additional_conditions=False,
        ),
        _latents(4, 16, 16, encoder_attention_mask=torch.tensor([[1, 1, 1, 1, 1, 0, 0]] * 2)),
        _to_out(*(f"transformer_blocks.{i}.attn{j}" for i in range(2) for j in (1, 2))), layout=TokenLayout(0, (8, 8)),
    ),
    "diffusers SD3": Row(  # its text follows the image
        _diffusers("SD3Transformer2DModel", **_HEADS, **_JOINT, sample_size=16, caption_projection_dim=32,
                   pos_embed_max_size=16),
        _latents(4, 16, 16, pooled_projections=torch.randn(2, 8)),
        {f"transformer_blocks.{i}.attn": None for i in range(2)}, layout=TokenLayout(7, (8, 8)),
    ),
    "diffusers Flux": Row(  # its text stands before the image, whose patches come ready
        _diffusers("FluxTransformer2DModel", **_JOINT, patch_size=1, in_channels=4, num_layers=1, num_single_layers=1,
                   attention_head_dim=16, num_attention_heads=2, axes_dims_rope=(4, 4, 8)),
        _latents(24, 4, pooled_projections=torch.randn(2, 8), **_positions()),
        {"transformer_blocks.0.attn": None, "single_transformer_blocks.0.attn": None},
        layout=TokenLayout(7, (4, 6)), heads=(2, 16), settings={"grid": "4x6"},
    ),
    "diffusers Wan": Row(
        _diffusers("WanTransformer3DModel", patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12,
                   in_channels=4, out_channels=4, text_dim=16, freq_dim=32, ffn_dim=32, num_layers=2,
                   rope_max_seq_len=32),
        _latents(4, 3, 8, 12), _to_out(*(f"blocks.{i}.attn{j}" for i in range(2) for j in (1, 2))),
        layout=TokenLayout(0, (3, 4, 6)), heads=(2, 12),
    ),
    "diffusers UNet": Row(
        _diffusers("UNet2DConditionModel", sample_size=16, layers_per_block=1, block_out_channels=(8, 16),
                   norm_num_groups=4, cross_attention_dim=16, attention_head_dim=8,
                   down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
                   up_block_types=("UpBlock2D", "CrossAttnUpBlock2D")),
        lambda: {"sample" if name == "hidden_states" else name: value for name, value in _latents(4, 16, 16)().items()},
        _to_out(*(f"{place}.transformer_blocks.0.attn{i}" for place in _UNET for i in (1, 2))),
        layout=TokenLayout(0, (16, 16)), heads=(8, 1),
    ),
    "diffusers VAE": Row(
        _diffusers("AutoencoderKL", down_block_types=("DownEncoderBlock2D",) * 2,
                   up_block_types=("UpDecoderBlock2D",) * 2, block_out_channels=(8, 16), latent_channels=4,
                   norm_num_groups=4, sample_size=16),
        _images("sample", 3, 16, 16), _to_out(*(f"{part}.mid_block.attentions.0" for part in ("encoder", "decoder"))),
        layout=TokenLayout(0, (8, 8)), heads=(1, 16),
    ),
    "x-transformers decoder": Row(
        _x_transformers("Decoder"), lambda: {"x": _ids()["idx"]},
        {f"attn_layers.layers.{i}.1.attend": f"attn_layers.layers.{i}.1.to_out" for i in (0, 2)}, causal=True,
    ),
    "x-transformers encoder, flash": Row(
        _x_transformers("Encoder", attn_flash=True), lambda: {"x": _ids()["idx"]},
        {f"attn_layers.layers.{i}.1.attend": f"attn_layers.layers.{i}.1.to_out" for i in (0, 2)},
    ),
}  # fmt: skip


SHOWN = [
    *(name for name in MODELS if name.startswith(("torchvision", "nanoGPT", "DINOv2", "VGGT", "diffusers", "x-"))),
    "torchvision maxvit",
]
"""What the table of supported architectures shows of them."""


def build(name: str) -> nn.Module:
    """The module of a name, in eval mode, with seeded weights."""
    torch.manual_seed(0)
    return (MODELS | KEPT)[name].build().eval()

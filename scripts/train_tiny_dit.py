"""Train a small diffusion transformer on coloured digits in many fonts, and a classifier of them, on two CPU cores.

    python scripts/train_tiny_dit.py --out tests/models/tiny-dit [--steps 1500 400 200 80] [--seed 0]
    python scripts/train_tiny_dit.py --evaluate tests/models/tiny-dit

The model is diffusers' ``DiTTransformer2DModel`` on pixels, in patches of 2 x 2. Its positions are shares of the
picture, so that one model draws several sizes: it learns at 8 x 8 tokens, where steps are cheap, then at 16 x 16 and
32 x 32, and at last at 32 x 32 and 64 x 64 in turns. It learns the velocity of a rectified flow (Liu et al., ICLR
2023): a straight line from noise at ``t = 0`` to a picture at ``t = 1``, with larger pictures spending more of their
time near the noise. Products run in bfloat16. Every picture is rendered when it is needed, in a font of Matplotlib's.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import tempfile
import time
from collections.abc import Sequence
from colorsys import hsv_to_rgb
from pathlib import Path

import matplotlib
import numpy as np
import torch
from diffusers import DiTTransformer2DModel
from diffusers.models.attention_processor import AttnProcessor
from PIL import Image, ImageDraw, ImageFont
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

STAGES = (((16, 64),), ((32, 32),), ((64, 8),), ((64, 8), (128, 1)))
"""Pixels a side, and pictures a step, of each stage of training; the last has steps of two kinds in turns."""
SIDES = (64, 128)
"""What the finished model draws."""
RATE = 2e-3
"""Rate of learning, half as much in each further stage; it falls to zero in the last."""
PATCH, WIDTH, HEADS, LAYERS = 2, 128, 2, 6
NOTHING = 10
"""The label of no digit, for guidance."""
STEPS, GUIDANCE = 8, 2.0
SAVE_EVERY = 100
FONTS = (
    "DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSerif",
    "DejaVuSerif-Bold", "DejaVuSerif-Italic", "STIXGeneral", "STIXGeneralBol", "STIXGeneralBolIta",
    "STIXGeneralItalic", "cmb10", "cmr10", "cmss10", "cmtt10",
)  # fmt: skip


@functools.cache
def font(name: str, size: int) -> ImageFont.FreeTypeFont:
    """One of Matplotlib's fonts."""
    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{name}.ttf", size)


def pictures(labels: Sequence[int], side: int, rng: np.random.Generator) -> Tensor:
    """Digits in bright colours on dark ones, ``(B, 3, side, side)`` from -1 to 1."""
    made = []
    for label in labels:
        shape = font(str(rng.choice(FONTS)), round(side * rng.uniform(0.8, 1.1)))
        left, top, right, bottom = shape.getbbox(str(label))
        x, y = side * rng.uniform(0.42, 0.58, size=2) - ((left + right) / 2, (top + bottom) / 2)
        drawn = Image.new("L", (side, side))
        ImageDraw.Draw(drawn).text((x, y), str(label), fill=255, font=shape)
        ink = np.asarray(drawn.rotate(rng.uniform(-12, 12), Image.Resampling.BILINEAR), np.float32)[..., None] / 255
        bright = hsv_to_rgb(rng.uniform(), rng.uniform(0.3, 1), rng.uniform(0.8, 1))
        dark = hsv_to_rgb(rng.uniform(), rng.uniform(0.3, 1), rng.uniform(0.1, 0.4))
        made.append(ink * np.float32(bright) + (1 - ink) * np.float32(dark))
    return torch.from_numpy(np.stack(made)).permute(0, 3, 1, 2) * 2 - 1


class Classifier(nn.Module):
    """Which digit a picture of any size shows: a small convolutional network that sees it at 32 x 32."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 24, 48, 96)
        self.layers = nn.Sequential(*(
            nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.GroupNorm(8, b), nn.SiLU())
            for a, b in itertools.pairwise(widths)
        ))  # fmt: skip
        self.hidden = nn.Linear(widths[-1] * 16, 96)
        self.head = nn.Linear(96, 10)

    def features(self, images: Tensor) -> Tensor:
        """What the last layer reads, ``(B, 96)``."""
        small = F.interpolate(images.clamp(-1, 1), (32, 32), mode="area")
        return F.silu(self.hidden(self.layers(small).flatten(1)))

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``(B, 10)``."""
        return self.head(self.features(images))


def build() -> DiTTransformer2DModel:
    """A model with random weights whose blocks and output begin as nothing, as DiT's do."""
    model = DiTTransformer2DModel(
        num_attention_heads=HEADS, attention_head_dim=WIDTH // HEADS, in_channels=3, out_channels=3, num_layers=LAYERS,
        sample_size=SIDES[0], patch_size=PATCH, num_embeds_ada_norm=10, activation_fn="gelu",
    )  # fmt: skip
    for layer in (*(block.norm1.linear for block in model.transformer_blocks), model.proj_out_1, model.proj_out_2):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    return model.eval()  # in training mode every block would drop labels by itself


def load(folder: Path) -> tuple[DiTTransformer2DModel, Classifier]:
    """What :func:`save` wrote, in float32."""
    classifier = Classifier()
    tensors = load_file(folder / "classifier.safetensors")
    classifier.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return DiTTransformer2DModel.from_pretrained(folder).float().eval(), classifier.eval()


def shifted(share: Tensor, side: int) -> Tensor:
    """Times of equal shares of the way: a larger picture still shows through noise that hides a small one."""
    slower = side / 32
    return share / (share + slower * (1 - share))


def noise(side: int, numbers: Sequence[int]) -> Tensor:
    """What pictures of these numbers begin as, ``(B, 3, side, side)``: it does not depend on the others."""
    return torch.stack([torch.randn(3, side, side, generator=torch.Generator().manual_seed(n)) for n in numbers])


@torch.no_grad()
def sample(model: nn.Module, labels: Sequence[int], side: int, seed: int = 0, steps: int = STEPS) -> Tensor:
    """Pictures ``(B, 3, side, side)`` of the labels: Euler steps, guided away from the picture of no label."""
    image = noise(side, range(seed, seed + len(labels)))
    both = torch.tensor([*labels, *len(labels) * [NOTHING]])
    times = shifted(torch.linspace(0, 1, steps + 1), side)
    for now, then in itertools.pairwise(times):
        velocity = model(image.repeat(2, 1, 1, 1), now.expand(len(both)) * 1000, both).sample.float()
        wanted, unasked = velocity.chunk(2)
        image = image + (then - now) * torch.lerp(unasked, wanted, GUIDANCE)
    return image.clamp(-1, 1)


def train_classifier(steps: int, seed: int) -> Classifier:
    """Trained on rendered pictures and on blurred ones with a little noise, as samples may be."""
    torch.manual_seed(seed)
    rng, model = np.random.default_rng(seed + 1), Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in range(steps):
        labels = rng.integers(10, size=64)
        images = pictures(labels, 32, rng)
        loss = F.cross_entropy(model(images + 0.1 * torch.randn_like(images)), torch.from_numpy(labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def evaluate(model: nn.Module, classifier: Classifier, side: int, size: int = 20) -> dict[str, float]:
    """Share of samples, and of rendered pictures that nobody was trained on, that the classifier reads right."""
    labels = [n % 10 for n in range(size)]
    asked = torch.tensor(labels)
    read = classifier(sample(model, labels, side)).argmax(1)
    rendered = classifier(pictures(labels * 10, side, np.random.default_rng(2**20))).argmax(1)
    return {
        "samples_read": (read == asked).float().mean().item(),
        "rendered_read": (rendered == asked.repeat(10)).float().mean().item(),
    }


def save(model: DiTTransformer2DModel, classifier: Classifier, out: Path, card: str) -> None:
    """Write the directory, weights in float16, as a whole or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        new = Path(scratch) / "new"
        copy.deepcopy(model).half().save_pretrained(new)
        save_file({k: v.half() for k, v in classifier.state_dict().items()}, new / "classifier.safetensors")
        (new / "README.md").write_text(card)
        for path in new.iterdir():
            path.chmod(0o644)  # safetensors makes its file readable by the owner only
        if out.exists():
            out.rename(Path(scratch) / "old")
        new.rename(out)


def card(model: nn.Module, done: str, seed: int) -> str:
    """What the directory says of itself."""
    return (
        "# tiny-dit\n\n"
        f"A diffusion transformer with {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, trained "
        f"from scratch by `scripts/train_tiny_dit.py` (seed {seed}; {done}) on digits in Matplotlib's fonts, and the "
        "classifier that reads its samples. A test model: it draws nothing else.\n"
    )


def train(out: Path, steps: Sequence[int], seed: int) -> None:
    """Train from random weights, stage by stage; what is saved is the mean of the weights of late."""
    classifier = train_classifier(150, seed)
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = build()
    for block in model.transformer_blocks:
        block.attn1.set_processor(AttnProcessor())  # written out: fused attention takes long for bfloat16 gradients
    mean = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)
    start, recent, done = time.monotonic(), [], []
    for stage, (kinds, many) in enumerate(zip(STAGES, steps, strict=True)):
        done.append(f"{many} steps at {' and '.join(f'{side} px' for side, _ in kinds)}")
        for own, kind in zip(range(1, many + 1), itertools.cycle(kinds), strict=False):
            share = min(1, own / 50) if stage == 0 else 1 - own / many if kinds is STAGES[-1] else 1
            for group in optimizer.param_groups:
                group["lr"] = share * RATE / 2**stage
            recent.append(learn(model, optimizer, *kind, rng))
            with torch.no_grad():
                for old, new in zip(mean.parameters(), model.parameters(), strict=True):
                    old.lerp_(new, max(0.02, 9 / (own + 9)))
            if own % 20 == 0 or own == many:
                print(f"{done[-1]}: {own}, loss {np.mean(recent):.4f}, {time.monotonic() - start:.0f} s", flush=True)
                recent.clear()
            if own % SAVE_EVERY == 0 or own == many:
                save(mean, classifier, out, card(model, ", ".join(done), seed))


def learn(
    model: DiTTransformer2DModel, optimizer: torch.optim.Optimizer, side: int, batch: int, rng: np.random.Generator
) -> float:
    """One step; returns the loss."""
    digits = rng.integers(10, size=batch)
    clean = pictures(digits, side, rng)
    labels = torch.from_numpy(digits).masked_fill(torch.rand(batch) < 0.1, NOTHING)
    t, start = shifted(torch.randn(batch).sigmoid(), side), torch.randn_like(clean)
    between = torch.lerp(start, clean, t[:, None, None, None])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        velocity = model(between, t * 1000, labels).sample
    loss = F.mse_loss(velocity.float(), clean - start)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--out", type=Path, help="train, and write the model directory here, over one that is there")
    action.add_argument("--evaluate", type=Path, metavar="DIR", help="print the scores of a trained model")
    parser.add_argument("--steps", type=int, nargs=len(STAGES), default=(1500, 400, 200, 80), help="of each stage")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    if arguments.evaluate:
        for side in SIDES:
            print(f"{side} px", evaluate(*load(arguments.evaluate), side))
    else:
        train(arguments.out, arguments.steps, arguments.seed)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Train a small DETR on rendered scenes until it detects, and say how well it does on held-out ones.

    python scripts/train_tiny_detr.py --out models/tiny-detr
    python scripts/train_tiny_detr.py --evaluate models/tiny-detr

DETR learns slowly from random weights. Three things that leave the architecture as it is make it quick here: the
encoder's tokens are read by DETR's own heads too and told which object lies under them; the queries start as the
position embeddings of a grid of points, with cross-attention's query and key weights equal, so that each looks at its
own neighbourhood from the first step; the backbone's batch norms are live until the model is saved.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import math
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from scenes import COUNTS, SIZE, Scene, render
from torchvision.ops import box_convert, generalized_box_iou_loss
from transformers import (
    AutoBackbone,
    AutoImageProcessor,
    DetrConfig,
    DetrForObjectDetection,
    DetrImageProcessor,
    ResNetConfig,
)
from transformers.models.detr.modeling_detr import replace_batch_norm
from transformers.utils import logging

STRIDE = 8  # pixels a token
GRID = 4  # queries a side
WIDTH = 128
BATCH = 16
WARM_UP_RATE, RATE = 2e-3, 5e-4
CLASS_WEIGHT = 4  # of the dense class loss, which is slow to start
REPORT = 50  # steps
HELDOUT_SCENES = 150  # looked at during training
FINAL_SCENES = 400  # behind the figures in the model card
CARD = "{card}\n"


def build(seed: int) -> DetrForObjectDetection:
    """A DETR with random weights, live batch norms and queries laid out on a grid."""
    torch.manual_seed(seed)
    backbone = ResNetConfig(
        embedding_size=32, hidden_sizes=[48, 96], depths=[1, 3], layer_type="basic", out_features=["stage2"]
    )
    config = DetrConfig(
        backbone_config=backbone,
        num_queries=GRID**2,
        d_model=WIDTH,
        encoder_layers=3,
        decoder_layers=3,
        encoder_ffn_dim=2 * WIDTH,
        decoder_ffn_dim=2 * WIDTH,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        dropout=0.0,
        auxiliary_loss=True,
        eos_coefficient=0.2,
        id2label={digit: str(digit) for digit in range(10)},
        label2id={str(digit): digit for digit in range(10)},
    )
    model = DetrForObjectDetection(config)
    model.model.backbone.model = AutoBackbone.from_config(backbone)
    with torch.no_grad():
        side = SIZE // STRIDE
        shape = torch.Size((1, WIDTH, side, side))
        positions = model.model.position_embedding(shape=shape, device=torch.device("cpu"), dtype=torch.float32)
        middles = torch.nn.functional.interpolate(positions, size=(GRID, GRID), mode="area")
        model.model.query_position_embeddings.weight.copy_(middles[0].flatten(1).T)
        for layer in model.model.decoder.layers:
            torch.nn.init.xavier_uniform_(layer.encoder_attn.q_proj.weight)
            layer.encoder_attn.k_proj.weight.copy_(layer.encoder_attn.q_proj.weight)
    return model


def frozen(model: DetrForObjectDetection) -> DetrForObjectDetection:
    """A copy as the library builds it, with DETR's frozen batch norms, ready to evaluate or save."""
    copied = copy.deepcopy(model).eval()
    with torch.no_grad():
        replace_batch_norm(copied.model.backbone.model)
    return copied


def image_processor() -> DetrImageProcessor:
    """What turns pictures into the model's input, with DETR's own mean and deviation."""
    return DetrImageProcessor(size={"height": SIZE, "width": SIZE}, do_pad=False)


def batches(seed: int, steps: int) -> Iterator[tuple[torch.Tensor, list[dict]]]:
    """Endless fresh scenes: pixels float32 ``(BATCH, 3, SIZE, SIZE)`` and DETR's labels (boxes cx, cy, w, h in 0..1)."""
    processor = image_processor()
    mean, deviation = torch.tensor(processor.image_mean), torch.tensor(processor.image_std)
    for step in range(steps):
        scenes = [render("train", step * BATCH + place, seed) for place in range(BATCH)]
        pixels = torch.from_numpy(np.stack([scene.image for scene in scenes])).float() / 255
        labels = [
            {
                "class_labels": torch.from_numpy(scene.labels),
                "boxes": box_convert(torch.from_numpy(scene.boxes) / SIZE, "xyxy", "cxcywh"),
            }
            for scene in scenes
        ]
        yield ((pixels - mean) / deviation).permute(0, 3, 1, 2).contiguous(), labels


def dense_targets(labels: list[dict], side: int, no_object: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What each of ``side * side`` tokens is to say: classes int64 ``(B, N)`` and boxes ``(B, N, 4)`` (cx, cy, w, h).

    An object owns the tokens in the middle of its box, and always those next to its centre. A token that no object owns
    names its own cell: this is how tokens learn where they are, which DETR's attention never adds to its values.
    """
    axis = (torch.arange(side) + 0.5) / side
    points = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1).reshape(-1, 2)
    classes = torch.full((len(labels), side * side), no_object)
    boxes = torch.cat([points, torch.full_like(points, 1 / side)], -1).repeat(len(labels), 1, 1)
    for row, label in enumerate(labels):
        distance = (points[:, None] - label["boxes"][None, :, :2]).abs()
        owned = (distance <= (0.35 * label["boxes"][:, 2:]).clamp(min=0.51 / side)).all(-1)
        nearest = distance.sum(-1).masked_fill(~owned, math.inf).min(1)
        taken = nearest.values.isfinite()
        classes[row, taken] = label["class_labels"][nearest.indices[taken]]
        boxes[row, taken] = label["boxes"][nearest.indices[taken]]
    return classes, boxes


def dense_loss(model: DetrForObjectDetection, tokens: torch.Tensor, labels: list[dict]) -> torch.Tensor:
    """DETR's loss on image tokens ``(B, N, width)``, each told its object instead of matched to one."""
    config = model.config
    classes, boxes = dense_targets(labels, math.isqrt(tokens.shape[1]), config.num_labels)
    weight = torch.ones(config.num_labels + 1)
    weight[-1] = config.eos_coefficient
    logits = model.class_labels_classifier(tokens)
    class_loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), classes.flatten(), weight)
    predicted, taken = model.bbox_predictor(tokens).sigmoid(), classes != config.num_labels
    corners = [box_convert(one[taken], "cxcywh", "xyxy") for one in (predicted, boxes)]
    distance = (predicted - boxes).abs().sum(-1)
    box_loss = config.bbox_loss_coefficient * (distance[taken].mean() + 0.4 * distance[~taken].mean())
    overlap_loss = config.giou_loss_coefficient * generalized_box_iou_loss(*corners, reduction="mean")
    return CLASS_WEIGHT * class_loss + box_loss + overlap_loss


def warm_up(model: DetrForObjectDetection, steps: int, seed: int) -> None:
    """Train the backbone and the heads alone: the heads read the tokens that will enter the encoder."""
    core = model.model
    optimiser, schedule = optimiser_for(model, WARM_UP_RATE, steps)
    for step, (pixels, labels) in enumerate(batches(seed, steps), start=1):
        features, _ = core.backbone(pixels, torch.ones(len(pixels), SIZE, SIZE))[-1]
        tokens = core.input_projection(features).flatten(2).transpose(1, 2)
        loss = dense_loss(model, torch.nn.functional.layer_norm(tokens, (WIDTH,)), labels)
        update(model, loss, optimiser, schedule)
        if step % REPORT == 0:
            print(f"warm-up step {step} loss {loss.item():.3f}", flush=True)


def optimiser_for(
    model: DetrForObjectDetection, rate: float, steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW with a short rise of the learning rate and a cosine fall."""
    optimiser = torch.optim.AdamW(model.parameters(), rate, weight_decay=1e-4)
    return optimiser, torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, steps, pct_start=0.05)


def update(
    model: DetrForObjectDetection,
    loss: torch.Tensor,
    optimiser: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
) -> None:
    """One optimisation step with clipped gradients."""
    optimiser.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    schedule.step()


def train(model: DetrForObjectDetection, out: Path, steps: int, seed: int, every: int) -> None:
    """Train the whole DETR for ``steps`` batches; the best model so far by AP50 is always in ``out``."""
    processor = image_processor()
    heldout = [render("heldout", index) for index in range(HELDOUT_SCENES)]
    optimiser, schedule = optimiser_for(model, RATE, steps)
    best, started = -1.0, time.monotonic()
    # another seed than the warm-up's: other scenes
    for step, (pixels, labels) in enumerate(batches(seed + 1, steps), start=1):
        output = model(pixel_values=pixels, labels=labels)
        update(model, output.loss + dense_loss(model, output.encoder_last_hidden_state, labels), optimiser, schedule)
        if step % REPORT == 0:
            parts = {name: round(output.loss_dict[name].item(), 3) for name in ("loss_ce", "loss_bbox", "loss_giou")}
            minutes = (time.monotonic() - started) / 60
            print(f"step {step} loss {output.loss.item():.3f} {parts} minutes {minutes:.1f}", flush=True)
        if step % every == 0 or step == steps:
            figures = evaluate(frozen(model), processor, heldout)
            print(f"step {step} AP50 {figures['AP50']:.3f} AP {figures['AP']:.3f}", flush=True)
            if figures["AP50"] > best:
                best = figures["AP50"]
                publish(frozen(model), processor, out, f"Step {step} of {steps}, seed {seed}.")


@torch.no_grad()
def detect(
    model: DetrForObjectDetection, processor: DetrImageProcessor, scenes: list[Scene]
) -> list[dict[str, object]]:
    """Every query's best class and box, as COCO results; the image id is the place in ``scenes``."""
    results: list[dict[str, object]] = []
    for first in range(0, len(scenes), BATCH):
        inputs = processor(images=[scene.image for scene in scenes[first : first + BATCH]], return_tensors="pt")
        output = model(**inputs)
        sizes = [(SIZE, SIZE)] * len(inputs["pixel_values"])
        found = processor.post_process_object_detection(output, threshold=0.0, target_sizes=sizes)
        for image_id, one in enumerate(found, start=first):
            boxes = box_convert(one["boxes"], "xyxy", "xywh").tolist()
            for score, label, box in zip(one["scores"].tolist(), one["labels"].tolist(), boxes, strict=True):
                results.append({"image_id": image_id, "category_id": label, "bbox": box, "score": score})
    return results


def evaluate(model: DetrForObjectDetection, processor: DetrImageProcessor, scenes: list[Scene]) -> dict[str, float]:
    """COCO's AP and AP50 of a model in evaluation mode on ``scenes``."""
    truth = COCO()
    annotations = [
        {"image_id": image_id, "category_id": label, "bbox": box, "area": box[2] * box[3], "iscrowd": 0}
        for image_id, scene in enumerate(scenes)
        for label, box in zip(
            scene.labels.tolist(), box_convert(torch.from_numpy(scene.boxes), "xyxy", "xywh").tolist(), strict=True
        )
    ]
    truth.dataset = {
        "info": {},
        "images": [{"id": image_id} for image_id in range(len(scenes))],
        "annotations": [{"id": number, **one} for number, one in enumerate(annotations, start=1)],
        "categories": [{"id": digit} for digit in range(10)],
    }
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools reports its progress with print
        truth.createIndex()
        measure = COCOeval(truth, truth.loadRes(detect(model, processor, scenes)), "bbox")
        measure.evaluate()
        measure.accumulate()
        measure.summarize()
    return {"AP": float(measure.stats[0]), "AP50": float(measure.stats[1])}


def publish(model: DetrForObjectDetection, processor: DetrImageProcessor, out: Path, card: str) -> None:
    """Write the model directory beside ``out`` and rename it, so that ``out`` is never half-written."""
    partial, old = (out.with_name(f".{out.name}.{word}") for word in ("partial", "old"))
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)
    model.save_pretrained(partial)
    processor.save_pretrained(partial)
    (partial / "README.md").write_text(CARD.format(card=card), encoding="utf-8")
    if out.exists():
        out.rename(old)
    partial.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def load(folder: Path) -> tuple[DetrForObjectDetection, DetrImageProcessor]:
    """A published model in evaluation mode, and its image processor."""
    return DetrForObjectDetection.from_pretrained(folder).eval(), AutoImageProcessor.from_pretrained(folder)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("models/tiny-detr"), help="where the model directory goes")
    parser.add_argument("--steps", type=int, default=8000, help=f"batches of {BATCH} scenes")
    parser.add_argument("--every", type=int, default=500, help="steps between two looks at held-out scenes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evaluate", type=Path, metavar="DIR", help="only evaluate this model directory")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)  # for reproducible sums; the matrices are too small to gain from more
    logging.disable_progress_bar()
    if arguments.evaluate is None:
        train(build(arguments.seed), arguments.out, arguments.steps, arguments.seed, arguments.every)
    scenes = [render("heldout", HELDOUT_SCENES + index) for index in range(FINAL_SCENES)]
    figures = evaluate(*load(arguments.evaluate or arguments.out), scenes)
    print(f"AP50 {figures['AP50']:.3f} AP {figures['AP']:.3f} on {len(scenes)} held-out scenes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

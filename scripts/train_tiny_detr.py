"""Train a small DETR on rendered scenes until it detects, and say how well it does on held-out ones.

    python scripts/train_tiny_detr.py --out tests/models/tiny-detr
    python scripts/train_tiny_detr.py --evaluate tests/models/tiny-detr

DETR learns slowly from random weights. Three things that leave the architecture as it is make it quick here: the
encoder's tokens are read by DETR's own heads too and told which object lies under them, for a while before the decoder
joins in; queries start as the position embeddings of a grid of points and attention with equal query and key weights,
so that each looks at its own neighbourhood from the first step; the backbone's batch norms live until it is saved.

The backbone is shallow on purpose: it sees 51 pixels, so where an object is can only be known through the encoder's
attention. A deeper one makes a detector whose encoder may attend anywhere at no loss, which would test nothing.
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
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from scenes import SIZE, Scene, instances, render
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
GRID = 3  # queries a side
WIDTH = 128
LOCALITY = 2.0  # gain of the first query weights: how narrow a neighbourhood attention starts with
BATCH = 16
WARM_UP_RATE, RATE = 1e-3, 5e-4
CLASS_WEIGHT = 4  # of the dense class loss, which is slow to start
REPORT = 50  # steps
HELDOUT_SCENES = 150  # looked at during training
FINAL_SCENES = 400  # behind the figures in the model card
CARD = f"""# tiny-detr

A DETR of {{parameters:,}} parameters that finds handwritten digits in rendered scenes of {SIZE}x{SIZE} pixels
({(SIZE // STRIDE) ** 2} tokens). Trained from random weights by `python scripts/train_tiny_detr.py {{how}}`.

{{figures}}; their digits were shown in no training scene.

The digits are scikit-learn's copy of "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak; UCI Machine
Learning Repository, CC BY 4.0).
"""


def build(seed: int) -> DetrForObjectDetection:
    """A DETR with random weights, live batch norms and queries laid out on a grid."""
    torch.manual_seed(seed)
    backbone = ResNetConfig(
        embedding_size=32, hidden_sizes=[48, 128], depths=[1, 1], layer_type="basic", out_features=["stage2"]
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
        shape = torch.Size((1, WIDTH, SIZE // STRIDE, SIZE // STRIDE))
        positions = model.model.position_embedding(shape=shape, device=torch.device("cpu"), dtype=torch.float32)
        middles = torch.nn.functional.interpolate(positions, size=(GRID, GRID), mode="area")
        model.model.query_position_embeddings.weight.copy_(middles[0].flatten(1).T)
        attentions = [layer.encoder_attn for layer in model.model.decoder.layers]
        for attention in [*attentions, *(layer.self_attn for layer in model.model.encoder.layers)]:
            torch.nn.init.xavier_uniform_(attention.q_proj.weight, gain=LOCALITY)
            attention.k_proj.weight.copy_(attention.q_proj.weight)
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
    """Fresh scenes: pixels float32 ``(BATCH, 3, SIZE, SIZE)`` and DETR's labels (boxes cx, cy, w, h in 0..1)."""
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


def updater(model: DetrForObjectDetection, rate: float, steps: int) -> Callable[[torch.Tensor], None]:
    """What takes one step down a loss: AdamW, clipped gradients, a short rise of the rate and a cosine fall."""
    optimiser = torch.optim.AdamW(model.parameters(), rate, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, steps, pct_start=0.05)

    def update(loss: torch.Tensor) -> None:
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()

    return update


def warm_up(model: DetrForObjectDetection, steps: int, seed: int) -> None:
    """Train all that comes before the decoder: the heads read the encoder's tokens."""
    core = model.model
    update = updater(model, WARM_UP_RATE, steps)
    for step, (pixels, labels) in enumerate(batches(seed, steps), start=1):
        features, _ = core.backbone(pixels, torch.ones(len(pixels), SIZE, SIZE))[-1]
        positions = core.position_embedding(shape=features.shape, device=features.device, dtype=features.dtype)
        tokens, where = (one.flatten(2).transpose(1, 2) for one in (core.input_projection(features), positions))
        encoded = core.encoder(inputs_embeds=tokens, spatial_position_embeddings=where).last_hidden_state
        loss = dense_loss(model, encoded, labels)
        update(loss)
        if step % REPORT == 0:
            print(f"warm-up step {step} loss {loss.item():.3f}", flush=True)


def train(model: DetrForObjectDetection, out: Path, steps: int, seed: int, every: int) -> None:
    """Train the whole DETR for ``steps`` batches; the best model so far by AP50 is always in ``out``."""
    processor = image_processor()
    heldout = [render("heldout", index) for index in range(HELDOUT_SCENES)]
    update = updater(model, RATE, steps)
    best, started = -1.0, time.monotonic()
    for step, (pixels, labels) in enumerate(batches(seed + 1, steps), start=1):  # not the warm-up's scenes again
        output = model(pixel_values=pixels, labels=labels)
        update(output.loss + dense_loss(model, output.encoder_last_hidden_state, labels))
        if step % REPORT == 0:
            parts = {name: round(output.loss_dict[name].item(), 3) for name in ("loss_ce", "loss_bbox", "loss_giou")}
            minutes = (time.monotonic() - started) / 60
            print(f"step {step} loss {output.loss.item():.3f} {parts} minutes {minutes:.1f}", flush=True)
        if step % every == 0 or step == steps:
            figures = evaluate(frozen(model), processor, heldout)
            print(f"step {step} AP50 {figures['AP50']:.3f} AP {figures['AP']:.3f}", flush=True)
            if figures["AP50"] > best:
                best = figures["AP50"]
                publish(frozen(model), processor, out, f"Unfinished: step {step} of {steps}, seed {seed}.\n")


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
    truth.dataset = {"info": {}, **instances(scenes)}
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
    (partial / "README.md").write_text(card, encoding="utf-8")
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
    parser.add_argument("--out", type=Path, default=Path("tests/models/tiny-detr"), help="the model directory")
    parser.add_argument("--warm-up", type=int, default=1300, help=f"batches of {BATCH} scenes without the decoder")
    parser.add_argument("--steps", type=int, default=1700, help=f"batches of {BATCH} scenes for the whole model")
    parser.add_argument("--every", type=int, default=200, help="steps between two looks at held-out scenes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evaluate", type=Path, metavar="DIR", help="only evaluate this model directory")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)  # for reproducible sums; the matrices are too small to gain from more
    logging.disable_progress_bar()
    if arguments.evaluate is None:
        model = build(arguments.seed).train()
        warm_up(model, arguments.warm_up, arguments.seed)
        train(model, arguments.out, arguments.steps, arguments.seed, arguments.every)
    model, processor = load(arguments.evaluate or arguments.out)
    figures = evaluate(model, processor, [render("heldout", HELDOUT_SCENES + index) for index in range(FINAL_SCENES)])
    line = f"AP50 {figures['AP50']:.3f}, AP {figures['AP']:.3f} on {FINAL_SCENES} held-out scenes"
    print(line)
    if arguments.evaluate is None:
        how = f"--warm-up {arguments.warm_up} --steps {arguments.steps} --seed {arguments.seed}"
        card = CARD.format(parameters=model.num_parameters(), how=how, figures=line)
        publish(model, processor, arguments.out, card)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

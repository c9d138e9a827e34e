from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import latte_convert
from latte_convert.checkpoints.resolve import resolve
from latte_convert.errors import DataError, InputError
from latte_convert.evaluation.evaluate import evaluate
from latte_convert.evaluation.ranks import rank_of, ranks
from latte_convert.evaluation.tasks.base import Setting
from latte_convert.evaluation.tasks.retrieval import RetrievalTask
from latte_convert.recipe import Recipe

pytestmark = pytest.mark.slow


@torch.no_grad()
def brute_force(model, folder, scenes) -> dict[str, float]:
    """Sort everything and look: one padded batch, full forward, no use of the project's own code."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    processor = transformers.CLIPImageProcessor.from_pretrained(folder)
    texts = [(name, text) for name, own in scenes.captions.items() for text in own]
    pixels = processor([Image.open(scenes.root / "images" / name) for name in scenes.captions], return_tensors="pt")
    words = tokenizer([text for _, text in texts], padding=True, return_tensors="pt")
    output = model(**pixels, **words)
    table = (output.image_embeds @ output.text_embeds.T).numpy()
    scores = {}
    for k in (1, 5, 10):
        nearest = [[texts[j] for j in np.argsort(-row)[:k]] for row in table]
        found = [
            any(text in own for _, text in top) for own, top in zip(scenes.captions.values(), nearest, strict=True)
        ]
        scores[f"i2t_r{k}"] = np.mean(found)
        names = list(scenes.captions)
        hits = [texts[j][0] in [names[i] for i in np.argsort(-table[:, j])[:k]] for j in range(len(texts))]
        scores[f"t2i_r{k}"] = np.mean(hits)
    return scores


def test_recall_by_brute_force(clip_artifact, tiny_models, scenes):
    report = evaluate(clip_artifact, "retrieval", [scenes.root], batch_size=32)
    original = transformers.CLIPModel.from_pretrained(tiny_models / "tiny-clip").eval()
    for which, model in (("original", original), ("hybrid", latte_convert.load(clip_artifact))):
        wanted = brute_force(model, tiny_models / "tiny-clip", scenes)
        assert {name: getattr(value, which) for name, value in report.metrics.items()} == pytest.approx(wanted)
    main = report.metrics[report.primary]
    assert report.primary == "i2t_r5"
    assert main.original > 0.5  # chance is 5 of 60
    assert main.hybrid != main.original
    low, high = main.interval
    assert low < main.retention < high
    assert report.samples == 60


def test_samples_are_images_with_all_their_captions(clip_artifact, scenes):
    report = evaluate(clip_artifact, "retrieval", [scenes.root / "captions.json", scenes.root / "images"], samples=7)
    assert report.samples == 7
    assert report.metrics["i2t_r10"].original > 0.9  # 10 of 14 captions; of 7 images all are in the first ten
    assert report.metrics["t2i_r10"].original == 1


def test_a_damaged_image_takes_its_captions_along(clip_artifact, scenes, tmp_path):
    root = tmp_path / "scenes"
    shutil.copytree(scenes.root, root)
    first, *others = scenes.captions
    (root / "images" / first).write_bytes(b"no image")
    report = evaluate(clip_artifact, "retrieval", [root], batch_size=32)
    assert [item.id for item in report.skipped] == [first]
    assert report.samples == 59
    # The same as without that image from the start.
    document = json.loads((root / "captions.json").read_text())
    document["images"] = document["images"][1:]
    document["annotations"] = [a for a in document["annotations"] if a["image_id"] > 0]
    (root / "captions.json").write_text(json.dumps(document))
    again = evaluate(clip_artifact, "retrieval", [root], batch_size=32)
    assert again.samples == len(others)
    assert again.metrics == report.metrics


def test_ranks_by_hand():
    gallery = np.eye(3)
    queries = np.array([[0.9, 0.1, 0.0], [0.2, 0.3, 0.9], [0.5, 0.5, 0.0]])
    assert ranks(queries, gallery, [np.array([0]), np.array([1]), np.array([1, 2])]).tolist() == [0, 1, 1]
    # A model that cannot tell anything apart is never right.
    assert rank_of(np.zeros(4), 2) == 3
    assert rank_of(np.zeros(4), np.array([0, 1])) == 2


def test_scores_of_images_with_different_numbers_of_captions():
    # Found at 1, 5, 10; captions; captions that find it at 1, 5, 10.
    records = np.array([[1, 1, 1, 5, 2, 3, 5], [0, 0, 1, 1, 0, 1, 1]], float)
    scores = RetrievalTask.score(RetrievalTask, records)
    assert scores == pytest.approx(
        {"i2t_r5": 0.5, "t2i_r5": 4 / 6, "i2t_r1": 0.5, "t2i_r1": 2 / 6, "i2t_r10": 1.0, "t2i_r10": 1.0}
    )


COCO = """{
 "images": [
  {"id": 1, "file_name": "a.png"},
  {"id": 2, "file_name": "b.png"}],
 "annotations": [
  {"image_id": 1, "caption": "A dog"},
  {"image_id": %s, "caption": "%s"}]
}"""


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("captions.json", COCO % (3, "A cat"), r"captions.json:7 \(annotations\[1\]\): a caption of image 3"),
        ("captions.json", COCO % (2, " "), r"captions.json:7 \(annotations\[1\]\): 'caption' is empty"),
        ("captions.json", COCO % (1, "A cat"), r"captions.json:4 \(images\[1\]\): this image has no caption"),
        ("captions.json", COCO % (2, "A cat"), r"captions.json:6 \(annotations\[0\]\): there is no image 'a.png'"),
        (
            "captions.json",
            COCO.replace('"id": 2', '"id": 1') % (1, "A cat"),
            r"json:4 \(images\[1\]\): image 1 is there twice",
        ),
        ("dataset.json", '{"images": [{"filename": "a.png", "sentences": [5]}]}', r"'sentences' has 5 where"),
        (
            "captions.jsonl",
            '{"image": "000.jpg", "caption": ["a", "b"]}',
            r"jsonl:1: 'caption' is \['a', 'b'\], not a text",
        ),
        ("captions.json", COCO[:60], r"captions.json:4: not valid JSON"),
        ("captions.json", '{"images": []}', "no list 'annotations'"),
        ("captions.txt", "image,caption\nx.jpg,A dog\nx.jpg,\n", r"captions.txt:3: 'caption' is empty"),
        ("captions.txt", "image,caption\nx.jpg\n", r"captions.txt:2: 1 columns where the header names 2"),
        ("captions.txt", "image,caption\n", "a header and no rows"),
        ("captions.txt", "image,caption\n000.jpg,A dog\ny.jpg,A cat\n", r"captions.txt:3: no such file .*y.jpg"),
        ("captions.txt", "image,caption\n000.jpg,A dog\n000.jpg,A cat\n", "1 usable sample; a metric needs at least 2"),
        ("notes.md", "nothing", "has no labels"),
    ],
)
def test_bad_labels_are_named(clip_artifact, name, text, message, tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "000.jpg")
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message) as error:
        evaluate(clip_artifact, "retrieval", [tmp_path])
    assert error.value.exit_code == 3


def test_it_does_not_fit_one_tower(dino_artifact, scenes):
    with pytest.raises(InputError, match=r"'retrieval' does not fit Dinov2Model: it takes image, not images and texts"):
        evaluate(dino_artifact, "retrieval", [scenes.root])


def siglip(path, tokenizer_folder):
    torch.manual_seed(0)
    tower = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    text = {**tower, "vocab_size": 40, "max_position_embeddings": 24, "projection_size": 32}
    text |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 3}
    model = transformers.SiglipModel(
        transformers.SiglipConfig(text_config=text, vision_config={**tower, "image_size": 32, "patch_size": 8})
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4)  # the library's initialisation tells nothing apart
    model.save_pretrained(path)
    transformers.SiglipImageProcessor(size={"height": 32, "width": 32}).save_pretrained(path)
    transformers.AutoTokenizer.from_pretrained(tokenizer_folder).save_pretrained(path)
    return model.eval()


def test_siglip_reads_texts_at_full_length(tiny_models, scenes, tmp_path):
    model = siglip(tmp_path / "siglip", tiny_models / "tiny-clip")
    task = RetrievalTask(Setting(resolve(tmp_path / "siglip"), (str(scenes.root),)))
    examples = [example for example in task.examples if example.modality == "text"]
    found = []
    for example in (examples[0], examples[-1]):  # the shortest and the longest
        found += task.predict(model, task.prepare(example, example.load(), model), [example])
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "siglip")(
        [examples[0].target, examples[-1].target], padding="max_length", max_length=24, return_tensors="pt"
    )
    assert words["input_ids"][0, -1] == 0  # padding
    words.pop("attention_mask", None)  # SigLIP was trained without
    with torch.no_grad():
        wanted = model(pixel_values=torch.zeros(2, 3, 32, 32), **words).text_embeds.numpy()
    np.testing.assert_allclose(np.stack(found), wanted, atol=1e-6)
    # And images as they are.
    image = next(example for example in task.examples if example.modality == "image")
    assert task.prepare(image, image.load(), model).kwargs["pixel_values"].shape == (1, 3, 32, 32)


def test_open_clip(scenes, tmp_path):
    import open_clip
    from open_clip.push_to_hf_hub import save_config_for_hf
    from safetensors.torch import save_file

    torch.manual_seed(0)
    config = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 32, "patch_size": 8, "width": 32, "layers": 2, "head_width": 8},
        "text_cfg": {"context_length": 40, "vocab_size": 49408, "width": 32, "heads": 4, "layers": 2},
    }
    model = open_clip.model.CLIP(**config).eval()
    source = tmp_path / "source"
    source.mkdir()
    settings = {"mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic", "resize_mode": "squash"}
    open_clip.model.set_model_preprocess_cfg(model, settings)
    save_config_for_hf(model, source / "open_clip_config.json", config)
    save_file({k: v.clone() for k, v in model.state_dict().items()}, source / "open_clip_model.safetensors")
    recipe = Recipe(kernel="latte", samples=4, k=1)
    artifact = latte_convert.convert(source, scenes.root / "images", recipe=recipe).save(tmp_path / "out")
    report = evaluate(artifact, "retrieval", [scenes.root], batch_size=32)
    _, transform = open_clip.create_model_from_pretrained(f"local-dir:{source}")
    texts = [text for own in scenes.captions.values() for text in own]
    with torch.no_grad():
        pixels = torch.stack([transform(Image.open(scenes.root / "images" / name)) for name in scenes.captions])
        images = model.encode_image(pixels, normalize=True)
        words = model.encode_text(open_clip.tokenize(texts, 40), normalize=True)
    order = (words @ images.T).argsort(dim=1, descending=True)
    hits = [i // 2 in order[i, :10].tolist() for i in range(len(texts))]
    assert report.metrics["t2i_r10"].original == pytest.approx(np.mean(hits))


def test_a_dual_encoder(tiny_models, scenes, tmp_path):
    torch.manual_seed(0)
    layers = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.VisionTextDualEncoderConfig.from_vision_text_configs(
        transformers.ViTConfig(**layers, image_size=32, patch_size=8, initializer_range=0.2),
        transformers.BertConfig(**layers, vocab_size=40, max_position_embeddings=24, initializer_range=0.2),
        projection_dim=16,
    )
    model = transformers.VisionTextDualEncoderModel(config).eval()
    model.save_pretrained(tmp_path / "source")
    processor = transformers.ViTImageProcessor(size={"height": 32, "width": 32})
    processor.save_pretrained(tmp_path / "source")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_models / "tiny-clip")
    tokenizer.save_pretrained(tmp_path / "source")
    recipe = Recipe(kernel="latte", samples=4, k=1)
    artifact = latte_convert.convert(tmp_path / "source", scenes.root / "images", recipe=recipe).save(tmp_path / "out")
    report = evaluate(artifact, "retrieval", [scenes.root], batch_size=32)
    texts = [text for own in scenes.captions.values() for text in own]
    with torch.no_grad():
        pixels = processor([Image.open(scenes.root / "images" / name) for name in scenes.captions], return_tensors="pt")
        words = tokenizer(texts, padding=True, return_tensors="pt")
        table = model(**pixels, **words).logits_per_text
    order = table.argsort(dim=1, descending=True)
    hits = [i // 2 in order[i, :10].tolist() for i in range(len(texts))]
    assert report.metrics["t2i_r10"].original == pytest.approx(np.mean(hits))

from __future__ import annotations

import csv
import shutil

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import latte_convert
from latte_convert.checkpoints.resolve import resolve
from latte_convert.errors import DataError, InputError
from latte_convert.evaluation.class_names import ClassNames, class_names
from latte_convert.evaluation.evaluate import evaluate
from latte_convert.evaluation.tasks.classification import ClassificationTask
from latte_convert.recipe import Recipe

pytestmark = pytest.mark.slow

RECIPE = Recipe(kernel="latte", samples=4, k=1)
NAMES = ["coffee", "hat", "Rocket", "cat", "long_sleeve, long sleeve top", "pants", "skirt"]


@pytest.fixture(scope="module")
def vit_artifact(subjects, tmp_path_factory):
    """A small ViT whose head was fitted to a few real photographs, so that it is right more often than by chance."""
    torch.manual_seed(0)
    source = tmp_path_factory.mktemp("vit") / "source"
    labels = dict(enumerate(NAMES))
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=32, patch_size=8,
        id2label=labels, label2id={name: i for i, name in labels.items()},
    )  # fmt: skip
    model = transformers.ViTForImageClassification(config).eval()
    processor = transformers.ViTImageProcessor(size={"height": 32, "width": 32})
    paths = sorted((subjects / "test").rglob("*.jpg"))
    targets = [{"coffee": 0, "rocket": 2, "cat": 3}[path.parent.name] for path in paths]
    pixels = processor([Image.open(path).convert("RGB") for path in paths], return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        features = model.vit(pixels).last_hidden_state[:, 0]
        features = torch.cat([features, torch.ones(len(features), 1)], 1)
        goals = torch.nn.functional.one_hot(torch.tensor(targets), len(NAMES)).float()
        weights = torch.linalg.lstsq(features.T @ features + 1e-2 * torch.eye(33), features.T @ goals).solution
        model.classifier.weight.copy_(weights[:-1].T)
        model.classifier.bias.copy_(weights[-1])
    model.save_pretrained(source)
    processor.save_pretrained(source)
    return latte_convert.convert(source, subjects / "train", recipe=RECIPE).save(source.parent / "hybrid")


@torch.no_grad()
def test_images_by_hand(vit_artifact, subjects):
    report = evaluate(vit_artifact, "classification", [subjects], batch_size=5)
    processor = transformers.AutoImageProcessor.from_pretrained(vit_artifact)
    original = transformers.ViTForImageClassification.from_pretrained(vit_artifact.parent / "source").eval()
    for which, model in (("original", original), ("hybrid", latte_convert.load(vit_artifact))):
        first, five = [], []
        for path in sorted((subjects / "test").rglob("*.jpg")):
            logits = model(**processor(Image.open(path).convert("RGB"), return_tensors="pt")).logits[0]
            order = [model.config.id2label[i].lower() for i in logits.argsort(descending=True).tolist()]
            first.append(order[0] == path.parent.name)
            five.append(path.parent.name in order[:5])
        assert getattr(report.metrics["accuracy"], which) == pytest.approx(np.mean(first))
        assert getattr(report.metrics["top5"], which) == pytest.approx(np.mean(five))
    assert report.metrics["accuracy"].original > 0.5  # chance is 1 of 7
    assert report.samples == 12
    assert evaluate(vit_artifact, "classification", [subjects / "test"], samples=4).samples == 4


def test_an_unknown_class_is_named_with_the_nearest(vit_artifact, subjects, tmp_path):
    root = tmp_path / "data"
    shutil.copytree(subjects / "test", root)
    (root / "cat").rename(root / "cats")
    with pytest.raises(DataError, match=r"data/cats: 'cats' is not one of the 7 classes \(nearest: cat"):
        evaluate(vit_artifact, "classification", [root])


def test_it_does_not_fit_without_a_head(dino_artifact, clip_artifact, subjects):
    for artifact, name in ((dino_artifact, "Dinov2Model"), (clip_artifact, "CLIPModel")):
        with pytest.raises(InputError, match=f"'classification' does not fit {name}: it has no classification head"):
            evaluate(artifact, "classification", [subjects])


# --- texts ------------------------------------------------------------------------------------------------

WORDS = ["good", "bad", "fine", "poor", "film", "a", "the", "very", "plot"]


@pytest.fixture(scope="module")
def reviews(tmp_path_factory):
    """Texts of several lengths with labels by name and by number."""
    path = tmp_path_factory.mktemp("reviews") / "reviews.csv"
    rng = np.random.default_rng(0)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for i in range(20):
            writer.writerow(
                [" ".join(rng.choice(WORDS, rng.integers(3, 9))), ["NEGATIVE", "positive", "0", "1"][i % 4]]
            )
    return path


@pytest.fixture(scope="module")
def roberta_artifact(reviews, tmp_path_factory):
    torch.manual_seed(0)
    source = tmp_path_factory.mktemp("roberta") / "source"
    vocabulary = {token: i for i, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    config = transformers.RobertaConfig(
        vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=20, initializer_range=0.3, type_vocab_size=1,
        id2label={0: "negative", 1: "positive"}, label2id={"negative": 0, "positive": 1},
    )  # fmt: skip
    transformers.RobertaForSequenceClassification(config).save_pretrained(source)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        model_max_length=18,
    ).save_pretrained(source)  # fmt: skip
    return latte_convert.convert(source, reviews, recipe=RECIPE).save(source.parent / "hybrid")


@torch.no_grad()
def test_texts_by_hand(roberta_artifact, reviews):
    report = evaluate(roberta_artifact, "classification", [reviews], batch_size=20)
    tokenizer = transformers.AutoTokenizer.from_pretrained(roberta_artifact)
    source = roberta_artifact.parent / "source"
    original = transformers.RobertaForSequenceClassification.from_pretrained(source).eval()
    for which, model in (("original", original), ("hybrid", latte_convert.load(roberta_artifact))):
        right = []
        with reviews.open() as file:
            for i, row in enumerate(csv.DictReader(file)):
                words = tokenizer(row["text"], return_tensors="pt")
                words.pop("token_type_ids", None)
                right.append(int(model(**words).logits.argmax()) == i % 2)
        assert getattr(report.metrics["accuracy"], which) == pytest.approx(np.mean(right))
    assert set(report.metrics) == {"accuracy"}
    assert report.samples == 20


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("good film,positiv", r"reviews.csv:3: 'positiv' is not one of the 2 classes \(nearest: positive"),
        ("good film,2", r"reviews.csv:3: '2' is not one of the 2 classes"),
        ("good film,", r"reviews.csv:3: 'label' is empty"),
        (",positive", r"reviews.csv:3: 'text' is empty"),
        ("good film", r"reviews.csv:3: 1 columns where the header names 2"),
    ],
)
def test_bad_rows_are_named(roberta_artifact, row, message, tmp_path):
    path = tmp_path / "reviews.csv"
    path.write_text(f"text,label\nfine plot,negative\n{row}\n")
    with pytest.raises(DataError, match=message) as error:
        evaluate(roberta_artifact, "classification", [path])
    assert error.value.exit_code == 3


# --- names of classes -------------------------------------------------------------------------------------


def test_what_a_label_means():
    names = ClassNames(["tench, Tinca tinca", "crane, bird", "crane", "crane, machine", "heron, crane"])
    assert [names.index(label, "x") for label in ("Tinca_tinca", "TENCH", "crane", "3", 4)] == [0, 0, 2, 3, 4]
    with pytest.raises(DataError, match="x: 'machines' is not one of the 5"):
        names.index("machines", "x")
    with pytest.raises(DataError, match=r"x: 'ibis' can be several classes \(0: ibis, a; 1: ibis, b\): use the index"):
        ClassNames(["ibis, a", "ibis, b"]).index("ibis", "x")


def test_imagenet_goes_by_wordnet_too():
    names = ClassNames([f"LABEL_{i}" for i in range(1000)])
    # The first class of ImageNet is the tench, the last toilet paper.
    assert (names.index("n01440764", "x"), names.index("n15075141", "x"), names.index("LABEL_5", "x")) == (0, 999, 5)


def timm_folder(path, **options):
    import timm
    from timm.models import save_for_hf

    torch.manual_seed(0)
    model = timm.create_model("test_vit", pretrained=False, **options)
    save_for_hf(model, str(path), safe_serialization=True)
    return path, model.eval()


@torch.no_grad()
def test_a_timm_head(subjects, tmp_path):
    source, model = timm_folder(tmp_path / "source", num_classes=10)
    artifact = latte_convert.convert(source, subjects / "train", recipe=RECIPE).save(tmp_path / "hybrid")
    data = tmp_path / "data"
    for i, name in enumerate(("cat", "coffee", "rocket")):
        shutil.copytree(subjects / "test" / name, data / f"LABEL_{3 * i}")
    report = evaluate(artifact, "classification", [data])
    transform = resolve(artifact).processor("image").apply
    ranks = []
    for path in sorted(data.rglob("*.jpg")):
        logits = model(transform(Image.open(path).convert("RGB"))[None])[0]
        ranks.append(logits.argsort(descending=True).tolist().index(int(path.parent.name[-1])))
    assert report.metrics["top5"].original == pytest.approx(np.mean(np.array(ranks) < 5))
    assert report.metrics["accuracy"].original == pytest.approx(np.mean(np.array(ranks) < 1))
    headless, _ = timm_folder(tmp_path / "headless", num_classes=0)
    assert ClassificationTask.fits(resolve(headless)) == "its head has 0 outputs, no classes"
    assert class_names(resolve(timm_folder(tmp_path / "imagenet")[0]))[0] == "n01440764"

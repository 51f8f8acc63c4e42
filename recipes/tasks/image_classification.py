"""Image classification: a class for each image."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn

from recipes.models.pretrained import Pretrained
from recipes.tasks.pretrained_recipe import (
    PretrainedRecipe,
    at_least_fp32,
    evaluation_reader,
    evaluation_source,
    saved_label_names,
    set_label_names,
)
from recipes.tasks.problem_recipe import ProblemRecipe
from recipes.tasks.problems import PROBLEMS, Problem
from recipes.tasks.splits import Splits
from runner.data.cache import Cache, Progress
from runner.data.recipe import Batch, DataFacts, Prepared
from runner.data.table import SEED, Table, write_bytes, write_table
from runner.errors import UserError, first_line, require

#: Images that are checked together.
_CHUNK = 64

#: Of random crops: widths for a height of 1, and how often one is drawn before the middle of the image is taken.
_RATIOS, _DRAWS = (3 / 4, 4 / 3), 10

#: Formats that are read, as Pillow calls them: those that Pillow decodes itself, and no program that it would start.
FORMATS = ("BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")

#: In the folder of an evaluation table.
_NAMES = "names.json"


@dataclass(frozen=True)
class LabelledImages:
    """Encoded images and their classes; `labels` is None for images to predict for.

    `names`: what follows `where` in messages; `sizes`: in bytes; `digests`: SHA-256. `read` reads them, one by one.
    """

    names: list[str]
    labels: list[int] | None
    sizes: list[int]
    digests: list[bytes]
    where: str
    read: Callable[[], Iterator[bytes]]

    def __len__(self) -> int:
        return len(self.names)


#: The training set of a saved model.
_NONE = LabelledImages([], [], [], [], "", lambda: iter(()))


@dataclass(frozen=True)
class Pictures(Splits[LabelledImages]):
    """`label_names`: of the classes in the order of their numbers."""

    label_names: tuple[str, ...]

    def content(self) -> Iterable[bytes]:
        for part in (self.train, self.eval):
            yield json.dumps([len(part), part.labels]).encode()
            yield from part.digests
        if not self.train:  # images that are only evaluated are named in the predictions
            yield json.dumps(self.eval.names).encode()


class ImageSource(Protocol):
    def read(self) -> Pictures:
        """Read and check the data. Raises UserError, and Unavailable for data that are not on this machine."""
        ...

    def read_part(
        self, part: Literal["train", "eval"], file: str | None = None, label_names: Sequence[str] | None = None
    ) -> LabelledImages:
        """One part by itself, from `file` if given. `label_names`: of the classes; None reads no labels."""
        ...


@dataclass(frozen=True)
class ImageClassification(ProblemRecipe, PretrainedRecipe[Pictures]):
    """A class for each image.

    Tables hold the encoded images, which are decoded whenever a batch is made: as small as the files, and never all in
    memory. The model's image processor makes its inputs. In training, and as a function of (seed, epoch, image):
    `random_crop` cuts out a part of at least this share of the image's area, or None for no crop, and `random_flip`
    mirrors half of the images. `metrics_shown`: those of one class for each row, or None for those that fit.
    """

    task: ClassVar[str] = "image classification"
    head: ClassVar[str] = "ImageClassification"

    data: ImageSource
    model: Pretrained
    random_crop: float | None = 0.08
    random_flip: bool = True
    metrics_shown: Sequence[str] | None = ("accuracy",)
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        ok = self.random_crop is None or 0 < self.random_crop <= 1
        require(ok, "recipe.random_crop", self.random_crop, "use a share of the image's area such as 0.08, or null")
        self.check_metrics_shown()
        self.check_label_smoothing()

    @property
    def targets(self) -> Problem:
        return PROBLEMS["single_label"]

    # --- data -------------------------------------------------------------------------------------------------------

    def facts(self, cache: Cache) -> DataFacts:
        images = self.data.read()
        names, labels = images.label_names, images.eval.labels
        self.check_metrics(names, labels)
        self.check_model()
        notes, saved = images.notes, self.model.classes(self.head)
        if saved not in (None, len(names)):
            notes = (*notes, f"the head of {self.model.name} for {saved} classes is replaced by a new one")
        self._entry(cache, images.digest, names, lambda: images)  # a broken image is found before a folder is made
        return DataFacts(
            len(images.train),
            len(images.eval),
            images.digest,
            images.source,
            unit="images",
            label_names=names,
            notes=notes,
            constant=self.targets.constant(labels),
        )

    def prepared_by(self) -> dict[str, Any]:
        return {}

    def write(self, folder: Path, splits: Pictures, progress: Progress) -> None:
        for name, part in (("train", splits.train), ("eval", splits.eval)):
            columns = self.targets.columns(part.labels, len(part), splits.label_names)
            write_table(folder / name, {**columns, "length": [1] * len(part)})
            write_bytes(folder / name, "image", part.sizes, _checked(part, splits.source, progress))
        (folder / "eval" / _NAMES).write_text(json.dumps(splits.eval.names), encoding="utf-8")
        (folder / "properties.json").write_text(json.dumps({"label_names": splits.label_names}), encoding="utf-8")

    @functools.cached_property
    def _processor(self) -> Any:
        return self.model.image_processor()

    @functools.cached_property
    def _size(self) -> tuple[int, int]:
        """Height and width of the model's inputs. Raises UserError."""
        shapes = {self._pixels(Image.new("RGB", size)).shape for size in ((60, 40), (40, 60))}
        if len(shapes) != 1:
            raise UserError(
                f"recipe.model.name={self.model.name} has an image processor that keeps the shape of images, so that "
                "they make no batch: give a height and a width as size in its preprocessor_config.json"
            )
        _, height, width = shapes.pop()
        return height, width

    @functools.cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(torch.get_num_threads())  # Pillow lets them decode and resize at once

    def _pixels(self, image: Image.Image, **settings: Any) -> np.ndarray:
        """The model's input, fp32 of shape [channels, height, width]."""
        pixels: np.ndarray = self._processor(images=image, return_tensors="np", **settings)["pixel_values"][0]
        return pixels

    def _input(self, content: np.ndarray, seed: int | None) -> np.ndarray:
        """`seed`: of the augmentation; None for none."""
        image = _decoded(content.tobytes())
        if seed is None:
            return self._pixels(image)
        draw = np.random.default_rng(int(seed))
        settings = {}
        if self.random_crop is not None:
            height, width = self._size
            box = random_box(*image.size, self.random_crop, draw)
            image = image.resize((width, height), Image.Resampling.BILINEAR, box)
            settings = {"do_resize": False, "do_center_crop": False}
        if self.random_flip and draw.random() < 0.5:
            image = ImageOps.mirror(image)
        return self._pixels(image, **settings)

    def collate(self, rows: Mapping[str, Sequence[Any]], prepared: Prepared, length: int | None = None) -> Batch:
        seeds = rows.get(SEED, [None] * len(rows["image"]))
        pixels = list(self._threads.map(self._input, rows["image"], seeds))
        return {"pixel_values": torch.from_numpy(np.stack(pixels)), "labels": self.targets.tensor(rows["label"])}

    # --- model ------------------------------------------------------------------------------------------------------

    def check_model(self) -> None:
        self.model.check("an image processor")
        _ = self._size  # which raises

    def build_model(self, prepared: Prepared) -> nn.Module:
        names = prepared.properties["label_names"]
        model: Any = self.model.build_model(self.head, new_head=True, num_labels=len(names))
        model.config.problem_type = self.targets.problem_type
        set_label_names(model.config, names)
        training = model.training
        try:
            with torch.no_grad():
                model.eval()(pixel_values=torch.zeros(1, 3, *self._size, dtype=model.dtype))
        except (RuntimeError, ValueError) as error:
            raise UserError(
                f"recipe.model.name={self.model.name} does not take what its image processor makes, images of 3 × "
                f"{' × '.join(map(str, self._size))} ({first_line(error)}): change one of its two configurations"
            ) from error
        trained: nn.Module = model.train(training)
        return trained

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.training_loss(self.predict(model, batch), batch["labels"])

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        """Logits, [images, classes]."""
        pixels = batch["pixel_values"].to(next(model.parameters()).dtype)
        return at_least_fp32(model(pixel_values=pixels).logits)

    def save_processor(self, prepared: Prepared, folder: Path) -> Path:
        self._processor.save_pretrained(folder)
        return folder / "preprocessor_config.json"

    # --- a saved model ----------------------------------------------------------------------------------------------

    def evaluation_data(self, model: Pretrained, file: str | None) -> Pictures:
        self.check_saved(model)
        names = saved_label_names(model, self.data)
        part = evaluation_reader(self.data, "read_part")("eval", file, None if file is not None else names)
        return Pictures(_NONE, part, evaluation_source(self.data, file), names)

    def prediction_columns(self, predictions: Tensor, table: Table) -> dict[str, Sequence[Any]]:
        """A row for each image: what is predicted, the label if it is known, and the probabilities of all classes."""
        names = json.loads((table.folder.parent / "properties.json").read_text(encoding="utf-8"))["label_names"]
        images = json.loads((table.folder / _NAMES).read_text(encoding="utf-8"))
        labels = table.column("label").tolist() if table.column("label_count").any() else None
        return {"image": images, **self.targets.predictions(predictions, labels, names)}


def random_box(width: int, height: int, least: float, draw: np.random.Generator) -> tuple[int, int, int, int]:
    """A random part of an image, as left, upper, right and lower edge, of at least this share of its area.

    Area and the logarithm of width ÷ height are uniform, as in Szegedy et al. 2015, "Going deeper with convolutions",
    and torchvision's `RandomResizedCrop`.
    """
    for _ in range(_DRAWS):
        area = width * height * draw.uniform(least, 1)
        ratio = math.exp(draw.uniform(math.log(_RATIOS[0]), math.log(_RATIOS[1])))
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            left, upper = int(draw.integers(width - wide + 1)), int(draw.integers(height - high + 1))
            return left, upper, left + wide, upper + high
    wide, high = min(width, round(height * _RATIOS[1])), min(height, round(width / _RATIOS[0]))
    left, upper = (width - wide) // 2, (height - high) // 2
    return left, upper, left + wide, upper + high


def _decoded(content: bytes) -> Image.Image:
    """An image in RGB and upright, as pipelines of transformers read it. Raises errors of many kinds."""
    from transformers.image_utils import load_image

    image = Image.open(io.BytesIO(content), formats=FORMATS)
    if image.mode.startswith(("I", "F")):  # Pillow would clip these to 255
        raise ValueError("it is grey with more than 8 bits for each pixel")
    upright: Image.Image = load_image(image)
    return upright


def _checked(part: LabelledImages, source: str, progress: Progress) -> Iterator[bytes]:
    """The images, each of which can be decoded and is as it was planned. Raises UserError."""

    def check(number: int, content: bytes) -> bytes:
        if hashlib.sha256(content).digest() != part.digests[number]:
            raise UserError(f"the data ({source}) changed after the run was planned: start the run again")
        try:
            _decoded(content)
        except Exception as error:
            wrong = f"{part.where} {part.names[number]} cannot be used as an image ({first_line(error)})"
            raise UserError(f"{wrong}: replace it, or remove it") from error
        return content

    images = enumerate(part.read())
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        for start in range(0, len(part), _CHUNK):
            progress(start, len(part))
            some = [one for _, one in zip(range(_CHUNK), images, strict=False)]
            yield from threads.map(lambda one: check(*one), some)
    progress(len(part), len(part))

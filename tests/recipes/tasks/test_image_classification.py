"""Image classification beside plain transformers; augmentation, new heads, and what is refused."""

from __future__ import annotations

import copy
import io
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageClassification, pipeline
from transformers.image_utils import load_image

from recipes.tasks.image_classification import ImageClassification, random_box
from runner.backends import Backend
from runner.config.instantiate import build_recipe
from runner.data.cache import Cache
from runner.data.recipe import Batch, Prepared
from runner.data.table import SEED
from runner.errors import UserError
from runner.exact import check_model
from runner.plan.experiment import prepare
from runner.train.adapter import add_adapter
from runner.train.build import build_loop
from runner.train.hooks import Hooks
from runner.train.job import Job
from tests.configured import configured
from tests.pool import WorkerPool
from tests.recipes import pictures
from tests.recipes.pictures import CLASSES, encoded, picture
from tests.replicas import train_recipe, weights_of
from tests.sync.reference import largest_difference

TRAINED = [
    *("batch.global_batch=12", "epochs=2", "precision=fp64", "equivalence=exact", "optimizer=sgd", "optimizer.lr=0.05"),
    *("schedule=constant", "schedule.warmup_share=0", "scaling=none", "tracking=none", "device=cpu"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """29 images in batches of 12 leave 5: with four workers one of them has two, the others one."""
    folder = tmp_path_factory.mktemp("pictures")
    pictures.write_folder(folder / "train", 29)
    pictures.write_folder(folder / "eval", 10, first=100)
    pictures.save_vit(folder / "vit", dropout=0.1)
    pictures.save_vit(folder / "vit of 5", labels=5)
    pictures.save_resnet(folder / "resnet")
    return folder


def settings(folder: Path, *more: str, model: str = "vit") -> list[str]:
    data = [f"recipe.data.{part}={folder / part}" for part in ("train", "eval")]
    return ["recipe=image_classification", *data, f"recipe.model.name={folder / model}", *more]


def made(folder: Path, cache: Path, *more: str, model: str = "vit") -> tuple[ImageClassification, Prepared]:
    recipe = build_recipe(configured(settings(folder, *more, model=model)).recipe, [])
    own = Cache(cache)
    return recipe, Prepared.load(recipe.prepare(own, recipe.facts(own)))


def batch_of(recipe: ImageClassification, data: Prepared, rows: list[int], seeds: list[int] | None = None) -> Batch:
    found = data.train[rows]
    if seeds is not None:
        found[SEED] = np.array(seeds, dtype=np.uint64)
    return recipe.collate(found, data)


# --- the same numbers as transformers -------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["vit", "resnet"])
def test_logits_and_gradients_are_those_of_plain_transformers(folder: Path, tmp_path: Path, model: str) -> None:
    recipe, data = made(folder, tmp_path, model=model)
    ours = recipe.build_model(data).eval()
    theirs = AutoModelForImageClassification.from_pretrained(folder / model).eval()
    processor = AutoImageProcessor.from_pretrained(folder / model, backend="pil")
    files = sorted(folder.glob("train/*/*"))
    inputs = processor([load_image(str(file)) for file in files[:6]], return_tensors="pt")
    batch = batch_of(recipe, data, list(range(6)))
    assert torch.equal(batch["pixel_values"], inputs["pixel_values"])
    assert torch.equal(recipe.predict(ours, batch), theirs(**inputs).logits)
    loss_sum, count = recipe.loss(ours, batch)
    (loss_sum / count).backward()
    theirs(**inputs, labels=batch["labels"]).loss.backward()
    for (name, own), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert own.grad is not None
        assert other.grad is not None
        assert float((own.grad - other.grad).abs().max()) < 1e-6, name


def test_a_saved_model_is_a_pipeline(folder: Path, tmp_path: Path) -> None:
    """With the names of its classes, and the probabilities that `runner.predict` writes, for images of any kind."""
    recipe, data = made(folder, tmp_path / "cache")
    recipe.save(recipe.build_model(data).eval(), data, tmp_path / "saved")
    turned = PIL.Image.Exif()
    turned[274] = 6  # to be shown turned by 90 degrees
    images = {
        "alpha.png": encoded(picture(1, 0).convert("RGBA")),
        "grey.png": encoded(picture(2, 0).convert("L")),
        "palette.gif": encoded(picture(3, 0).convert("P"), "GIF"),
        "turned.jpg": encoded(picture(4, 0), "JPEG", exif=turned),
    }
    (tmp_path / "asked").mkdir()
    for name, content in images.items():
        (tmp_path / "asked" / name).write_bytes(content)
    saved = recipe.from_saved(str(tmp_path / "saved"), str(tmp_path / "asked")).for_predictions()
    cache = Cache(tmp_path / "cache")
    asked = Prepared.load(saved.prepare(cache, saved.facts(cache)))
    with torch.no_grad():
        logits = saved.predict(saved.build_model(asked).eval(), saved.collate(asked.eval[list(range(4))], asked))
    columns = saved.prediction_columns(logits, asked.eval)
    assert columns["image"] == sorted(images)
    assert "label" not in columns
    classify = pipeline("image-classification", str(tmp_path / "saved"))
    for row, name in enumerate(sorted(images)):
        answers = classify(str(tmp_path / "asked" / name))
        assert answers[0]["label"] == columns["predicted"][row]
        for answer in answers:
            assert columns[f"probability_{answer['label']}"][row] == pytest.approx(answer["score"], abs=1e-6)


def test_predictions_name_the_files_that_were_asked_for(folder: Path, tmp_path: Path) -> None:
    """Also after the same images were asked for by other names."""
    recipe, data = made(folder, tmp_path / "cache")
    recipe.save(recipe.build_model(data).eval(), data, tmp_path / "saved")
    cache = Cache(tmp_path / "cache")
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.png").write_bytes(encoded(picture(1, 0)))
        saved = recipe.from_saved(str(tmp_path / "saved"), str(tmp_path / name)).for_predictions()
        asked = Prepared.load(saved.prepare(cache, saved.facts(cache)))
        assert saved.prediction_columns(torch.zeros(1, len(CLASSES)), asked.eval)["image"] == [f"{name}.png"]


def test_a_head_for_other_classes_is_new(folder: Path, tmp_path: Path) -> None:
    """The same one on every worker, since it is drawn after seeding; the rest is as saved, and a note says it."""
    recipe, data = made(folder, tmp_path, model="vit of 5")
    notes = recipe.facts(Cache(tmp_path)).notes
    assert [note for note in notes if "5 classes is replaced" in note]
    torch.manual_seed(1)
    first: Any = recipe.build_model(data)
    torch.manual_seed(1)
    second: Any = recipe.build_model(data)
    saved: Any = AutoModelForImageClassification.from_pretrained(folder / "vit of 5")
    assert sorted(first.new_weights) == ["classifier.bias", "classifier.weight"]
    assert first.classifier.weight.shape[0] == 3
    assert torch.equal(first.classifier.weight, second.classifier.weight)
    assert largest_difference(dict(first.vit.state_dict()), dict(saved.vit.state_dict())) == 0


def test_an_adapter_with_a_new_head_is_a_pipeline(folder: Path, tmp_path: Path) -> None:
    """Its folder has the weights of its model, and not the head that it replaces."""
    recipe, data = made(folder, tmp_path / "cache", model="vit of 5")
    lora = configured(settings(folder, "adapter=lora", "adapter.rank=2")).adapter
    adapted: Any = add_adapter(lora, recipe.build_model(data)).eval()
    recipe.save(adapted, data, tmp_path / "saved")
    image = sorted((folder / "eval").glob("*/*"))[0]
    classify = pipeline("image-classification", str(tmp_path / "saved"))
    with torch.no_grad():
        shares = recipe.predict(adapted, recipe.collate(data.eval[[0]], data)).softmax(-1)[0]
    answers = {answer["label"]: answer["score"] for answer in classify(str(image))}
    assert answers == pytest.approx(dict(zip(pictures.CLASSES, shares.tolist(), strict=True)), abs=1e-6)


# --- augmentation ---------------------------------------------------------------------------------------------


def test_augmentation_follows_from_the_seed_of_a_row_alone(folder: Path, tmp_path: Path) -> None:
    recipe, data = made(folder, tmp_path)
    together = batch_of(recipe, data, [3, 8, 3], [5, 6, 7])["pixel_values"]
    assert torch.equal(batch_of(recipe, data, [8], [6])["pixel_values"][0], together[1])
    assert torch.equal(batch_of(recipe, data, [3], [7])["pixel_values"][0], together[2])
    assert not torch.equal(together[0], together[2])
    assert not torch.equal(batch_of(recipe, data, [3])["pixel_values"][0], together[0])


def test_augmentation_can_be_off(folder: Path, tmp_path: Path) -> None:
    """Each by itself; a flipped image is the image or its mirror, by half of the seeds."""
    off, data = made(folder, tmp_path, "recipe.random_crop=null", "recipe.random_flip=false")
    plain = batch_of(off, data, [0])["pixel_values"]
    assert torch.equal(batch_of(off, data, [0], [9])["pixel_values"], plain)
    flips, _ = made(folder, tmp_path, "recipe.random_crop=null")
    found = batch_of(flips, data, [0] * 60, list(range(60)))["pixel_values"]
    same = [torch.equal(one, plain[0]) for one in found]
    assert all(own or torch.allclose(one, plain[0].flip(-1), atol=0.02) for own, one in zip(same, found, strict=True))
    assert 15 < sum(same) < 45


def test_random_boxes() -> None:
    """They are in the image, of the asked share of its area and of moderate shape; long images have one, too."""
    draw = np.random.default_rng(0)
    shares = []
    for _ in range(500):
        left, upper, right, lower = random_box(200, 150, 0.3, draw)
        assert 0 <= left < right <= 200
        assert 0 <= upper < lower <= 150
        assert 0.73 < (right - left) / (lower - upper) < 1.36
        shares.append((right - left) * (lower - upper) / 30_000)
    assert 0.29 < min(shares) < 0.35
    assert 0.85 < max(shares) <= 1
    left, upper, right, lower = random_box(1000, 10, 0.9, draw)
    assert (upper, lower, right - left) == (0, 10, 13)


# --- workers --------------------------------------------------------------------------------------------------


def test_one_two_and_four_workers(pool: WorkerPool, folder: Path) -> None:
    """With augmentation, dropout and accumulation, the weights of one worker; another seed augments otherwise."""
    own = settings(folder, *TRAINED)
    (one,) = pool.run(1, train_recipe, own)
    for workers, more in ((2, "accumulation.steps=3"), (4, "accumulation.steps=1")):
        for result in pool.run(workers, train_recipe, [*own, more]):
            assert largest_difference(result["weights"], one["weights"]) < 1e-12
            assert result["ledger"] == one["ledger"]
    (plain,) = pool.run(1, train_recipe, [*own, "recipe.random_crop=null"])
    assert largest_difference(plain["weights"], one["weights"]) > 1e-3


def resumed(backend: Backend, overrides: list[str], stop: int | None) -> dict[str, torch.Tensor]:
    """The weights after training, stopped after this step and continued by a new loop."""
    experiment = prepare(configured([*overrides, f"device.workers={backend.world_size}"]))
    job = Job(experiment.config, experiment.facts, Path(), "cpu", backend.world_size, 1, experiment.plan, time.time())
    loop = build_loop(job, backend, Hooks())
    loop.train(until=stop)
    if stop is not None:
        state = copy.deepcopy(loop.state_dict())
        loop.policy.close()
        loop = build_loop(job, backend, Hooks())
        loop.load_state_dict(state)
        loop.train()
    found = {name: tensor.clone() for name, tensor in weights_of(loop).items()}
    loop.policy.close()
    return found


def test_a_resumed_run_augments_the_same(pool: WorkerPool, folder: Path) -> None:
    own = settings(folder, *TRAINED)
    whole = pool.run(2, resumed, own, None)
    for stop in (2, 3, 4):  # within the first epoch, at its end, and within the second
        again = pool.run(2, resumed, own, stop)
        assert all(largest_difference(a, b) == 0 for a, b in zip(whole, again, strict=True))


def test_batch_normalisation_is_not_exact(pool: WorkerPool, folder: Path, tmp_path: Path) -> None:
    """The probe refuses it in one sentence; without `exact` it is trained."""
    recipe, data = made(folder, tmp_path, model="resnet")
    with pytest.raises(UserError, match="batch normalisation"):
        check_model(recipe, data, recipe.build_model(data), torch.device("cpu"))
    own = settings(folder, *TRAINED, "equivalence=standard", model="resnet")
    (result,) = pool.run(1, train_recipe, own)
    assert len(result["losses"]) > 2


# --- what is refused ------------------------------------------------------------------------------------------


def _truncated(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _deep(content: bytes) -> bytes:
    grey = np.asarray(PIL.Image.open(io.BytesIO(content)).convert("L"), dtype=np.uint16)
    return encoded(PIL.Image.fromarray(grey * 200))


def _bomb(content: bytes) -> bytes:
    """The header of a PNG file says 20,000 × 20,000 pixels, which would need 1.2 GB."""
    header = b"IHDR" + struct.pack(">II", 20_000, 20_000) + content[24:29]
    return content[:12] + header + struct.pack(">I", zlib.crc32(header)) + content[33:]


def _program(content: bytes) -> bytes:
    """PostScript, which Pillow would have Ghostscript run."""
    return encoded(PIL.Image.open(io.BytesIO(content)), "EPS")


@pytest.mark.parametrize("change", [_truncated, _deep, _bomb, _program, lambda content: b"<html>", lambda content: b""])
def test_a_broken_image(folder: Path, tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    """It is named before anything is trained, and nothing is left in the cache."""
    pictures.write_folder(tmp_path / "train", 9)
    broken = tmp_path / "train" / "red" / "005.png"
    broken.write_bytes(change(broken.read_bytes()))
    data = [f"recipe.data.{part}={tmp_path / 'train'}" for part in ("train", "eval")]
    with pytest.raises(UserError) as caught:
        made(folder, tmp_path / "cache", *data)
    assert f"recipe.data.train={tmp_path / 'train'}: red/005.png" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_models_that_do_not_fit(folder: Path, tmp_path: Path) -> None:
    """No image processor; one for other sizes; one that keeps the shape of images."""
    pictures.save_vit(tmp_path / "none")
    (tmp_path / "none" / "preprocessor_config.json").unlink()
    with pytest.raises(UserError, match="without an image processor"):
        made(folder, tmp_path / "cache", f"recipe.model.name={tmp_path / 'none'}")
    pictures.save_vit(tmp_path / "large", size=20)
    recipe, data = made(folder, tmp_path / "cache", f"recipe.model.name={tmp_path / 'large'}")
    with pytest.raises(UserError, match=r"large .* 3 × 20 × 20"):
        recipe.build_model(data)
    pictures.save_vit(tmp_path / "kept", do_resize=False)
    with pytest.raises(UserError, match="keeps the shape"):
        made(folder, tmp_path / "cache", f"recipe.model.name={tmp_path / 'kept'}")

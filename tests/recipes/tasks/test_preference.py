"""Preferences: what is learned of a pair, losses, and the reference model."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipes.models.pretrained import Pretrained
from recipes.sources.preferences import PreferenceFiles
from recipes.tasks.preference import Preference, Reward
from runner.data.cache import Cache
from runner.data.recipe import Prepared
from runner.errors import UserError
from tests.recipes.writers import MARKED, preferences, preferred_chats, save_llama, write_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preferences")
    write_rows(folder / "texts.jsonl", preferences(8))
    write_rows(folder / "chats.jsonl", preferred_chats(8))
    save_llama(folder / "llama", dropout=0.5)
    save_llama(folder / "marked", MARKED)
    return folder


def recipe_of(folder: Path, rows: str = "texts", model: str = "llama", kind: Any = Preference, **settings: Any) -> Any:
    file = str(folder / f"{rows}.jsonl")
    return kind(data=PreferenceFiles(train=file, eval=file), model=Pretrained(str(folder / model)), **settings)


def prepared(recipe: Any, folder: Path) -> Prepared:
    cache = Cache(folder / "cache")
    return Prepared.load(recipe.prepare(cache, recipe.facts(cache)))


@pytest.mark.parametrize(("rows", "model", "end"), [
    ("texts", "llama", "<|endoftext|>"), ("chats", "llama", "<|im_end|>"), ("chats", "marked", "<|im_end|>"),
])  # fmt: skip
def test_targets_are_the_answer_and_its_end(folder: Path, rows: str, model: str, end: str) -> None:
    recipe = recipe_of(folder, rows, model)
    data = prepared(recipe, folder)
    tokenizer = recipe.model.tokenizer([])
    end = tokenizer.eos_token if rows == "texts" else end
    batch = recipe.collate(data.train[list(range(8))], data)
    for name in ("chosen", "rejected"):
        for number, row in enumerate(preferences(8)):
            targets = batch[f"{name}_input_ids"][number][batch[f"{name}_targets"][number] > 0]
            answer = row[name] if rows == "texts" else row[name].strip()
            assert tokenizer.decode(targets) == answer + end


@pytest.mark.parametrize("objective", ["dpo", "ipo"])
def test_losses(folder: Path, objective: str) -> None:
    """Those of the papers, from log-probabilities that are computed here, text by text."""
    recipe = recipe_of(folder, objective=objective, beta=0.3)
    data = prepared(recipe, folder)
    start = recipe.build_model(data).double().eval()
    model = recipe.build_model(data).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.3)
    row = data.train[[3]]

    def log_prob(of: Any, name: str) -> tuple[torch.Tensor, int]:
        ids = torch.tensor(row[f"{name}_ids"][0]).long()
        is_target = torch.tensor(row[f"{name}_targets"][0][1:]) > 0
        with torch.no_grad():
            log_probs = of(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        return log_probs[torch.arange(len(ids) - 1), ids[1:]][is_target].sum(), int(is_target.sum())

    ratios, tokens = {}, {}
    for name in ("chosen", "rejected"):
        (now, tokens[name]), (before, _) = log_prob(model, name), log_prob(start, name)
        ratios[name] = now - before
    if objective == "dpo":
        expected = -torch.sigmoid(0.3 * (ratios["chosen"] - ratios["rejected"])).log()
    else:
        difference = ratios["chosen"] / tokens["chosen"] - ratios["rejected"] / tokens["rejected"]
        expected = (difference - 1 / 0.6) ** 2
    found, count = recipe.loss(model, recipe.collate(row, data))
    assert (float(found.detach()), int(count)) == (
        pytest.approx(float(expected), rel=1e-5),
        1,
    )  # the reference is in fp32


def test_the_reference_is_the_model_before_training(folder: Path) -> None:
    """Without dropout: rewards are 0 then, and with another reference they are not."""
    other = Pretrained(str(folder / "llama")).build_model("CausalLM", 1, 0)
    with torch.no_grad():
        other.get_input_embeddings().weight.mul_(2)  # type: ignore[operator]
    other.save_pretrained(folder / "other")  # type: ignore[operator]
    shutil.copy(folder / "llama/tokenizer.json", folder / "other")
    for reference, zero in ((None, True), (str(folder / "other"), False)):
        recipe = recipe_of(folder, reference=reference)
        data = prepared(recipe, folder)
        model = recipe.build_model(data).eval()
        with torch.no_grad():
            rewards = recipe.rewards(recipe.predict(model, recipe.collate(data.eval[list(range(8))], data)))
        assert bool((rewards.abs() < 1e-5).all()) == zero


def test_cached_rows_are_of_one_reference(folder: Path, tmp_path: Path) -> None:
    """Other weights in the same folder are another entry; what only the policy's loss depends on is not."""
    save_llama(tmp_path / "llama")
    recipe = dataclasses.replace(recipe_of(folder), model=Pretrained(str(tmp_path / "llama")))
    before = prepared(recipe, tmp_path)
    assert prepared(dataclasses.replace(recipe, beta=0.5, objective="ipo"), tmp_path).folder == before.folder
    model = recipe.build_model(before)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    model.save_pretrained(tmp_path / "llama")
    after = prepared(recipe, tmp_path)
    assert after.folder != before.folder
    assert not (after.train.column("chosen_reference") == before.train.column("chosen_reference")).any()


def test_truncation(folder: Path) -> None:
    """A pair without an answer within `max_length` has no loss, but rewards of whole texts need none."""
    whole = prepared(recipe_of(folder), folder).train
    starts = [int(np.argmax(targets)) for targets in whole[list(range(8))]["chosen_targets"]]
    limit = (min(starts) + max(starts) + 1) // 2
    for kind, counts in ((Preference, [int(start < limit) for start in starts]), (Reward, [1] * 8)):
        data = prepared(recipe_of(folder, kind=kind, max_length=limit), folder)
        assert data.train.column("label_count").tolist() == counts
        assert data.properties["truncated"]["train"] == [8, 8]
    assert len({start < limit for start in starts}) == 2
    with pytest.raises(UserError, match=r"recipe\.max_length=3 is invalid: no training pair"):
        prepared(recipe_of(folder, max_length=3), folder)

"""Chats: which tokens are targets, batches, loss and replies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.models.pretrained import Pretrained
from recipes.sources.conversations import ConversationFiles
from recipes.tasks.chat import Chat, Chats, ChatTokenizer, ChatTokens
from runner.data.cache import Cache, silent
from runner.data.recipe import Prepared, label_counts
from runner.errors import UserError
from tests.recipes.writers import CHATML, MARKED, SHORTENING, chat_tokenizer, chats, save_llama, write_rows

ROWS = chats(12, turns=3)

# --- targets --------------------------------------------------------------------------------------------------


def tokens(tokenizer: Any, rows: list[dict[str, Any]], train_on: str = "completions") -> list[ChatTokens]:
    return list(ChatTokenizer(tokenizer, train_on).rows(Chats(rows, numbers=range(1, len(rows) + 1)), silent))


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_what_the_assistant_says_is_learned(template: str) -> None:
    """All of its turns with the token that ends them, by marks and without; the same tokens as transformers'."""
    tokenizer = chat_tokenizer(template)
    for row, found in zip(ROWS, tokens(tokenizer, ROWS), strict=True):
        said = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        ids, is_target = found.ids.tolist(), found.is_target
        assert tokenizer.decode(found.ids[is_target]) == "".join(f"{text}<|im_end|>" for text in said)
        assert ids == tokenizer.apply_chat_template(row["messages"], return_dict=False)
        prompt = tokenizer.apply_chat_template(row["messages"][:-1], add_generation_prompt=True, return_dict=False)
        assert found.prompt.tolist() == prompt
        assert found.texts == (row["messages"][-2]["content"], said[-1])
        if template == MARKED:
            of = tokenizer.apply_chat_template(row["messages"], return_dict=True, return_assistant_tokens_mask=True)
            assert of["assistant_masks"] == is_target.astype(int).tolist()
    (everything,) = tokens(tokenizer, ROWS[:1], "all")
    assert everything.is_target.all()


def test_special_tokens_are_not_added_twice() -> None:
    """A template with <s> for a tokenizer that would add one; prompts without a template have the tokenizer's."""
    tokenizer = chat_tokenizer("{{ bos_token }}" + CHATML)
    start = tokenizer.bos_token_id
    for row in [*ROWS[:1], {"prompt": "Where?", "completion": " In the pond."}]:
        (found,) = tokens(tokenizer, [row])
        assert found.ids.tolist().count(start) == 1
        assert found.ids[0] == found.prompt[0] == start
        assert not found.is_target[0]


@pytest.mark.parametrize("completion", [" In the pond.", "oooooo", "\n\n- here"])
def test_completions_end_with_the_end_of_text(completion: str) -> None:
    """The prompt has the tokens that it has by itself, also if the whole text would merge it with the completion."""
    tokenizer = chat_tokenizer(None)
    tokenizer.backend_tokenizer.add_tokens(["?\n\n"])
    prompt = "Where does the otter live?"
    (found,) = tokens(tokenizer, [{"prompt": prompt, "completion": completion}])
    assert found.prompt.tolist() == tokenizer(prompt)["input_ids"] == found.ids[~found.is_target].tolist()
    assert tokenizer.decode(found.ids[found.is_target]) == completion + tokenizer.eos_token


def test_templates_that_do_not_fit() -> None:
    """Each is refused with a sentence that names the fix; one that does not keep a prefix only where that matters."""
    several = next(row for row in ROWS if len(row["messages"]) > 3)
    with pytest.raises(UserError, match=r"row 2 .*recipe\.train_on=all"):
        tokens(chat_tokenizer(SHORTENING), [ROWS[0], several])
    assert tokens(chat_tokenizer(SHORTENING), [several], "all")
    with pytest.raises(UserError, match=r"recipe\.chat_template=FILE"):
        tokens(chat_tokenizer(None), ROWS)
    with pytest.raises(UserError, match=r"row 1 .*chat template: no system here"):
        tokens(chat_tokenizer("{{ raise_exception('no system here') }}"), ROWS)


# --- data and batches -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of conversations, and a model."""
    root = tmp_path_factory.mktemp("chat")
    save_llama(root / "model")
    write_rows(root / "train.jsonl", chats(40, turns=3))
    write_rows(root / "eval.jsonl", ROWS)
    return root


def recipe(folder: Path, **settings: Any) -> Chat:
    data = ConversationFiles(str(folder / "train.jsonl"), str(folder / "eval.jsonl"))
    return Chat(data, Pretrained(str(folder / "model")), **{"max_length": 200, "max_new_tokens": 12, **settings})


def prepared(made: Chat, cache: Path) -> Prepared:
    return Prepared.load(made.prepare(Cache(cache), made.facts(Cache(cache))))


def test_metrics_by_hand(folder: Path, tmp_path: Path) -> None:
    """Over targets: their mean loss, its exponential, and the share that was the most probable token."""
    data = prepared(recipe(folder), tmp_path)
    metrics = recipe(folder).metrics(torch.tensor([[2.0, 4, 3], [0, 0, 0]]), data.eval)
    assert metrics == pytest.approx({"perplexity": np.exp(0.5), "loss": 0.5, "token_accuracy": 75})


def test_long_conversations(folder: Path, tmp_path: Path) -> None:
    """They are truncated at the end; rows without a target are not trained on, but keep their place in predictions."""
    whole = prepared(recipe(folder), tmp_path)
    length = int(np.quantile(whole.train.column("length"), 0.2)) - 20
    made = recipe(folder, max_length=length)
    facts, data = made.facts(Cache(tmp_path)), prepared(made, tmp_path)
    assert max(data.train.column("length")) == length
    lost = 40 - facts.train_samples
    assert (label_counts(data.train) > 0).all()
    assert (facts.eval_samples, (label_counts(data.eval) == 0).any()) == (12, True)
    assert 0 < lost < 40
    assert any(f"{lost} of 40" in note for note in facts.notes)
    assert data.properties["truncated"]["train"] == [int((whole.train.column("length") > length).sum()), 40]


def test_a_template_in_a_file(folder: Path, tmp_path: Path) -> None:
    """It replaces the tokenizer's and is saved with the model, which also knows the token that ends a turn."""
    (tmp_path / "own.jinja").write_text(MARKED.replace("<|im_end|>", "</end>"))
    made = recipe(folder, chat_template=str(tmp_path / "own.jinja"))
    data = prepared(made, tmp_path / "cache")
    assert data.folder != prepared(recipe(folder), tmp_path / "cache").folder
    made.save(made.build_model(data), data, tmp_path / "saved")
    assert "</end>" in AutoTokenizer.from_pretrained(tmp_path / "saved").get_chat_template()
    # "</end>" is no special token of this tokenizer.
    assert ["learn where to stop" in note for note in data.properties["notes"]] == [True, True]
    assert made.build_model(data).generation_config.eos_token_id == [0]
    data = prepared(recipe(folder), tmp_path / "cache")
    recipe(folder).save(recipe(folder).build_model(data), data, tmp_path / "usual")
    end = chat_tokenizer().convert_tokens_to_ids("<|im_end|>")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "usual").generation_config.eos_token_id == [0, end]


def test_replies_do_not_depend_on_the_batch(folder: Path, tmp_path: Path) -> None:
    """Prompts are padded on the left: each reply is what `generate` gives for its prompt alone."""
    made = recipe(folder).for_predictions()
    data = prepared(made, tmp_path)
    model: Any = made.build_model(data).eval().double()
    end = data.properties["ends"][0]
    together = made.predict(model, made.collate(data.eval[list(range(12))], data))
    assert together.shape == (12, 3 + 12)
    for row in (0, 3, 5):
        ids = torch.tensor(data.eval[[row]]["prompt_ids"][0][None].astype(np.int64))
        expected = model.generate(ids, max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(ids))[0]
        reply = [token for token in expected[ids.shape[1] :].tolist() if token not in (0, end)]
        found = [int(token) for token in together[row, 3:] if token >= 0]
        assert found == reply
    columns = made.prediction_columns(together, data.eval)
    assert list(columns) == ["input", "generated", "reference", "loss", "perplexity"]
    assert columns["reference"] == [row["messages"][-1]["content"] for row in ROWS]


def test_prompts_to_answer(folder: Path, tmp_path: Path) -> None:
    """A file to predict for needs no answers; where it has some, they have a loss."""
    asked = [{"messages": row["messages"][:-1]} for row in chats(4)]
    write_rows(tmp_path / "asked.jsonl", [*asked, *chats(1)])
    made = recipe(folder).from_saved(str(folder / "model"), str(tmp_path / "asked.jsonl")).for_predictions()
    data = prepared(made, tmp_path / "cache")  # type: ignore[arg-type]
    assert len(data.train) == 0
    model = made.build_model(data).eval()
    columns = made.prediction_columns(made.predict(model, made.collate(data.eval[list(range(5))], data)), data.eval)
    assert columns["input"][0] == asked[0]["messages"][-1]["content"]
    assert columns["reference"] == [*[None] * 4, chats(1)[0]["messages"][-1]["content"]]
    assert [loss is None for loss in columns["loss"]] == [True, False, True, False, False]  # an earlier turn, too

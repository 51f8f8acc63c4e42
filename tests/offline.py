"""What every shipped recipe needs to train without the Hub: small files and models in folders."""

from __future__ import annotations

from pathlib import Path

from tests.recipes import labelled, pictures, writers, zoo
from tests.recipes.letters import save_gpt2
from tests.tiny_models import save_bert


def offline_recipes(folder: Path) -> dict[str, list[str]]:
    """Overrides with which recipes, by name, can be trained or prepared. Others need none."""
    model = save_bert(folder / "model", ["It ran.", "It fell.", *zoo.texts()], positions=384)
    rows = "".join(f"It ran.\tIt fell.\t{label}\n" for label in ("neutral", "entailment", "contradiction", "-"))
    contents = {
        "acceptable.tsv": "gj04\t1\t\tThe book fell.\ngj04\t0\t*\tThe book felled.\n" * 30,
        "pairs.tsv": "premise\thypothesis\tlabel\n" + 20 * rows,
        "lines.txt": "It ran.\n" * 200,
    }
    for name, content in contents.items():
        (folder / name).write_text(content)

    def given(train: Path, evaluation: Path, model: Path = model) -> list[str]:
        return [f"recipe.data.train={train}", f"recipe.data.eval={evaluation}", f"recipe.model.name={model}"]

    acceptable, pairs = (given(folder / name, folder / name) for name in ("acceptable.tsv", "pairs.tsv"))
    lines = given(folder / "lines.txt", folder / "lines.txt", save_gpt2(folder / "gpt2", positions=128))
    squad = given(*zoo.write(folder))
    chat_model, pair_model = writers.save_llama(folder / "llama", positions=1024), writers.save_t5(folder / "t5")
    preferences = writers.write_rows(folder / "preferences.jsonl", writers.preferences(20))
    images = pictures.write_folder(folder / "pictures", 30)
    return {
        **dict.fromkeys(("cola", "forum_thread"), acceptable),
        **dict.fromkeys(("mnli", "text_classification"), pairs),
        "causal_lm": lines,
        "chat": given(*2 * [writers.write_rows(folder / "chats.jsonl", writers.chats(20))], chat_model),
        "seq2seq": [
            *given(*2 * [writers.write_rows(folder / "pairs.jsonl", writers.pairs(20))], pair_model),
            *("recipe.data.source_column=translation.en", "recipe.data.target_column=translation.de"),
        ],
        "preference": given(*2 * [preferences], chat_model),
        "reward": given(*2 * [preferences], chat_model),
        "squad": squad,
        "image_classification": given(images, images, pictures.save_vit(folder / "vit")),
        **labelled.write(folder),
    }

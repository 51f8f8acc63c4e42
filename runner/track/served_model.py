"""The program that MLflow runs for the `model/` of a run: a pipeline of transformers. MLflow stores a copy of it.

So it imports nothing of the runner, and works where the runner is not installed.
"""

from __future__ import annotations

from typing import Any

import pandas
from mlflow.models import set_model
from mlflow.pyfunc import PythonModel


class ServedModel(PythonModel):
    """A model of transformers and its tokenizer."""

    def load_context(self, context: Any) -> None:
        from transformers import pipeline

        self._task = context.model_config["task"]
        self._pipeline = pipeline(self._task, model=context.artifacts["model"])

    def predict(self, context: Any, model_input: pandas.DataFrame) -> Any:
        """Predictions for a table with the columns `text` (or one of any name) and `text_pair`, or for a list of texts.

        Returns for each row, from a classifier the score of each class (or the number) and the best class, as a table;
        of tags the list of entities; from a language model the text that it writes.
        """
        table = pandas.DataFrame(model_input)
        table = table if "text" in table else table.set_axis(["text", *table.columns[1:]], axis=1)
        if self._task == "text-classification":
            rows = table.filter(["text", "text_pair"]).to_dict("records")
            return pandas.DataFrame([self._scores(row) for row in rows])
        if self._task == "token-classification":
            return [self._pipeline(text, aggregation_strategy="simple") for text in table["text"]]
        return [self._written(text) for text in table["text"]]

    def _scores(self, row: dict[str, str]) -> dict[str, Any]:
        found = self._pipeline(row, top_k=None, truncation=True)
        scores = {one["label"]: one["score"] for one in found}
        one_class = self._pipeline.model.config.problem_type == "single_label_classification"
        return {**({"label": found[0]["label"]} if one_class else {}), **scores}

    def _written(self, text: str) -> str:
        chat = self._pipeline.tokenizer.chat_template is not None
        prompt = [{"role": "user", "content": text}] if chat else text
        written = self._pipeline(prompt, return_full_text=False)[0]["generated_text"]
        return str(written)


set_model(ServedModel())

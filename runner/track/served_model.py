"""The program that MLflow runs for the `model/` of a run: a pipeline of transformers, or its answers by hand where
transformers has none. MLflow stores a copy of it.

So it imports nothing of the runner, and works where the runner is not installed.
"""

from __future__ import annotations

import base64
import io
from typing import Any

import pandas
from mlflow.models import set_model
from mlflow.pyfunc import PythonModel

#: Of images, as Pillow calls them. For others it may start programs, which what is sent to a server must not choose.
_FORMATS = ("BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")


class ServedModel(PythonModel):
    """A model of transformers and its tokenizer or image processor."""

    def load_context(self, context: Any) -> None:
        from transformers import (
            AutoImageProcessor,
            AutoModelForQuestionAnswering,
            AutoModelForSeq2SeqLM,
            AutoTokenizer,
            pipeline,
        )

        self._settings, self._task = context.model_config, context.model_config["task"]
        path = context.artifacts["model"]
        by_hand = {"question-answering": AutoModelForQuestionAnswering, "text2text-generation": AutoModelForSeq2SeqLM}
        if self._task in by_hand:
            self._model = by_hand[self._task].from_pretrained(path).eval()
            self._tokenizer = AutoTokenizer.from_pretrained(path)
        elif self._task == "image-classification":
            processor = AutoImageProcessor.from_pretrained(path, backend="pil")  # the one of training
            self._pipeline = pipeline(self._task, model=path, image_processor=processor)
        else:
            self._pipeline = pipeline(self._task, model=path)

    def predict(self, context: Any, model_input: pandas.DataFrame) -> Any:
        """Predictions for a table with the columns `text` (or one of any name) and `text_pair`, or for a list of texts;
        for questions with the columns `question` and `context`; for images with their files' content, as bytes or in
        base64, in the first column.

        Returns for each row, from a classifier the score of each class (or the number) and the best class, as a table;
        of tags the list of entities; from a language model, or sequence to sequence, the text that it writes; of
        questions `answer` and `score`, as a table.
        """
        table = pandas.DataFrame(model_input)
        if self._task == "question-answering":
            pairs = zip(table["question"], table["context"], strict=True)
            return pandas.DataFrame([self._answer(*pair) for pair in pairs], columns=["answer", "score"])
        if self._task == "image-classification":
            return pandas.DataFrame([self._scores(self._image(content)) for content in table.iloc[:, 0]])
        table = table if "text" in table else table.set_axis(["text", *table.columns[1:]], axis=1)
        if self._task == "text-classification":
            rows = table.filter(["text", "text_pair"]).to_dict("records")
            return pandas.DataFrame([self._scores(row) for row in rows])
        if self._task == "token-classification":
            return [self._pipeline(text, aggregation_strategy="simple") for text in table["text"]]
        write = self._written_from if self._task == "text2text-generation" else self._written
        return [write(text) for text in table["text"]]

    def _answer(self, question: str, context: str) -> tuple[str, float]:
        """The span of the context with the highest start score plus end score, in any window of it; and that sum."""
        import torch  # MLflow reads this file to log a model, without running it

        encoded = self._tokenizer(
            self._shortened(question),
            context,
            truncation="only_second",
            max_length=self._settings["max_length"],
            stride=self._settings["doc_stride"],
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        best = ("", -float("inf"))
        for row, offsets in enumerate(encoded["offset_mapping"]):
            names = self._tokenizer.model_input_names
            inputs = {name: torch.tensor([encoded[name][row]]) for name in names if name in encoded}
            with torch.no_grad():
                output = self._model(**inputs)
            tokens = [token for token, part in enumerate(encoded.sequence_ids(row)) if part == 1]
            start, end = output.start_logits[0, tokens], output.end_logits[0, tokens]
            allowed = torch.ones(len(tokens), len(tokens)).triu().tril(self._settings["max_answer_length"] - 1)
            sums = (start[:, None] + end).masked_fill(allowed == 0, -float("inf"))
            first, last = divmod(int(sums.argmax()), len(tokens))
            if (score := float(sums[first, last])) > best[1]:
                best = (context[offsets[tokens[first]][0] : offsets[tokens[last]][1]], score)
        return best

    def _shortened(self, question: str) -> str:
        """The beginning of a question that has at most `max_query_length` tokens."""
        keep = longest = self._settings["max_query_length"]
        while True:
            encoded = self._tokenizer(question, add_special_tokens=False, return_offsets_mapping=True)
            if len(encoded["offset_mapping"]) <= longest:
                return question
            # A part of a text can have more tokens by itself than within the whole: shorten it until it fits.
            question = question[: encoded["offset_mapping"][keep - 1][1]] if keep else ""
            keep -= 1

    def _written_from(self, text: str) -> str:
        """The text that an encoder and decoder write, without random numbers and without other settings of lengths."""
        given = self._settings
        encoded = self._tokenizer(
            given["source_prefix"] + text, truncation=True, max_length=given["max_source_length"], return_tensors="pt"
        )
        inputs = {name: encoded[name] for name in ("input_ids", "attention_mask")}
        config = self._model.generation_config
        config.update(max_length=None, min_length=None, min_new_tokens=None)
        tokens = self._model.generate(
            **inputs, do_sample=False, num_beams=given["num_beams"], max_new_tokens=given["max_new_tokens"]
        )
        return str(self._tokenizer.decode(tokens[0], skip_special_tokens=True)).strip()

    def _image(self, content: bytes | str) -> Any:
        """The image itself: transformers would take a text for the address or the path of a file, and read that."""
        from PIL import Image  # only where images are served

        file = io.BytesIO(base64.b64decode(content) if isinstance(content, str) else content)
        return Image.open(file, formats=_FORMATS)

    def _scores(self, row: Any) -> dict[str, Any]:
        settings = {"truncation": True} if isinstance(row, dict) else {}
        found = self._pipeline(row, top_k=self._pipeline.model.config.num_labels, **settings)
        scores = {one["label"]: one["score"] for one in found}
        one_class = self._pipeline.model.config.problem_type == "single_label_classification"
        return {**({"label": found[0]["label"]} if one_class else {}), **scores}

    def _written(self, text: str) -> str:
        chat = self._pipeline.tokenizer.chat_template is not None
        prompt = [{"role": "user", "content": text}] if chat else text
        written = self._pipeline(prompt, return_full_text=False)[0]["generated_text"]
        return str(written)


set_model(ServedModel())

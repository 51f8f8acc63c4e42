"""Pretrained models and their tokenizers, from a local folder or the Hugging Face Hub."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runner.errors import UserError, first_line

#: Files in a model's folder that a tokenizer can be made from; the weights are not among them.
_TOKENIZER_SUFFIXES = (".json", ".txt", ".model")

#: What a local folder must hold, as file patterns.
_MODEL_FILES = {
    "a configuration": ("config.json",),
    "weights": ("*.safetensors", "pytorch_model*.bin"),
    "a tokenizer": ("tokenizer.json", "vocab.txt", "vocab.json", "*.model"),
}


@dataclass(frozen=True)
class Pretrained:
    """`name`: a folder that `from_pretrained` can read, or a model's name on the Hub."""

    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            shown = "null" if self.name is None else self.name
            raise UserError(f"recipe.model.name={shown} cannot be: give a local folder or a model's name on the Hub")

    @property
    def location(self) -> str:
        """What `from_pretrained` is given: an absolute folder where there is one, else the name."""
        path = Path(self.name).expanduser()
        return str(path.resolve()) if path.is_dir() else self.name

    def check(self) -> None:
        path = Path(self.name).expanduser()
        if path.is_dir():
            for what, patterns in _MODEL_FILES.items():
                if not any(next(path.glob(pattern), None) for pattern in patterns):
                    raise UserError(
                        f"recipe.model.name={self.name} is a folder without {what} ({' or '.join(patterns)}): "
                        "give a folder that from_pretrained can read"
                    )
            return
        if path.is_absolute() or self.name.startswith((".", "~")) or self.name.count("/") > 1:
            raise UserError(
                f"recipe.model.name={self.name} does not exist: give a model's folder or its name on the Hub"
            )
        self._ask_hub()

    @property
    def has_dropout(self) -> bool:
        return True  # what a configuration calls its dropouts differs from model to model

    def longest_input(self) -> int | None:
        path = Path(self.name).expanduser() / "config.json"
        if not path.is_file():
            return None
        try:
            config = json.loads(path.read_text())
        except ValueError as error:
            raise UserError(f"recipe.model.name={self.name} has a config.json that is no JSON: {error}") from error
        positions = config.get("max_position_embeddings", config.get("n_positions"))
        return positions if isinstance(positions, int) else None

    def _ask_hub(self) -> str:
        """The path of the model's configuration in the Hub's cache, fetched if need be."""
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

        from recipes.hub import go_offline_if_unreachable

        go_offline_if_unreachable()
        try:
            return hf_hub_download(self.name, "config.json")
        except (HFValidationError, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
            raise UserError(
                f"recipe.model.name={self.name} is neither a local folder nor a model that the Hugging Face Hub can "
                f"give now: check the name, go online, or give a folder that holds config.json, weights and tokenizer"
            ) from error

    def tokenizer_identity(self) -> str:
        path = Path(self.name).expanduser()
        if not path.is_dir():
            revision = Path(self._ask_hub()).parent.name
            return f"{self.name} at {revision}"
        digest = hashlib.sha256()
        for file in sorted(path.iterdir()):
            if file.suffix in _TOKENIZER_SUFFIXES:
                digest.update(file.name.encode() + b"\0" + file.read_bytes())
        return digest.hexdigest()

    def tokenizer(self, texts: Sequence[str]) -> Any:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(self.location, trust_remote_code=False)
        except Exception as error:
            raise UserError(f"recipe.model.name={self.name} has no usable tokenizer: {first_line(error)}") from error
        if tokenizer.pad_token_id is None:
            if tokenizer.eos_token is None:
                raise UserError(
                    f"recipe.model.name={self.name} has a tokenizer with neither a pad token nor an end-of-text token: "
                    "set pad_token in its tokenizer_config.json"
                )
            # GPT-2 and its kin were trained without padding. Any token will do where the attention mask hides it.
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    def build(self, classes: int, vocabulary: int, pad_id: int) -> nn.Module:
        from transformers import AutoModelForSequenceClassification

        from recipes.hub import go_offline_if_unreachable

        if not Path(self.location).is_dir():
            go_offline_if_unreachable()
        try:
            model = AutoModelForSequenceClassification.from_pretrained(
                self.location, num_labels=classes, dtype=torch.float32, trust_remote_code=False
            )
        except Exception as error:
            raise UserError(f"recipe.model.name={self.name} cannot be loaded: {first_line(error)}") from error
        # Models that read the last token's state find it by the pad token.
        model.config.pad_token_id = pad_id
        module: nn.Module = model
        return module

"""Models and tokenizers from a local folder or the Hugging Face Hub: with their weights, or without for timing."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recipes.models.published_shapes import SHAPES, published_shape
from recipes.sources.hub import go_offline_if_unreachable
from recipes.sources.sources import from_json, local_path
from recipes.synthetic.made_tokenizer import KINDS, made_tokenizer, special_ids
from runner.errors import Unavailable, UserError, did_you_mean, first_line

#: Where weights come from.
_INITS = ("pretrained", "random")

#: Files in a model's folder that a tokenizer can be made from; the weights are not among them.
_TOKENIZER_SUFFIXES = (".json", ".txt", ".model")

#: What a local folder must hold, as file patterns; for random weights the configuration will do.
_MODEL_FILES = {
    "a configuration": ("config.json",),
    "weights": ("*.safetensors", "pytorch_model*.bin"),
    "a tokenizer": ("tokenizer.json", "vocab.txt", "vocab.json", "*.model"),
}

#: Model types whose first position comes after that of padding, so that they have fewer than their configuration says.
_POSITIONS_AFTER_PADDING = (
    "camembert",
    "longformer",
    "mpnet",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xmod",
)

#: Model types with a head for the next token that see a whole text unless their configuration makes decoders of them.
_SEE_BOTH_WAYS = (
    *("bert", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert", "roberta"),
    *("roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"),
)

#: The same of a tokenizer on the Hub, where nothing can be looked for by a pattern.
_HUB_TOKENIZERS = ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model")


@dataclass(frozen=True)
class Pretrained:
    """A transformers model by its name.

    `name`: a folder that `from_pretrained` can read, or a model's name on the Hub. `init`: `pretrained` loads the
    weights. `random` draws them, and takes the configuration alone: where the Hub cannot give it, the published sizes
    of a few well-known models. A tokenizer that is not here is then made from the training texts. Such a run costs what
    the real one would, and is good for nothing else.
    """

    name: str
    init: str = "pretrained"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            shown = "null" if self.name is None else self.name
            raise UserError(f"recipe.model.name={shown} cannot be: give a local folder or a model's name on the Hub")
        if self.init not in _INITS:
            raise UserError(f"recipe.model.init={self.init} is no source of weights{did_you_mean(self.init, _INITS)}")

    @property
    def location(self) -> str:
        """What `from_pretrained` is given: an absolute folder where there is one, else the name."""
        folder = self._folder
        return self.name if folder is None else str(folder.resolve())

    @property
    def notes(self) -> list[str]:
        """What is to be known of the model beside its results, a sentence each."""
        if self.init != "random":
            return []
        notes = [f"weights of {self.name} are random (recipe.model.init=random): timing only"]
        if self._makes_tokenizer:
            notes.append(f"no tokenizer of {self.name} is here: one made from the training texts")
        return notes

    @property
    def has_dropout(self) -> bool:
        return True  # what a configuration calls its dropouts differs from model to model

    @property
    def _folder(self) -> Path | None:
        path = local_path(self.name, f"recipe.model.name={self.name}")
        return path if path.is_dir() else None

    @property
    def _makes_tokenizer(self) -> bool:
        return self.init == "random" and self._tokenizer_file() is None

    def check(self) -> None:
        folder = self._folder
        if folder is not None:
            needed = ("a configuration",) if self.init == "random" else tuple(_MODEL_FILES)
            for what in needed:
                if _first(folder, _MODEL_FILES[what]) is None:
                    raise UserError(
                        f"recipe.model.name={self.name} is a folder without {what} "
                        f"({' or '.join(_MODEL_FILES[what])}): give a folder that from_pretrained can read"
                    )
        elif Path(self.name).is_absolute() or self.name.startswith((".", "~")) or self.name.count("/") > 1:
            raise UserError(
                f"recipe.model.name={self.name} does not exist: give a model's folder or its name on the Hub"
            )
        else:
            self._config_file()
        if self._makes_tokenizer:
            self._kind_to_make()

    def longest_input(self) -> int | None:
        config = self._known()
        positions = config.get("max_position_embeddings", config.get("n_positions"))
        if not isinstance(positions, int):
            return None
        if config.get("model_type") not in _POSITIONS_AFTER_PADDING:
            return positions
        padding = config.get("pad_token_id")
        return positions - 1 - (padding if isinstance(padding, int) else 1)  # 1 is these models' default

    def sees_both_ways(self) -> bool:
        """Whether the configuration says that the model sees the tokens after one too; False where it is not here."""
        config = self._known()
        return config.get("model_type") in _SEE_BOTH_WAYS and not config.get("is_decoder")

    def _known(self) -> dict[str, Any]:
        """What config.json says, or the published sizes; empty where neither is here."""
        try:
            file = self._config_file()
        except Unavailable:
            return {}
        return (published_shape(self.name) or {}) if file is None else self._read(file)

    def _read(self, file: Path) -> dict[str, Any]:
        if not file.is_file():
            return {}
        try:
            content = from_json(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"recipe.model.name={self.name} has a config.json that is no JSON: {error}") from error
        if not isinstance(content, dict):
            raise UserError(f"recipe.model.name={self.name} has a config.json that holds no settings by name")
        return content

    def _config_file(self) -> Path | None:
        """config.json, in the folder or the Hub's cache; None where random weights go by the published sizes instead.

        Raises UserError, Unavailable.
        """
        folder = self._folder
        if folder is not None:
            return folder / "config.json"
        try:
            return self._hub_file("config.json")
        except Unavailable:
            if self.init == "random" and published_shape(self.name):
                return None
            raise

    def _hub_file(self, file: str) -> Path:
        """A file of the model in the Hub's cache, fetched if need be. Raises UserError, Unavailable."""
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import (
            EntryNotFoundError,
            GatedRepoError,
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
        )

        go_offline_if_unreachable()
        try:
            return Path(hf_hub_download(self.name, file))
        except (HFValidationError, EntryNotFoundError, HfHubHTTPError, OSError) as error:
            elsewhere = isinstance(error, (LocalEntryNotFoundError, GatedRepoError))
            wrong = isinstance(error, (HFValidationError, EntryNotFoundError, RepositoryNotFoundError))
            raise (UserError if wrong and not elsewhere else Unavailable)(
                f"recipe.model.name={self.name} is neither a local folder nor a model that the Hugging Face Hub can "
                f"give now: check the name, go online, or {self._other_ways()}"
            ) from error

    def _other_ways(self) -> str:
        if self.init == "random":
            return f"give a folder that holds config.json, or one of {', '.join(SHAPES)}"
        timing = "; recipe.model.init=random needs none, for timing" if published_shape(self.name) else ""
        return f"give a folder that holds config.json, weights and tokenizer{timing}"

    def _tokenizer_file(self) -> Path | None:
        """A file that the model's tokenizer can be made from; None if there is none here or on the Hub."""
        folder = self._folder
        if folder is not None:
            return _first(folder, _MODEL_FILES["a tokenizer"])
        for name in _HUB_TOKENIZERS:
            try:
                return self._hub_file(name)
            except UserError:
                continue  # no model has all of these files
        return None

    def tokenizer_identity(self) -> str:
        folder = self._folder
        file = self._tokenizer_file() if self.init == "random" else None
        if self.init == "random" and file is None:
            model_type, vocabulary = self._kind_to_make()
            return f"made from the training texts for {model_type}, of at most {vocabulary} tokens"
        if folder is None:
            return f"{self.name} at {(file or self._hub_file('config.json')).parent.name}"
        digest = hashlib.sha256()
        for one in sorted(folder.iterdir()):
            if one.suffix in _TOKENIZER_SUFFIXES:
                digest.update(one.name.encode() + b"\0" + one.read_bytes())
        return digest.hexdigest()

    def tokenizer(self, texts: Sequence[str]) -> Any:
        from transformers import AutoTokenizer

        if self._makes_tokenizer:
            return made_tokenizer(*self._kind_to_make(), texts)
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

    def _kind_to_make(self) -> tuple[str, int]:
        """Model type and size of the vocabulary of the tokenizer that has to be made."""
        config = self._config()
        if config.model_type not in KINDS:
            raise Unavailable(
                f"recipe.model.name={self.name} has no tokenizer here, and recipe.model.init=random can make one for "
                f"{', '.join(KINDS)} only, not for {config.model_type}: give a folder that holds one"
            )
        return config.model_type, config.vocab_size

    def _config(self) -> Any:
        """transformers' configuration of the model. Raises UserError, Unavailable."""
        from transformers import AutoConfig

        file = self._config_file()
        try:
            if file is None:
                return AutoConfig.for_model(**(published_shape(self.name) or {}))
            return AutoConfig.from_pretrained(str(file.parent), trust_remote_code=False)
        except Exception as error:
            raise UserError(f"recipe.model.name={self.name} cannot be loaded: {first_line(error)}") from error

    def build_classifier(self, classes: int, vocabulary: int, pad_id: int) -> nn.Module:
        """A model for sequence classification, in fp32. Raises UserError."""
        from transformers import AutoModelForSequenceClassification

        return self._built(
            AutoModelForSequenceClassification, "sequence classification", vocabulary, pad_id, num_labels=classes
        )

    def build_span_model(self, vocabulary: int, pad_id: int) -> nn.Module:
        """A model with a start and an end score for each token, in fp32. Raises UserError."""
        from transformers import AutoModelForQuestionAnswering

        return self._built(AutoModelForQuestionAnswering, "extractive question answering", vocabulary, pad_id)

    def build_language_model(self, vocabulary: int, pad_id: int) -> nn.Module:
        """A model for causal language modelling, in fp32. Raises UserError."""
        from transformers import AutoModelForCausalLM

        return self._built(AutoModelForCausalLM, "causal language modelling", vocabulary, pad_id)

    def _built(self, auto: Any, task: str, vocabulary: int, pad_id: int, **settings: Any) -> nn.Module:
        """What an auto class of transformers makes of the name; `settings` go into the model's configuration."""
        make = self._drawn if self.init == "random" else self._loaded
        try:
            model = make(auto, settings)
        except UserError:
            raise
        except Exception as error:
            if first_line(error).startswith("Unrecognized configuration class"):
                raise UserError(
                    f"recipe.model.name={self.name} is of a type for which transformers has no model for {task}: "
                    "choose another one"
                ) from error
            raise UserError(f"recipe.model.name={self.name} cannot be loaded: {first_line(error)}") from error
        known = getattr(model.config, "vocab_size", vocabulary)
        if vocabulary > known:
            raise UserError(
                f"recipe.model.name={self.name} has a tokenizer of {vocabulary} tokens and a model that knows {known}: "
                "give the tokenizer that belongs to the model"
            )
        # Models that read the last token's state find it by the pad token.
        model.config.pad_token_id = pad_id
        module: nn.Module = model
        return module

    def _loaded(self, auto: Any, settings: dict[str, Any]) -> Any:
        if self._folder is None:
            go_offline_if_unreachable()
        return auto.from_pretrained(self.location, dtype=torch.float32, trust_remote_code=False, **settings)

    def _drawn(self, auto: Any, settings: dict[str, Any]) -> Any:
        config = self._config()
        config.update({**(special_ids(config.model_type) if self._makes_tokenizer else {}), **settings})
        return auto.from_config(config, dtype=torch.float32, trust_remote_code=False)


def _first(folder: Path, patterns: Sequence[str]) -> Path | None:
    return next((file for pattern in patterns for file in sorted(folder.glob(pattern))), None)

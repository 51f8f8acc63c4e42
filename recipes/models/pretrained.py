"""Models, tokenizers and image processors from a local folder or the Hugging Face Hub.

With their weights or, for timing, random ones.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recipes.sources.hub import go_offline_if_unreachable
from runner.backends.memory import is_out_of_memory
from runner.errors import Unavailable, UserError, first_line, require

#: By which a folder with an adapter is known, as PEFT writes it. It names the model that the adapter belongs to.
_ADAPTER_CONFIG = "adapter_config.json"
#: What a local folder must contain, as file patterns; for random weights no weights. And what makes its inputs.
_MODEL_FILES = {
    "a configuration": ("config.json", _ADAPTER_CONFIG),
    "weights": ("*.safetensors", "pytorch_model*.bin"),
}
_PROCESSOR_FILES = {
    "a tokenizer": ("tokenizer.json", "vocab.txt", "vocab.json", "*.model"),
    "an image processor": ("preprocessor_config.json", "processor_config.json"),
}
#: The weights of a whole model, and the index of those in several files: the second only without the first.
_WEIGHTS = ("model*.safetensors*", "pytorch_model*.bin*")

#: PEFT's name of an adapter's task -> the head of its base model.
_ADAPTER_HEADS = {
    "SEQ_CLS": "SequenceClassification",
    "QUESTION_ANS": "QuestionAnswering",
    "CAUSAL_LM": "CausalLM",
    "TOKEN_CLS": "TokenClassification",
    "SEQ_2_SEQ_LM": "Seq2SeqLM",
}
#: Settings of the number of positions.
_POSITIONS = ("max_position_embeddings", "n_positions")

#: Suffixes of the files in a model's folder that define its tokenizer. Weights have others.
_TOKENIZER_SUFFIXES = (".jinja", ".json", ".txt", ".model")

#: Model types that number positions from the padding id + 1, so that they have fewer than their configuration says.
_POSITIONS_AFTER_PADDING = (
    *("camembert", "longformer", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xmod"),
)

#: Model types whose attention knows distances instead of positions, so that `n_positions` limits nothing.
_RELATIVE_POSITIONS = ("longt5", "mt5", "pop2piano", "switch_transformers", "t5", "umt5")

#: Model types with a language modelling head that are bidirectional unless their configuration says `is_decoder`.
_BIDIRECTIONAL = (
    *("bert", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert", "roberta"),
    *("roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"),
)

NOT_CAUSAL = "sees the tokens that it has to predict: use a causal model, such as recipe.model.name=gpt2"


@dataclass(frozen=True)
class Pretrained:
    """A transformers model by its name.

    `name`: a folder that `from_pretrained` can read, with an adapter of PEFT or a whole model, or a model's name on the
    Hub. `init`: `pretrained` loads the weights; `random` draws them and needs only configuration and tokenizer.
    `complete`: the model is used as it is saved, in the number format of its file; a weight that is missing there is an
    error instead of a new one.
    """

    name: str
    init: str = "pretrained"
    complete: bool = False

    def __post_init__(self) -> None:
        ok = isinstance(self.name, str) and bool(self.name.strip())
        require(ok, "recipe.model.name", self.name, "give a local folder or a model's name on the Hub")
        require(self.init in ("pretrained", "random"), "recipe.model.init", self.init, "use pretrained or random")

    @property
    def _folder(self) -> Path | None:
        path = os.path.expanduser(self.name)
        return Path(path).resolve() if os.path.isdir(path) else None

    @property
    def _random(self) -> bool:
        return self.init == "random"

    @property
    def notes(self) -> list[str]:
        return [f"weights of {self.name} are random (recipe.model.init=random): timing only"] if self._random else []

    @property
    def has_dropout(self) -> bool:
        return True  # configurations have different names for their dropouts

    @functools.cached_property
    def model_type(self) -> str | None:
        return self._known().get("model_type")

    def check(self, processor: str = "a tokenizer") -> None:
        """Check the files of a folder, and that a name is known. `processor`: what makes inputs, "an image processor".

        Raises UserError, Unavailable.
        """
        folder = self._folder
        if folder is not None:
            for what, patterns in {**_MODEL_FILES, processor: _PROCESSOR_FILES[processor]}.items():
                if not (self._random and what == "weights") and _first(folder, patterns) is None:
                    raise UserError(
                        f"recipe.model.name={self.name} is a folder without {what} "
                        f"({' or '.join(patterns)}): give a folder that from_pretrained can read"
                    )
            if not self._random:
                self._check_weights(folder)
                self._check_base(processor)
        elif Path(self.name).is_absolute() or self.name.startswith((".", "~")) or self.name.count("/") > 1:
            raise UserError(f"recipe.model.name={self.name} does not exist: check the path")
        else:
            self._config_file()

    @property
    def _base(self) -> str | None:
        """The model to which the adapter in the folder belongs, a folder or a name on the Hub; None: it has none."""
        folder = self._folder
        if folder is None or not (folder / _ADAPTER_CONFIG).exists():
            return None
        return str(self._read_json(folder / _ADAPTER_CONFIG).get("base_model_name_or_path"))

    def _read_json(self, file: Path) -> dict[str, Any]:
        """Raises UserError."""
        try:
            content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(
                f"recipe.model.name={self.name} has a {file.name} that is not JSON ({first_line(error)}); copy it again"
            ) from error
        return content

    def _check_base(self, processor: str) -> None:
        base = self._base
        if base is not None:
            try:
                Pretrained(base).check(processor)
            except UserError as error:
                of_base = str(error).removeprefix("recipe.model.name=")
                raise type(error)(
                    f"recipe.model.name={self.name} is an adapter, and its base model {of_base}"
                ) from error

    def check_head(self, head: str, classes: int | None = None) -> None:
        """Check that the model can have a head of this kind, and that a head that it has fits the number of classes.

        Raises UserError.
        """
        config = self._known()
        if head == "CausalLM" and config.get("model_type") in _BIDIRECTIONAL and not config.get("is_decoder"):
            raise UserError(f"recipe.model {NOT_CAUSAL}")
        if head == "Seq2SeqLM" and config and not config.get("is_encoder_decoder"):
            from transformers import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING  # takes seconds

            ok = type(self._config()) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
            rule = f"a {config.get('model_type')} model has no encoder and decoder; use one such as google-t5/t5-small"
            require(ok, "recipe.model.name", self.name, rule)
        saved = self.classes(head)
        ok = classes is None or saved in (None, classes)
        rule = f"its classification head has {saved} classes, and these data have {classes}"
        require(ok, "recipe.model.name", self.name, f"{rule}; give a model without this head, or other data")

    def classes(self, head: str) -> int | None:
        """How many classes the head of this kind has that the weights are saved with; None if there is none."""
        config = self._known()
        names, saved = config.get("id2label"), (config.get("architectures") or [""])[0]
        return len(names) if names and saved.endswith(f"For{head}") and not self._random else None

    def _check_weights(self, folder: Path) -> None:
        """Read the headers of the weights, which must be complete. Raises UserError."""
        from safetensors import SafetensorError, safe_open

        index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
        files = [whole] if whole.exists() else []
        if not files and index.exists():
            files = sorted(folder / name for name in set(self._read_json(index)["weight_map"].values()))
        for file in files:
            try:
                with safe_open(file, framework="numpy"):
                    pass
            except (SafetensorError, OSError) as error:
                raise UserError(
                    f"recipe.model.name={self.name} has weights that cannot be read: {file.name} is damaged or missing "
                    f"({first_line(error)}); copy it again"
                ) from error

    def longest_input(self) -> int | None:
        config = self._known()
        if config.get("model_type") in _RELATIVE_POSITIONS:
            return None
        positions = next((config[name] for name in _POSITIONS if name in config), None)
        if not isinstance(positions, int) or config.get("model_type") not in _POSITIONS_AFTER_PADDING:
            return positions if isinstance(positions, int) else None
        padding = config.get("pad_token_id")
        return positions - 1 - (padding if isinstance(padding, int) else 1)  # 1 is these models' default

    def _known(self) -> dict[str, Any]:
        """The content of config.json; empty if it is not available."""
        try:
            file = self._config_file()
        except Unavailable:
            return {}
        if not file.exists():
            return {}  # `check` refuses the folder
        return self._read_json(file)

    def _config_file(self) -> Path:
        """config.json in the folder or the Hub's cache. Raises Unavailable."""
        folder = self._folder
        if folder is not None:
            file, base = folder / "config.json", self._base
            return file if file.exists() or base is None else Pretrained(base, self.init)._config_file()
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

        go_offline_if_unreachable()
        try:
            return Path(hf_hub_download(self.name, "config.json"))
        except (HFValidationError, EntryNotFoundError, HfHubHTTPError, OSError) as error:
            needed = "config.json and tokenizer" if self._random else "config.json, weights and tokenizer"
            known = isinstance(error, (EntryNotFoundError, HFValidationError))
            why = "" if known else f" ({first_line(error)})"
            raise Unavailable(
                f"recipe.model.name={self.name} is neither a local folder nor available from the Hugging Face Hub"
                f"{why}: check the name, go online, or give a folder with {needed}"
            ) from error

    def tokenizer_identity(self) -> str:
        folder = self._folder
        if folder is None:
            return f"{self.name} at {self._config_file().parent.name}"
        digest = hashlib.sha256()
        for one in sorted(folder.iterdir()):
            if one.suffix in _TOKENIZER_SUFFIXES:
                digest.update(one.name.encode() + b"\0" + one.read_bytes())
        return digest.hexdigest()

    def weights_identity(self) -> str:
        """A string that changes whenever the weights do; random ones differ in every run. Raises Unavailable."""
        folder = self._folder
        if folder is None:
            return f"{self.name} at {self._config_file().parent.name} ({self.init})"
        digest = hashlib.sha256(self.init.encode())
        for one in sorted(folder.iterdir()):
            if one.suffix in (".bin", ".safetensors") or one.name in ("config.json", _ADAPTER_CONFIG):
                digest.update(one.name.encode() + b"\0")
                with one.open("rb") as file:
                    while part := file.read(2**24):
                        digest.update(part)
        base = self._base
        return digest.hexdigest() + (f" on {Pretrained(base).weights_identity()}" if base is not None else "")

    def tokenizer(self, texts: Sequence[str]) -> Any:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(self._location, trust_remote_code=False)
        except Exception as error:
            raise UserError(f"recipe.model.name={self.name} has no usable tokenizer: {first_line(error)}") from error
        if tokenizer.pad_token_id is None:
            if tokenizer.eos_token is None:
                raise UserError(
                    f"recipe.model.name={self.name} has a tokenizer with neither a pad token nor an end-of-text token: "
                    "set pad_token in its tokenizer_config.json"
                )
            # GPT-2 and similar models were trained without padding. The attention mask hides it, so any token will do.
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    def image_processor(self) -> Any:
        """The transformers image processor. Raises UserError.

        It is always the one that uses Pillow, so that images have the same pixels with and without torchvision.
        """
        from transformers import AutoImageProcessor

        if self._folder is None:
            go_offline_if_unreachable()
        try:
            return AutoImageProcessor.from_pretrained(self._location, backend="pil", trust_remote_code=False)
        except Exception as error:
            name = f"recipe.model.name={self.name}"
            raise UserError(f"{name} has no usable image processor: {first_line(error)}") from error

    @property
    def _location(self) -> str:
        return str(self._folder or self.name)

    def _config(self) -> Any:
        """transformers' configuration of the model. Raises UserError, Unavailable."""
        from transformers import AutoConfig

        file = self._config_file()
        try:
            return AutoConfig.from_pretrained(str(file.parent), trust_remote_code=False)
        except Exception as error:
            raise UserError(f"recipe.model.name={self.name} cannot be loaded: {first_line(error)}") from error

    def copy_weights(self, folder: Path, without: Collection[str] = ()) -> None:
        """Copy the files that hold the model's weights to a folder, all or none. Raises OSError.

        `without`: names of weights to leave out, such as those of a head that was replaced.
        """
        from huggingface_hub import snapshot_download

        own = self._folder or Path(snapshot_download(self.name, allow_patterns=[*_WEIGHTS], local_files_only=True))
        files = next(filter(None, (sorted(own.glob(pattern)) for pattern in _WEIGHTS)))
        try:
            for file in files:
                shutil.copyfile(file, folder / file.name)
                _remove_weights(folder / file.name, without)
        except OSError:
            for file in files:
                (folder / file.name).unlink(missing_ok=True)
            raise

    def label_names(self) -> tuple[str, ...]:
        """The model's classes in the order of their numbers, LABEL_0, LABEL_1, … without names. Raises UserError."""
        names = self._config().id2label
        return tuple(str(names[number]) for number in sorted(names))

    def problem_type(self) -> str | None:
        """What the model was trained for, in transformers' words; None if it does not say. Raises UserError."""
        found: str | None = self._config().problem_type
        return found

    def build_model(
        self, head: str, vocabulary: int = 0, pad_id: int | None = None, new_head: bool = False, **settings: Any
    ) -> nn.Module:
        """A transformers model with this head in fp32; `settings` go into its configuration. Raises UserError.

        `vocabulary`, `pad_id`: of the tokenizer, if it reads text. `new_head`: one for another number of classes than
        `num_labels` is replaced by a new one.
        """
        import transformers

        auto = getattr(transformers, f"AutoModelFor{head}")
        try:
            if self._random:
                config = self._config()
                config.update(settings)
                model = auto.from_config(config, dtype=torch.float32, trust_remote_code=False)
                model.name_or_path = ""  # where the configuration is from, which has not these weights
            else:
                model = self._load(auto, head, new_head, **settings)
        except UserError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise UserError(f"recipe.model.name={self.name} cannot be loaded: {first_line(error)}") from error
        known = getattr(model.config, "vocab_size", vocabulary)
        if vocabulary > known:
            raise UserError(
                f"recipe.model.name={self.name} has a tokenizer of {vocabulary} tokens, but the model knows {known}: "
                "use the model's own tokenizer"
            )
        # Classifiers that read the state of the last token find it by the pad token.
        if pad_id is not None:
            model.config.pad_token_id = pad_id
        module: nn.Module = model
        return module

    def _load(self, auto: Any, head: str, new_head: bool, **settings: Any) -> nn.Module:
        """The model with its saved weights. An adapter is merged into them, unless the model is to be complete."""
        base = self._base
        if base is not None:
            config = self._config()  # saved with the adapter: that of the base has other classes
            config.update(settings)
            settings = {"config": config}
        if not os.path.isdir(location := base or self._location):
            go_offline_if_unreachable()
        with _without_warnings() if base is not None else contextlib.nullcontext():  # of what the adapter brings
            model, loading = auto.from_pretrained(
                location,
                dtype="auto" if self.complete else torch.float32,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # they are refused below, by name
                output_loading_info=True,
                **settings,
            )
        missing, mismatched = sorted(loading["missing_keys"]), sorted(loading["mismatched_keys"])
        if base is not None:
            model, missing, mismatched = self._with_adapter(head, model, missing, mismatched)
        classes = settings.get("num_labels")
        for key, found, wanted in mismatched:
            if new_head and wanted[0] == classes and list(found[1:]) == list(wanted[1:]):
                missing.append(key)
                continue
            raise UserError(
                f"recipe.model.name={self.name} has weights of another shape: {key} has {list(found)}, "
                f"not {list(wanted)}; give the configuration of these weights"
            )
        if self.complete and missing:
            raise self._lacks(missing[0], model)
        model.new_weights = missing
        loaded: nn.Module = model
        return loaded

    def _with_adapter(
        self, head: str, model: Any, missing: Sequence[str], mismatched: Sequence[tuple[str, Any, Any]]
    ) -> tuple[Any, list[str], list[tuple[str, Any, Any]]]:
        """The base model with its adapter, and of `missing` and `mismatched` what the adapter does not bring."""
        from peft import PeftConfig, PeftModel  # takes a second, and few models need it

        settings = PeftConfig.from_pretrained(self._location)
        task = str(getattr(settings.task_type, "value", settings.task_type))
        if _ADAPTER_HEADS.get(task, head) != head:
            raise UserError(
                f"recipe.model.name={self.name} is an adapter for another task ({task}): choose the recipe that it was "
                "trained with"
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PEFT uses names that transformers has replaced
            warnings.filterwarnings("error", "Found missing adapter keys")
            try:
                adapted = PeftModel.from_pretrained(
                    model, self._location, torch_device="cpu", autocast_adapter_dtype=not self.complete
                )
            except UserWarning as warning:
                key = re.findall(r"[\w.]+\.[\w.]+", first_line(warning))[0]
                raise self._lacks(key, model) from warning
        ends = tuple(f".{name}." for name in getattr(settings, "modules_to_save", None) or ())
        missing = [key for key in missing if not any(end in f".{key}" for end in ends)]
        mismatched = [one for one in mismatched if not any(end in f".{one[0]}" for end in ends)]
        if self.complete:
            return adapted, missing, mismatched
        merged = adapted.merge_and_unload().requires_grad_(True)
        merged.name_or_path = ""  # it is in no folder, which an adapter could name
        return merged, missing, mismatched

    def _lacks(self, weight: str, model: nn.Module) -> UserError:
        rule = "choose the recipe that it was trained with"
        return UserError(f"{self.name} lacks {weight}, which a {type(model).__name__} has: {rule}")


def _remove_weights(file: Path, names: Collection[str]) -> None:
    """Rewrite a file of weights without these, if it has any of them."""
    from safetensors.torch import load_file, save_file

    if file.suffix not in (".safetensors", ".bin") or not names:
        return
    is_safe = file.suffix == ".safetensors"
    weights = load_file(file) if is_safe else torch.load(file, weights_only=True)
    kept = {name: tensor for name, tensor in weights.items() if name not in names}
    if len(kept) < len(weights):
        if is_safe:
            save_file(kept, file, metadata={"format": "pt"})
        else:
            torch.save(kept, file)


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Keep transformers from printing warnings."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _first(folder: Path, patterns: Sequence[str]) -> Path | None:
    return next((file for pattern in patterns for file in sorted(folder.glob(pattern))), None)

"""What the tasks have in common: they fine-tune a transformers model on tokenised text."""

from __future__ import annotations

import dataclasses
import functools
import json
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from recipes.models.pretrained import Pretrained
from recipes.models.unpadded import UNPADDED_TYPES, unpad_layers
from recipes.tasks.splits import Splits
from runner.data.cache import Cache, Progress
from runner.data.layout import padded
from runner.data.recipe import Batch, DataFacts, Prepared, Recipe
from runner.data.table import write_table
from runner.errors import UserError, did_you_mean, require
from runner.kernels.unpadded import without_padding
from runner.log import LOG

#: Samples tokenised together: enough for all cores, and a bound on memory, since a tokenizer keeps far more of each
#: than its token ids.
_CHUNK = 1000

#: Special tokens of a text or pair, at most (RoBERTa has four): loading the tokenizer to count them takes seconds.
_MOST_SPECIAL = 8

_MODEL_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


class ModelSource(Protocol):
    """Where a model and its tokenizer come from."""

    @property
    def has_dropout(self) -> bool:
        """Whether training uses dropout; True if that is not known."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Sentences to show with a run's results."""
        return ()

    @property
    def model_type(self) -> str | None:
        """transformers' name of the architecture; None if that is not known before it is loaded. Optional."""
        return None

    def check(self) -> None:
        """Check that the model can be loaded, without loading it. Raises UserError, Unavailable."""
        ...

    def longest_input(self) -> int | None:
        """Tokens that the model has positions for; None if that is not known before it is loaded."""
        ...

    def tokenizer_identity(self) -> str:
        """A string that changes whenever the tokenizer does, apart from the texts it is trained on."""
        ...

    def weights_identity(self) -> str:
        """A string that changes whenever the weights do, for tasks that cache what the model computes."""
        raise UserError(f"{type(self).__name__} does not tell its weights apart: implement weights_identity")

    def tokenizer(self, texts: Sequence[str]) -> Any:
        """A transformers tokenizer with a pad token; `texts`: the training set, for tokenizers trained on it."""
        ...

    def check_head(self, head: str, classes: int | None = None) -> None:
        """Check that the model can have this head, with this number of classes. Raises UserError."""
        return

    def build_model(self, head: str, vocabulary: int, pad_id: int, **settings: Any) -> nn.Module:
        """A transformers model in fp32, of the class `AutoModelFor` + `head`. `settings` go into its configuration."""
        ...


@dataclass(frozen=True)
class _Saved:
    """A source of data without a training set, as a function that reads it."""

    read: Callable[[], Any]


@dataclass(frozen=True)
class Tokenised:
    """The columns of both tables.

    `properties`: what is known of them. `files`: JSON by file name, next to the evaluation table, for what a table of
    integers cannot hold.
    """

    train: Mapping[str, Any]
    eval: Mapping[str, Any]
    properties: Mapping[str, Any]
    files: Mapping[str, Any] = field(default_factory=dict)


SplitsType = TypeVar("SplitsType", bound=Splits[Any])


@dataclass(frozen=True)
class TransformerRecipe(Recipe, Generic[SplitsType]):
    """Reading, caching, building, padding, saving and what was saved are the same for every task.

    A task says what its samples become, what the loss is and what is predicted. `padding`: `none` has layers compute
    the tokens of a batch alone, if the model can; `longest` pads to the longest row of a batch, or to the device's
    buckets.
    """

    #: Names the task in the cache.
    task: ClassVar[str]
    #: The model's class in transformers is `AutoModelFor` + this.
    head: ClassVar[str]
    #: Settings that limit the tokens of a row, and what each is at least.
    limits: ClassVar[Sequence[str]] = ("max_length",)
    least_tokens: ClassVar[int] = 1
    #: Values of `padding`.
    paddings: ClassVar[Sequence[str]] = ("none", "longest")

    data: Any
    model: ModelSource
    padding: str = field(default="longest", kw_only=True)

    def __post_init__(self) -> None:
        names = self.paddings
        require(self.padding in names, "recipe.padding", self.padding, f"use {', '.join(names[:-1])} or {names[-1]}")
        least = f"use at least {self.least_tokens} token{'s' * (self.least_tokens > 1)}"
        for name in self.limits:
            require(getattr(self, name) >= self.least_tokens, f"recipe.{name}", getattr(self, name), least)

    @property
    def has_dropout(self) -> bool:
        return self.model.has_dropout

    @property
    def notes(self) -> Sequence[str]:
        if self.padding != "none" or not self.computes_padding:
            return self.model.notes
        which = f"{self._model_type} models" if self._model_type else "this model"
        return [*self.model.notes, f"layers of {which} compute padding, too: recipe.padding=none has no effect"]

    @property
    def _model_type(self) -> str | None:
        return getattr(self.model, "model_type", None)  # a user's source may have none

    @property
    def can_unpad(self) -> bool:
        return self._model_type in UNPADDED_TYPES

    @property
    def computes_padding(self) -> bool:
        return self.padding != "none" or not self.can_unpad

    # --- data -------------------------------------------------------------------------------------------------------

    def prepare(self, cache: Cache, facts: DataFacts) -> Path:
        return self._entry(cache, facts.digest, facts.label_names, self.data.read)

    def tokenised(self, cache: Cache, splits: SplitsType, digest: str) -> Prepared:
        """The tables, for a task that knows only from them how many rows there are. The model is checked before."""
        self.check_model()
        return Prepared.load(self._entry(cache, digest, (), lambda: splits))

    def _entry(self, cache: Cache, digest: str, names: Sequence[str], read: Callable[[], SplitsType]) -> Path:
        key = {
            "task": self.task,
            "data": digest,
            "tokenizer": self.model.tokenizer_identity(),
            **self.tokenised_by(),
            **({"label_names": names} if names else {}),
        }
        return cache.get(key, lambda folder: self._write(folder, read(), digest, cache.progress))

    def _write(self, folder: Path, splits: SplitsType, digest: str, progress: Progress) -> None:
        # The entry is named by the planned digest: other content would mislead every later run.
        if splits.digest != digest:
            raise UserError(f"the data ({splits.source}) changed after the run was planned: start the run again")
        tokenizer = self.model.tokenizer(splits.train_texts())
        found = self.tokenise(splits, tokenizer, progress)
        write_table(folder / "train", found.train)
        write_table(folder / "eval", found.eval)
        for name, content in found.files.items():
            (folder / "eval" / name).write_text(json.dumps(content), encoding="utf-8")
        of_tokenizer = {"vocabulary": len(tokenizer), "pad_id": tokenizer.pad_token_id}
        (folder / "properties.json").write_text(json.dumps({**found.properties, **of_tokenizer}))
        tokenizer.save_pretrained(folder / "tokenizer")

    @abstractmethod
    def tokenised_by(self) -> dict[str, Any]:
        """The settings that the tables depend on, by name."""

    @abstractmethod
    def tokenise(self, splits: SplitsType, tokenizer: Any, progress: Progress) -> Tokenised:
        """Both tables. Raises UserError for samples that cannot be used."""

    # --- model ------------------------------------------------------------------------------------------------------

    def check_model(self) -> None:
        self.model.check()
        self.model.check_head(self.head)
        self.check_positions(*self.limits)

    def check_positions(self, *settings: str) -> None:
        """Check that the model has positions for the tokens of these settings. Raises UserError."""
        limit = self.model.longest_input()
        for name in settings:
            tokens = getattr(self, name)
            rule = f"the model has {limit} positions; set it to at most {limit}"
            require(limit is None or tokens <= limit, f"recipe.{name}", tokens, rule)

    def build_model(self, prepared: Prepared) -> nn.Module:
        return self.unpad(self.built(prepared), prepared)

    def built(self, prepared: Prepared, **settings: Any) -> nn.Module:
        """The model for the tokenizer of the data. `settings` go into its configuration."""
        of = prepared.properties
        return self.model.build_model(self.head, of["vocabulary"], of["pad_id"], **settings)

    def unpad(self, model: nn.Module, prepared: Prepared) -> nn.Module:
        """The model that was built, made to compute no padding if that is wanted and possible."""
        if not self.computes_padding and not prepared.compiles:  # the number of tokens differs from batch to batch
            unpad_layers(model)
        return model

    def save(self, model: nn.Module, prepared: Prepared, folder: Path) -> None:
        from transformers import AutoTokenizer

        trained: Any = model  # model sources build models of transformers
        trained.save_pretrained(folder)
        AutoTokenizer.from_pretrained(prepared.folder / "tokenizer").save_pretrained(folder)
        if not (folder / "config.json").exists():
            _complete_adapter(trained, folder)
        # safetensors makes its files readable by their owner only; the others' permissions follow the umask.
        for weights in folder.glob("*.safetensors"):
            weights.chmod((folder / "tokenizer_config.json").stat().st_mode)

    def from_saved(self, model: str, file: str | None = None) -> Recipe:
        saved = Pretrained(model, complete=True)
        return dataclasses.replace(self, model=saved, data=_Saved(functools.partial(self.evaluation_data, saved, file)))

    def evaluation_data(self, model: Pretrained, file: str | None) -> SplitsType:
        """The evaluation data and an empty training set. Arguments as of `from_saved`."""
        found: SplitsType = evaluation_reader(self.data, "read_evaluation")(file)
        return found


def _complete_adapter(trained: Any, folder: Path) -> None:
    """Make the folder of an adapter loadable by `from_pretrained`, with the names of its classes.

    transformers loads an adapter into the model that it names, with that model's classes, unless there is a config.json
    beside it, which has others. Then the weights of the model must be there, too.
    """
    config, base = trained.config, Pretrained(trained.get_base_model().name_or_path)
    if tuple(config.id2label[number] for number in sorted(config.id2label)) != base.label_names():
        config.architectures = [type(trained.get_base_model()).__name__]
        config.save_pretrained(folder)
        try:
            base.copy_weights(folder)
        except OSError as error:  # a full disk must not cost the adapter, which is saved
            why = f"the weights of {base.name} were not copied to {folder} ({error.strerror})"
            LOG.warning(f"{why}: PEFT loads the adapter, from_pretrained alone does not")


def evaluation_reader(data: object, method: str) -> Callable[..., Any]:
    """The method that reads the evaluation data alone. Raises UserError for a source of the user's that has none."""
    found: Callable[..., Any] | None = getattr(data, method, None)
    if found is None:
        raise UserError(f"{type(data).__name__} cannot read its evaluation data alone: implement {method}")
    return found


def evaluation_source(data: object, file: str | None) -> str:
    """Where evaluation data came from, for people: the `file` given, or what the source of data names."""
    described = getattr(data, "described", None)  # a user's source may have none
    return file or (described("eval") if described is not None else getattr(data, "eval", None) or str(data))


def check_metrics_shown(shown: Sequence[str] | None, known: Collection[str], of: str = "") -> None:
    """Check the setting of that name. `of`: what the `known` metrics belong to, for the message. Raises UserError."""
    ok = shown is None or isinstance(shown, (list, tuple))
    require(ok, "recipe.metrics_shown", shown, f"give a list, such as [{next(iter(known))}], or null")
    for name in shown or ():
        rule = f"there is no metric '{name}'{of}{did_you_mean(str(name), known)}"
        require(name in known, "recipe.metrics_shown", shown, rule)


def set_label_names(config: Any, names: Sequence[str]) -> None:
    """Save the names of the classes with the model: for pipelines, and for runner.evaluate and runner.predict."""
    config.id2label = dict(enumerate(names))
    config.label2id = {name: number for number, name in enumerate(names)}


def saved_label_names(model: Pretrained, data: object) -> tuple[str, ...]:
    """The names of a saved model's classes, spelt as `data.label_names` does, or those if the model has none."""
    names, given = model.label_names(), tuple(getattr(data, "label_names", None) or ())
    if all(name == f"LABEL_{number}" for number, name in enumerate(names)) and len(given) == len(names):
        return given
    spelling = {name.casefold(): name for name in given}
    return tuple(spelling.get(name.casefold(), name) for name in names)


def check_room(setting: str, tokens: int, tokenizer: Callable[[], Any], pair: bool = False) -> None:
    """Check that more than special tokens fit: otherwise tokenizers truncate nothing at all. Raises UserError."""
    if tokens <= _MOST_SPECIAL:
        special = tokenizer().num_special_tokens_to_add(pair=pair)
        rule = f"the tokenizer adds {special} special tokens; use at least {special + 1} tokens"
        require(tokens > special, setting, tokens, rule)


def chunks(samples: int, progress: Progress) -> Iterator[slice]:
    """The samples in parts that are tokenised together, with reports of progress."""
    for start in range(0, samples, _CHUNK):
        progress(start, samples)
        yield slice(start, start + _CHUNK)
    progress(samples, samples)


def count_truncated(
    tokenizer: Any,
    texts: Sequence[Any],
    lengths: Sequence[int],
    max_length: int,
    pairs: Sequence[str] | None = None,
    **settings: Any,
) -> int:
    """How many texts, or pairs, have more than `max_length` tokens. `lengths`: of the truncated ones."""
    full = [row for row, length in enumerate(lengths) if length == max_length]
    count = 0
    for start in range(0, len(full), _CHUNK):
        rows = full[start : start + _CHUNK]
        second = None if pairs is None else [pairs[row] for row in rows]
        encoded = tokenizer([texts[row] for row in rows], second, verbose=False, **settings)
        count += sum(len(ids) > max_length for ids in encoded["input_ids"])
    return count


def truncation(
    what: str, setting: str, tokens: int, train: tuple[int, int], evaluation: tuple[int, int]
) -> dict[str, Any]:
    """What `Recipe.prepare` says of truncated samples; the pairs are how many of how many."""
    return {"what": what, "setting": setting, "tokens": tokens, "train": train, "eval": evaluation}


def text_batch(rows: Mapping[str, Sequence[Any]], pad_id: int, length: int | None) -> Batch:
    """Token ids, the attention mask, and token types if the rows have any, each of shape [rows, tokens]."""
    lengths = torch.tensor([len(row) for row in rows["input_ids"]])
    input_ids = padded(rows["input_ids"], pad_id, length)
    # The mask comes from the lengths: the pad token may also occur in the text, as GPT-2's end of text does.
    batch = {"input_ids": input_ids, "attention_mask": (torch.arange(input_ids.shape[1]) < lengths[:, None]).long()}
    if "token_type_ids" in rows:
        batch["token_type_ids"] = padded(rows["token_type_ids"], 0, length)
    return batch


def outputs(model: nn.Module, batch: Batch, **settings: Any) -> Any:
    """The model's output for the tokens of a batch, whose padding has to follow the tokens of each row."""
    with without_padding(batch.get("attention_mask")):
        return model(**{name: batch[name] for name in _MODEL_INPUTS if name in batch}, **settings)


def at_least_fp32(scores: Tensor) -> Tensor:
    """Losses and metrics of scores in reduced precision are computed in fp32; fp64 stays."""
    return scores if scores.dtype is torch.float64 else scores.float()

"""What all tasks have in common, whatever a row is: they fine-tune a transformers model on data from a source."""

from __future__ import annotations

import dataclasses
import functools
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from recipes.models.pretrained import Pretrained
from recipes.tasks.splits import Splits
from runner.data.cache import Cache, Progress
from runner.data.recipe import DataFacts, Prepared, Recipe
from runner.errors import UserError, did_you_mean, require
from runner.log import LOG


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


SplitsType = TypeVar("SplitsType", bound=Splits[Any])


@dataclass(frozen=True)
class PretrainedRecipe(Recipe, Generic[SplitsType]):
    """Reading, caching, building, saving and what was saved are the same for every task."""

    #: Names the task in the cache.
    task: ClassVar[str]
    #: The model's class in transformers is `AutoModelFor` + this.
    head: ClassVar[str]

    data: Any
    model: ModelSource

    @property
    def has_dropout(self) -> bool:
        return self.model.has_dropout

    @property
    def notes(self) -> Sequence[str]:
        return self.model.notes

    # --- data -------------------------------------------------------------------------------------------------------

    def prepare(self, cache: Cache, facts: DataFacts) -> Path:
        return self._entry(cache, facts.digest, facts.label_names, self.data.read)

    def _entry(self, cache: Cache, digest: str, names: Sequence[str], read: Callable[[], SplitsType]) -> Path:
        key = {
            "task": self.task,
            "data": digest,
            **self.prepared_by(),
            **({"label_names": names} if names else {}),
        }
        return cache.get(key, lambda folder: self._write(folder, read(), digest, cache.progress))

    def _write(self, folder: Path, splits: SplitsType, digest: str, progress: Progress) -> None:
        # The entry is named by the planned digest: other content would mislead every later run.
        if splits.digest != digest:
            raise UserError(f"the data ({splits.source}) changed after the run was planned: start the run again")
        self.write(folder, splits, progress)

    @abstractmethod
    def prepared_by(self) -> dict[str, Any]:
        """What the tables depend on besides the data, by name."""

    @abstractmethod
    def write(self, folder: Path, splits: SplitsType, progress: Progress) -> None:
        """Write what `Prepared.load` reads. Raises UserError for samples that cannot be used."""

    # --- model ------------------------------------------------------------------------------------------------------

    def save(self, model: nn.Module, prepared: Prepared, folder: Path) -> None:
        trained: Any = model  # model sources build models of transformers
        trained.save_pretrained(folder)
        mode = self.save_processor(prepared, folder).stat().st_mode
        if not (folder / "config.json").exists():
            _complete_adapter(trained, folder)
        # safetensors makes its files readable by their owner only; the others' permissions follow the umask.
        for weights in folder.glob("*.safetensors"):
            weights.chmod(mode)

    @abstractmethod
    def save_processor(self, prepared: Prepared, folder: Path) -> Path:
        """Write what makes the model's inputs, such as its tokenizer, and return one of the files."""

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
            base.copy_weights(folder, without=getattr(trained.get_base_model(), "new_weights", ()))
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


def check_label_smoothing(share: float) -> None:
    """Check the setting of that name: the share of each target's weight that all classes get. Raises UserError."""
    require(0 <= share < 1, "recipe.label_smoothing", share, "use a share such as 0.1, at least 0 and below 1")


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


def at_least_fp32(scores: Tensor) -> Tensor:
    """Losses and metrics of scores in reduced precision are computed in fp32; fp64 stays."""
    return scores if scores.dtype is torch.float64 else scores.float()

"""`model/README.md`: the model card of a run, with metadata for the Hugging Face Hub."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.config.choices import AdapterKind
from runner.errors import printable
from runner.folder.evaluation_rows import read_rows, standard_errors
from runner.folder.files import write_text
from runner.folder.reading import read_json, read_settings
from runner.folder.record import RunRecord
from runner.plan import Plan
from runner.plan.certificate import Certificate
from runner.plan.levels import COMPARABLE, EQUIVALENT, IDENTICAL
from runner.run.earlier import certificate_of_run, plan_of_run
from runner.track.card import data_params, last_part
from runner.track.mlflow_model import task_of
from runner.track.secrets import masked

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, ModelCardData

FILE_NAME = "README.md"
#: The line of the example that says where the model is.
HERE = 'name = "."  # this folder'

#: Task -> the class of transformers that loads a model for it.
_CLASSES = {
    "text-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "text-generation": "AutoModelForCausalLM",
    "question-answering": "AutoModelForQuestionAnswering",
    "text2text-generation": "AutoModelForSeq2SeqLM",
    "image-classification": "AutoModelForImageClassification",
}
#: Metric -> its name on the Hub, where that is another one.
_HUB_METRICS = {"matthews": "matthews_correlation", "auc": "roc_auc", "pearson": "pearsonr", "spearman": "spearmanr"}
#: In place of the name of a data set on the Hub, which has to be one word.
_NOT_ON_THE_HUB = "local"
#: Standard errors to each side of a value that make an interval of 95%.
_95_PERCENT = 1.96
#: Level of a certificate -> what it says about this run and one on one worker.
_MEANING = {
    IDENTICAL: "the weights have the same bits",
    EQUIVALENT: "only rounding in the last bits can differ",
    COMPARABLE: "same data, model, evaluation and number of samples, with the differences below",
}
#: Rows of the table of settings: its name -> that of the property of the certificate.
_SETTINGS = {
    "learning rate": "learning_rate",
    "schedule": "schedule",
    "optimizer": "optimizer",
    "set by the scaling rule": "scaled_settings",
    "gradient clipping": "clipping",
    "adapter": "adapter",
    "precision": "precision",
    "synchronisation": "sync",
    "sharding": "sharding",
    "seed": "seed",
}


@dataclass(frozen=True)
class _Run:
    """Holds what a run's folder says.

    `task`: in transformers' words, if known. `recipe`: its settings. `in_4_bits`: it is an adapter that was trained and
    evaluated next to weights in 4 bits. `errors`: standard errors of metrics over evaluation rows.
    """

    model: Path
    task: str | None
    record: RunRecord
    plan: Plan
    certificate: Certificate
    ledger: Mapping[str, Any]
    recipe: Mapping[str, Any]
    in_4_bits: bool
    errors: Mapping[str, float]

    @property
    def data(self) -> Mapping[str, Any]:
        data = self.recipe.get("data")
        return data if isinstance(data, Mapping) else {}

    @property
    def is_adapter(self) -> bool:
        return (self.model / "adapter_config.json").exists()

    @property
    def model_name(self) -> str:
        """The name that the model was loaded by, without the folders above it; else the class that builds it."""
        name = self._given.get("name")
        return hub_name(name) or last_part(name or str(self._given.get("_target_")).rpartition(".")[2])

    @property
    def is_pretrained(self) -> bool:
        return "name" in self._given and self._given.get("init") != "random"

    @property
    def base_model(self) -> str | None:
        """The name on the Hub of the model that was trained further."""
        return hub_name(self._given["name"]) if self.is_pretrained else None

    @property
    def _given(self) -> Mapping[str, Any]:
        model = self.recipe.get("model")
        return model if isinstance(model, Mapping) else self.recipe if model is None else {"name": str(model)}

    def hub_data(self, split: str) -> str | None:
        """The name of the data set on the Hub that `train` or `eval` data are from."""
        return None if self.data.get(split) else hub_name(self.data.get("hub_name"))

    def value_of(self, name: str) -> str:
        """The value of a property of the certificate in words; `none` without it."""
        value = next((item.value for item in self.certificate.properties if item.name == name), "none")
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    def data_name(self, split: str) -> str:
        if split == "eval" and self.data.get("eval_share"):
            return f"a part of {self.data_name('train')} that was held out"
        made_by = str(self.data.get("_target_") or self.recipe.get("_target_")).rpartition(".")[2]
        return f"`{data_params(self.recipe).get(f'{split}_data') or made_by}`"


def write_model_card(folder: Path, record: RunRecord) -> None:
    """Write the card of a finished run next to its model. Raises RunFailed if the disk does not take it."""
    if (folder / "model").is_dir():
        write_text(folder / "model" / FILE_NAME, model_card(folder, record))


def model_card(folder: Path, record: RunRecord) -> str:
    """The card of the run in a folder, from what it has recorded. Raises UserError for a damaged file.

    Files and folders are named without their path.
    """
    settings = read_settings(folder / "config.yaml")
    adapter = settings.get("adapter", {})
    run = _Run(
        model=folder / "model",
        task=task_of(folder / "model"),
        record=record,
        plan=plan_of_run(folder, refuse_changed=False),
        certificate=certificate_of_run(folder),
        ledger=read_json(folder / "ledger.json"),
        recipe=settings.get("recipe", {}),
        in_4_bits=adapter.get("kind") == AdapterKind.qlora.name and not adapter.get("merge"),
        errors=standard_errors(read_rows(folder)),
    )
    parts = [f"---\n{_metadata(run).to_yaml()}\n---", *_summary(run), *_use(run), *_training(run), *_reproduction(run)]
    return printable(masked("\n\n".join(parts))) + "\n"


def is_hub_name(name: str) -> bool:
    """True if the Hub can have something of this name, with or without an owner."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def hub_name(name: object) -> str | None:
    """`name` if the Hub can have something of this name; a file or folder of this name here hides it."""
    text = str(name or "")
    return text if is_hub_name(text) and not os.path.exists(text) else None


def _metadata(run: _Run) -> ModelCardData:
    from huggingface_hub import ModelCardData

    recipe = str(run.recipe.get("name"))
    results = [] if run.task is None else list(_results(run, run.task))
    transformers = None if run.task is None else "transformers"
    train = run.hub_data("train")
    adapter = [name for name, used in (("lora", run.is_adapter), ("qlora", run.in_4_bits)) if used]
    return ModelCardData(
        base_model=run.base_model,
        datasets=None if train is None else [train],
        library_name="peft" if run.is_adapter else transformers,
        pipeline_tag=run.task,
        metrics=[result.metric_type for result in results if result.metric_type != "loss"] or None,
        tags=["finetune-runner", recipe, *adapter],
        model_name=recipe,
        eval_results=results or None,
    )


def _results(run: _Run, task: str) -> Iterator[EvalResult]:
    """The metrics in the form of the Hub, which has no numbers that are not finite."""
    from huggingface_hub import EvalResult

    hub, held_out = run.hub_data("eval"), run.data.get("eval_share")
    for metric, value in run.record.result.eval.items():
        if math.isfinite(value):
            yield EvalResult(
                task_type=task,
                dataset_type=hub or _NOT_ON_THE_HUB,
                dataset_name=hub or run.data_name("eval").replace("`", ""),
                dataset_config=run.data.get("hub_config") if hub else None,
                dataset_split=run.data.get("hub_train" if held_out else "hub_eval") if hub else None,
                dataset_revision=run.data.get("hub_revision") if hub else None,
                metric_type=_HUB_METRICS.get(metric, metric),
                metric_name=metric,
                metric_value=value,
            )


def _summary(run: _Run) -> Iterator[str]:
    record, data, unit = run.record, run.record.data, run.record.data.unit or "samples"
    local = " (a local folder)" if run.is_pretrained and run.base_model is None else ""
    trained = "fine-tuned" if run.is_pretrained else "trained from random weights"
    model = f"`{run.model_name}`{local}"
    if run.is_adapter:
        model = f"A LoRA adapter for {model}{', next to weights in 4 bits (QLoRA)' if run.in_4_bits else ''}"
    yield f"# {run.recipe.get('name')}: {last_part(run.model_name)}"
    yield f"{model}, {trained} on {run.data_name('train')} ({data.train_samples or 0:,} {unit})."
    rows = []
    for name, value in sorted(record.result.eval.items(), key=lambda item: item[0] != record.metric):
        constant, error = data.constant.get(name), run.errors.get(name)
        interval = "" if error is None else f"± {_95_PERCENT * error:.2g}"
        rows.append((name, f"{value:.4g}", interval, "" if constant is None else f"{constant:.4g}"))
    yield _table(("metric", "value", "95% interval", "best constant answer"), rows)
    yield (
        f"On {data.eval_samples or 0:,} {unit} of {run.data_name('eval')}. Rates and correlations are in percent. The "
        "interval is for other evaluation data of the same size; it does not include another seed."
    )


def _use(run: _Run) -> Iterator[str]:
    """How to load the model, as code that runs in its folder."""
    yield "## Use"
    auto, images = _CLASSES.get(run.task or ""), run.task == "image-classification"
    variable, processor = ("processor", "AutoImageProcessor") if images else ("tokenizer", "AutoTokenizer")
    if auto is not None and run.in_4_bits:
        # LongT5 and Switch cast their activations to the dtype of `wo`.
        whole = ["wo", "lm_head"] if run.task == "text2text-generation" else None
        new = read_json(run.model / "adapter_config.json").get("modules_to_save") or whole
        skipped = f", llm_int8_skip_modules={json.dumps(new)}" if new else ""
        lines = [
            f"from transformers import {', '.join(sorted((auto, processor, 'BitsAndBytesConfig')))}"
            "  # needs peft and bitsandbytes",
            "",
            HERE,
            f"{variable} = {processor}.from_pretrained(name)",
            "# as in training and evaluation; in full precision the outputs are slightly different",
            f'bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"{skipped})',
            f"model = {auto}.from_pretrained(name, quantization_config=bits)",
        ]
    elif auto is not None:
        needs = "transformers and peft" if run.is_adapter else "transformers"
        lines = [
            f"from transformers import {', '.join(sorted((auto, processor)))}  # needs {needs}",
            "",
            HERE,
            f"{variable} = {processor}.from_pretrained(name)",
            f"model = {auto}.from_pretrained(name)",
        ]
    else:
        lines = [
            "from safetensors.torch import load_file",
            "",
            'weights = load_file("model.safetensors")  # by name of the parameter',
        ]
    yield "\n".join(["```python", *lines, "```"])


def _training(run: _Run) -> Iterator[str]:
    yield "## Training"
    plan, record, result = run.plan, run.record, run.record.result
    split = f"micro-batch {plan.micro_batch} × accumulation {plan.accumulation_steps} × {plan.world_size} worker(s)"
    seen, unit = result.samples_seen or 0, record.data.unit or "samples"
    epochs = seen / (record.data.train_samples or 1)
    devices = dict.fromkeys(segment.device for segment in run.certificate.segments)
    rehearsed = " (rehearsed)" if record.rehearsed else ""
    rows = {
        "data": f"{run.data_name('train')}, {seen:,} {unit} seen ({epochs:.3g} epochs)",
        "optimizer steps": f"{result.optimizer_steps or 0:,}",
        "global batch": f"{plan.global_batch:,} ({split})",
        **{label: run.value_of(name) for label, name in _SETTINGS.items()},
        "trained parameters": f"{result.trained_parameters or 0:,} of {result.parameters or 0:,}",
        "device": f"{' → '.join(devices)}{rehearsed}, {result.machine}",
    }
    yield _table(("setting", "value"), [row for row in rows.items() if row[1] != "none"])
    if record.varied:
        yield f"One run of a sweep over {', '.join(record.varied)}."


def _reproduction(run: _Run) -> Iterator[str]:
    yield "## Reproducibility"
    level, ledger = run.record.certificate, run.ledger
    meaning = f" ({_MEANING[level]})" if level in _MEANING else ""
    yield f"Certificate: **{level}** to the same recipe on one worker in fp32{meaning}."
    different = [item for item in run.certificate.properties if not item.equal]
    if different:
        rows = [(item.name.replace("_", " "), item.value, item.baseline, item.effect) for item in different]
        yield _table(("different", "here", "one worker", "effect"), rows)
    sound = "exactly the planned samples were trained on" if ledger["sound"] else "it does not match the plan"
    yield f"Ledger: {sound}. Digest of which samples were in which step: `{ledger['digest']}`."
    yield f"Versions: {run.value_of('versions')}."
    yield (
        "Licence: not stated. Those of the base model and of the data apply; set `license` in the metadata of this "
        "page if you share the model."
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table of Markdown, each row in one line."""
    lines = [header, ["---"] * len(header), *rows]
    cells = ([" ".join(str(cell).split()).replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)

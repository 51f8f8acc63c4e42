"""The `model/` of a run as an MLflow model, which can be registered, loaded and served."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from runner.folder.reading import read_json, read_settings
from runner.track.store import set_up_mlflow

#: The end of a model's class name, or PEFT's name of an adapter's task (where it has none, it names the class) ->
#: transformers' name of the pipeline for it, or ours, where there is none.
_TASKS = {
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "CAUSAL_LM": "text-generation",
    "ForQuestionAnswering": "question-answering",
    "QUESTION_ANS": "question-answering",
    "ForConditionalGeneration": "text2text-generation",
    "MTModel": "text2text-generation",
    "SEQ_2_SEQ_LM": "text2text-generation",
    "ForImageClassification": "image-classification",
}

#: Task -> settings of the recipe without which it would give other answers.
_SETTINGS = {
    "question-answering": ("max_length", "doc_stride", "max_query_length", "max_answer_length"),
    "text2text-generation": ("max_source_length", "source_prefix", "max_new_tokens", "num_beams"),
}


def save_mlflow_model(model: Path, folder: Path, config: Path) -> bool:
    """Write the model as an MLflow model to the new `folder`; False if it is of no task that can be served.

    `config`: the `config.yaml` of its run. Raises UserError if the task needs the recipe's settings and it is damaged.
    """
    task = task_of(model)
    names = _SETTINGS.get(task, ()) if task is not None else ()
    recipe = read_settings(config).get("recipe", {}) if names else {}
    if task is None or not all(name in recipe for name in names):
        return False
    set_up_mlflow()
    import mlflow.pyfunc  # takes seconds

    packages = ["mlflow", "pandas", "torch", "transformers"]
    if (model / "adapter_config.json").exists():
        packages.append("peft")
    if task == "image-classification":
        packages.append("pillow")
    mlflow.pyfunc.save_model(
        folder,
        python_model=str(Path(__file__).with_name("served_model.py")),
        artifacts={"model": str(model)},
        model_config={"task": task, **{name: recipe[name] for name in names}},
        # MLflow would load the model to find them out. No index has a local version, such as torch for CPUs.
        pip_requirements=[f"{package}=={version(package).partition('+')[0]}" for package in packages],
    )
    return True


def task_of(model: Path) -> str | None:
    """transformers' name of the task of the model in a folder; None if it is not known. Raises UserError."""
    kinds: list[str] = []
    for name, key in (("config.json", "architectures"), ("adapter_config.json", "task_type")):
        if (model / name).exists():
            content = read_json(model / name)
            found = content.get(key) or (content.get("auto_mapping") or {}).get("base_model_class") or []
            kinds += [found] if isinstance(found, str) else found
    tasks = (task for kind in kinds for suffix, task in _TASKS.items() if kind.endswith(suffix))
    return next(tasks, None)

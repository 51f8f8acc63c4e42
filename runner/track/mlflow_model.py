"""The `model/` of a run as an MLflow model, which can be registered, loaded and served."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from runner.folder.reading import read_json
from runner.track.store import set_up_mlflow

#: The end of a model's class name, or PEFT's name of an adapter's task -> transformers' name of the pipeline for it.
_PIPELINES = {
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "CAUSAL_LM": "text-generation",
}


def save_mlflow_model(model: Path, folder: Path) -> bool:
    """Write the model as an MLflow model to the new `folder`; False if transformers has no pipeline for it."""
    task = _pipeline_for(model)
    if task is None:
        return False
    set_up_mlflow()
    import mlflow.pyfunc  # takes seconds

    packages = ["mlflow", "pandas", "torch", "transformers"]
    if (model / "adapter_config.json").exists():
        packages.append("peft")
    mlflow.pyfunc.save_model(
        folder,
        python_model=str(Path(__file__).with_name("served_model.py")),
        artifacts={"model": str(model)},
        model_config={"task": task},
        # MLflow would load the model to find them out. No index has a local version, such as torch for CPUs.
        pip_requirements=[f"{package}=={version(package).partition('+')[0]}" for package in packages],
    )
    return True


def _pipeline_for(model: Path) -> str | None:
    kinds: list[str] = []
    for name, key in (("config.json", "architectures"), ("adapter_config.json", "task_type")):
        if (model / name).exists():
            content = read_json(model / name).get(key) or []
            kinds += [content] if isinstance(content, str) else content
    found = (task for kind in kinds for suffix, task in _PIPELINES.items() if kind.endswith(suffix))
    return next(found, None)

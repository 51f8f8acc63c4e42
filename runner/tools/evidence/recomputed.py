"""What can be recomputed only with the data, the weights or the time to train: the result, and the first steps."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from runner.config.choices import PrecisionName
from runner.config.compose import compose, parsed, settings
from runner.config.instantiate import build_recipe
from runner.config.schema import Config
from runner.data.cache import Cache
from runner.data.recipe import Recipe
from runner.errors import RunFailed, UserError, first_line
from runner.folder.files import Checksums, damage
from runner.folder.reading import read_json
from runner.launch.local import WorkerFailed, launch
from runner.plan.experiment import Experiment, prepare
from runner.run.earlier import saved_settings
from runner.tools.evaluate.command import launch_evaluation
from runner.tools.evaluate.prepared import prepare as prepare_evaluation
from runner.tools.evidence import replay
from runner.tools.evidence.claims import CLAIMED, DIFFERENT, VERIFIED, Finding, Recorded, close
from runner.tools.verify.command import replay_job

#: Settings that say where something is, and not what was done.
_PLACES = ("device", "recipe.data", "recipe.model.name", "cache_dir", "trusted_packages")
#: Relative differences of losses that rounding explains, on other hardware and in other kernels.
_ROUNDING = {
    PrecisionName.fp64: 1e-9,
    PrecisionName.fp32: 1e-4,
    PrecisionName.tf32: 1e-2,
    PrecisionName.bf16: 5e-2,
    PrecisionName.fp16: 5e-2,
}
#: Of metrics, from the same weights; and how many samples may change sides by rounding.
_METRICS, _FLIPS = 1e-4, 2
#: Of the digest of the data that a run's card has.
_DIGITS = 16


def check_places(overrides: Sequence[str]) -> None:
    """Refuse settings that would make it another run. Raises UserError."""
    for override in parsed(overrides):
        key = override.key_or_group
        if not any(key == place or key.startswith(f"{place}.") for place in _PLACES):
            raise UserError(
                f"{override.input_line} would make it another run: only {', '.join(_PLACES)} can be given, to say "
                "where data, model and workers are"
            )


def recomputed(
    run: Recorded,
    weights: Checksums,
    models: Sequence[Path],
    overrides: Sequence[str],
    config_dirs: Sequence[str],
    steps: int | None,
) -> Iterator[Finding]:
    """Compare data, weights and result, and with `steps` the losses of as many steps, with what is here.

    `weights`: of the run's model. `models`: folders of models, of which one may be the run's. `overrides`: where the
    data are. A claim about what is not here stays one.
    """
    data = _data(run, overrides, config_dirs)
    yield data
    model = next((one for one in (run.folder / "model", *models) if weights and damage(one, weights) is None), None)
    if model is not None:
        where = "its own files" if model == run.folder / "model" else str(model)
        yield Finding("weights", VERIFIED, f"{where} have the digests that the bundle says the run's model had")
    else:
        yield Finding("weights", CLAIMED, "they are not here: give --model FOLDER, or make the bundle --with-models")
    if data.outcome == VERIFIED and model is not None:
        yield _result(run, model, overrides, config_dirs)
    else:
        yield Finding("result", CLAIMED, "it takes the data and the weights to compute it again")
    if steps is None:
        yield Finding("training", CLAIMED, "--replay 20 trains the first 20 steps again")
    elif data.outcome != VERIFIED:
        yield Finding("training", CLAIMED, "it takes the data to train again")
    elif run.resumed:
        yield Finding("training", CLAIMED, "the run was resumed, and its settings are those of its last part")
    else:
        yield _training(run, overrides, config_dirs, steps)


def _config(run: Recorded, overrides: Sequence[str], config_dirs: Sequence[str]) -> Config:
    saved, _ = saved_settings(run.folder)
    return settings(compose(["tracking=none", *overrides], config_dirs, saved))


def _data(run: Recorded, overrides: Sequence[str], config_dirs: Sequence[str]) -> Finding:
    digest = run.data_digest
    if digest is None or len(digest) < _DIGITS:
        return Finding("data", CLAIMED, "the run has not recorded their digest (it has no tracking.json)")
    try:
        config = _config(run, overrides, config_dirs)
        recipe: Recipe = build_recipe(config.recipe, config.trusted_packages)
        facts = recipe.facts(Cache(config.cache_dir))
    except UserError as error:
        return Finding("data", CLAIMED, f"they cannot be read here ({first_line(error)})")
    if not facts.digest.startswith(digest):
        return Finding("data", DIFFERENT, f"{facts.source} have the digest {facts.digest[:_DIGITS]}, not {digest}")
    return Finding("data", VERIFIED, f"{facts.source} have the digest {digest} of every text and label")


def _result(run: Recorded, model: Path, overrides: Sequence[str], config_dirs: Sequence[str]) -> Finding:
    """Evaluate the saved model as `runner.evaluate` does, without leaving anything."""
    used = [one for one in overrides if not one.startswith("recipe.model.")]
    with tempfile.TemporaryDirectory(prefix="runner-evidence-") as work:
        if not (run.folder / "model").exists():
            shutil.copytree(model, run.folder / "model")
        _move_base(run.folder / "model", overrides)
        folder = f"hydra.run.dir={Path(work) / 'evaluation'}"
        try:
            evaluation = prepare_evaluation(str(run.folder), ["tracking=none", folder, *used], config_dirs, None)
            found = launch_evaluation(evaluation, Path(work))["metrics"]
        except (UserError, RunFailed, WorkerFailed) as error:
            return Finding("result", CLAIMED, f"it cannot be computed here ({first_line(error)})")
    claimed = run.record.result.eval
    if unknown := sorted(set(claimed) - set(found)):
        return Finding("result", DIFFERENT, f"{unknown[0]} is claimed, and the recipe computes no such metric")
    rounding = max(_METRICS, _ROUNDING[evaluation.config.precision.name])
    flips = 100 * _FLIPS / evaluation.facts.eval_samples  # percent
    for name, value in claimed.items():
        absolute = 0.0 if name in evaluation.recipe.minimised else flips
        if not close(found[name], float(value), rounding, absolute):
            return Finding(
                "result", DIFFERENT, f"{name} is {value}, and these weights have {found[name]} on these data"
            )
    digits = "in every digit" if all(close(found[name], float(claimed[name]), 0.0) for name in claimed) else "nearly"
    shown = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
    return Finding("result", VERIFIED, f"{shown}: these weights have it on these data, {digits}")


def _move_base(model: Path, overrides: Sequence[str]) -> None:
    """Let an adapter name the model that `recipe.model.name=` gives: its own name is a path on the author's machine."""
    settings_file, key = model / "adapter_config.json", "recipe.model.name"
    given = [one.value() for one in parsed(overrides) if one.key_or_group == key]
    if given and settings_file.exists():
        content = read_json(settings_file)
        base = str(Path(str(given[-1])).resolve()) if Path(str(given[-1])).is_dir() else str(given[-1])
        settings_file.write_text(json.dumps({**content, "base_model_name_or_path": base}), encoding="utf-8")


def _training(run: Recorded, overrides: Sequence[str], config_dirs: Sequence[str], steps: int) -> Finding:
    """Train the first steps again and compare the loss of each."""
    recorded = run.metrics["train/loss"]
    steps = min(steps, len(recorded))
    try:
        experiment = prepare(_config(run, overrides, config_dirs))
        experiment = dataclasses.replace(experiment, plan=run.plan)
        if experiment.placement.workers != run.plan.world_size:
            workers = run.plan.world_size
            return Finding("training", CLAIMED, f"it was trained by {workers} workers: give device.workers={workers}")
        if (where := _other_dropout(run, experiment)) is not None:
            return Finding("training", CLAIMED, f"it was trained on {where}, where other units are dropped than here")
        with tempfile.TemporaryDirectory(prefix="runner-evidence-") as work:
            job: dict[str, Any] = {"job": replay_job(experiment, Path(work), run.plan.world_size).as_json()}
            losses = launch(replay.run_launched, {**job, "steps": steps}, run.plan.world_size)
    except (UserError, RunFailed, WorkerFailed) as error:
        return Finding("training", CLAIMED, f"it cannot be trained here ({first_line(error)})")
    tolerance = _ROUNDING[experiment.config.precision.name]
    differences = [abs(loss - recorded[step]) / abs(recorded[step]) for step, loss in enumerate(losses, start=1)]
    for step, difference in enumerate(differences, start=1):
        if not difference <= tolerance:
            why = f"the loss of step {step} was {recorded[step]}, and is {losses[step - 1]} when it is trained again"
            return Finding("training", DIFFERENT, why)
    largest = max(differences, default=math.nan)
    digits = "in every digit" if largest == 0 else f"up to {largest:.1g} of its value"
    device = experiment.placement.device_type
    return Finding("training", VERIFIED, f"{steps} steps trained again on {device} have the recorded losses, {digits}")


def _other_dropout(run: Recorded, experiment: Experiment) -> str | None:
    """The device of the run, if its random streams drop other units than those of this machine's device."""
    properties = {one["name"]: one["value"] for one in (*run.certificate["equal"], *run.certificate["different"])}
    same = properties["device"] == experiment.placement.device_type
    by_sample = run.config.equivalence.dropout_by_sample or not experiment.setup.has_dropout
    return None if same or by_sample else str(properties["device"])

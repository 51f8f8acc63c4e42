"""Checks that need data and weights: of their digests, and of the result, computed as by `runner.evaluate`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from runner.config.choices import PrecisionName
from runner.config.compose import compose, settings
from runner.config.instantiate import build_recipe
from runner.data.cache import Cache
from runner.data.recipe import Recipe
from runner.errors import RunFailed, UserError, first_line
from runner.folder.files import Checksums, damage
from runner.launch.local import WorkerFailed
from runner.run.earlier import saved_settings
from runner.tools.evaluate.command import launch_evaluation
from runner.tools.evaluate.prepared import prepare
from runner.tools.evidence.claims import CLAIMED, DIFFERENT, VERIFIED, Finding, Recorded, compared
from runner.track.card import FILE_NAME as CARD_FILE
from runner.track.card import TrackingRecord

#: Relative differences of metrics, from the same weights, that rounding explains: in fp32 and fp64, and in others.
_ROUNDING = 1e-4
_ROUNDING_IN = {PrecisionName.tf32: 1e-2, PrecisionName.bf16: 5e-2, PrecisionName.fp16: 5e-2}
#: Samples of which rounding may change the prediction.
_FLIPS = 2
#: Digits of the digest of the data that a run's card has.
_DIGITS = 16


def recomputed(
    run: Recorded, weights: Checksums, models: Sequence[Path], overrides: Sequence[str], config_dirs: Sequence[str]
) -> Iterator[Finding]:
    """Compare data, weights and result with what is here. A claim about what is not here stays one.

    `weights`: of the run's model. `models`: folders of models, of which one may be the run's. `overrides`: where the
    data are.
    """
    yield (data := _data(run, overrides, config_dirs))
    own = run.folder / "model"
    model = next((one for one in (own, *models) if weights and damage(one, weights) is None), None)
    if model is None:
        yield Finding("weights", CLAIMED, "they are not here: give --model FOLDER, or make the bundle --with-models")
    else:
        yield Finding("weights", VERIFIED, "the files have the digests that the bundle says the run's model had")
    if model is None or data.outcome != VERIFIED:
        yield Finding("result", CLAIMED, "it takes the data and the weights to compute it again")
        return
    if model != own:
        shutil.copytree(model, own)
    yield _result(run, overrides, config_dirs)


def _data(run: Recorded, overrides: Sequence[str], config_dirs: Sequence[str]) -> Finding:
    dataset = TrackingRecord.read(run.folder).dataset if (run.folder / CARD_FILE).exists() else None
    digest = str((dataset or {}).get("digest", ""))
    if len(digest) < _DIGITS:
        return Finding("data", CLAIMED, "the run has not recorded their digest (it has no tracking.json)")
    saved, _ = saved_settings(run.folder)
    try:
        config = settings(compose(["tracking=none", *overrides], config_dirs, saved))
        recipe: Recipe = build_recipe(config.recipe, config.trusted_packages)
        facts = recipe.facts(Cache(config.cache_dir))
    except UserError as error:
        return Finding("data", CLAIMED, f"they cannot be read here ({first_line(error)})")
    if not facts.digest.startswith(digest):
        return Finding("data", DIFFERENT, f"{facts.source} have the digest {facts.digest[:_DIGITS]}, not {digest}")
    return Finding("data", VERIFIED, f"{facts.source} have the digest {digest} of every sample and label")


def _result(run: Recorded, overrides: Sequence[str], config_dirs: Sequence[str]) -> Finding:
    """Evaluate the saved model as `runner.evaluate` does, without leaving anything."""
    with tempfile.TemporaryDirectory(prefix="runner-evidence-") as work:
        folder = f"hydra.run.dir={Path(work) / 'evaluation'}"
        try:
            evaluation = prepare(str(run.folder), ["tracking=none", folder, *overrides], config_dirs, None)
            found = launch_evaluation(evaluation, Path(work))["metrics"]
        except (UserError, RunFailed, WorkerFailed) as error:
            return Finding("result", CLAIMED, f"it cannot be computed here ({first_line(error)})")
    claimed = run.record.result.eval
    shown = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
    rounding = _ROUNDING_IN.get(evaluation.config.precision.name, _ROUNDING)
    flips = 100 * _FLIPS / evaluation.facts.eval_samples  # percent
    absolute = dict.fromkeys(claimed.keys() - set(evaluation.recipe.minimised), flips)
    again = {name: found.get(name) for name in claimed}
    return compared("result", claimed, again, f"{shown}: these weights have it on these data", rounding, absolute)

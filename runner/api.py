"""The commands as Python functions: the same overrides, results as objects, and errors as exceptions.

```python
from runner.api import compare, plan, run, sweep

finished = run("recipe=cola", "device=cpu2", "sync.k=4", quiet=True)
print(finished.result.eval["matthews"], finished.folder)
runs = sweep("device=cpu,cpu2", "seed=0,1,2")  # a pandas DataFrame, one row per run
setups = compare(*runs["source"], margin=0.5)  # one row per setup, with its verdict
```

Nothing of the process is changed afterwards: signal handlers, environment variables, logging, Hydra's state. The first
run starts a process that workers are forked from, which ends with this one. As with `multiprocessing`, a script calls
these functions below `if __name__ == "__main__":`, because workers import its main module; notebooks and tests need
nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from runner.cli import silence_libraries
from runner.config.arguments import HydraOptions
from runner.data.cache import silent
from runner.errors import Terminal, UserError
from runner.launch.signals import handlers_restored

if TYPE_CHECKING:
    from pandas import DataFrame

    from runner.plan.experiment import Experiment
    from runner.run.job import FinishedRun

__all__ = ["compare", "plan", "run", "sweep"]


def run(*overrides: str, config_dir: str | Path | None = None, quiet: bool = False) -> FinishedRun:
    """Train one run, as `python -m runner` does, or continue one with `resume=…`.

    `config_dir`: a folder with own choices, as `--config-dir`. `quiet`: print nothing. Raises UserError for a mistake
    in the settings or data, before a folder is made; RunFailed, WorkerFailed or the recipe's own exception if training
    fails, and KeyboardInterrupt or Preempted (which is one) if it is interrupted.
    """
    with _left_unchanged():
        from runner.launch.local import start_forkserver  # imports multiprocessing only when a run starts

        start_forkserver()
        from runner.run.job import run_single  # after the forkserver has started

        options = _options(overrides, config_dir)
        finished = run_single(options, time.time(), Terminal(highlight=False, quiet=quiet))
        assert finished is not None  # only under torchrun
        return finished


def sweep(*overrides: str, config_dir: str | Path | None = None) -> DataFrame:
    """Train the jobs of a sweep, as `python -m runner -m` does; its runs, one row each, as in `runs.csv`.

    Jobs that failed have only a `source` and the reason in `flags`. Raises UserError before a folder is made, and
    KeyboardInterrupt.
    """
    with _left_unchanged():
        from runner.launch.local import start_forkserver  # as above

        start_forkserver(several_jobs=True)
        import pandas

        from runner.tools.compare.columns import run_rows  # as above
        from runner.tools.compare.comparison import compare_runs  # after the forkserver has started, like the following
        from runner.tools.compare.from_folders import read_folders, run_folders  # as above
        from runner.tools.sweep.command import run_sweep  # as above
        from runner.tools.sweep.preflight import prepare_sweep  # as above

        options = _options(["-m", *overrides], config_dir)
        request = prepare_sweep(options, time.time())
        run_sweep(request, options)
        found = read_folders([(os.path.relpath(one), one) for one in run_folders(request.folder)], None)
        return pandas.DataFrame(run_rows(compare_runs(found)))


def plan(*overrides: str, config_dir: str | Path | None = None) -> Experiment:
    """Plan a run, as `python -m runner.plan` does: `plan`, `certificate`, `facts`, and `notes`. Raises UserError."""
    with _left_unchanged():
        from runner.run.preflight import prepare_run_for_plan  # imports torch and Hydra

        return prepare_run_for_plan(_options(overrides, config_dir), silent)


def compare(
    *runs: str | Path,
    baseline: str | None = None,
    metric: str | None = None,
    margin: float | None = None,
    family_wise: bool = False,
) -> DataFrame:
    """Compare runs, as `python -m runner.compare` does; one row per setup, as in `setups.csv`.

    `runs`: folders of runs or folders that contain them, or MLflow run ids. Raises UserError.
    """
    import pandas

    from runner.tools.compare.columns import setup_rows  # as above
    from runner.tools.compare.command import finished_runs, parsed  # this function only, like the following
    from runner.tools.compare.comparison import compare_runs  # as above

    given = {"baseline": baseline, "metric": metric, "margin": margin}
    options = parsed([*map(str, runs), *(f"--{name}={value}" for name, value in given.items() if value is not None)])
    comparison = compare_runs(finished_runs(options), options.baseline, options.margin, family_wise)
    return pandas.DataFrame(setup_rows(comparison))


def _options(overrides: Sequence[str], config_dir: str | Path | None) -> HydraOptions:
    options = HydraOptions([*overrides, *([f"--config-dir={config_dir}"] if config_dir is not None else [])])
    if options.only_shows:
        raise UserError(f"{' '.join(options.flags)} only prints something: use it on the command line")
    return options


@contextlib.contextmanager
def _left_unchanged() -> Iterator[None]:
    """Restore what a command may change in its process."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig

    environment, arguments = dict(os.environ), sys.argv
    handlers, level = list(logging.root.handlers), logging.root.level
    hydra, config = GlobalHydra.instance().hydra, HydraConfig.instance().cfg
    try:
        with handlers_restored():
            silence_libraries()
            yield
    finally:
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        os.environ.update(environment)
        sys.argv = arguments
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
        GlobalHydra.instance().hydra, HydraConfig.instance().cfg = hydra, config

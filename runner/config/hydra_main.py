"""Hydra's own command line: help, completion and printing of the configuration, and the jobs of a sweep."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from runner.config.arguments import HydraOptions


def show(options: HydraOptions) -> int:
    """Help, completion and printing of the configuration: done by Hydra, without running a job."""
    if not options.completes:
        from runner.config.compose import compose  # imports Hydra

        compose(options.overrides, options.config_dirs)  # Hydra sets up the logging that the files ask for
    try:
        hydra_main(options.for_hydra, lambda cfg: None)
        sys.stdout.flush()
    except BrokenPipeError:  # `runner --help | head`; Python flushes once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def hydra_main(arguments: Sequence[str], job: Callable[[Any], float | None]) -> None:
    """Hydra's own command line, which reads `sys.argv`."""
    import hydra

    from runner.config.compose import CONFIG_NAME, conf_dir, register  # imports Hydra

    register()
    # Hydra would print its own report and exit with 1; here `guarded` handles every error.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    sys.argv = [sys.argv[0], *arguments]
    hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=CONFIG_NAME)(job)()

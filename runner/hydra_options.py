"""The arguments of `python -m runner`, as Hydra's own parser reads them."""

from __future__ import annotations

from collections.abc import Sequence

from runner.errors import UserError
from runner.paths import config_dirs


class HydraOptions:
    """What Hydra's own parser makes of the arguments. Raises UserError for an option it does not know."""

    def __init__(self, arguments: Sequence[str]) -> None:
        from hydra._internal.utils import get_args_parser

        from runner.sweep.resume import KEY, take_resume

        parser = get_args_parser()
        parser.error = _refuse_option  # argparse exits after printing usage
        parsed = parser.parse_intermixed_args(list(arguments))
        #: The id of the sweep that goes on, which is no setting of a run and nothing that Hydra knows.
        self.overrides, self.resumed = take_resume(parsed.overrides)
        #: The same arguments, options first: Hydra's parser would refuse overrides on both sides of `-m`.
        self.ordered = list(arguments)
        for override in parsed.overrides:
            self.ordered.remove(override)
        self.ordered += self.overrides
        self.multirun: bool = parsed.multirun
        if self.resumed and not self.multirun:
            raise UserError(f"{KEY}={self.resumed} goes on with a sweep of several jobs: add -m")
        #: Help, completion and printing of the configuration: nothing is run.
        self.only_shows = bool(parsed.help or parsed.hydra_help or parsed.cfg or parsed.info or parsed.shell_completion)
        if parsed.experimental_rerun:
            raise UserError(
                "--experimental-rerun would unpickle a file, which can run any code: give the overrides again"
            )
        if parsed.config_path or parsed.config_name:
            raise UserError(
                "--config-path and --config-name would replace the runner's own configuration: use --config-dir=FOLDER "
                "to add choices of your own"
            )
        self.config_dirs = config_dirs(parsed.config_dir)

    def add(self, override: str) -> None:
        """One override more, as if it had been given last."""
        self.overrides.append(override)
        self.ordered.append(override)


def _refuse_option(message: str) -> None:
    raise UserError(f"{message}; runner --hydra-help lists the options")

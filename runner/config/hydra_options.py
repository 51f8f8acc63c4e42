"""The arguments of `python -m runner`, as Hydra's own parser reads them."""

from __future__ import annotations

from collections.abc import Sequence

from runner.config.paths import config_dirs
from runner.errors import UserError

#: Names the sweep that a command resumes.
RESUME_SWEEP = "resume_sweep"


def take_resume(overrides: list[str]) -> tuple[list[str], str | None]:
    """The overrides without `resume_sweep=…`, and its value. Raises UserError if it is given twice or is empty."""
    given = [override for override in overrides if override.lstrip("+").partition("=")[0] == RESUME_SWEEP]
    if not given:
        return overrides, None
    value = given[0].partition("=")[2].strip("'\"")
    if len(given) > 1 or not value or "," in value:
        raise UserError(f"{' '.join(given)} is not one sweep: give the id that the sweep printed, {RESUME_SWEEP}=…")
    return [override for override in overrides if override not in given], value


class HydraOptions:
    """What Hydra's own parser makes of the arguments. Raises UserError for an option it does not know."""

    def __init__(self, arguments: Sequence[str]) -> None:
        from hydra._internal.utils import get_args_parser

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
            raise UserError(f"{RESUME_SWEEP}={self.resumed} goes on with a sweep of several jobs: add -m")
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

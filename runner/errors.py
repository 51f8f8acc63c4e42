"""Errors for users that can be fixed, each one sentence, and the terminal that text is printed on."""

from __future__ import annotations

import difflib
import enum
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

#: Control characters (C0 and C1), among them the one that starts commands to a terminal, and those that change the
#: direction in which text is shown, so that it reads as another text.
_DIRECTION = (0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_CONTROL = dict.fromkeys(code for code in (*range(0x20), *range(0x7F, 0xA0), *_DIRECTION) if chr(code) not in "\n\t")


class UserError(Exception):
    """A mistake in the user's settings, data or command.

    The message is one sentence that names the setting, its value and the fix. The command line prints it without
    a traceback and exits with code 2; a sweep marks the job as failed and continues.
    """


class Unavailable(UserError):
    """Data, weights or a tokenizer that are not on this machine and cannot be downloaded now.

    It ends a run like any other mistake; `runner.plan` continues with what is known without them.
    """


class Preempted(KeyboardInterrupt):
    """The run was asked to make room, by SIGTERM or SIGUSR1. `step`: that was saved before it ended, if one was."""

    def __init__(self, step: int | None = None) -> None:
        super().__init__()
        self.step = step


class RunFailed(Exception):
    """A run that cannot go on although its settings are valid: a loss that is not finite, a full disk.

    The message is one sentence that says why and what to try. The command line prints it without a traceback and exits
    with code 1.
    """


class Diverged(RunFailed):
    """Losses, gradients, weights or metrics that are not finite."""


class OutOfMemory(RunFailed):
    """A worker had too little memory for a training step, and could not repeat it alone with smaller micro-batches.

    `accumulation_steps`: how many micro-batches it had; None if it was killed.
    """

    def __init__(self, message: str, accumulation_steps: int | None = None) -> None:
        super().__init__(message)
        self.accumulation_steps = accumulation_steps


def require(ok: bool, setting: str, value: object, rule: str) -> None:
    """Raise UserError unless `ok`. `rule` follows "is invalid: ", such as "use at least 1 sample"."""
    if not ok:
        raise UserError(f"{setting}={shown(value)} is invalid: {rule}")


def not_installed(setting: str, extra: str) -> UserError:
    """The error for a `name=value` whose packages are one of the extras in pyproject.toml."""
    return UserError(f"{setting} needs a package that is not installed: pip install -e '.[{extra}]' in a checkout")


def shown(value: object) -> str:
    """A value as it is written on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return value.name if isinstance(value, enum.Enum) else str(value)


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def nearest(word: str, choices: Iterable[str], count: int = 3) -> list[str]:
    """The choices that are spelt like `word`, at most `count`, best first."""
    choices = list(dict.fromkeys(choices))
    by_lower = {choice.lower(): choice for choice in reversed(choices)}
    close = [by_lower[name] for name in difflib.get_close_matches(word.lower(), by_lower, n=count, cutoff=0.5)]
    # The most common mistake is a correct last part under the wrong path (`lr` for `optimizer.lr`).
    tail = word.lower().rsplit(".", 1)[-1]
    same_tail = [choice for choice in choices if choice.rsplit(".", 1)[-1] == tail and choice not in close]
    return (sorted(same_tail, key=lambda choice: choice.count(".")) + close)[:count]


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """A clause such as `; did you mean 'optimizer.lr'?`; without a close match all choices, if they are few."""
    choices = list(dict.fromkeys(choices))
    close = nearest(word, choices)
    if close:
        return "; did you mean " + " or ".join(f"'{name}'" for name in close) + "?"
    if choices and len(choices) <= 16:
        return "; there are: " + ", ".join(sorted(choices))
    return ""


def printable(text: str) -> str:
    """`text` without control characters: names and error texts come from files, data and servers of others."""
    return text.translate(_CONTROL)


class Terminal(Console):
    """Where every command prints. No text has control characters; only rich's own styles and cursor movements do."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))

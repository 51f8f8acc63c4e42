"""Warnings, and other lines on the error stream, which show no credentials."""

from __future__ import annotations

import logging
import re
import sys

from runner.errors import Terminal

# `user:password@` up to the last @ of the line, since a password may hold an @, a slash or a blank; but not beyond the
# next URL, and not from a port. Or a user name or token alone.
_USERINFO = re.compile(r"(\w[\w+.-]*://)(?:[^\s/:@]+:(?!\d{1,5}(?:\s|$))(?:(?!\w[\w+.-]*://).)*|[^\s/]*)@")
# Parts of names that are clear anywhere in a name, and short ones that must be a whole word of it.
_QUERY = re.compile(
    r"([?&;#](?:[^=&;\s]*(?:passw|pwd|secret|token|key|credential|signature|authorization|odbc_connect)[^=&;\s]*"
    r"|(?:[^=&;\s]*[^a-z=&;\s])?(?:auth|code|pass|sig)(?:[^a-z=&;\s][^=&;\s]*)?)=)[^&\s]+",
    re.IGNORECASE,
)
#: In place of a credential.
MASK = "***"


def masked(text: str) -> str:
    """`text` with `***` for the user part of every URL and for secrets in its query."""
    return _QUERY.sub(rf"\1{MASK}", _USERINFO.sub(rf"\1{MASK}@", text))


class _OnStderr(logging.Handler):
    """Prints on the error stream as it is now, which a job of a sweep leads into a file."""

    def emit(self, record: logging.LogRecord) -> None:
        level = record.levelno
        kind, style = ("", "dim") if level < logging.WARNING else (f"{record.levelname.lower()}: ", "yellow")
        text = kind + masked(record.getMessage())
        terminal = Terminal(stderr=True, highlight=False, emoji=False, soft_wrap=True)
        with terminal.capture() as printed:
            terminal.print(text, style=style, markup=False)
        # Written to the stream that rich has put there while it shows progress: the line is printed above that.
        sys.stderr.write(printed.get())


#: Where everything is logged that may surprise, and what happens before a run begins (`info`).
LOG = logging.getLogger("runner")
LOG.setLevel(logging.INFO)
LOG.propagate = False  # Hydra's handlers would print it again
LOG.addHandler(_OnStderr())

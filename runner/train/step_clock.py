"""Where the time of a step goes."""

from __future__ import annotations

from typing import Any

from runner.backends import Backend

#: `backward` without the communication that it stands still for; `other`: logging, reducing losses, the loop itself.
PHASES = ("data", "forward", "backward", "optimizer", "communication", "other")


class StepClock:
    """Adds up the device's time by phase. A phase ends where the next begins.

    The host's clock would do for a CPU; on a GPU, which runs behind the host, time stamps go through its own queue and
    are read when the host waits for it anyway. A device whose whole step is one program has no phases to tell.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._stamps: list[tuple[str, Any]] = []

    def begin(self, phase: str) -> None:
        stamp = self._backend.record_event()
        if stamp is not None:
            self._stamps.append((phase, stamp))

    def drain(self) -> dict[str, float]:
        """Seconds by phase since the last time, empty where there are none; the device has to have been waited for."""
        if not self._stamps:
            return {}
        seconds = dict.fromkeys(PHASES, 0.0)
        for (phase, start), (_, end) in zip(self._stamps, self._stamps[1:], strict=False):
            seconds[phase] += start.elapsed_time(end) / 1000
        self._stamps = self._stamps[-1:]  # the phase that is going on
        return seconds

"""Seconds of each phase of a step."""

from __future__ import annotations

import time

from megarlhf.cluster import backend, residency, watchdog


class Clock:
    """The phases of one step; their seconds are metrics. The watchdog is told of each phase."""

    def __init__(self, step: int):
        self.step, self.name, self.since = step, "", time.perf_counter()
        self.seconds = {"time/step": 0.0}

    def enter(self, name: str) -> None:
        """Begin a phase. The seconds of a phase that is entered again add up."""
        self.stop()
        watchdog.phase(name, self.step)
        residency.enter(name)
        self.name = f"time/{name}"

    def stop(self) -> None:
        """End the phase."""
        backend.synchronize()
        now = time.perf_counter()
        if self.name:
            self.seconds[self.name] = self.seconds.get(self.name, 0.0) + now - self.since
            self.seconds["time/step"] += now - self.since
        self.name, self.since = "", now

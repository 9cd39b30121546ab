"""What a program tells the person who watches it. One stream, standard error; on a terminal below it a progress bar,
in a file lines alone, each with its time."""

from __future__ import annotations

import contextlib
import sys
import time

from tqdm import tqdm

EVERY = 30.0  # seconds between two lines of progress in a file


def on_terminal() -> bool:
    with contextlib.suppress(Exception):  # closed, or a stream of somebody's own
        return sys.stderr.isatty()
    return False


def say(message: str) -> None:
    """A message: on a terminal above the progress bar, in a file with the time in front."""
    if on_terminal():
        tqdm.write(message, file=sys.stderr)
        return
    print(time.strftime("%Y-%m-%d %H:%M:%S"), message, file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """1:02:03 or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Progress:
    """How far a program is: a bar on a terminal, lines in a file. `unit` is what is counted."""

    def __init__(self, total: int, unit: str, *, done: int = 0, enabled: bool = True):
        self.total, self.unit, self.done, self.first, self.enabled = total, unit, done, done, enabled
        self.started = self.told = time.monotonic()
        bar = enabled and on_terminal()
        self.bar = tqdm(total=total, initial=done, unit=unit, unit_scale=unit != "step", dynamic_ncols=True,
                        smoothing=0.1) if bar else None  # fmt: skip

    def to(self, done: int, shown: dict[str, str] | None = None) -> None:
        """`done` of `total`. `shown`: numbers by name. With them a file has a line each time, otherwise one now and
        then."""
        self.done = done
        if self.bar is not None:
            self.bar.set_postfix(shown or {}, refresh=False)
            self.bar.update(done - self.bar.n)
        elif self.enabled and (shown is not None or time.monotonic() - self.told >= EVERY):
            self._tell(shown or {})

    def add(self, count: int) -> None:
        self.to(self.done + count)

    def _tell(self, shown: dict[str, str]) -> None:
        self.told = time.monotonic()
        rate = (self.done - self.first) / max(self.told - self.started, 1e-9)
        numbers = [f"{name} {value}" for name, value in shown.items()]
        if self.unit != "step":
            numbers.append(f"{rate:,.0f} {self.unit}/s")
        if rate and self.done < self.total:
            numbers.append(f"{duration((self.total - self.done) / rate)} left")
        say(f"{self.unit} {self.done:,} of {self.total:,}: {', '.join(numbers)}")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """The last line, unless it was told."""
        if self.bar is not None:
            self.bar.close()
        elif self.enabled and self.unit != "step":
            self._tell({})

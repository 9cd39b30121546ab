"""USR1 and TERM, from the program's first line on; imports neither torch nor megatron.

USR1 is always remembered: the loop acts at its first safe point. TERM is remembered once the ranks have met; before
that there is nothing to save, and the process leaves at once.
"""

from __future__ import annotations

import os
import signal

STAY, REQUEUE, END = 0, 1, 2  # the larger wins when ranks disagree

_asked = STAY


def asked() -> int:
    """The strongest request of the signals so far: STAY, REQUEUE or END."""
    return _asked


def watch() -> None:
    """Install the handlers. Call it first of all: importing torch takes minutes on a cold file system."""
    signal.signal(signal.SIGUSR1, _remember)
    signal.signal(signal.SIGTERM, _leave)


def remember() -> None:
    """From now on both signals ask for a save and do not end the process."""
    signal.signal(signal.SIGUSR1, _remember)
    signal.signal(signal.SIGTERM, _remember)


def end_at_once() -> None:
    """From now on both signals end the process; one that was remembered before ends it now."""
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    if _asked != STAY:
        signal.raise_signal(signal.SIGTERM if _asked == END else signal.SIGUSR1)


def _remember(number: int, _) -> None:
    global _asked
    _asked = max(_asked, REQUEUE if number == signal.SIGUSR1 else END)


def _leave(number: int, _) -> None:
    # srun returns the highest status of all ranks: that of the first failed rank must win over those ended by TERM.
    os._exit(1 if "SLURM_PROCID" in os.environ else 128 + number)

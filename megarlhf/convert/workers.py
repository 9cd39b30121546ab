"""One process, or the ranks of `mpirun -n N megarlhf convert ...`: the division of the work, and a common
failure."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from megarlhf.config import UserError


class Workers:
    def __init__(self):
        size = next((os.environ[name] for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE") if name in os.environ), "1")
        self.rank, self.size, self._comm = 0, 1, None
        if int(size) > 1:
            try:
                from mpi4py import MPI
            except ImportError:
                raise UserError("mpirun: the package mpi4py is missing; install it, or run without mpirun")
            self._comm = MPI.COMM_WORLD
            self.rank, self.size = self._comm.rank, self._comm.size
            if self.size != int(size):
                raise UserError(
                    f"mpirun: started {size} processes, but mpi4py sees {self.size}; it was built for another MPI than "
                    "this mpirun's"
                )

    def together(self, action: Callable[[], Any]) -> list[Any]:
        """The results of `action` on all processes. If it fails on one process, it fails on all, with the first failing
        rank's message."""
        if self._comm is None:
            return [action()]
        failure, result = None, None
        try:
            result = action()
        except (UserError, OSError) as error:
            failure = str(error)
        answers = self._comm.allgather((result, failure))
        for _, failure in answers:
            if failure is not None:
                raise UserError(failure)
        return [result for result, _ in answers]

    def first(self, action: Callable[[], Any]) -> Any:
        """The result of `action`, which only the first process runs."""
        return self.together(lambda: action() if self.rank == 0 else None)[0]

    def progressed(self) -> None:
        """A part of an action is done: for whoever watches over long ones. Any thread may call it."""

    def abort(self) -> None:
        """End the other processes, which may be waiting for this one."""
        if self._comm is not None:
            self._comm.Abort(1)

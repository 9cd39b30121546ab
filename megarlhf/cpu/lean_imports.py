"""Imports of libraries that prepare for GPUs and compilers, without Triton and torch's compiler."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch
import torch.compiler


@contextlib.contextmanager
def lean_imports() -> Iterator[None]:
    """While this is open, Triton cannot be imported and `torch.compile` returns its argument. The two would cost every
    rank 110 MiB and seconds, and torch.compile a C++ compiler at the first call."""
    compilers = {(torch, "compile"): torch.compile, (torch.compiler, "disable"): torch.compiler.disable}
    hides_triton = "triton" not in sys.modules
    for module, name in compilers:
        setattr(module, name, lambda model=None, **_: model if model is not None else (lambda function: function))
    if hides_triton:
        sys.modules["triton"] = None  # importing it raises ImportError
    try:
        yield
    finally:
        for (module, name), function in compilers.items():
            setattr(module, name, function)
        if hides_triton:
            del sys.modules["triton"]

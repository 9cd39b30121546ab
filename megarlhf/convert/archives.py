"""`.nemo` archives: unpacked in full beside the target, and removed afterwards."""

from __future__ import annotations

import contextlib
import lzma
import shutil
import tarfile
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

from megarlhf.config import UserError
from megarlhf.convert.storage import lock

PREFIX = ".nemo-"
# Weights hardly compress. An archive that unpacks to more than this many times its size is an attack on the disk.
RATIO = 100


@contextlib.contextmanager
def unpacked(source: Path, beside: Path) -> Iterator[Path]:
    """A `.nemo` archive as a directory. A directory is returned as it is; a file is unpacked in `beside` and removed at
    the end."""
    if source.is_dir():
        yield source
        return
    beside.mkdir(parents=True, exist_ok=True)
    _sweep(beside)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=beside) as directory, lock(Path(directory, "lock")):
        content = Path(directory, "content")
        content.mkdir()
        unpack(source, content)
        yield content


def _sweep(beside: Path) -> None:
    """Remove the remains of killed conversions in `beside`: directories without a held lock."""
    for left in beside.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError, UserError):
            if time.time() - left.stat().st_mtime > 60:  # a new one has its lock by then
                with lock(left / "lock", certain=True):
                    shutil.rmtree(left)


def unpack(source: Path, directory: Path) -> None:
    """Only plain files and folders, only into `directory`: an archive can name any path, links that lead away, and
    files of any size with nothing in them. It is read to its end, where gzip and xz keep their checksums."""
    try:
        room = min(source.stat().st_size * RATIO, shutil.disk_usage(directory).free)
        with tarfile.open(source, "r:*") as archive:
            for member in archive:
                parts = Path(member.name).parts
                plain = (member.isfile() and not member.issparse()) or member.isdir()
                if member.name.startswith("/") or ".." in parts or not plain:
                    raise UserError(
                        f"{source}: refused, its member '{member.name}' leads out of the archive or is no plain file"
                    )
                path = directory.joinpath(*parts)
                if member.isdir():
                    path.mkdir(parents=True, exist_ok=True)
                    continue
                room -= member.size
                if room < 0:
                    raise UserError(
                        f"{source}: its member '{member.name}' of {member.size} bytes does not fit on the disk, or is "
                        f"more than an archive of {source.stat().st_size} bytes can have; make room, or unpack it and "
                        "give the directory"
                    )
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(path, "xb") as file:
                    shutil.copyfileobj(archive.extractfile(member), file, 1 << 24)
            while rest := archive.fileobj.read(1 << 24):
                room -= len(rest)
                if room < 0:
                    raise UserError(f"{source}: goes on for longer than any .nemo; unpack it and give the directory")
    except FileExistsError:
        raise UserError(f"{source}: its member '{member.name}' stands twice in it; pack it again")
    except OSError as error:
        raise UserError(f"{source}: cannot be read ({error}); give a .nemo file, or the directory it unpacks to")
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, ValueError) as error:
        raise UserError(f"{source}: not a complete .nemo archive ({error}); fetch it again")

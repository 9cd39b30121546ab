"""The CRC-32 of zip members, which torch.save writes and torch.load does not check."""

from __future__ import annotations

import io
import os
import zipfile
from typing import BinaryIO

CHUNK = 1 << 24


def verify_members(file: BinaryIO, offset: int = 0, length: int | None = None) -> None:
    """Read the zip in `length` bytes of `file` from `offset`; raises one of zipfile's errors if a member does not have
    its CRC. Members without a CRC are not read: torch can leave it out, as our own writers do (checksums.py)."""
    length = os.fstat(file.fileno()).st_size - offset if length is None else length
    with zipfile.ZipFile(_Part(file, offset, length)) as archive:
        for member in archive.infolist():
            if member.compress_type != zipfile.ZIP_STORED:
                raise zipfile.BadZipFile(f"member {member.filename} is compressed, which torch.save never does")
            if member.CRC:
                with archive.open(member) as content:  # which compares at the end
                    while content.read(CHUNK):
                        pass


class _Part(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, file: BinaryIO, offset: int, length: int):
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence])
        return self._at

    def readinto(self, buffer) -> int:
        self._file.seek(self._offset + self._at)
        view = memoryview(buffer)[: max(0, self._length - self._at)]
        count = self._file.readinto(view)
        self._at += count
        return count

"""Records of a torch archive: stored in a zip, each beginning at a multiple of 64 bytes, so that a reader can map it.

Does not live here: what the records hold (`export.weights_file`, `original.pickles`, which call this). Loads no torch.
"""

from __future__ import annotations

import struct
import zipfile
from typing import IO

__all__ = ["ALIGNMENT_NBYTES", "open_record"]

ALIGNMENT_NBYTES = 64

_LOCAL_HEADER_NBYTES = 30
_ZIP64_FIELD_NBYTES = 20
_ZIP64_FROM_NBYTES = 1 << 30
"""Where `zipfile` would not insist on it yet: it goes by a size with 5 % added."""

_PADDING_FIELD = 0x4246
"""The zip field in which torch hides its padding."""


def open_record(archive: zipfile.ZipFile, name: str, nbytes: int) -> IO[bytes]:
    """Begin a record, which is written before the next one begins.

    Args:
        archive: open for writing, into a file or a pipe.
        name: with the archive's folder.
        nbytes: that will be written.
    """
    info = zipfile.ZipInfo(name)  # dated 1980: equal content gives equal files
    is_large = nbytes > _ZIP64_FROM_NBYTES
    assert archive.fp is not None  # it is open for writing
    begin = archive.fp.tell() + _LOCAL_HEADER_NBYTES + len(name.encode()) + (_ZIP64_FIELD_NBYTES if is_large else 0)
    padding_nbytes = -(begin + struct.calcsize("<HH")) % ALIGNMENT_NBYTES
    info.extra = struct.pack("<HH", _PADDING_FIELD, padding_nbytes) + bytes(padding_nbytes)
    return archive.open(info, "w", force_zip64=is_large)

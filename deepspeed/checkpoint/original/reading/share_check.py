"""One rank's share of a check of all archives of a checkpoint.

Lives here: who checks what, and the error. Does not live here: the check of one archive (`original.archive`). Called by the
sources.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from deepspeed.checkpoint.agreement import Ranks
from deepspeed.checkpoint.disk.file_check import share_files
from deepspeed.checkpoint.original.archive import check_archive
from deepspeed.errors import CheckpointDamagedError

__all__ = ["check_share"]


def check_share(folder: Path, files: Iterable[Path], ranks: Ranks) -> None:
    """Compare this rank's share of the archives with the checksums in them; bytes are shared out evenly. Not collective.

    Raises:
        CheckpointDamagedError: naming every file that is missing, cut short or changed.
    """
    sizes = {str(file): file.stat().st_size if file.is_file() else 0 for file in files}
    own = share_files(sizes, ranks.world_size)[ranks.rank]
    faults = {str(Path(file).relative_to(folder)): fault for file in own if (fault := check_archive(Path(file)))}
    if faults:
        listed = "; ".join(f"{file}: {fault}" for file, fault in sorted(faults.items()))
        raise CheckpointDamagedError(
            f"checkpoint {folder} is damaged: {listed}. Nothing was loaded. Load an older tag, or bring the files again "
            "from where they were copied."
        )

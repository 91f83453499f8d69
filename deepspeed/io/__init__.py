"""Writers of one file each, for `torch.save` and other code that calls `write`: past the page cache, plain, or counting.

    handle = AsyncIOBuilder().load().aio_handle()
    buffer = handle.new_cpu_locked_tensor(1 << 26, torch.empty(0, dtype=torch.uint8))
    with FastFileWriter(path, FastFileWriterConfig(handle, buffer)) as file:
        torch.save(state, file)

`deepspeed.checkpoint` has a writer of its own, chosen by `checkpoint.writer`; this room is for scripts.
"""

from __future__ import annotations

from deepspeed.io.writers import BaseFileWriter, FastFileWriter, FastFileWriterConfig, MockFileWriter, PyFileWriter

__all__ = ["BaseFileWriter", "FastFileWriter", "FastFileWriterConfig", "MockFileWriter", "PyFileWriter"]

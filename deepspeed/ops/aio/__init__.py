"""Asynchronous input and output of files: `engine` for this package, the documented `aio_handle` for scripts."""

from deepspeed.common.lazy import attach
from deepspeed.ops.op_builder import AsyncIOBuilder

__all__ = ["AsyncIOBuilder", "aio_handle", "aio_read", "aio_write", "deepspeed_memcpy"]

_HANDLE = "deepspeed.ops.aio.handle"

__getattr__, __dir__ = attach(  # what needs torch is imported when it is used
    __name__,
    names={
        "aio_handle": f"{_HANDLE}:AioHandle",
        "aio_read": f"{_HANDLE}:aio_read",
        "aio_write": f"{_HANDLE}:aio_write",
        "deepspeed_memcpy": f"{_HANDLE}:deepspeed_memcpy",
    },
)

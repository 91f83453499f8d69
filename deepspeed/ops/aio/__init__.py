"""Asynchronous input and output of files: `engine` for this package, the documented `aio_handle` for scripts."""

from deepspeed.ops.op_builder import AsyncIOBuilder

__all__ = ["AsyncIOBuilder"]

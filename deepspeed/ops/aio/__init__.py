"""Asynchronous input and output: so far only the builder that says whether it is there (clients ask before they use it)."""

from deepspeed.ops.op_builder import AsyncIOBuilder

__all__ = ["AsyncIOBuilder"]

"""Operators: optimizers, asynchronous input and output, and the table that describes them (`op_builder`)."""

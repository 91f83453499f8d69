"""Tensor parallelism: layers of which each rank has a part.

`auto` cuts a model that knows nothing of ranks; `plan`, `attention`, `heads` and `search` say where; `layers` are the parts.
"""

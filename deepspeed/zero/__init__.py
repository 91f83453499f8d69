"""ZeRO: who keeps which part of gradients, optimizer state and parameters, and how a step brings them together.

    flat        parameters and gradients as views of flat buffers
    reducer     gradients become their mean over ranks, bucket by bucket, during backward (row_sparse: embedding tables)
    norm        global norm and non-finite check in one pass
    master      unscale, clip, update, write back: one walk over the full-precision values
    optimizer   one update from reduced gradients to new weights; what `initialize` returns
    state_io    optimizer state by parameter name
    access      weight, gradient and state of one parameter, for clients

Today the shard axis has one rank (stage 0); docs/adr/0007-one-path-for-every-zero-stage.md says why stage 0 has no path
of its own. Import the module that you need; this door loads none of them.
"""

from __future__ import annotations

__all__ = ["access", "flat", "master", "norm", "optimizer", "reducer", "row_sparse", "state_io"]

"""ZeRO: who keeps which part of gradients, optimizer state and parameters, and how a step brings them together.

    for clients
      init_context   `Init`: shard a model while it is built (init_settings, construction; shard keeps the shards)
      gather         `GatheredParameters`: whole values inside a block
      external       parameters that a module uses and another owns
      leaf           modules that are gathered as one unit
      tiling         `TiledLinear`
      memory_needs   tables of memory, before a run is started
      access         weight, gradient and state of one parameter
      published      the attributes `ds_...` of a sharded parameter
    for the engine
      flat           parameters in flat layouts, cut into shards
      gradients      where gradients accumulate
      reducer        gradients become their mean over ranks, bucket by bucket, during backward (row_sparse: embedding tables)
      norm           global norm and non-finite check in one pass
      master         unscale, clip, update, write back: one walk over the full-precision values
      threaded       the same walk in two threads: `ratio`, `super_offload`
      zenflow        the update by importance: some columns at once, the rest later
      optimizer      one update from reduced gradients to new weights; what `initialize` returns
      state_io       optimizer state by parameter name
      holder         who keeps a sharded parameter
      units, trace, prefetch, coordinator    stage 3: what is gathered together, when, and for how long

docs/adr/0008-sharded-stages.md says how the stages are one layout. Inside the library, import the module that you need; the
names for clients load when first used.
"""

from __future__ import annotations

from deepspeed.common.lazy import attach

__all__ = [
    "GatheredParameters",
    "Init",
    "TiledLinear",
    "TiledLinearReturnBias",
    "ZeroParamStatus",
    "ZeroParamType",
    "partition_parameters",
    "register_external_parameter",
    "unwrap_model_for_generation",
]

UNBUILT = {
    name: f"deepspeed.zero.{name} is not built yet in this version; see the table in README.md"
    for name in ("DeepSpeedTensorOverride", "DeepSpeedZeRoOffload", "MiCS_Init")
}
"""Documented names that this version does not have, with the sentence that says so."""

__getattr__, __dir__ = attach(
    __name__,
    names={
        "GatheredParameters": "deepspeed.zero.gather:GatheredParameters",
        "Init": "deepspeed.zero.init_context:Init",
        "TiledLinear": "deepspeed.zero.tiling:TiledLinear",
        "TiledLinearReturnBias": "deepspeed.zero.tiling:TiledLinearReturnBias",
        "ZeroParamStatus": "deepspeed.zero.published:ZeroParamStatus",
        "ZeroParamType": "deepspeed.zero.published:ZeroParamType",
        "partition_parameters": "deepspeed.zero.init_context",
        "register_external_parameter": "deepspeed.zero.external:register_external_parameter",
        "unwrap_model_for_generation": "deepspeed.zero.gather:unwrap_model_for_generation",
    },
    unbuilt=UNBUILT,
)

"""Door for an old path: layers of parts, under the names that clients ask `isinstance` of."""

from __future__ import annotations

from deepspeed.tensor_parallel.layers import ColumnLinear as LinearLayer
from deepspeed.tensor_parallel.layers import ColumnLinear as SubParamLinearLayer
from deepspeed.tensor_parallel.layers import RowLinear as LinearAllreduce
from deepspeed.tensor_parallel.layers import RowLinear as SubParamLinearAllreduce
from deepspeed.tensor_parallel.layers import VocabularyEmbedding as EmbeddingLayer
from deepspeed.tensor_parallel.whole import GatherReplacedLayerParams

__all__ = [
    "EmbeddingLayer",
    "GatherReplacedLayerParams",
    "LinearAllreduce",
    "LinearLayer",
    "SubParamLinearAllreduce",
    "SubParamLinearLayer",
]

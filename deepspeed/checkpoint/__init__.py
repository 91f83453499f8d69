"""What is on disk, and how to write and read it. This room knows files, names and ranks, not models or optimizers.

    save_dir/
      latest                      text: the tag that a load without a tag takes
      <tag>/
        manifest.json             what there is: tensors, fragments, files and their hashes, state; guarded by a checksum
        client_state.json         the user's state; its tensors lie in the first rank's shard
        rank_00000.safetensors    what rank 0 wrote, and its `rank_state`
        rank_00001.safetensors    ...

Tensors are described globally (name, shape, dtype) and stored as fragments of their flattened form, so any rank of any
later job asks for the range it needs, whoever wrote it. There is no pickle anywhere.
The page `docs/reference/checkpoint-format.md` describes every field; `docs/adr/0003-checkpoint-format.md` says why.

    engine --- Piece --> save (background, writer) --> disk: container, client_state, manifest --> folders, storage (commit)
    engine <-- tensors - opening.open_checkpoint <-- reader | original.reading <-- tags (which folder)
                             every decision by `agreement.together`: all ranks go on, or all raise the same error
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed.common.lazy import attach

if TYPE_CHECKING:  # what type checkers see; a test holds it equal to _NAMES
    from deepspeed.checkpoint.constants import ORIGINAL_VOCAB_SIZE as ORIGINAL_VOCAB_SIZE
    from deepspeed.checkpoint.constants import PADDED_VOCAB_SIZE as PADDED_VOCAB_SIZE
    from deepspeed.checkpoint.constants import PARAMETER_TO_AVERAGE_PATTERNS as PARAMETER_TO_AVERAGE_PATTERNS
    from deepspeed.checkpoint.constants import PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0 as PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0
    from deepspeed.checkpoint.constants import (
        PARAMETER_WITH_ROW_PARALLELISM_PATTERNS as PARAMETER_WITH_ROW_PARALLELISM_PATTERNS,
    )
    from deepspeed.checkpoint.constants import PARAMETER_WITH_SUB_PARAMS as PARAMETER_WITH_SUB_PARAMS
    from deepspeed.checkpoint.constants import (
        PIPELINE_REPLICATED_PARAMETER_PATTERNS as PIPELINE_REPLICATED_PARAMETER_PATTERNS,
    )
    from deepspeed.checkpoint.constants import TP_REPLICATED_PARAMETER_PATTERNS as TP_REPLICATED_PARAMETER_PATTERNS
    from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_INFO as UNIVERSAL_CHECKPOINT_INFO
    from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_VERSION_KEY as UNIVERSAL_CHECKPOINT_VERSION_KEY
    from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_VERSION_VALUE as UNIVERSAL_CHECKPOINT_VERSION_VALUE
    from deepspeed.checkpoint.constants import VOCABULARY_PARAMETER_PATTERNS as VOCABULARY_PARAMETER_PATTERNS
    from deepspeed.checkpoint.disk.client_state import UnstorableStateError as UnstorableStateError
    from deepspeed.checkpoint.disk.client_state import decode_client_state as decode_client_state
    from deepspeed.checkpoint.disk.client_state import encode_client_state as encode_client_state
    from deepspeed.checkpoint.disk.manifest import Manifest as Manifest
    from deepspeed.checkpoint.disk.tags import list_tags as list_tags
    from deepspeed.checkpoint.moments import read_optimizer_state as read_optimizer_state
    from deepspeed.checkpoint.opening import open_checkpoint as open_checkpoint
    from deepspeed.checkpoint.original.published.deepspeed_checkpoint import DeepSpeedCheckpoint as DeepSpeedCheckpoint
    from deepspeed.checkpoint.original.published.merging import merge_state as merge_state
    from deepspeed.checkpoint.original.published.reshape import model_3d_desc as model_3d_desc
    from deepspeed.checkpoint.original.published.reshape import reshape_meg_2d_parallel as reshape_meg_2d_parallel
    from deepspeed.checkpoint.original.published.stage_file_names import (
        get_layer_ckpt_name_for_rank as get_layer_ckpt_name_for_rank,
    )
    from deepspeed.checkpoint.original.published.stage_file_names import (
        get_model_ckpt_name_for_rank as get_model_ckpt_name_for_rank,
    )
    from deepspeed.checkpoint.original.published.stage_file_names import (
        get_zero_ckpt_name_for_rank as get_zero_ckpt_name_for_rank,
    )
    from deepspeed.checkpoint.original.published.zero_checkpoint import ZeROCheckpoint as ZeROCheckpoint
    from deepspeed.checkpoint.reader import CheckpointReader as CheckpointReader
    from deepspeed.checkpoint.save.piece import Piece as Piece
    from deepspeed.checkpoint.source import CheckpointSource as CheckpointSource
    from deepspeed.checkpoint.source import EngineState as EngineState
    from deepspeed.checkpoint.tag_agreement import resolve_tag as resolve_tag
    from deepspeed.checkpoint.universal_checkpoint import SubparamShape as SubparamShape
    from deepspeed.checkpoint.universal_checkpoint import enable_universal_checkpoint as enable_universal_checkpoint

_NAMES = {
    "CheckpointReader": "deepspeed.checkpoint.reader:CheckpointReader",
    "CheckpointSource": "deepspeed.checkpoint.source:CheckpointSource",
    "DeepSpeedCheckpoint": "deepspeed.checkpoint.original.published.deepspeed_checkpoint:DeepSpeedCheckpoint",
    "EngineState": "deepspeed.checkpoint.source:EngineState",
    "Manifest": "deepspeed.checkpoint.disk.manifest:Manifest",
    "ORIGINAL_VOCAB_SIZE": "deepspeed.checkpoint.constants:ORIGINAL_VOCAB_SIZE",
    "PADDED_VOCAB_SIZE": "deepspeed.checkpoint.constants:PADDED_VOCAB_SIZE",
    "PARAMETER_TO_AVERAGE_PATTERNS": "deepspeed.checkpoint.constants:PARAMETER_TO_AVERAGE_PATTERNS",
    "PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0": "deepspeed.checkpoint.constants:PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0",
    "PARAMETER_WITH_ROW_PARALLELISM_PATTERNS": "deepspeed.checkpoint.constants:PARAMETER_WITH_ROW_PARALLELISM_PATTERNS",
    "PARAMETER_WITH_SUB_PARAMS": "deepspeed.checkpoint.constants:PARAMETER_WITH_SUB_PARAMS",
    "PIPELINE_REPLICATED_PARAMETER_PATTERNS": "deepspeed.checkpoint.constants:PIPELINE_REPLICATED_PARAMETER_PATTERNS",
    "Piece": "deepspeed.checkpoint.save.piece:Piece",
    "SubparamShape": "deepspeed.checkpoint.universal_checkpoint:SubparamShape",
    "TP_REPLICATED_PARAMETER_PATTERNS": "deepspeed.checkpoint.constants:TP_REPLICATED_PARAMETER_PATTERNS",
    "UNIVERSAL_CHECKPOINT_INFO": "deepspeed.checkpoint.constants:UNIVERSAL_CHECKPOINT_INFO",
    "UNIVERSAL_CHECKPOINT_VERSION_KEY": "deepspeed.checkpoint.constants:UNIVERSAL_CHECKPOINT_VERSION_KEY",
    "UNIVERSAL_CHECKPOINT_VERSION_VALUE": "deepspeed.checkpoint.constants:UNIVERSAL_CHECKPOINT_VERSION_VALUE",
    "UnstorableStateError": "deepspeed.checkpoint.disk.client_state:UnstorableStateError",
    "VOCABULARY_PARAMETER_PATTERNS": "deepspeed.checkpoint.constants:VOCABULARY_PARAMETER_PATTERNS",
    "ZeROCheckpoint": "deepspeed.checkpoint.original.published.zero_checkpoint:ZeROCheckpoint",
    "decode_client_state": "deepspeed.checkpoint.disk.client_state:decode_client_state",
    "enable_universal_checkpoint": "deepspeed.checkpoint.universal_checkpoint:enable_universal_checkpoint",
    "encode_client_state": "deepspeed.checkpoint.disk.client_state:encode_client_state",
    "get_layer_ckpt_name_for_rank": "deepspeed.checkpoint.original.published.stage_file_names:get_layer_ckpt_name_for_rank",
    "get_model_ckpt_name_for_rank": "deepspeed.checkpoint.original.published.stage_file_names:get_model_ckpt_name_for_rank",
    "get_zero_ckpt_name_for_rank": "deepspeed.checkpoint.original.published.stage_file_names:get_zero_ckpt_name_for_rank",
    "list_tags": "deepspeed.checkpoint.disk.tags:list_tags",
    "merge_state": "deepspeed.checkpoint.original.published.merging:merge_state",
    "model_3d_desc": "deepspeed.checkpoint.original.published.reshape:model_3d_desc",
    "open_checkpoint": "deepspeed.checkpoint.opening:open_checkpoint",
    "read_optimizer_state": "deepspeed.checkpoint.moments:read_optimizer_state",
    "reshape_meg_2d_parallel": "deepspeed.checkpoint.original.published.reshape:reshape_meg_2d_parallel",
    "resolve_tag": "deepspeed.checkpoint.tag_agreement:resolve_tag",
}
"""Loaded when first used: the commands that export weights read this room without torch, whose import would be most of their
time."""

__all__ = [*_NAMES]

__getattr__, __dir__ = attach(__name__, submodules=("constants", "universal_checkpoint", "utils"), names=_NAMES)

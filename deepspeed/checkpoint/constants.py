"""Published names for the keys of `universal_checkpoint_info`, by which a model says how its parameters are cut.

    model.universal_checkpoint_info = {UNIVERSAL_CHECKPOINT_VERSION_KEY: UNIVERSAL_CHECKPOINT_VERSION_VALUE,
                                       PARAMETER_WITH_ROW_PARALLELISM_PATTERNS: [r".*dense_4h_to_h.weight"], ...}

Values are lists of regular expressions (`re.match` against parameter names) unless said otherwise. Does not live here: what
is done with them (`original.reading.tensor_parallel`, `original.writing.to_universal`). Called by users and by those
modules.
"""

from __future__ import annotations

__all__ = [
    "ORIGINAL_VOCAB_SIZE",
    "PADDED_VOCAB_SIZE",
    "PARAMETER_TO_AVERAGE_PATTERNS",
    "PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0",
    "PARAMETER_WITH_ROW_PARALLELISM_PATTERNS",
    "PARAMETER_WITH_SUB_PARAMS",
    "PIPELINE_REPLICATED_PARAMETER_PATTERNS",
    "TP_REPLICATED_PARAMETER_PATTERNS",
    "UNIVERSAL_CHECKPOINT_INFO",
    "UNIVERSAL_CHECKPOINT_VERSION_KEY",
    "UNIVERSAL_CHECKPOINT_VERSION_VALUE",
    "VOCABULARY_PARAMETER_PATTERNS",
]

UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"
UNIVERSAL_CHECKPOINT_VERSION_KEY = "universal_checkpoint_version"
UNIVERSAL_CHECKPOINT_VERSION_VALUE = 0.4

ORIGINAL_VOCAB_SIZE = "original_vocab_size"
"""Rows of the vocabulary; a number."""

PADDED_VOCAB_SIZE = "padded_vocab_size"
"""Rows with the padding that makes them divisible; a number."""

VOCABULARY_PARAMETER_PATTERNS = "vocabulary_parameter_patterns"
"""Parameters with one row per word: their padding rows are cut off."""

PIPELINE_REPLICATED_PARAMETER_PATTERNS = "pipeline_replicated_parameter_patterns"
TP_REPLICATED_PARAMETER_PATTERNS = "tp_replicated_parameter_patterns"
PARAMETER_TO_AVERAGE_PATTERNS = "parameter_to_average_patterns"

PARAMETER_WITH_ROW_PARALLELISM_PATTERNS = "parameter_with_row_parallelism_patterns"
"""Joined along dimension 1; without a pattern: dimension 0."""

PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0 = "parameter_with_2_sub_params_cat_dim_0"
"""Two equal sub-parameters over each other, each cut by itself."""

PARAMETER_WITH_SUB_PARAMS = "parameter_with_sub_params"
"""List of `SubparamShape`, or of dictionaries with its fields."""

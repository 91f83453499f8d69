"""The original's two layouts, stage files and universal folders: the only room that knows them, or touches a pickle.

    here       archive (one .pt file, restricted; classes become `stand_ins`), pickles (archives that name the original's
               classes), files (the grammar of names), zero_layout (where a parameter lies in flat shards)
    reading    model_ranks -> rank_slices (slices, unsharded, experts) -> tensor_parallel, affine, pipeline -> `StageSource`;
               universal -> `UniversalSource`; assembled (global tensors out of pieces)
    writing    to_stages, to_universal
    published  what clients of the original import

Does not live here: anything about our own layout, or about engines. Called by `checkpoint.opening` and the converters.
"""

from __future__ import annotations

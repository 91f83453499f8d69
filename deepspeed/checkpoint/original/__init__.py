"""The original's two layouts, stage files and universal folders: the only room that knows them, or touches a pickle.

    reading   archive (one .pt file, restricted; classes become `stand_ins`), files (the grammar of names), assembled (global
              tensors out of pieces), zero_layout (where a parameter lies in flat shards)
    stages    model_ranks -> rank_slices (slices, unsharded, experts) -> tensor_parallel, affine, pipeline -> `StageSource`
    universal `UniversalSource`: a universal folder as a `CheckpointSource`
    writing   pickles (archives that name the original's classes), to_stages, to_universal

Does not live here: anything about our own layout, or about engines. Called by `checkpoint.opening` and the converters.
"""

from __future__ import annotations

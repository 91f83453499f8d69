"""The original's two layouts, stage files and universal folders: the only room that knows them, or touches a pickle.

    archive   one .pt file, by torch's restricted unpickler; classes of the original become plain `stand_ins`
    files     the grammar of the file names
    assembled global tensors out of pieces that lie in many files
    stages    `StageSource`: stage files as a `CheckpointSource`
    universal `UniversalSource`: a universal folder as a `CheckpointSource`

Does not live here: anything about our own layout, or about engines. Called by `checkpoint.opening` and the converters.
"""

from __future__ import annotations

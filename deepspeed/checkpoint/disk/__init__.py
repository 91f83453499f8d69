"""The bytes of our own format: files and folders, containers, the manifest, hashes, tags, plain values as JSON.

    storage (durable bytes) <- folders (written aside, committed by a rename) <- tags, layouts (which folder is meant)
    safetensors_header <- container (tensors), manifest (what there is), client_state (plain values), file_check (hashes)

Does not live here: which rank writes what (`save`), reading on request (`reader`). Nothing here talks to other ranks.
"""

from __future__ import annotations

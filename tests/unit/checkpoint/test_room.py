"""The door of the room: names that load when first used."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import deepspeed.checkpoint


def test_what_type_checkers_see_is_what_attribute_access_finds() -> None:
    tree = ast.parse(Path(deepspeed.checkpoint.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname: f"{node.module}:{alias.name}"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == deepspeed.checkpoint._NAMES
    assert all(getattr(deepspeed.checkpoint, name) is not None for name in deepspeed.checkpoint.__all__)


def test_names_that_clients_of_the_original_import_are_there_and_cost_no_torch() -> None:
    code = (
        "import sys; import deepspeed.checkpoint as room; from deepspeed.checkpoint import constants; "
        "assert {*constants.__all__} <= {*room.__all__}; room.ORIGINAL_VOCAB_SIZE; assert 'torch' not in sys.modules; "
        "from deepspeed.checkpoint import DeepSpeedCheckpoint, ZeROCheckpoint, SubparamShape, enable_universal_checkpoint; "
        "from deepspeed.checkpoint import model_3d_desc, reshape_meg_2d_parallel, merge_state; "
        "from deepspeed.checkpoint.utils import get_layer_ckpt_name_for_rank, get_model_ckpt_name_for_rank; "
        "from deepspeed.checkpoint.utils import get_zero_ckpt_name_for_rank as name; "
        "assert name is room.get_zero_ckpt_name_for_rank"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_dotted_access_works_when_only_the_package_was_imported() -> None:
    code = "import deepspeed; deepspeed.checkpoint.utils.clone_tensors_for_torch_save; deepspeed.checkpoint.open_checkpoint"
    subprocess.run([sys.executable, "-c", code], check=True)

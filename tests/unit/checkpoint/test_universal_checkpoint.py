from __future__ import annotations

import torch

from deepspeed.checkpoint import constants
from deepspeed.checkpoint.original.reading.assembled import Pieces, Stored
from deepspeed.checkpoint.original.reading.tensor_parallel import TensorParallelRules
from deepspeed.checkpoint.original.stand_ins import GLOBAL_NAMES
from deepspeed.checkpoint.universal_checkpoint import SubparamShape, enable_universal_checkpoint


def test_pickles_name_the_class_that_is_published() -> None:
    assert GLOBAL_NAMES[SubparamShape] == f"deepspeed.checkpoint.universal_checkpoint.{SubparamShape.__name__}"
    assert SubparamShape(patterns=["qkv"], shape=(3, -1), partition_dim=0).partition_dim == 0


def test_parameters_are_enabled_as_they_are() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    before = set(dir(param))
    enable_universal_checkpoint([param])
    assert set(dir(param)) == before


def test_the_published_keys_are_those_that_the_reader_knows() -> None:
    def slices() -> list[Stored]:
        return [Stored((2, 3), torch.float32, Pieces([torch.full((6,), float(rank))])) for rank in range(2)]

    def joined(key: str) -> tuple[int, ...]:
        return TensorParallelRules({key: ["w"], constants.ORIGINAL_VOCAB_SIZE: 3}, 2).join("w", slices()).shape

    assert joined("no key") == (4, 3)
    assert joined(constants.TP_REPLICATED_PARAMETER_PATTERNS) == (2, 3)
    assert joined(constants.PIPELINE_REPLICATED_PARAMETER_PATTERNS) == (2, 3)
    assert joined(constants.PARAMETER_TO_AVERAGE_PATTERNS) == (2, 3)
    assert joined(constants.PARAMETER_WITH_ROW_PARALLELISM_PATTERNS) == (2, 6)
    assert joined(constants.VOCABULARY_PARAMETER_PATTERNS) == (3, 3)

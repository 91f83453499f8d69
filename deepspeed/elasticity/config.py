"""The block `elasticity` as schedulers make it: from a dict, with errors of its own.

Does not live here: keys and ranges (`deepspeed.config.elasticity`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from deepspeed.config.base import faults_of
from deepspeed.config.elasticity import ElasticityConfig as ElasticityBlock
from deepspeed.errors import ElasticityConfigError, ElasticityError, ElasticityIncompatibleWorldSize

__all__ = ["ElasticityConfig", "ElasticityConfigError", "ElasticityError", "ElasticityIncompatibleWorldSize"]


class ElasticityConfig(ElasticityBlock):
    """The block `elasticity`, made from a dict."""

    def __init__(self, param_dict: Mapping[str, Any]) -> None:
        """Read the block.

        Raises:
            ElasticityConfigError: listing all that is wrong with it.
        """
        try:
            super().__init__(**param_dict)
        except ValidationError as error:
            faults = "; ".join(map(str, faults_of(error.errors(include_url=False), "elasticity")))
            raise ElasticityConfigError(f"the block elasticity cannot be used: {faults}") from None

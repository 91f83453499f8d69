"""Jobs whose number of hosts changes: the batch for every count, and the agent of a host. Loaded when first used.

Does not live here: the arithmetic of batches (`config.elastic_batch`), the launcher's elastic mode (`launcher`), going on
from a checkpoint (`engine.resuming`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed.common.lazy import attach

if TYPE_CHECKING:  # what type checkers and editors see; a test holds it equal to _NAMES
    from deepspeed.elasticity.config import ElasticityConfig as ElasticityConfig
    from deepspeed.elasticity.elastic_agent import DSElasticAgent as DSElasticAgent
    from deepspeed.elasticity.elasticity import compute_elastic_config as compute_elastic_config
    from deepspeed.elasticity.elasticity import elasticity_enabled as elasticity_enabled
    from deepspeed.elasticity.elasticity import ensure_immutable_elastic_config as ensure_immutable_elastic_config
    from deepspeed.errors import ElasticityConfigError as ElasticityConfigError
    from deepspeed.errors import ElasticityError as ElasticityError
    from deepspeed.errors import ElasticityIncompatibleWorldSize as ElasticityIncompatibleWorldSize

_NAMES = {
    "DSElasticAgent": "deepspeed.elasticity.elastic_agent:DSElasticAgent",
    "ElasticityConfig": "deepspeed.elasticity.config:ElasticityConfig",
    "ElasticityConfigError": "deepspeed.errors:ElasticityConfigError",
    "ElasticityError": "deepspeed.errors:ElasticityError",
    "ElasticityIncompatibleWorldSize": "deepspeed.errors:ElasticityIncompatibleWorldSize",
    "compute_elastic_config": "deepspeed.elasticity.elasticity:compute_elastic_config",
    "elasticity_enabled": "deepspeed.elasticity.elasticity:elasticity_enabled",
    "ensure_immutable_elastic_config": "deepspeed.elasticity.elasticity:ensure_immutable_elastic_config",
}

__all__ = [*_NAMES]

__getattr__, __dir__ = attach(__name__, submodules=("config", "elastic_agent", "elasticity"), names=_NAMES)

"""What an optimizer keeps for a parameter, where its name does not tell: it is made, and asked.

Called by `formula`, which loads this only then: it takes torch.
"""

from __future__ import annotations

import torch
from torch import nn

from deepspeed.config import DeepSpeedConfig
from deepspeed.planning.states import Optimizers
from deepspeed.precision.policy import DtypePolicy
from deepspeed.zero.flat import Kind

__all__ = ["kept_nbytes"]


def kept_nbytes(config: DeepSpeedConfig) -> int:
    """Bytes per parameter of what the optimizer of `config` keeps of the parameter's size.

    Raises:
        ConfigError: there is no such optimizer, or not with these options.
    """
    param = nn.Parameter(torch.empty(1, 1))
    policy = DtypePolicy.from_config(config, "cpu")
    kind = Kind(0, policy.param_for(param), policy.master_for(param))
    return sum(Optimizers(nn.ParameterList([param])).state_nbytes(config, kind, policy.state))

"""What a run will hold and send, before anything is allocated (docs/adr/0021-memory-plan.md).

    formula   a number of parameters: states by the paper's formula                     pure, no torch is loaded
       |
    sources   a module, or a Hugging Face configuration
    building, pipelines    functions that build a model; stages of a pipeline, each in turn
       |
    states    weights, gradients, masters, optimizer state, buckets, gathered units     asks engine.partition
    tracing   activations of one micro-batch, `stages`: of a pipeline's batch            fake tensors
    traffic   bytes per step                                                            pure
       |
    terms     a plan: terms with bytes, tier and the setting that lowers them           pure
       |
    comparison: every stage and offload side by side --> text, `deepspeed plan`

Lives here: everything of the plan. Does not live here: layouts (`sharding`, `engine.partition`). Called by `deepspeed.plan`.
"""

from deepspeed.planning.comparison import Comparison
from deepspeed.planning.planned import plan
from deepspeed.planning.terms import RankPlan, Term

__all__ = ["Comparison", "RankPlan", "Term", "plan"]

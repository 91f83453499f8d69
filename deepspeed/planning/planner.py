"""The plan of one rank under one setting: states at the busiest moment of its timeline, inputs, traffic.

    a module, or a stage of a pipeline + its timeline --- a configuration ---> RankPlan

Called by `comparison`, once per setting; `formula` has the one without a module. Does not live here: which settings
(`comparison`), timelines (`tracing`, `stages`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from deepspeed.comm.sums import shared_nbytes_of_sums
from deepspeed.config import DeepSpeedConfig
from deepspeed.engine.stage import refuse_for_pipelines
from deepspeed.pipe.module import PipelineModule
from deepspeed.planning.ranks import Ranks
from deepspeed.planning.sequences import Exchanged
from deepspeed.planning.sources import Subject
from deepspeed.planning.states import Optimizers, model_states
from deepspeed.planning.terms import RankPlan, Term
from deepspeed.planning.timeline import Timeline
from deepspeed.planning.traffic import sent_by
from deepspeed.zero.sanity import HASH_NBYTES

__all__ = ["Planner"]

_NOTHING = Exchanged()


@dataclass(frozen=True)
class Planner:
    """Plans for one rank.

    Attributes:
        subject: what it holds; of a pipeline, one stage.
        ranks: how they are laid out.
        timeline: of one micro-batch, or of a stage's batch; None: activations are left out.
        optimizers: of the module.
        device_type: of the engine.
        batch_nbytes: of what the data gives it for as long as the timeline is.
        passed_nbytes: of a pipeline, that it sends to its neighbours per optimizer step.
        exchanged: of sequence-parallel ranks.
    """

    subject: Subject
    ranks: Ranks
    timeline: Timeline | None
    optimizers: Optimizers
    device_type: str
    batch_nbytes: int = 0
    passed_nbytes: int = 0
    exchanged: Exchanged = _NOTHING

    def plan(self, label: str, config: DeepSpeedConfig) -> RankPlan:
        """One setting's.

        Raises:
            ConfigError: it does not start with a pipeline.
        """
        module = self.subject.module
        if isinstance(module, PipelineModule):
            refuse_for_pipelines(config, module)
        states = model_states(module, config, self.ranks, self.optimizers, self.timeline, device_type=self.device_type)
        sent = sent_by(states, config)
        if not isinstance(module, PipelineModule) and self.timeline is not None:
            sent += config.gradient_accumulation_steps * (self.timeline.sent_nbytes + self.exchanged.sent_nbytes)
        terms = [term for term in (*states.terms, *self._of_sharing()) if term.nbytes]
        if isinstance(module, PipelineModule):
            terms = [
                replace(term, name="activations and messages") if term.name == "activations" else term for term in terms
            ]
        return RankPlan(label, tuple(terms), sent + self.passed_nbytes)

    def _of_sharing(self) -> Iterator[Term]:
        """The micro-batch, and what ranks that share a model keep beside it."""
        yield Term("inputs", self.batch_nbytes, moment="pass")
        if self.ranks.tensor > 1:
            yield Term("checksums of inputs", HASH_NBYTES)  # `engine.same_inputs`
        if self.device_type == "cpu" and self.timeline is not None:
            summed = shared_nbytes_of_sums(self.timeline.summed_nbytes, self.ranks.tensor) if self.ranks.tensor > 1 else 0
            yield Term("memory that ranks share", summed + self.exchanged.shared_nbytes)

"""How many ranks share a sequence, and a layer, as a config says it: asked before anything else of it, for the mesh.

    sequence_parallel_size, mesh_param                           --> sequence     tokens of one sample over ranks (Ulysses)
    tensor_parallel.autotp_size, .tp.tp_size, tp_model_init      --> tensor       parts of a layer over ranks (AutoTP)

Does not live here: reading the config alone (`config.degrees`), the mesh (`topology.mesh`), the batch triangle
(`config.batch`), cutting (`tensor_parallel.auto`). Called by `api`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from deepspeed import comm
from deepspeed.common.logging import warn_once
from deepspeed.config.degrees import sequence_ranks, tensor_block, tensor_ranks, whole
from deepspeed.config.load import load_config
from deepspeed.errors import ArgumentError
from deepspeed.tensor_parallel.recorded import Recorded
from deepspeed.topology.mesh import ParallelMesh

__all__ = ["Degrees", "check_group", "group_source", "with_recorded", "without_tensor_ranks"]

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


class Degrees(NamedTuple):
    """Of one job."""

    sequence: int = 1
    tensor: int = 1

    @classmethod
    def of(cls, raw: Mapping[str, Any], mesh_param: tuple[int, ...] | None) -> Degrees:
        """Those that a config and `initialize(mesh_param=(data, sequence))` ask for.

        Raises:
            ArgumentError: the two say different things, or mesh_param is no pair.
        """
        sequence = sequence_ranks(raw)
        if mesh_param is not None:
            asked = _sequence_of(mesh_param)
            if sequence not in (1, asked):
                raise ArgumentError(
                    f"initialize(mesh_param={mesh_param}) with sequence_parallel_size={sequence} in the config: the second "
                    "number and the key mean the same. Leave one of the two out."
                )
            sequence = asked
        return cls(sequence, tensor_ranks(raw))

    def mesh(self, mesh_param: tuple[int, ...] | None = None) -> ParallelMesh:
        """All ranks laid out so. Every rank of the world must call it.

        Raises:
            ArgumentError: they do not divide the ranks, or mesh_param does not multiply out.
        """
        mesh = ParallelMesh.build(sequence=self.sequence, tensor=self.tensor)
        if mesh_param is not None and mesh.data_parallel.size != mesh_param[0]:
            raise ArgumentError(
                f"initialize(mesh_param={mesh_param}) on {mesh.world_size} ranks: {self.sequence} sequence-parallel and "
                f"{self.tensor} tensor-parallel ranks leave {mesh.data_parallel.size} data-parallel ones. Give sizes whose "
                "product is the number of ranks."
            )
        return mesh

    def check(self, mesh: ParallelMesh, giver: str) -> None:
        """Refuse a config that asks for other degrees than the groups that the caller made.

        Raises:
            ArgumentError: it does.
        """
        for axis, size in self._asdict().items():
            found = mesh.axis(axis).size
            if size not in (1, found):
                raise ArgumentError(
                    f"the config asks for {size} {axis}-parallel ranks, but the {giver} has {found}. Leave the key out of "
                    f"the config, or let the {giver} have {size}."
                )


def with_recorded(source: Any, recorded: Recorded | None) -> Any:
    """A config as it was given, or with what `tp_model_init` was told of the model.

    Raises:
        ArgumentError: the two say different things.
    """
    if recorded is None:
        return source
    raw = load_config(source)
    block, told = tensor_block(raw), {} if recorded.config is None else tensor_block(load_config(recorded.config))
    if block and told and block != told:
        raise ArgumentError(
            "tp_model_init(config=...) and the config of initialize() have different tensor_parallel blocks. Give one."
        )
    block = block or told
    size = tensor_ranks({"tensor_parallel": block})
    if size not in (1, recorded.tp_size):
        raise ArgumentError(
            f"tp_model_init(tp_size={recorded.tp_size}), but tensor_parallel in the config says {size}. Give the same "
            "number of ranks, or leave the key out of the config."
        )
    return {**raw, "tensor_parallel": {**block, "autotp_size": recorded.tp_size}}


def group_source(raw: Mapping[str, Any], recorded: Recorded | None, mpu: Any) -> tuple[Any, Any]:
    """(The mpu, the tensor-parallel group) that say which ranks share layers, from wherever they were given; None: nobody.

    Raises:
        ArgumentError: several were given.
    """
    inner = tensor_block(raw).get("tensor_parallel", tensor_block(raw).get("tp"))
    inner = inner if isinstance(inner, Mapping) else {}
    given = {
        "initialize(mpu)": mpu,
        "tp_model_init(mpu)": None if recorded is None else recorded.mpu,
        "tensor_parallel.tp.mpu": inner.get("mpu"),
        "tp_model_init(tp_group)": None if recorded is None else recorded.tp_group,
        "tensor_parallel.tp.tp_group": inner.get("tp_group"),
    }
    found = {name: each for name, each in given.items() if each is not None}
    if len({id(each) for each in found.values()}) > 1:
        raise ArgumentError(
            f"{' and '.join(found)} both say which ranks share layers. Give one of them; an mpu tells all groups."
        )
    units = [each for name, each in found.items() if "mpu" in name]
    return (units or [None])[0], (list(found.values()) or [None])[0] if not units else None


def check_group(group: Any, mesh: ParallelMesh) -> None:
    """Refuse a tensor-parallel group that ranks are not laid out by.

    Raises:
        ArgumentError: it has other ranks than the mesh's.
    """
    if group is None:
        return
    ranks, laid_out = tuple(comm.get_all_ranks_from_group(group)), mesh.axis("tensor").ranks
    if ranks != laid_out:
        raise ArgumentError(
            f"the tp_group of rank {mesh.rank} has the ranks {list(ranks)}, but {mesh.axis('tensor').size} tensor-parallel "
            f"ranks are neighbours here: {list(laid_out)}. Leave tp_group out, or give an mpu, which tells the other groups."
        )


def without_tensor_ranks(source: Any, mesh: ParallelMesh) -> Any:
    """A config as it was given, or with the samples that a step has where `train_batch_size` counts tensor-parallel ranks.

    The original counts them as data-parallel ones. The other two sizes tell.
    """
    tensor, data = mesh.axis("tensor").size, mesh.data_parallel.size
    if tensor == 1:
        return source
    raw = load_config(source)
    train, micro, steps = (whole(raw.get(key)) for key in _BATCH)
    if not all(key in raw for key in _BATCH) or train != micro * steps * data * tensor:
        return source
    true = micro * steps * data
    warn_once(
        "tensor ranks in train_batch_size",
        "train_batch_size = %d counts each of %d tensor-parallel ranks, which see the same samples: a step has %d samples "
        "(%d micro x %d accumulation x %d data-parallel). Write train_batch_size = %d.",
        *(train, tensor, true, micro, steps, data, true),
    )
    return {**raw, "train_batch_size": true}


def _sequence_of(mesh_param: tuple[int, ...]) -> int:
    sizes = [whole(size) for size in mesh_param]
    if sizes != list(mesh_param) or len(sizes) != len(("data", "sequence")):
        raise ArgumentError(
            f"initialize(mesh_param={mesh_param}): needed two numbers of ranks, (data-parallel, sequence-parallel)."
        )
    return sizes[1]

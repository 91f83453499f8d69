"""A model as a list of layers, of which each rank builds its stage.

    layers     0 1 2 3 4 5 6 7                  num_stages=2, num_chunks=2: four parts, dealt out in turn
    parts     |0 1|2 3|4 5|6 7|
    stage 0    0 1     4 5         children "0", "1", "4", "5"      names are those of the whole list, whatever the cut,
    stage 1        2 3     6 7     children "2", "3", "6", "7"      so checkpoints fit any number of stages

Lives here: `PipelineModule`. Does not live here: the cut (`partition`, `weights`), descriptions (`specs`), tied modules
(`ties`), running layers (`forward`), and training (`engine.pipeline`, which `deepspeed.initialize` makes of it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.seeds import set_random_seed
from deepspeed.activations.checkpointing import checkpoint
from deepspeed.errors import PipelineError
from deepspeed.pipe.forward import Recomputation, Stretch
from deepspeed.pipe.grid import PipelineParallelGrid, mesh_of
from deepspeed.pipe.partition import matching_weights, partition_balanced, partition_uniform
from deepspeed.pipe.specs import BoundForward, Layer, LayerSpec, TiedLayerSpec, layer_name
from deepspeed.pipe.ties import first_specs, join_ties, require_no_hidden_ties, share_first_values, stages_of_ties
from deepspeed.pipe.weights import count_parameters, measure_seconds
from deepspeed.topology.grid import PipeDataParallelTopology, ProcessTopology

__all__ = ["PipelineModule", "StateFiles"]


class StateFiles(Protocol):
    """What writes and reads a state dict in one file, as `deepspeed.runtime.checkpoint_engine` does."""

    def save(self, state_dict: dict[str, Any], path: str) -> Any:
        """Write it."""

    def load(self, path: str, map_location: str) -> Any:
        """Read it."""


class PipelineModule(nn.Module):
    """A sequence of layers cut into stages; every rank of the world must make it, with the same arguments.

    It joins the process group where there is none. Layers are modules (built by every rank; those of other stages are let
    go), `LayerSpec` (built by the ranks of its stage alone), `TiedLayerSpec` or functions. Each gets what the one before
    gave, a tensor or any nesting of tensors, as its single argument.

    Args:
        layers: the list.
        num_stages: stages; the ranks left are copies that see different data.
        topology: `PipeDataParallelTopology` or `PipeModelDataParallelTopology`, instead of `num_stages`.
        loss_fn: called on the last stage as `loss_fn(outputs, labels)`; None takes the last layer's output for the loss.
        seed_layers: seed before each layer is built (`base_seed + index`) and before each layer runs
            (`pipe.forward.pass_seed` of the layer and of the micro-batch's number in the whole run), so that values and
            dropout depend neither on the cut, nor on evaluations in between, nor on a restart. Without an engine, passes
            through this object are numbered as they come.
        seed_fn: called with these numbers; None seeds Python, numpy and torch.
        base_seed: see above.
        partition_method: `"parameters"` (equal numbers of elements), `"uniform"` (of layers), `"type:REGEX"` (of layers
            whose class name the expression is found in, in either case), `"profile"` (equal forward times, measured on
            `profile_input`), or a list with the weight of each layer.
        activation_checkpoint_interval: layers per piece whose activations are computed again in backward; 0 keeps them all.
        activation_checkpoint_func: how, called as `func(function, *inputs)`; as `activation_checkpointing` configures it.
        checkpointable_layers: class names; only pieces made of these alone are recomputed. None: all that have parameters.
        dynamic_shape: activations may change shape with their values, so every one is described when it is sent.
        num_chunks: parts of the model per stage, for the schedule `interleaved`.
        profile_input: input of the first layer, for `"profile"`.

    Attributes:
        parts: boundaries of the `num_stages * num_chunks` parts in the list; part k belongs to stage `k % num_stages`.
        stage_id: this rank's stage.
        forward_funcs: what computes each of this stage's layers, in order.
        tied_modules: this stage's copies of tied modules by key.
        tied_layers: key of each tie of the whole model -> index of its first layer.
        tie_groups: the ties over several stages, by key, the same on all ranks but for their groups.
        mesh: all ranks, with the axes `pipe`, `replica` and `tensor`.
        activation_checkpoint_interval: as given; the configuration's, where it is above 0, replaces it.

    Raises:
        PipelineError: neither or both of `num_stages` and `topology`, ranks that do not divide, fewer layers than parts, or
            layers that cannot be cut so; the text says what to do.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[..., Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str | Sequence[float] = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = checkpoint,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
        *,
        num_chunks: int = 1,
        profile_input: Any = None,
    ) -> None:
        super().__init__()
        comm.init_distributed(verbose=False)
        self.seed_layers, self.seed_fn, self.base_seed = seed_layers, seed_fn, base_seed
        self.dynamic_shape = dynamic_shape
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.activation_checkpoint_func = activation_checkpoint_func
        self.checkpointable_layers = checkpointable_layers

        layout = _topology(num_stages, topology)
        self.num_stages: int = layout.get_dim("pipe")
        self.num_chunks = num_chunks
        _require_enough_layers(len(layers), self.num_stages, num_chunks)
        self.mesh = mesh_of(layout)
        self.stage_id = self.mesh.axis("pipe").rank
        self._grid = PipelineParallelGrid(layout, mesh=self.mesh)
        self._keep_loss(loss_fn)
        self.parts = _cut(layers, partition_method, self.num_stages * num_chunks, profile_input)

        owners = [self.stage_owner(index) for index in range(len(layers))]
        require_no_hidden_ties(layers, owners)
        specs = first_specs(layers)
        self.tied_layers = {key: next(at for at, layer in enumerate(layers) if layer is spec) for key, spec in specs.items()}
        self.tied_modules = nn.ModuleDict()
        self._stretches = [
            Stretch([self._add(at, layers[at], specs) for at in here], here.start, self._seed, base_seed)
            for here in (self._layers_of(chunk) for chunk in range(num_chunks))
        ]
        self.forward_funcs = [call for stretch in self._stretches for call in stretch.calls]
        self._move_to(get_accelerator().current_device_name())
        self.tie_groups = join_ties(stages_of_ties(layers, owners), self.mesh)
        share_first_values(self.tie_groups, dict(self.tied_modules.items()))

    def _keep_loss(self, loss_fn: Callable[..., Any] | None) -> None:
        """Register a loss that is a module on the last stage alone: no other moves, trains or saves it."""
        self.loss_fn: Callable[..., Any] | None
        if self._grid.is_last_stage:
            self.loss_fn = loss_fn
        else:
            object.__setattr__(self, "loss_fn", loss_fn)

    def _move_to(self, device: str) -> None:
        """What has no values, as for a plan that looks at shapes alone, stays where it is."""
        if not any(tensor.is_meta for tensor in (*self.parameters(), *self.buffers())):
            self.to(device)

    @property
    def _seed(self) -> Callable[[int], Any] | None:
        return (self.seed_fn or set_random_seed) if self.seed_layers else None

    def _add(self, index: int, layer: Layer, specs: dict[str, TiedLayerSpec]) -> Callable[[Any], Any]:
        """Build one of this stage's layers, register it under its name and return what computes it."""
        if self._seed is not None:
            self._seed(self.base_seed + index)
        if isinstance(layer, TiedLayerSpec):
            if layer.key not in self.tied_modules:
                self.tied_modules[layer.key] = specs[layer.key].build()
            _require_attributes(layer, self.tied_modules[layer.key])
            return layer.bind(self.tied_modules[layer.key])
        if isinstance(layer, LayerSpec):
            layer = layer.build()
        if isinstance(layer, nn.Module):
            self.add_module(str(index), layer)
        return layer

    # -- computing ------------------------------------------------------------------------------------------------------

    def forward(self, inputs: Any) -> Any:
        """Pass the first layer's input, or what the stage before gave, through this stage's layers.

        Raises:
            PipelineError: the stage has several parts, which do not follow each other; use `forward_chunk`.
        """
        if self.num_chunks > 1 and self.num_stages > 1:
            raise PipelineError(
                f"this stage has {self.num_chunks} parts of the model with other stages between them: forward() cannot "
                "pass through them at once. Call forward_chunk(chunk, inputs), or let the engine's train_batch do it."
            )
        for chunk in range(self.num_chunks):
            inputs = self.forward_chunk(chunk, inputs)
        return inputs

    def forward_chunk(self, chunk: int, inputs: Any, number: int | None = None) -> Any:
        """Pass `inputs` through one of this stage's parts of the model.

        Args:
            chunk: the part.
            inputs: of its first layer.
            number: of the micro-batch in the whole run, for `seed_layers`; None: passes through the part are numbered as
                they come, from 0.
        """
        recomputation = Recomputation(
            self.activation_checkpoint_interval, self.activation_checkpoint_func, self._is_checkpointable
        )
        return self._stretches[chunk](inputs, recomputation, number)

    def _is_checkpointable(self, funcs: Sequence[Callable[[Any], Any]]) -> bool:
        """Whether the activations of a piece made of these layers are recomputed. Subclasses may decide otherwise."""
        modules = [func.module if isinstance(func, BoundForward) else func for func in funcs]
        if self.checkpointable_layers is not None:
            return all(type(module).__name__ in self.checkpointable_layers for module in modules)
        return any(next(module.parameters(), None) is not None for module in modules if isinstance(module, nn.Module))

    def set_checkpoint_interval(self, interval: int) -> None:
        """Recompute pieces of so many layers from now on; 0 keeps all activations."""
        self.activation_checkpoint_interval = interval

    def get_additional_losses(self) -> dict[str, torch.Tensor] | None:
        """Return losses to report beside the main one, by name, or None. For subclasses."""
        return None

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile each of this stage's layers by itself, with the arguments of `torch.compile`."""
        for child in (*self._own_layers().values(), *self.tied_modules.values()):
            child.compile(*args, **kwargs)

    # -- places ---------------------------------------------------------------------------------------------------------

    def partitions(self) -> list[int]:
        """Return the boundaries of the parts in the list of layers."""
        return list(self.parts)

    def stage_owner(self, layer_idx: int) -> int:
        """Return the stage that has a layer.

        Raises:
            PipelineError: there is no such layer.
        """
        for part, (start, stop) in enumerate(pairwise(self.parts)):
            if start <= layer_idx < stop:
                return part % self.num_stages
        raise PipelineError(f"layer {layer_idx} does not exist; the layers are 0 to {self.parts[-1] - 1}.")

    def num_pipeline_stages(self) -> int:
        """Return the number of stages."""
        return self.num_stages

    def topology(self) -> ProcessTopology:
        """Return the layout of the ranks."""
        return self._grid.topology()

    def mpu(self) -> PipelineParallelGrid:
        """Return the ranks and groups under the names of Megatron."""
        return self._grid

    def _layers_of(self, chunk: int) -> range:
        """Indices of the layers of one of this stage's parts."""
        part = chunk * self.num_stages + self.stage_id
        return range(self.parts[part], self.parts[part + 1])

    @property
    def _local_start(self) -> int:
        """Index of this stage's first layer."""
        return self._layers_of(0).start

    @property
    def _local_stop(self) -> int:
        """One past the last layer of this stage's first part, which is all of it unless there are chunks."""
        return self._layers_of(0).stop

    def _own_layers(self) -> dict[str, nn.Module]:
        """This stage's layers by name, tied ones left out."""
        return {name: child for name, child in self.named_children() if name.isdecimal()}

    # -- tied modules ---------------------------------------------------------------------------------------------------

    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, comm.ProcessGroup]]:
        """Return each parameter that this stage holds a copy of and the group of the ranks that hold the others."""
        shared = [(tie.key, tie.axis) for tie in self.tie_groups if tie.axis is not None]
        return [(param, axis.group) for key, axis in shared for param in self.tied_modules[key].parameters()]

    def allreduce_tied_weight_gradients(self) -> None:
        """Sum the gradients of tied parameters over their copies; every rank must call it. The engine does so by itself."""
        for param, group in self.get_tied_weights_and_groups():
            if param.requires_grad:
                if param.grad is None:  # the copies that computed nothing take part too
                    param.grad = torch.zeros_like(param)
                comm.all_reduce(param.grad, group=group)

    # -- a file per layer, as the original writes them; the engine's checkpoints are others -------------------------------

    def ckpt_prefix(self, checkpoints_path: str | Path, tag: str) -> str:
        """Return how the names of all files of this rank's stage begin."""
        coordinates = self.topology().get_coord(self.mesh.rank)._asdict()
        places = "".join(f"-{axis}_{at:02d}" for axis, at in coordinates.items() if axis != "data")
        return str(Path(checkpoints_path) / str(tag) / f"module{places}")

    def ckpt_layer_path(self, ckpt_dir: str | Path, local_layer_idx: int) -> str:
        """Return the file of one of this stage's layers, counted within the stage."""
        place = self.topology().get_rank_repr(self.mesh.rank)
        return str(Path(ckpt_dir) / f"layer_{self._global_index(local_layer_idx):02d}{place and '-'}{place}-model_states.pt")

    def ckpt_layer_path_list(self, ckpt_dir: str | Path, local_layer_idx: int) -> list[str]:
        """Return the files of one of this stage's layers that exist, of all ranks that share its matrices."""
        pattern = f"layer_{self._global_index(local_layer_idx):02d}-*model_states.pt"
        return sorted(str(path) for path in Path(ckpt_dir).glob(pattern))

    def save_state_dict(
        self, save_dir: str | Path, checkpoint_engine: StateFiles, exclude_frozen_params: bool = False
    ) -> None:
        """Write the weights, a file per layer; a tied module goes with its first layer. Every rank must call it.

        Args:
            save_dir: made where it is not there; all ranks see the files when this returns.
            checkpoint_engine: what writes a file, for example the engine's `checkpoint_engine`.
            exclude_frozen_params: leave out parameters that take no gradient.
        """
        Path(save_dir).mkdir(parents=True, exist_ok=True)
        for path, module in self._files(save_dir) if self.mesh.data_parallel.rank == 0 else ():
            frozen = {name for name, param in module.named_parameters() if exclude_frozen_params and not param.requires_grad}
            checkpoint_engine.save({name: value for name, value in module.state_dict().items() if name not in frozen}, path)
        comm.barrier()

    def load_state_dir(self, load_dir: str | Path, checkpoint_engine: StateFiles, strict: bool = True) -> None:
        """Read what `save_state_dict` wrote at any number of stages, here or in the original. Every rank must call it.

        Args:
            load_dir: the folder.
            checkpoint_engine: what reads a file.
            strict: refuse files that have other names than the layer.
        """
        for path, module in self._files(load_dir):
            module.load_state_dict(checkpoint_engine.load(path, map_location="cpu"), strict=strict)
        share_first_values(self.tie_groups, dict(self.tied_modules.items()))

    def _files(self, folder: str | Path) -> Iterator[tuple[str, nn.Module]]:
        """Yield the file of each of this stage's modules; copies of tied ones belong to another stage."""
        seen = {self.tied_modules[tie.key] for tie in self.tie_groups if tie.axis is not None and not tie.is_owner}
        for local_index, func in enumerate(self.forward_funcs):
            module = func.module if isinstance(func, BoundForward) else func
            if isinstance(module, nn.Module) and module not in seen:
                seen.add(module)
                yield self.ckpt_layer_path(folder, local_index), module

    def _global_index(self, local_index: int) -> int:
        return [index for chunk in range(self.num_chunks) for index in self._layers_of(chunk)][local_index]


def _topology(num_stages: int | None, topology: ProcessTopology | None) -> ProcessTopology:
    if topology is not None and num_stages in (None, topology.get_dim("pipe")):
        return topology
    if topology is not None or num_stages is None:
        raise PipelineError(
            f"PipelineModule got num_stages={num_stages} and topology={topology}; it needs one of the two. "
            "Give num_stages=2, or topology=PipeDataParallelTopology(num_pp=2, num_dp=4)."
        )
    world_size = comm.get_world_size()
    if num_stages < 1 or world_size % num_stages:
        raise PipelineError(
            f"num_stages={num_stages}, but {world_size} ranks were started, which {num_stages} does not divide. "
            f"Start a multiple of {max(num_stages, 1)} ranks (`deepspeed --num_gpus {max(num_stages, 1)} train.py`), "
            f"or choose a number of stages that divides {world_size}."
        )
    return PipeDataParallelTopology(num_stages, world_size // num_stages)


def _require_enough_layers(count: int, num_stages: int, num_chunks: int) -> None:
    if num_chunks < 1 or count < num_stages * num_chunks:
        raise PipelineError(
            f"{count} layers, num_stages={num_stages}, num_chunks={num_chunks}: each of the {num_stages * num_chunks} parts "
            "needs at least one layer. Use fewer stages or chunks, or split layers into smaller ones."
        )


def _cut(layers: Sequence[Layer], method: str | Sequence[float], parts: int, profile_input: Any) -> list[int]:
    if not isinstance(method, str):
        if len(method) != len(layers) or min(method) < 0:
            raise PipelineError(
                f"partition_method has {len(method)} weights for {len(layers)} layers, the least "
                f"{min(method, default=None)}; needed is one per layer, none negative."
            )
        return partition_balanced(method, parts)
    kind, _, pattern = method.partition(":")
    match kind.lower():
        case "uniform":
            return partition_uniform(len(layers), parts)
        case "parameters":
            return partition_balanced(count_parameters(layers), parts)
        case "type":
            return partition_balanced(matching_weights(pattern, [layer_name(layer) for layer in layers]), parts)
        case "profile":
            return partition_balanced(_measured_once(layers, profile_input), parts)
    raise PipelineError(
        f"partition_method={method!r} is not known. Use 'parameters', 'uniform', 'type:REGEX', 'profile', or one "
        "weight per layer."
    )


def _measured_once(layers: Sequence[Layer], profile_input: Any) -> list[float]:
    """Measure on the first rank and tell the others, since ranks that measured by themselves would cut differently."""
    if profile_input is None:
        raise PipelineError("partition_method='profile' measures layers. Give profile_input: one input of the first layer.")
    outcome: list[Any] = [None]
    if comm.get_rank() == 0:
        try:
            outcome = [measure_seconds(layers, profile_input)]
        except PipelineError as error:
            outcome = [str(error)]
    comm.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], str):
        raise PipelineError(outcome[0])
    measured: list[float] = outcome[0]
    return measured


def _require_attributes(layer: TiedLayerSpec, module: nn.Module) -> None:
    """Refuse names in `tied_weight_attr` that the module lacks; the default is a guess and may be."""
    for name in layer.tied_weight_attr if layer.tied_weight_attr != ["weight"] else []:
        owner, _, attribute = name.rpartition(".")
        try:
            found = getattr(module.get_submodule(owner), attribute)
        except AttributeError:
            found = None
        if not isinstance(found, torch.Tensor):
            raise PipelineError(
                f"tied layer {layer.key!r}: {layer.typename.__name__} has no parameter {name!r}. Its parameters are: "
                f"{', '.join(name for name, _ in module.named_parameters())}."
            )

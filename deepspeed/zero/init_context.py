"""`zero.Init`: a model is sharded while it is built, so that no rank ever holds all of it.

    with zero.Init(config_dict_or_path=config):
        model = Model()          each module's constructor returns -> its own parameters become shards (rank 0's values)
          torch.nn.init.ones_(self.head.weight)
                                 looked up -> whole again, until the constructor around it returns: rank 0's values stay
          torch.zeros(3)         floating tensors have the configured dtype and are on this rank's device
    model.head.weight            shape (0,); `GatheredParameters` shows and edits it, `initialize` takes it over

Lives here: the context, and the names that clients read and replace on `deepspeed.runtime.zero.partition_parameters`,
which is this very module. Does not live here: watching constructors (`zero.construction`), shards (`zero.shard`), reading
the config (`zero.init_settings`). Called by clients; `initialize` calls `init_suspended`.

[Note: all ranks build alike] Sharding and look-ups of parameters are collective. Every rank must run the same constructors
and look parameters up alike inside the context; what one rank does alone belongs inside `GatheredParameters(...,
modifier_rank=...)`, where look-ups gather nothing.

[Note: what stays whole] Parameters on the meta device (until they have data, they have nothing to shard), lazy ones, and
tensor subclasses with a placement of their own. `initialize` takes them as they are then. What `torch.nn.utils.parametrize`
computes a weight from has shards and stays whole besides: every look at `module.weight` computes it, also after the context.

Tensors made by the old `torch.Tensor(2, 3)` keep torch's default dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.errors import ArgumentError, UnbuiltFeatureError
from deepspeed.offload.agreement import together
from deepspeed.offload.shard_file import ShardFile
from deepspeed.topology.mesh import AxisGroup
from deepspeed.zero.construction import Construction, Replacements
from deepspeed.zero.external import attach_external_tables, register_external_parameter, unregister_external_parameter
from deepspeed.zero.flat import owner_of
from deepspeed.zero.gather import GatheredParameters, is_one_rank_editing
from deepspeed.zero.holder import holder_of
from deepspeed.zero.init_settings import InitSettings, read_settings
from deepspeed.zero.published import ZeroParamStatus, ZeroParamType
from deepspeed.zero.shard import ShardedParameters

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "ZeroParamType",
    "get_accelerator",
    "init_suspended",
    "register_external_parameter",
    "unregister_external_parameter",
    "zero_wrapper_for_fp_tensor_constructor",
]

_orig_torch_arange = torch.arange  # clients compare with it to leave `arange` alone
_orig_torch_empty = torch.empty
_CONSTRUCTORS = ("arange", "empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randn", "tensor", "zeros")
_EXACT = ("empty", "eye", "ones", "zeros")  # the same values whether made in a narrow dtype or rounded to it
_LOOKED_UP_NUMEL = 1 << 27
_LOOKED_UP_LEAST = 4  # an expression like `a.weight.copy_(b.weight)` needs several at a time, however large

_construction = Construction()  # the contexts that are entered
_constructors = Replacements()  # what they put into torch


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., torch.Tensor], target_fp_dtype: torch.dtype, target_device: torch.device
) -> Callable[..., torch.Tensor]:
    """Make a tensor constructor for the inside of `zero.Init`; looked up by name when a context is entered.

    Args:
        fn: `torch.zeros` or the like.
        target_fp_dtype: of floating results, unless the caller names a dtype.
        target_device: of results, unless the caller names a device or has made "meta" the default device.
    """
    is_exact = getattr(fn, "__name__", "") in _EXACT

    @functools.wraps(fn)
    def construct(*args: Any, **options: Any) -> torch.Tensor:
        if options.get("out") is not None or options.get("generator") is not None:
            return fn(*args, **options)
        if options.get("device") is None and not _orig_torch_empty(0).is_meta:
            options["device"] = target_device
        if options.get("dtype") is not None:
            return fn(*args, **options)
        if is_exact:
            return fn(*args, **{**options, "dtype": target_fp_dtype})
        requires_grad = options.pop("requires_grad", False)
        made = fn(*args, **options)
        return (made.to(target_fp_dtype) if made.is_floating_point() else made).requires_grad_(requires_grad)

    return construct


class Init:
    """Context in which every module's parameters are sharded as soon as its constructor returns.

    Collective, see [Note: all ranks build alike]. Starts the process group unless there is one. Contexts nest, the inner one
    counts; one object can be entered again.

    Args:
        module: an existing module, whose parameters are sharded at once; no `with` is needed for it.
        data_parallel_group: the ranks that share each parameter; all if left out.
        mem_efficient_linear: taken for compatibility: no weight that was gathered is kept for backward, at stage 3 with
            `memory_efficient_linear`.
        remote_device: "cpu" keeps shards in host memory; "nvme" in a file in `offload_param.nvme_path`, but for the first
            `offload_param.max_in_cpu` elements, until `initialize` takes the parameters over.
        pin_memory: page-lock shards in host memory.
        config_dict_or_path: dict, path or base64; it may lack batch sizes and hold "auto".
        config: the same under its older name.
        enabled: False makes everything here do nothing.
        dtype: of floating tensors made inside; None asks the config (`bf16`, `fp16`), else it is fp32. A dtype that the
            model names itself is kept.
        mpu: an object whose `get_sequence_data_parallel_group()`, or else `get_data_parallel_group()`, gives the group.
        zero_param_parallel_group: not built yet.
        zero_quantized_weights: not built yet.
        zero_quantized_nontrainable_weights: not built yet.
        sequence_data_parallel_group: the group where sequence parallelism spreads data over more ranks; it wins.
        param_swapper: not built yet.

    Raises:
        UnbuiltFeatureError: an argument or config key that this version does not have yet.
        ConfigError: faults in the blocks `zero_optimization`, `fp16`, `bf16`.
        ArgumentError: two different configs, or a group that this rank is not in.
        UsageError: on leaving: a parameter was written to while sharded, so that the values are lost.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: comm.ProcessGroup | None = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: comm.ProcessGroup | None = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: comm.ProcessGroup | None = None,
        param_swapper: object | None = None,
    ) -> None:
        self._entered: list[_Context] = []
        self.enabled = enabled
        if not enabled:
            return
        _refuse_unbuilt(
            zero_param_parallel_group=zero_param_parallel_group,
            zero_quantized_weights=zero_quantized_weights,
            zero_quantized_nontrainable_weights=zero_quantized_nontrainable_weights,
            param_swapper=param_swapper,
        )
        source = _one_config(config_dict_or_path, config)
        self._settings = read_settings(source, dtype=dtype, remote_device=remote_device, pin_memory=pin_memory)
        if not comm.is_initialized():
            comm.init_distributed(verbose=False)
        axis = _axis(sequence_data_parallel_group or data_parallel_group, mpu)
        device = torch.device(get_accelerator().device_name(comm.get_local_rank()))
        file: ShardFile | None = None
        if self._settings.nvme_path is not None:
            with together(axis, device):
                file = ShardFile(self._settings.nvme_path, f"init_rank{axis.rank}", self._settings.io)
        self._holder = ShardedParameters(
            axis,
            device,
            rest_device=torch.device("cpu") if self._settings.is_remote else None,
            pin_memory=self._settings.pin_memory,
            file=file,
            max_in_memory=self._settings.max_in_cpu,
        )
        if module is not None:
            for below in module.modules():
                _shard_own(below, self._holder)

    def __enter__(self) -> Init:
        if self.enabled:
            _constructors.undo()  # of an outer context: the wrappers are to wrap torch's own
            with torch.device("cpu"):  # torch remembers for good, at the first use, which functions this block concerns
                torch.empty(0)
            context = _Context(self._settings, self._holder)
            self._entered.append(context)
            context.install()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.enabled:
            context = self._entered.pop()
            context.uninstall()
            if kind is None:
                context.finish()
            else:
                context.abandon()


@contextmanager
def init_suspended() -> Iterator[None]:
    """Leave all `zero.Init` contexts for the time of a block, for `initialize` inside one. Collective."""
    contexts = [watcher for watcher in _construction.watchers if isinstance(watcher, _Context)]
    for context in reversed(contexts):
        context.uninstall()
        context.close_all()
    try:
        yield
    finally:
        for context in contexts:
            context.install()


class _Context:
    """One entered `zero.Init`: the watcher of construction that shards."""

    def __init__(self, settings: InitSettings, holder: ShardedParameters) -> None:
        self.watches_apply = settings.override_module_apply
        self._holder = holder
        self._most_numel = min(settings.max_live_numel, _LOOKED_UP_NUMEL)
        self._built: list[nn.Module] = []
        self._open: dict[int, tuple[nn.Parameter, nn.Module | None]] = {}  # looked up in the constructor of a module
        self._constructors = {
            name: zero_wrapper_for_fp_tensor_constructor(
                getattr(torch, name), target_fp_dtype=settings.dtype, target_device=holder.device
            )
            for name in _CONSTRUCTORS
        }

    # -- life ---------------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Begin to be the innermost context."""
        _construction.enter(self)
        self._put_constructors()

    def uninstall(self) -> None:
        """Stop watching; the context around this one counts again."""
        _construction.leave(self)
        _constructors.undo()
        if _construction.watchers:
            watcher = _construction.watcher
            assert isinstance(watcher, _Context)  # nobody else enters
            watcher._put_constructors()

    def _put_constructors(self) -> None:
        _constructors.undo()
        for name, constructor in self._constructors.items():
            _constructors.put(torch, name, constructor)

    def finish(self) -> None:
        """Shard what was looked up or added since its module was built, and check that no write was lost."""
        self.close_all()
        for module in self._built:
            _shard_own(module, self._holder)
        self._built.clear()
        self._holder.refuse_lost_writes()

    def abandon(self) -> None:
        """Let go after an exception, without communication: other ranks may be elsewhere."""
        for param, _ in self._open.values():
            _drop([param])
        self._open.clear()
        self._built.clear()

    # -- what happens while modules are built -------------------------------------------------------------------------

    def built(self, module: nn.Module) -> None:
        """Shard the module's own parameters, and again those that were looked up in its constructor."""
        is_outermost = _construction.innermost is None
        self._close(p for p, user in list(self._open.values()) if user is module or (user is None and is_outermost))
        self._built.append(module)
        _shard_own(module, self._holder)

    def abandoned(self, module: nn.Module) -> None:
        """Let go of what was looked up in a constructor that raised."""
        for param, user in list(self._open.values()):
            if user is module:
                del self._open[id(param)]
                _drop([param])

    def looked_up(self, param: nn.Parameter) -> None:
        """Make a sharded parameter whole until the constructor that runs now returns, within a budget."""
        holder = holder_of(param)
        if isinstance(holder, ShardedParameters) and not holder.is_fetched(param) and not is_one_rank_editing():
            holder.fetch([param])
            self._open[id(param)] = (param, _construction.innermost)
            self._close_oldest()

    def apply(self, module: nn.Module, fn: Callable[[nn.Module], None]) -> None:
        """Call `fn(module)` with the module's own parameters whole, and keep the values of the group's first rank."""
        own = [p for p in module._parameters.values() if p is not None and not is_one_rank_editing()]
        _fetch(own)
        try:
            fn(module)
        except BaseException:
            _drop(own)
            raise
        for param in own:
            _keep(param)

    def close_all(self) -> None:
        """Shard again all that was looked up."""
        self._close([param for param, _ in self._open.values()])

    def _close_oldest(self) -> None:
        live_numel = sum(param.numel() for param, _ in self._open.values())
        while live_numel > self._most_numel and len(self._open) > _LOOKED_UP_LEAST:
            param, _ = next(iter(self._open.values()))
            live_numel -= param.numel()
            self._close([param])

    def _close(self, params: Iterable[nn.Parameter]) -> None:
        for param in params:
            del self._open[id(param)]
            _keep(param)


# -- sharding what a module has ---------------------------------------------------------------------------------------


def _shard_own(module: nn.Module, holder: ShardedParameters) -> None:
    attach_external_tables([module])
    named = {
        f"{type(module).__name__}.{name}": param
        for name, param in module._parameters.items()
        if param is not None and _can_be_sharded(param)
    }
    holder.shard(named)
    if isinstance(module, ParametrizationList):
        holder.fetch(list(named.values()))  # and never dropped


def _can_be_sharded(param: nn.Parameter) -> bool:
    """See [Note: what stays whole]; besides, those that a context or an engine has already."""
    is_taken = holder_of(param) is not None or owner_of(param) is not None
    return not is_taken and not param.is_meta and not is_lazy(param) and type(param.data) is torch.Tensor


def _holder(param: nn.Parameter) -> ShardedParameters | None:
    holder = holder_of(param)
    return holder if isinstance(holder, ShardedParameters) else None


def _keep(param: nn.Parameter) -> None:
    """Shard a fetched parameter again, with the values of the group's first rank."""
    holder = _holder(param)
    if holder is not None:  # else an engine has taken it over
        holder.follow_casts([param])
        holder.store([param], holder.axis.ranks[0])
        holder.drop([param])


def _fetch(params: Iterable[nn.Parameter]) -> None:
    for param in params:
        holder = _holder(param)
        if holder is not None:
            holder.fetch([param])


def _drop(params: Iterable[nn.Parameter]) -> None:
    for param in params:
        holder = _holder(param)
        if holder is not None:
            holder.drop([param])


# -- arguments --------------------------------------------------------------------------------------------------------


def _refuse_unbuilt(**arguments: object) -> None:
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise UnbuiltFeatureError(f"zero.Init({name}={value!r}): not built yet in this version. Leave it out.")


def _one_config(config_dict_or_path: Any, config: Any) -> Any:
    if config_dict_or_path is not None and config is not None and config_dict_or_path != config:
        raise ArgumentError(
            "zero.Init was given config_dict_or_path and config, and they differ; needed one. Pass config_dict_or_path."
        )
    return config if config_dict_or_path is None else config_dict_or_path


def _axis(group: comm.ProcessGroup | None, mpu: Any) -> AxisGroup:
    if group is None and mpu is not None:
        group = getattr(mpu, "get_sequence_data_parallel_group", mpu.get_data_parallel_group)()
    if group is None:
        group = comm.get_world_group()
    ranks, rank = comm.get_all_ranks_from_group(group), comm.get_rank()
    if rank not in ranks:
        raise ArgumentError(
            f"zero.Init: the group of the ranks {ranks} was given on rank {rank}, which is not in it. "
            "Pass the data-parallel group that this rank belongs to."
        )
    return AxisGroup(ranks, rank, group)

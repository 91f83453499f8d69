"""Sequence-parallel norms: between the blocks of a layer, tensor ranks hold parts of the tokens instead of all of them.

    embedding --split--> [ norm --gather--> attention --scatter--> + , norm --gather--> MLP --scatter--> + ] --gather--> head
    tokens T              T/n               T                      T/n                  T                T/n             T

The sum over ranks that ends a block becomes a reduce-scatter along the tokens, and the copy that begins one an all-gather:
as many bytes as before, and residuals and norms are kept and computed once instead of on every rank. Parameters of norms see
a part of the tokens, so their gradients are summed over the axis.

Lives here: the hooks on layers and blocks. Does not live here: which blocks are cut (`planning`), products (`layers`).
Called by `auto`, after the conversion. Source: Korthikanti et al. (arXiv:2205.05198), section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from deepspeed.comm import differentiable
from deepspeed.errors import ArgumentError, UnbuiltFeatureError
from deepspeed.tensor_parallel.entry import PlainEntry
from deepspeed.tensor_parallel.layers import ColumnLinear, CutLayer, RowLinear, sum_gradients
from deepspeed.tensor_parallel.planning import Block
from deepspeed.tensor_parallel.randomness import has_dropout
from deepspeed.topology.mesh import AxisGroup

__all__ = ["hold_token_parts"]

_TOKENS = 1
"""The dimension of tokens in (rows, tokens, width)."""
_HIDDEN = "hidden_states"


def hold_token_parts(model: nn.Module, blocks: Sequence[Block], axis: AxisGroup) -> None:
    """Let tensor ranks hold parts of the tokens between the blocks of a cut model's layers.

    Args:
        model: cut already.
        blocks: attention and MLPs that were cut.
        axis: the tensor ranks.

    Raises:
        ArgumentError: the blocks do not lie in one list of layers, or a layer has weights that need all tokens.
        UnbuiltFeatureError: a layer drops activations.
    """
    layers = _layers(model, blocks)
    for name, layer in layers.items():
        _refuse_unfit(name, layer, [block.name for block in blocks])
    norms = {id(norm): norm for name, layer in layers.items() for norm in _norms(name, layer, blocks)}
    for norm in norms.values():
        sum_gradients(norm, axis)
    for block in blocks:
        module = model.get_submodule(block.name)
        module.register_forward_pre_hook(_gathering(axis), with_kwargs=True)
        for column in block.columns:
            layer = model.get_submodule(column)
            assert isinstance(layer, ColumnLinear)  # the plan's
            layer.entry = PlainEntry()
        row = model.get_submodule(block.row)
        assert isinstance(row, RowLinear)  # the plan's
        row.scatters_tokens = True
    first, *_, last = (*layers.values(), *layers.values())
    first.register_forward_pre_hook(_splitting(axis), with_kwargs=True)
    last.register_forward_hook(_joining(axis))


# -- moments ---------------------------------------------------------------------------------------------------------------


def _splitting(axis: AxisGroup) -> Any:
    def before_first(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = _hidden(module, args, kwargs)
        if hidden.dim() <= _TOKENS or hidden.shape[_TOKENS] % axis.size:
            raise ArgumentError(
                f"tensor_parallel.sequence_parallel: hidden states of shape {tuple(hidden.shape)} over {axis.size} ranks: "
                f"the number of tokens, dimension {_TOKENS}, must be a multiple of {axis.size}. Pad the batch "
                f"(pad_to_multiple_of={axis.size} of a tokenizer or collator), or leave the key out."
            )
        return _with_hidden(args, kwargs, differentiable.split(hidden, _TOKENS, axis.group))

    return before_first


def _gathering(axis: AxisGroup) -> Any:
    def before_block(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = _hidden(module, args, kwargs)
        widths = [hidden.shape[_TOKENS]] * axis.size
        return _with_hidden(args, kwargs, differentiable.all_gather(hidden, _TOKENS, axis.group, widths))

    return before_block


def _joining(axis: AxisGroup) -> Any:
    def after_last(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        hidden, *others = output if isinstance(output, tuple) else (output,)
        whole = differentiable.gather(hidden, _TOKENS, axis.group, [hidden.shape[_TOKENS]] * axis.size)
        return (whole, *others) if isinstance(output, tuple) else whole

    return after_last


def _hidden(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    found = args[0] if args else kwargs.get(_HIDDEN)
    if not isinstance(found, Tensor):
        raise ArgumentError(
            f"tensor_parallel.sequence_parallel: {type(module).__name__} was called without a tensor of hidden states as "
            f"its first argument or as {_HIDDEN!r}. Leave the key out for this model."
        )
    return found


def _with_hidden(args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, _HIDDEN: hidden})


# -- places ----------------------------------------------------------------------------------------------------------------


def _layers(model: nn.Module, blocks: Sequence[Block]) -> dict[str, nn.Module]:
    """The one list of layers that all blocks lie in, by name."""
    lists = {found for block in blocks if (found := _list_around(model, block.name))}
    if len(lists) != 1 or not all(_list_around(model, block.name) for block in blocks):
        raise ArgumentError(
            f"tensor_parallel.sequence_parallel: the layers that were cut lie in {sorted(lists) or 'no list'}; one list of "
            "layers is needed, whose first takes all tokens and whose last gives them. Leave the key out for this model."
        )
    (name,) = lists
    layers = {f"{name}.{key}": layer for key, layer in model.get_submodule(name).named_children()}
    without = [name for name in layers if not any(block.name.startswith(f"{name}.") for block in blocks)]
    if without:
        raise ArgumentError(
            f"tensor_parallel.sequence_parallel: nothing of {', '.join(map(repr, without[:3]))} was cut. Cut every layer, "
            "or leave the key out."
        )
    return layers


def _list_around(model: nn.Module, name: str) -> str | None:
    """The outermost list of modules that `name` lies in."""
    parts = name.split(".")
    for count in range(1, len(parts)):
        path = ".".join(parts[:count])
        if isinstance(model.get_submodule(path), nn.ModuleList):
            return path
    return None


def _refuse_unfit(name: str, layer: nn.Module, blocks: Sequence[str]) -> None:
    if any(has_dropout(module) for module in layer.modules()):
        raise UnbuiltFeatureError(
            f"tensor_parallel.sequence_parallel with dropout, which {name!r} has, is not built yet. Set the model's dropout "
            "rates to 0, or leave the key out."
        )
    for path, module in layer.named_modules(prefix=name):
        is_inside = isinstance(module, CutLayer) or any(path == block or path.startswith(f"{block}.") for block in blocks)
        for key, param in module.named_parameters(recurse=False):
            if not is_inside and param.dim() > 1:
                raise ArgumentError(
                    f"tensor_parallel.sequence_parallel: {path}.{key} has shape {tuple(param.shape)} and was not cut, but "
                    "only norms may work on parts of the tokens. Cut it (partition_config), or leave the key out."
                )


def _norms(name: str, layer: nn.Module, blocks: Sequence[Block]) -> Iterator[nn.Module]:
    """Modules with parameters of their own outside of blocks."""
    inside = tuple(f"{block.name}." for block in blocks)
    for path, module in layer.named_modules(prefix=name):
        if next(module.parameters(recurse=False), None) is not None and not f"{path}.".startswith(inside):
            yield module

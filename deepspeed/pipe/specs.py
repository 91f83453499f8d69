"""Layers that are described first and built later: by the stage that gets them, and by no other.

Lives here: the two descriptions. Does not live here: deciding who builds what (`module`, the caller). Layers may also be
given as modules, which every rank has built then, and as functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import nn

from deepspeed.common.logging import get_logger
from deepspeed.errors import PipelineError

__all__ = ["BoundForward", "Layer", "LayerSpec", "TiedLayerSpec", "layer_name"]

logger = get_logger(__name__)


class LayerSpec:
    """One layer, to be built as `typename(*args, **kwargs)`.

    Args:
        typename: class of the layer.
        *args: arguments of its constructor; those that are specs themselves are not built.
        **kwargs: likewise.

    Raises:
        PipelineError: `typename` is no class of modules.
    """

    def __init__(self, typename: type[nn.Module], *args: Any, **kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise PipelineError(
                f"LayerSpec got {typename!r}; it needs a subclass of torch.nn.Module. "
                "Modules that are built already and functions are put into the list of layers as they are."
            )
        self.typename = typename
        self.module_args = args
        self.module_kwargs = kwargs

    def build(self, log: bool = False) -> nn.Module:
        """Make the layer; `log` tells it."""
        if log:
            logger.info("building %r", self)
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        named = [f"{name}={value!r}" for name, value in self.module_kwargs.items()]
        return f"{type(self).__name__}({self.typename.__name__}: {', '.join([*map(repr, self.module_args), *named])})"


class TiedLayerSpec(LayerSpec):
    """A layer that is one module with every other layer of the same key, on whichever stages these lie.

    Each stage that has such a layer holds a copy, built from the key's first description. The copies start with the values
    of the first stage's and stay equal: the gradients of all their parameters are summed over the copies.

    Args:
        key: what the layers have in common; the module is `tied_modules.<key>`, so it has no dots.
        typename: class of the module, the same for the whole key.
        *args: arguments of its constructor.
        forward_fn: called as `forward_fn(module, inputs)` instead of the module; a head may project with an embedding so.
        tied_weight_attr: the parameters that this layer needs in common: names, through dots. They are checked to exist; all
            others of the module are as equal.
        **kwargs: further arguments of the constructor.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *args: Any,
        forward_fn: Callable[[Any, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **kwargs: Any,
    ) -> None:
        super().__init__(typename, *args, **kwargs)
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)

    def bind(self, module: nn.Module) -> nn.Module | BoundForward:
        """Return what computes this layer with `module`."""
        return module if self.forward_fn is None else BoundForward(module, self.forward_fn)


class BoundForward:
    """A function over a module that is registered elsewhere."""

    def __init__(self, module: nn.Module, forward_fn: Callable[[Any, Any], Any]) -> None:
        self.module = module
        self.forward_fn = forward_fn

    def __call__(self, inputs: Any) -> Any:
        """Call the function with the module and what the layer before gave."""
        return self.forward_fn(self.module, inputs)


Layer: TypeAlias = LayerSpec | nn.Module | Callable[[Any], Any]
"""One entry of the list of layers."""


def layer_name(layer: Layer) -> str:
    """Return the name by which `type:REGEX` knows a layer: its class, or the function."""
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    return type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", type(layer).__name__)

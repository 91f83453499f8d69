"""transformers' registry of attention functions, with ours in front of one implementation.

    ALL_ATTENTION_FUNCTIONS["sdpa"]        SharedAttention      models whose type was registered: Ulysses; others: as before
    ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]   SharedMask           the same, for masks
    GenerationMixin.generate               within it every model attends to the tokens that it is given, as before

A model keeps the implementation that it has, so that all else which depends on its name stays as it was. What was there
before is kept in what replaces it, so nothing here has to be remembered; `restore_transformers` puts it back.

Lives here: the two replacements. Does not live here: the attention (`sequence.hugging_face`), masks (`sequence.masks`).
transformers is imported where it is used: it is an optional dependency.

[Note: generation is local] A generated token follows its own rank's prompt. So what ranks give to `generate`, alike
or not, are prompts of their own, never parts of one sequence.
"""

from __future__ import annotations

import difflib
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from deepspeed.common.compiling import not_compiled
from deepspeed.errors import ArgumentError
from deepspeed.sequence.library import transformers
from deepspeed.sequence.masks import MaskOfParts, local_mask

__all__ = [
    "SharedAttention",
    "core_attention",
    "is_generating",
    "is_registered",
    "own_masks",
    "register",
    "restore_transformers",
]

Attention = Callable[..., tuple[Tensor, Any]]
_EAGER = "eager"
_RUNNING = "ds_calls_running"


class SharedAttention:
    """Stands for one implementation: each model type's attention of its own, else what was there.

    Args:
        core: what was there.
    """

    def __init__(self, core: Attention) -> None:
        self.core = core
        self.of_types: dict[str, Attention] = {}

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        """As transformers calls attention functions."""
        ours = None if is_generating() else self.of_types.get(_type_of(getattr(module, "config", None)))
        if ours is None:
            return self.core(module, query, key, value, local_mask(attention_mask), *args, **kwargs)
        return ours(module, query, key, value, attention_mask, *args, **kwargs)


class SharedMask:
    """Stands for the mask function of one implementation.

    Args:
        core: what was there.
        attention: whose model types get a `MaskOfParts`.
    """

    def __init__(self, core: Callable[..., Any], attention: SharedAttention) -> None:
        self.core = core
        self.is_core = False
        self._attention = attention

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers calls mask functions."""
        if self.is_core or is_generating() or _type_of(kwargs.get("config")) not in self._attention.of_types:
            return self.core(*args, **kwargs)
        return _mask_of_parts(kwargs.get("attention_mask"), functools.partial(self.core, *args, **kwargs))


@not_compiled
def _mask_of_parts(padding: Tensor | None, local: Callable[[], Any]) -> MaskOfParts:
    return MaskOfParts(padding, local)


def _type_of(config: Any) -> str:
    return str(getattr(config, "model_type", ""))


def core_attention(implementation: str) -> Attention:
    """Return transformers' function of an implementation, without ours.

    Raises:
        ArgumentError: there is no such implementation; the text has the nearest.
    """
    functions = transformers("modeling_utils").ALL_ATTENTION_FUNCTIONS
    found = functions.get(implementation)
    if found is None and implementation == _EAGER:
        return _eager
    if found is None:
        names = [_EAGER, *functions.valid_keys()]
        near = difflib.get_close_matches(implementation, names, 1)
        hint = f"; nearest: {near[0]!r}" if near else ""
        raise ArgumentError(
            f"core_attn_implementation={implementation!r} is no attention of transformers here; needed one of "
            f"{names}{hint}. "
            "Install what it needs, or give another one."
        )
    return found.core if isinstance(found, SharedAttention) else found


def _eager(module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    """Models bring an eager function of their own beside their attention."""
    for cls in getattr(module, "attention_class", type(module)).__mro__:
        function = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if function is not None:
            return function(module, *args, **kwargs)  # type: ignore[no-any-return]
    raise ArgumentError(
        f"{type(module).__name__} was asked for eager attention, and its module has no eager_attention_forward. Load "
        "the model with "
        'attn_implementation="sdpa".'
    )


def register(implementation: str, model_type: str, attention: Attention) -> None:
    """Let models of a type that have this implementation attend by `attention`; a later one replaces it."""
    functions = transformers("modeling_utils").ALL_ATTENTION_FUNCTIONS
    shared = functions.get(implementation)
    if not isinstance(shared, SharedAttention):
        shared = SharedAttention(core_attention(implementation))
        functions.register(implementation, shared)
        masks = _masks()
        if implementation in masks:
            masks.register(implementation, SharedMask(masks[implementation], shared))
    shared.of_types[model_type] = attention
    _let_generation_be_local()


def is_registered(implementation: str, model_type: str, attention: Attention) -> bool:
    """Whether models of that type attend by `attention` now; while they generate they do not."""
    shared = transformers("modeling_utils").ALL_ATTENTION_FUNCTIONS.get(implementation)
    is_there = isinstance(shared, SharedAttention) and shared.of_types.get(model_type) is attention
    return is_there and not is_generating()


def restore_transformers() -> None:
    """Put back what was in transformers' registry before `register`. Models attend to their own tokens alone again."""
    functions, masks = transformers("modeling_utils").ALL_ATTENTION_FUNCTIONS, _masks()
    for name, found in list(functions.items()):
        if isinstance(found, SharedAttention):
            functions.register(name, found.core)
            if found.core is _eager:
                type(functions)._global_mapping.pop(name)
    for name, found in list(masks.items()):
        if isinstance(found, SharedMask):
            masks.register(name, found.core)
    mixin = _mixin()
    if hasattr(mixin.generate, _RUNNING):
        mixin.generate = mixin.generate.__wrapped__


def is_generating() -> bool:
    """Whether a model's `generate` runs now. See [Note: generation is local]."""
    return bool(getattr(_mixin().generate, _RUNNING, None))


def _let_generation_be_local() -> None:
    """Put a function in front of `generate` that knows which calls run; it goes by the same name and signature."""
    mixin = _mixin()
    core = mixin.generate
    if hasattr(core, _RUNNING):
        return
    running: list[Any] = []

    @functools.wraps(core)
    def generate(*args: Any, **kwargs: Any) -> Any:
        running.append(core)
        try:
            return core(*args, **kwargs)
        finally:
            running.pop()

    setattr(generate, _RUNNING, running)  # functools.wraps hands it on to whoever goes in front of this one
    mixin.generate = generate


def _mixin() -> Any:
    return transformers("generation").GenerationMixin


@contextmanager
def own_masks(implementation: str) -> Iterator[None]:
    """Within it transformers makes plain masks, whatever the type of the model."""
    mask = _masks().get(implementation)
    if not isinstance(mask, SharedMask):
        yield
        return
    mask.is_core = True
    try:
        yield
    finally:
        mask.is_core = False


def _masks() -> Any:
    return transformers("masking_utils").ALL_MASK_ATTENTION_FUNCTIONS

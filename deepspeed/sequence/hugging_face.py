"""`UlyssesSPAttentionHF`: Ulysses around the attention of a transformers model, without a change to the model.

    model.forward  --> position ids, what is padding --> MaskOfParts (`sequence.masks`)
    each attention --> ALL_ATTENTION_FUNCTIONS[name]  --> UlyssesSPAttentionHF
                           one exchange to heads, the implementation's own function on the whole sequence, one exchange back

Works with any implementation of the registry (eager, SDPA, flex, flash): they see a whole sequence and fewer heads.
Samples are packed and padded as transformers has it: position ids that start anew, and a 2-D attention mask.

Source: Ulysses for ALST (arXiv:2506.13996), section 3.2. Lives here: the attention, and `register_with_transformers`.
Does not live here: the registry (`sequence.registry`), masks (`sequence.masks`), loaders (`sequence.data`), the loss
(`sequence.loss`).

[Note: positions] Each rank gets its tokens' positions in the whole sequence. A model that is given none counts from 0 on
every rank, which looks like packed samples; so a model object that was registered refuses a forward without them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from deepspeed import comm
from deepspeed.common.compiling import not_compiled
from deepspeed.errors import ArgumentError, UsageError
from deepspeed.sequence.exchange import HeadPlan, Lengths
from deepspeed.sequence.layer import expanded_for
from deepspeed.sequence.library import transformers
from deepspeed.sequence.masks import WholeSequence, local_mask, whole_of
from deepspeed.sequence.parts import Route, to_heads, to_sequence
from deepspeed.sequence.registry import core_attention, is_registered, own_masks, register
from deepspeed.sequence.state import SequenceParallelUnit, initialize_sequence_parallel
from deepspeed.topology import groups

__all__ = ["UlyssesSPAttentionHF", "attach_to_model", "head_counts"]

_PER_HEAD = ("position_bias", "head_mask")


class UlyssesSPAttentionHF(nn.Module):
    """An attention function of transformers over a sequence whose parts lie on the ranks of a group.

    Args:
        attn: the implementation's function, as transformers calls it.
        batch_size: samples of a micro-batch; the last one may have fewer.
        attn_head_count: query heads of the model.
        attn_head_size: of a query head.
        kv_head_count: key and value heads of the model.
        num_hidden_layers: accepted, no effect.
        process_group: ranks that share a sequence.
        seq_length_is_variable: lengths differ between steps or ranks; costs one small all-gather per forward.
        local_seq_length: tokens of every rank, where lengths do not vary.
        global_seq_length: of all ranks together, where lengths do not vary.
        disable_in_eval: a module in eval mode attends to its own tokens alone.

    Raises:
        ArgumentError: fewer query heads than ranks, or lengths that are missing or do not fit.
    """

    def __init__(
        self,
        attn: Callable[..., tuple[Tensor, Any]],
        batch_size: int,
        attn_head_count: int,
        attn_head_size: int,
        kv_head_count: int,
        num_hidden_layers: int,
        process_group: comm.ProcessGroup | None,
        seq_length_is_variable: bool = False,
        local_seq_length: int | None = None,
        global_seq_length: int | None = None,
        disable_in_eval: bool = False,
    ) -> None:
        super().__init__()
        self.attn = attn
        self.process_group = process_group
        self.world_size = comm.get_world_size(process_group)
        self.rank = comm.get_rank(process_group)
        HeadPlan(attn_head_count, kv_head_count, self.world_size)  # raises for heads that cannot be spread
        self.disable_in_eval = disable_in_eval
        self._lengths = None if seq_length_is_variable else _lengths(local_seq_length, global_seq_length, self.world_size)

    def is_on(self, module: nn.Module) -> bool:
        """Whether `module` attends to the tokens of all ranks now."""
        return self.world_size > 1 and (module.training or not self.disable_in_eval)

    @not_compiled
    def forward(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Return the context of this rank's tokens, (batch, tokens, heads, head size), and None for the weights.

        Every rank of the group must call it, in forward and in backward.

        Args:
            module: the attention module of the model.
            query: (batch, heads, tokens of this rank, head size).
            key: (batch, key and value heads, tokens of this rank, head size).
            value: like `key`; its head size may differ.
            attention_mask: what the model made for a mask, or None, or 2-D padding of this rank.
            args: for the implementation, like `kwargs`.
            kwargs: among them `position_ids`, (batch, tokens of this rank).

        Raises:
            ArgumentError: a mask or bias that only the model could cut, tokens before this sequence (a cache).
            UsageError: attention weights are asked for.
            CommError: other ranks are gone, late, or have other shapes.
        """
        if not self.is_on(module):
            return self.attn(module, query, key, value, local_mask(attention_mask), *args, **kwargs)
        self._check(module, query, key, kwargs)
        positions = kwargs.get("position_ids")
        whole = whole_of(
            attention_mask,
            lambda padding: WholeSequence.gathered(self.process_group, query, self._lengths, positions, padding),
        )
        plan = HeadPlan(query.shape[1], key.shape[1], self.world_size)
        ranks = range(self.world_size)
        queries, keys = tuple(map(plan.queries, ranks)), tuple(map(plan.keys, ranks))
        route = Route(self.process_group, self.rank, whole.lengths, (queries, keys, keys), 2, 1)
        query, key, value = to_heads(route, query, key, value)
        key, value = (expanded_for(plan, self.rank, each, 1) for each in (key, value))
        if positions is not None:
            kwargs["position_ids"] = whole.position_ids
        mask = self._mask(module, whole, query, kwargs)
        seen = _OwnHeads.of(module, query.shape[1] // key.shape[1], queries[self.rank], kwargs)
        context = self.attn(seen, query, key, value, mask, *args, **kwargs)[0]
        back = Route(self.process_group, self.rank, whole.lengths, (queries,), 1, 2)
        return to_sequence(back, context)[0], None

    def _mask(self, module: Any, whole: WholeSequence, query: Tensor, kwargs: dict[str, Any]) -> Any:
        is_causal = kwargs.get("is_causal")
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        with own_masks(module.config._attn_implementation):
            return whole.mask(module.config, query, bool(is_causal), kwargs.get("sliding_window") is not None)

    def _check(self, module: nn.Module, query: Tensor, key: Tensor, kwargs: dict[str, Any]) -> None:
        if query.shape[2] != key.shape[2]:
            raise ArgumentError(
                f"{type(module).__name__}: {query.shape[2]} query tokens and {key.shape[2]} key tokens on this rank; "
                "over sequence ranks both are the same tokens. Use use_cache=False, or model.generate; for a loop of your "
                "own that generates, register with disable_in_eval=True and call model.eval()."
            )
        if self._lengths is not None and self._lengths.tokens[self.rank] != query.shape[2]:
            raise ArgumentError(
                f"{type(module).__name__}: {query.shape[2]} tokens on this rank, but sequences were registered with "
                f"{self._lengths.total} tokens over {self.world_size} ranks, {self._lengths.tokens[self.rank]} here. "
                "Register with "
                "seq_length_is_variable=True."
            )
        given = [name for name in _PER_HEAD if kwargs.get(name) is not None]
        if given:
            raise ArgumentError(
                f"{type(module).__name__} adds {given} to its attention, which covers this rank's tokens alone; "
                "sequence parallelism "
                "needs attention by positions and masks. Use another model, or sequence_parallel_size=1."
            )
        if kwargs.get("output_attentions"):
            raise UsageError(
                "output_attentions=True over sequence-parallel ranks: each has the weights of some heads alone. Leave "
                "it out, or ask "
                "in eval mode after registering with disable_in_eval=True."
            )

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str | None,
        sequence_parallel_size: int,
        micro_batch_size: int,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> SequenceParallelUnit:
        """Let models of a type attend over sequence-parallel ranks, and return what `deepspeed.initialize` takes as `mpu`.

        Every rank of the world must call it, after `deepspeed.init_distributed`. Neighbouring ranks share a sequence.
        Models of other types keep their attention, so does this one where it has other implementations than the given.

        Args:
            model_name_or_path: a model with a `config`, or what `AutoConfig.from_pretrained` takes. A model is switched
                to the given implementation where it has another; one that is made later must be made with it.
            core_attn_implementation: name in transformers' registry; None: what the model has.
            sequence_parallel_size: ranks that share a sequence; 1 changes nothing.
            micro_batch_size: samples of a micro-batch.
            seq_length: tokens of a whole sequence, where lengths do not vary; the size must divide it.
            seq_length_is_variable: as for the class.
            disable_in_eval: as for the class.
            max_length: older name of `seq_length`.

        Raises:
            ArgumentError: an unknown implementation, heads, lengths or sizes that do not fit.
            CommError: there is no process group.
            MissingPackageError: transformers is not installed.
        """
        config, model = _config_of(model_name_or_path)
        text = config.get_text_config()
        implementation = core_attn_implementation or getattr(text, "_attn_implementation", None)
        if implementation is None:
            raise ArgumentError(
                f"core_attn_implementation=None with {model_name_or_path!r}, whose configuration names none; needed a "
                "name, such as "
                '"sdpa". Give the one that the model will be loaded with (attn_implementation=...).'
            )
        core = core_attention(implementation)
        initialize_sequence_parallel(sequence_parallel_size)
        unit = SequenceParallelUnit(groups.get_current())
        if sequence_parallel_size > 1:
            attention = cls(
                core,
                micro_batch_size,
                *head_counts(text),
                num_hidden_layers=text.num_hidden_layers,
                process_group=unit.get_sequence_parallel_group(),
                seq_length_is_variable=seq_length_is_variable,
                global_seq_length=seq_length or max_length,
                disable_in_eval=disable_in_eval,
            )
            _attach(attention, text, implementation, model)
        return unit


def attach_to_model(
    model: Any, implementation: str, group: comm.ProcessGroup | None, *, disable_in_eval: bool = False
) -> UlyssesSPAttentionHF:
    """Let models of this one's type attend over the ranks of a group; lengths vary. See `register_with_transformers`."""
    text = model.config.get_text_config()
    attention = UlyssesSPAttentionHF(
        core_attention(implementation),
        1,
        *head_counts(text),
        num_hidden_layers=text.num_hidden_layers,
        process_group=group,
        seq_length_is_variable=True,
        disable_in_eval=disable_in_eval,
    )
    _attach(attention, text, implementation, model)
    return attention


def _attach(attention: UlyssesSPAttentionHF, text: Any, implementation: str, model: Any) -> None:
    register(implementation, text.model_type, attention)
    if model is not None:
        if text._attn_implementation != implementation:
            model.set_attn_implementation(implementation)
        _require_positions(model, attention, text.model_type)


class _OwnHeads:
    """An attention module as the implementation's function sees it: with the head counts of this rank.

    Everything else is asked of the module itself.
    """

    def __init__(self, module: nn.Module, own: dict[str, Any]) -> None:
        self.attention_class = type(module)
        self.__dict__.update(own)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    @classmethod
    def of(cls, module: Any, group_size: int, queries: range, kwargs: dict[str, Any]) -> _OwnHeads:
        """Cut what is per head (attention sinks) to `queries`, here and in `kwargs`."""
        own: dict[str, Any] = {"num_key_value_groups": group_size}
        if isinstance(getattr(module, "sinks", None), Tensor):
            own["sinks"] = module.sinks[queries.start : queries.stop]
        if isinstance(kwargs.get("s_aux"), Tensor):
            kwargs["s_aux"] = kwargs["s_aux"][queries.start : queries.stop]
        return cls(module, own)


def _lengths(local: int | None, whole: int | None, world_size: int) -> Lengths:
    if local is None and whole is not None and whole % world_size == 0:
        local = whole // world_size
    if local is None or whole not in (None, local * world_size):
        raise ArgumentError(
            f"seq_length_is_variable=False with {whole} tokens in all and {local} on each of {world_size} "
            "sequence-parallel ranks; "
            "needed seq_length, a multiple of the ranks. Give it, or seq_length_is_variable=True."
        )
    return Lengths.equal(local, world_size)


def _config_of(model: Any) -> tuple[Any, Any]:
    if hasattr(model, "config"):
        return model.config, model
    return transformers().AutoConfig.from_pretrained(model), None


def head_counts(text: Any) -> tuple[int, int, int]:
    """Query heads, their size, key and value heads of a decoder's config.

    Raises:
        ArgumentError: an attention whose tokens do not see the last ones, or all, before them.
    """
    if getattr(text, "attention_chunk_size", None):
        raise ArgumentError(
            f"{text.model_type} attends in chunks of {text.attention_chunk_size} tokens, which its attention function "
            "is not told; "
            "sequence parallelism needs causal, sliding or full attention. Use another model, or sequence_parallel_size=1."
        )
    heads = text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    return heads, size, getattr(text, "num_key_value_heads", None) or heads


def _require_positions(model: Any, attention: UlyssesSPAttentionHF, model_type: str) -> None:
    """See [Note: positions]."""
    place = 2  # forward(input_ids, attention_mask, position_ids)

    @not_compiled
    def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        is_missing = kwargs.get("position_ids") is None and len(args) <= place
        implementation = model.config.get_text_config()._attn_implementation
        if is_missing and attention.is_on(module) and is_registered(implementation, model_type, attention):
            raise ArgumentError(
                f"{type(module).__name__} was called without position_ids, while its sequences lie on "
                f"{attention.world_size} ranks: "
                "each would count from 0. Pass this rank's part of the whole sequence's position_ids; "
                "UlyssesSPDataLoaderAdapter "
                "cuts them for you."
            )

    model.register_forward_pre_hook(check, with_kwargs=True)

"""`GatheredParameters` over real ranks, on parameters that `zero.Init` sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed
from deepspeed import comm
from deepspeed.errors import ArgumentError, UsageError
from deepspeed.zero import GatheredParameters, Init, TiledLinear, ZeroParamStatus, unwrap_model_for_generation
from deepspeed.zero.external import external_parameters_of
from tests.support.models import TiedGpt
from tests.support.ranks import run_ranks

WORLDS = [1, 2, 3]


def _model() -> Any:
    torch.manual_seed(0)
    with Init():
        return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))


def _read(param: nn.Parameter) -> list[float]:
    with GatheredParameters(param):
        return [float(value) for value in param.detach().flatten()]


# -- what can be gathered ---------------------------------------------------------------------------------------------

FORMS: dict[str, Callable[[Any], Any]] = {
    "a parameter": lambda m: m[0].weight,
    "a module": lambda m: m,
    "a generator": lambda m: m.parameters(),
    "a list with repeats and None": lambda m: [m[0].weight, m[0].weight, None, m[0].bias],
    "the values of a dict": lambda m: dict(m.named_parameters()).values(),
    "a set, in another order on each rank": lambda m: set(m.parameters()),
    "a list with ordinary tensors": lambda m: [torch.ones(2), nn.Parameter(torch.ones(2)), *m.parameters()],
    "nothing": lambda m: [],
    "None": lambda m: None,
}


def _gather_forms(rank: int, world_size: int) -> dict[str, int]:
    model, whole = _model(), {}
    for name, form in FORMS.items():
        with GatheredParameters(form(model)):
            whole[name] = sum(p.numel() > 0 for p in model.parameters())
            for p in model.parameters():
                assert (p.ds_status is ZeroParamStatus.AVAILABLE) == (p.shape == p.ds_shape)
        assert all(p.numel() == 0 and p.ds_status is ZeroParamStatus.NOT_AVAILABLE for p in model.parameters())
    return whole


@pytest.mark.parametrize("world_size", WORLDS)
def test_every_form_of_argument_is_gathered_and_released(world_size: int) -> None:
    for whole in run_ranks(_gather_forms, world_size):
        assert list(whole.values()) == [1, 4, 4, 2, 4, 4, 4, 0, 0]


def test_other_arguments_are_refused() -> None:
    for wrong in (3, ["weight"], {"weight": torch.ones(1)}):
        with pytest.raises(ArgumentError, match=r"needed a parameter, a module or an iterable of parameters"):
            GatheredParameters(wrong)


def test_ordinary_parameters_need_no_process_group() -> None:
    layer = nn.Linear(2, 2)
    with GatheredParameters(layer.parameters(), modifier_rank=0):
        nn.init.ones_(layer.weight)
    assert layer.weight.unique().tolist() == [1.0]
    assert not comm.is_initialized()


# -- edits ------------------------------------------------------------------------------------------------------------


def _edit(rank: int, world_size: int) -> None:
    model = _model()
    param = model[0].bias
    before = _read(param)
    for modifier in range(world_size):
        with GatheredParameters(param, modifier_rank=modifier):
            param.data.fill_(10.0 + rank)
        assert _read(param) == [10.0 + modifier] * 2
    with GatheredParameters(param):
        param.data.fill_(-1.0)
    assert _read(param) == [10.0 + world_size - 1] * 2
    with pytest.raises(ValueError, match="inside"), GatheredParameters(param, modifier_rank=0):
        _fill_and_raise(param)
    assert _read(param) == [10.0 + world_size - 1] * 2
    assert _read(param) != before
    with GatheredParameters(param, modifier_rank=0, enabled=False):
        assert param.numel() == 0
    with GatheredParameters(param, modifier_rank=0):
        param.data = torch.tensor([3.0, 4.0]) if rank == 0 else param.data
    assert _read(param) == [3.0, 4.0]


def _fill_and_raise(param: nn.Parameter) -> None:
    param.data.fill_(-2.0)
    raise ValueError("inside")


@pytest.mark.parametrize("world_size", WORLDS)
def test_edits_of_the_modifier_rank_reach_all_ranks_and_no_others_do(world_size: int) -> None:
    run_ranks(_edit, world_size)


def _nest(rank: int, world_size: int) -> None:
    model = _model()
    first, second = model[0].weight, model[1].weight
    with GatheredParameters([first, second]):
        with GatheredParameters(model.parameters(), modifier_rank=0):
            if rank == 0:
                first.data.fill_(6.0)
        assert first.shape == (2, 3)
        assert first.unique().tolist() == [6.0]  # on every rank
        assert model[0].bias.numel() == 0
        second.data.fill_(9.0)  # nobody stores it
    assert [p.numel() for p in model.parameters()] == [0] * 4
    assert set(_read(first)) == {6.0}
    assert 9.0 not in _read(second)
    block = GatheredParameters(first)
    with block, block:
        assert first.numel() == 6
    assert first.numel() == 0


@pytest.mark.parametrize("world_size", WORLDS)
def test_blocks_nest_and_overlap_and_each_returns_to_the_state_before_it(world_size: int) -> None:
    run_ranks(_nest, world_size)


def _change_shape(rank: int, world_size: int) -> str:
    model = _model()
    param = model[0].weight
    block = GatheredParameters(param, modifier_rank=1)
    block.__enter__()
    if rank == 1:
        param.data = torch.ones(3, 2)
    with pytest.raises(UsageError) as caught:
        block.__exit__(None, None, None)
    assert param.numel() == 0
    assert len(_read(param)) == 6
    with pytest.raises(ArgumentError, match=r"modifier_rank=5, but the parameters are shared by the ranks \[0, 1\]"):
        GatheredParameters(param, modifier_rank=5).__enter__().__exit__(None, None, None)
    assert param.numel() == 0
    return str(caught.value)


def test_a_shape_that_one_rank_changed_is_an_error_on_all_of_them() -> None:
    for text in run_ranks(_change_shape, 2):
        assert "Linear.weight of shape (2, 3) came out of GatheredParameters() with another shape on rank 1" in text


# -- as clients use it ------------------------------------------------------------------------------------------------


def _load_on_rank_0(rank: int, world_size: int) -> None:
    torch.manual_seed(1)
    want = TiedGpt().state_dict()
    with Init():
        model = TiedGpt()
    state = want if rank == 0 else {name: value.to("meta") for name, value in want.items()}
    for prefix, module in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        own = [p for name, p in module.named_parameters(recurse=False) if dot + name in state]
        with GatheredParameters(own, modifier_rank=0):
            if rank == 0:
                module._load_from_state_dict(state, dot, {}, True, [], [], [])
    with GatheredParameters(model.parameters()):
        for name, value in want.items():
            torch.testing.assert_close(model.state_dict()[name], value, rtol=0, atol=0)


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_checkpoint_that_only_rank_0_has_read_is_loaded_module_by_module(world_size: int) -> None:
    run_ranks(_load_on_rank_0, world_size)


def _resize_an_embedding(rank: int, world_size: int) -> None:
    with Init():
        old = nn.Embedding(5, 2)
    rows = _read(old.weight)
    with Init():
        grown = nn.Embedding(7, 2)
    with GatheredParameters([old.weight, grown.weight], modifier_rank=0):
        if rank == 0:
            grown.weight.data[:5] = old.weight.data
    with GatheredParameters([old.weight, grown.weight], modifier_rank=0):
        old.weight = grown.weight
    assert old.weight is grown.weight
    assert old.weight.ds_shape == (7, 2)
    assert _read(old.weight)[:10] == rows


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_embedding_is_resized_by_gathering_the_old_and_the_new_one(world_size: int) -> None:
    run_ranks(_resize_an_embedding, world_size)


def _call_methods(rank: int, world_size: int) -> None:
    model = _model()
    param = model[0].weight
    param.all_gather()
    param.all_gather()
    assert param.shape == (2, 3)
    param.data.fill_(float(rank + 1))
    param.partition(has_been_updated=True)
    param.partition()
    assert param.numel() == 0
    assert set(_read(param)) == {1.0}
    param.all_gather_coalesced(model.parameters()).wait()
    assert all(p.shape == p.ds_shape for p in model.parameters())
    param.partition(set(model.parameters()))
    assert all(p.numel() == 0 for p in model.parameters())
    with GatheredParameters(model[1].weight, fwd_module=model[0]):
        assert external_parameters_of(model[0]) == (model[1].weight,)
    assert [p is model[1].weight for _, p in model[0].ds_external_parameters()] == [True]
    assert list(model[1].ds_external_parameters()) == []
    with unwrap_model_for_generation(model) as unwrapped:
        assert unwrapped(torch.ones(1, 3)).shape == (1, 3)
    param.ds_tensor.data = param.ds_tensor.data * 2
    assert set(_read(param)) == {2.0}


@pytest.mark.parametrize("world_size", WORLDS)
def test_the_methods_of_a_sharded_parameter_gather_and_release_it(world_size: int) -> None:
    run_ranks(_call_methods, world_size)


def _ask_an_engine(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = TiedGpt()
    numels = [p.numel() for p in model.parameters()]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "param_persistence_threshold": 0},
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    params: list[Any] = list(model.parameters())
    assert [p.ds_numel for p in params] == numels
    assert [list(module.ds_external_parameters()) for module in model.modules()] == [[] for _ in model.modules()]
    with GatheredParameters(set(params), modifier_rank=0):
        assert [p.ds_status for p in params] == [ZeroParamStatus.AVAILABLE] * len(params)
        for p in params:
            p.data.fill_(float(rank + 1))
    for p in params:
        p.ds_active_sub_modules.clear()
        assert p.shape == torch.Size([0])
        assert set(_read(p)) == {1.0}
    engine.destroy()
    assert not any(hasattr(p, "ds_id") for p in params)


@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_that_an_engine_shards_answer_alike(world_size: int) -> None:
    run_ranks(_ask_an_engine, world_size)


def _fill_tiles(rank: int, world_size: int) -> Tensor:
    with Init():
        layer, tiled = nn.Linear(5, 4), TiledLinear(5, 4, in_splits=2, out_splits=3)
    tiled.copy_params_from(layer)
    inputs = torch.arange(10.0).view(2, 5)
    with GatheredParameters([*layer.parameters(), *tiled.parameters()]):
        difference: Tensor = (layer(inputs) - tiled(inputs)).abs().max()
        assert layer(inputs).abs().max() > 0.1
    return difference.detach()


def test_a_tiled_linear_takes_the_values_of_a_sharded_layer() -> None:
    for difference in run_ranks(_fill_tiles, 2):
        # |w| <= 5**-0.5 and inputs <= 9, so sums are <= 21; 6 roundings in each of two orders, 2**-24 of that each
        assert difference <= 2 * 6 * 21 * 2**-24


# -- small parameters that an engine keeps whole ----------------------------------------------------------------------


def _edit_small_ones(rank: int, world_size: int, is_trained: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))
    model[1].bias.requires_grad_(False)
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    config |= {"bf16": {"enabled": True}}
    config |= {"optimizer": {"type": "SGD", "params": {"lr": 0.0}}} if is_trained else {}
    engine = deepspeed.initialize(model=model, config=config)[0]
    params: list[Any] = list(model.parameters())
    for p in params:
        assert (p.ds_numel, p.ds_shape, p.partition_numel()) == (p.numel(), p.shape, p.numel())
        assert p.ds_persist
        assert p.ds_status is ZeroParamStatus.AVAILABLE
    with GatheredParameters(set(params), modifier_rank=world_size - 1):
        for p in params:
            p.data.fill_(float(rank + 1))
    assert [set(_read(p)) for p in params] == [{float(world_size)}] * len(params)
    if is_trained:  # at rate 0: what comes back is the master
        engine.backward(engine(torch.ones(1, 3).bfloat16()).sum())
        engine.step()
    params[0].all_gather()
    params[0].partition(has_been_updated=True)
    assert [set(p.detach().flatten().tolist()) for p in params] == [{float(world_size)}] * len(params)
    engine.destroy()
    assert not any(name.startswith(("ds_", "_ds")) for p in params for name in vars(p))


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("world_size", WORLDS)
def test_an_edit_of_small_parameters_reaches_all_ranks(world_size: int, is_trained: bool) -> None:
    """Which are too small to be sharded is the engine's business: clients gather and edit all alike."""
    run_ranks(_edit_small_ones, world_size, is_trained)


def _replace_engine(rank: int, world_size: int) -> None:
    model = nn.Linear(3, 2)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    deepspeed.initialize(model=model, config=config)
    config = {**config, "zero_optimization": {"stage": 1}, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = deepspeed.initialize(model=model, config=config)[0]
    assert not any(hasattr(p, "ds_id") for p in model.parameters())
    engine.destroy()


def test_an_engine_at_another_stage_makes_them_ordinary_ones() -> None:
    run_ranks(_replace_engine, 2)

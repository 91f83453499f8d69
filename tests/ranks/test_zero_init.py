"""`zero.Init` over real ranks: what is built inside equals what rank 0 would have built alone."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed
from deepspeed import comm
from deepspeed.errors import UsageError
from deepspeed.zero import GatheredParameters, Init, ZeroParamStatus, ZeroParamType
from deepspeed.zero.init_context import init_suspended
from deepspeed.zero.shard import is_sharded, take_whole, whole_shape, whole_values
from tests.support.models import Branching, Lora, PartlyFrozen, TiedGpt, WithEmptyParameter
from tests.support.ranks import RanksFailed, run_ranks

WORLDS = [1, 2, 3]


def _whole(module: nn.Module) -> dict[str, Tensor]:
    with GatheredParameters(module.parameters()):
        return {name: p.detach().clone() for name, p in module.named_parameters()}


def _plain(build: Callable[[], nn.Module], seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {name: p.detach().clone() for name, p in build().named_parameters()}


def _assert_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert list(got) == list(want)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


def _assert_released(param: Any, shape: torch.Size, world_size: int) -> None:
    assert param.shape == torch.Size([0])
    assert param.ds_shape == shape == whole_shape(param)
    assert param.ds_numel == shape.numel()
    assert param.partition_numel() == param.ds_tensor.numel() == -(-shape.numel() // world_size)
    assert param.ds_status is ZeroParamStatus.NOT_AVAILABLE
    assert param.ds_param_type is ZeroParamType.PARTITIONED
    assert param.ds_active_sub_modules == set()
    assert not param.ds_persist
    assert is_sharded(param)


# -- values -----------------------------------------------------------------------------------------------------------


class OddShapes(nn.Module):
    """Parameters of 0 to 3 dimensions, empty, frozen, integer and boolean ones, and a tag of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.cube = nn.Parameter(torch.randn(2, 3, 4))
        self.exact = nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.codes = nn.Parameter(torch.arange(5), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)
        self.strided = nn.Parameter(torch.randn(4, 3).t())
        self.scale.tag = "kept"  # type: ignore[attr-defined]


MODELS: list[Callable[[], nn.Module]] = [TiedGpt, Lora, PartlyFrozen, Branching, WithEmptyParameter, OddShapes]


def _build_models(rank: int, world_size: int) -> list[dict[str, Tensor]]:
    values = []
    for build in MODELS:
        torch.manual_seed(rank)
        with Init():
            model = build()
        want = _plain(build)
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        assert names == [name for name, _ in build().named_parameters(remove_duplicate=False)]
        for name, param in model.named_parameters():
            _assert_released(param, want[name].shape, world_size)
            assert (param.dtype, param.requires_grad) == (want[name].dtype, build().get_parameter(name).requires_grad)
        values.append(_whole(model))
        assert all(p.numel() == 0 for p in model.parameters())
        if build is OddShapes:
            assert model.scale.tag == "kept"
    return values


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_model_built_inside_has_the_values_that_rank_0_would_have_built_alone(world_size: int) -> None:
    wanted = [_plain(build) for build in MODELS]
    for values in run_ranks(_build_models, world_size):
        for got, want in zip(values, wanted, strict=True):
            _assert_equal(got, want)


class LateValues(nn.Module):
    """Every way of writing values after a module was built, inside the constructor of the module around it."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(5, 3)
        nn.init.constant_(self.lin.weight, 3.0)
        self.lin.bias.data.fill_(2.0)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 6, batch_first=True), 2)
        held = self.lin.weight
        self.between = nn.Linear(3, 5)
        with torch.no_grad():
            held.mul_(2.0)  # the look-up counts until this constructor returns
            self.between.weight.copy_(self.lin.weight.t())
        for p in self.encoder.parameters():
            if p.dim() > 1:
                nn.init.xavier_uniform_(p)
        self.tied = nn.Linear(5, 3)
        self.tied.weight = self.lin.weight
        self.lin.late = nn.Parameter(torch.full((3,), 7.0))  # type: ignore[assignment]
        self.apply(_initialise)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.LayerNorm):
        for p in module._parameters.values():
            assert p is not None
            nn.init.uniform_(p)


def _write_late(rank: int, world_size: int) -> dict[str, Tensor]:
    torch.manual_seed(10 + rank)
    with Init():
        model = LateValues()
        nn.init.normal_(model.between.bias)  # outside any constructor
    assert model.tied.weight is model.lin.weight
    assert model.lin.late.numel() == 0
    return _whole(model)


@pytest.mark.parametrize("world_size", WORLDS)
def test_values_written_after_construction_take_effect_and_are_those_of_rank_0(world_size: int) -> None:
    def build() -> nn.Module:
        model = LateValues()
        nn.init.normal_(model.between.bias)
        return model

    want = _plain(build, seed=10)
    for got in run_ranks(_write_late, world_size):
        _assert_equal(got, want)


class ManyLookups(nn.Module):
    """Looks all of its layers' weights up and notes how much was whole at the most."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 2, bias=False) for _ in range(9))
        self.most_numel = 0
        for position, layer in enumerate(self.layers):
            nn.init.constant_(layer.weight, float(position))
            live = sum(p.numel() for one in self.layers for p in one._parameters.values() if p is not None)
            self.most_numel = max(self.most_numel, live)


def _look_up_within(rank: int, world_size: int, max_live_parameters: int) -> tuple[int, list[float]]:
    with Init(config_dict_or_path={"zero_optimization": {"stage3_max_live_parameters": max_live_parameters}}):
        model = ManyLookups()
    return model.most_numel, [float(value.unique()) for value in _whole(model).values()]


@pytest.mark.parametrize(("max_live_parameters", "most_numel"), [(1, 4 * 6), (30, 5 * 6), (10**6, 9 * 6)])
def test_what_was_looked_up_stays_whole_within_max_live_parameters(max_live_parameters: int, most_numel: int) -> None:
    for live, values in run_ranks(_look_up_within, 2, max_live_parameters):
        assert live == most_numel
        assert values == [float(position) for position in range(9)]


def _lose_a_write(rank: int, world_size: int, writer: int) -> str:
    context = Init()
    context.__enter__()
    model = nn.Linear(3, 2)
    if rank == writer:
        nn.init.ones_(model._parameters["weight"])
    with pytest.raises(UsageError) as caught:
        context.__exit__(None, None, None)
    return str(caught.value)


def test_a_write_into_an_empty_tensor_is_an_error_on_every_rank() -> None:
    texts = run_ranks(_lose_a_write, 3, 1)
    assert "Linear.weight was written to while sharded" in texts[1]
    assert all("a parameter on another rank" in texts[rank] for rank in (0, 2))
    assert all("GatheredParameters([module.weight], modifier_rank=0)" in text for text in texts)


def _assign_storage(rank: int, world_size: int) -> None:
    with Init():
        model = nn.Linear(3, 2)
    model.weight.data = torch.ones(2, 3)
    with GatheredParameters(model.weight):
        pass


def test_storage_assigned_while_sharded_is_refused_at_the_next_gather() -> None:
    with pytest.raises(RanksFailed, match=r"Linear.weight was given 6 elements \(param.data = ...\) while sharded"):
        run_ranks(_assign_storage, 2)


# -- the context ------------------------------------------------------------------------------------------------------


def _tensors_inside(rank: int, world_size: int) -> None:
    with Init(dtype=torch.bfloat16):
        made = [torch.zeros(2), torch.ones(2), torch.empty(2), torch.full((2,), 1.0), torch.rand(2), torch.randn(2)]
        made += [torch.arange(0.0, 2.0), torch.tensor([1.0]), torch.eye(2), torch.linspace(0, 1, 3), torch.logspace(0, 1, 3)]
        for tensor in made:
            assert tensor.dtype is torch.bfloat16
        assert torch.arange(3).dtype is torch.int64
        assert torch.tensor(True).dtype is torch.bool
        assert torch.zeros(2, dtype=torch.float64).dtype is torch.float64
        assert torch.ones(2, device="meta").is_meta
        assert torch.tensor(1.0, requires_grad=True).is_leaf
        with torch.device("meta"):
            assert torch.zeros(2).is_meta
        with Init(dtype=torch.float64):
            assert torch.zeros(2).dtype is torch.float64
        assert torch.zeros(2).dtype is torch.bfloat16
        with init_suspended():
            assert torch.zeros(2).dtype is torch.float32
            assert nn.Linear(2, 2).weight.numel() == 4
        assert torch.zeros(2).dtype is torch.bfloat16
        layer = nn.Linear(2, 2)
        explicit = nn.Linear(2, 2, dtype=torch.float64)
    assert torch.zeros(2).dtype is torch.float32
    assert (layer.weight.dtype, explicit.weight.dtype) == (torch.bfloat16, torch.float64)


def test_floating_tensors_made_inside_have_the_configured_dtype_unless_they_name_one() -> None:
    run_ranks(_tensors_inside, 1)


class Outer(nn.Module):
    """Builds one layer in a context of its own, and one after it."""

    def __init__(self) -> None:
        super().__init__()
        with Init(dtype=torch.float64):
            self.inner = nn.Linear(2, 2)
        self.after = nn.Linear(2, 2)
        self.own = nn.Parameter(torch.ones(3))


def _nest(rank: int, world_size: int) -> None:
    before = {name: vars(nn.Module).get(name) for name in ("__init__", "__getattr__", "apply", "named_parameters")}
    context = Init(dtype=torch.bfloat16)
    with context:

        class Declared(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.full((4,), 3.0))

        model, declared = Outer(), Declared()
    ordinary = nn.Linear(2, 2)
    assert not hasattr(ordinary.weight, "ds_id")
    assert ordinary.weight.numel() == 4
    assert Declared().weight.numel() == 4
    with context:
        again = Declared()
    assert [p.numel() for p in (*model.parameters(), *declared.parameters(), *again.parameters())] == [0] * 7
    assert {p.dtype for p in model.inner.parameters()} == {torch.float64}
    assert {p.dtype for p in (*model.after.parameters(), model.own)} == {torch.bfloat16}
    assert _whole(declared)["weight"].tolist() == [3.0] * 4
    assert {name: vars(nn.Module).get(name) for name in before} == before
    assert "__init_subclass__" not in vars(nn.Module)


@pytest.mark.parametrize("world_size", [1, 2])
def test_contexts_nest_end_and_can_be_entered_again(world_size: int) -> None:
    run_ranks(_nest, world_size)


class Raising(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.lin.weight.data.fill_(5.0)
        raise ValueError("no")


def _leave_by_exceptions(rank: int, world_size: int) -> None:
    zeros = torch.zeros
    kept: list[nn.Module] = []

    def build() -> None:
        with Init():
            kept.append(nn.Linear(2, 2))
            kept[0].weight.data.fill_(5.0)
            with Init():
                Raising()

    with pytest.raises(ValueError, match="no"):
        build()
    assert torch.zeros is zeros
    assert kept[0].weight.numel() == 0
    assert nn.Linear(2, 2).weight.numel() == 4
    with Init():
        with pytest.raises(ValueError, match="no"):
            Raising()
        survivor = nn.Linear(2, 2)
    assert survivor.weight.numel() == 0
    assert _whole(survivor)["weight"].numel() == 4


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_exception_ends_the_contexts_and_leaves_modules_sharded(world_size: int) -> None:
    run_ranks(_leave_by_exceptions, world_size)


def _leave_in_another_order(rank: int, world_size: int) -> None:
    zeros = torch.zeros
    outer, inner = Init(dtype=torch.bfloat16), Init(dtype=torch.float64)
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert torch.zeros(1).dtype is torch.float64
    assert nn.Linear(2, 2).weight.numel() == 4  # looked up
    inner.__exit__(None, None, None)
    assert torch.zeros is zeros


def test_leaving_the_outer_context_first_leaves_the_inner_one_in_force() -> None:
    run_ranks(_leave_in_another_order, 1)


def _before_the_process_group(rank: int, world_size: int) -> int:
    assert not comm.is_initialized()
    with Init():
        model = nn.Linear(5, 4)
    assert comm.get_world_size() == world_size
    return int(model.weight.ds_tensor.numel())


def test_it_works_before_init_distributed_with_the_real_number_of_ranks() -> None:
    assert run_ranks(_before_the_process_group, 3, init=False) == [7, 7, 7]


def _shard_an_existing_module(rank: int, world_size: int) -> dict[str, Tensor]:
    torch.manual_seed(rank)
    with torch.device("meta"):
        hollow = nn.Linear(2, 2)
    model = nn.Sequential(TiedGpt(), hollow)
    Init(module=model)
    assert not is_sharded(hollow.weight)  # nothing to shard yet
    hollow.to_empty(device="cpu")
    nn.init.ones_(hollow.weight)
    nn.init.zeros_(hollow.bias)
    Init(module=model)
    assert all(p.numel() == 0 for p in model.parameters())
    return _whole(model[0])


@pytest.mark.parametrize("world_size", WORLDS)
def test_an_existing_module_is_sharded_at_once_and_meta_parameters_when_they_have_data(world_size: int) -> None:
    for got in run_ranks(_shard_an_existing_module, world_size):
        _assert_equal(got, _plain(TiedGpt))


def _in_groups(rank: int, world_size: int) -> tuple[int, float]:
    pair, alone = comm.new_group([1, 2]), comm.new_group([0])
    group = alone if rank == 0 else pair

    class Mpu:
        def get_data_parallel_group(self) -> Any:
            return group

    torch.manual_seed(rank)
    with Init(data_parallel_group=group):
        model = nn.Linear(5, 1, bias=False)
        nn.init.constant_(model.weight, float(rank))
    with Init(mpu=Mpu()):
        other = nn.Linear(5, 1, bias=False)
    assert other.weight.ds_tensor.numel() == model.weight.ds_tensor.numel()
    assert other.weight.ds_process_group is group
    return model.weight.ds_tensor.numel(), float(_whole(model)["weight"].unique())


def test_a_group_shares_its_parameters_and_its_first_rank_has_the_values() -> None:
    assert run_ranks(_in_groups, 3) == [(5, 0.0), (3, 1.0), (3, 1.0)]


def _on_the_host(rank: int, world_size: int) -> None:
    for options in (
        {"remote_device": "cpu"},
        {"config_dict_or_path": {"zero_optimization": {"offload_param": {"device": "cpu"}}}},
    ):
        with Init(**options):  # type: ignore[arg-type]
            model = nn.Linear(3, 3)
        assert model.weight.ds_tensor.device.type == "cpu"
        assert _whole(model)["weight"].shape == (3, 3)


def test_shards_may_rest_in_host_memory() -> None:
    run_ranks(_on_the_host, 2)


def _read_only_apply(rank: int, world_size: int, override: bool) -> list[int]:
    seen = []
    with Init(config_dict_or_path={"zero_optimization": {"override_module_apply": override}}):
        model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
        model.apply(lambda module: seen.extend(p.numel() for p in module._parameters.values() if p is not None))
    assert all(p.numel() == 0 for p in model.parameters())
    return seen


@pytest.mark.parametrize(("override", "seen"), [(True, [6, 2, 2, 2]), (False, [0, 0, 0, 0])])
def test_module_apply_opens_parameters_around_its_function_unless_the_config_says_no(
    override: bool, seen: list[int]
) -> None:
    assert run_ranks(_read_only_apply, 2, override) == [seen, seen]


def _init_on_rank_0_alone(rank: int, world_size: int) -> dict[str, Tensor]:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = nn.Linear(3, 2), nn.Linear(2, 2), nn.Linear(2, 2)
            params = [*self.first.parameters(), *self.second.parameters(recurse=False), *self.first.parameters()]
            with GatheredParameters(params, modifier_rank=0):
                if rank == 0:
                    nn.init.constant_(self.first.weight, 4.0)
            with GatheredParameters(self.first.bias, modifier_rank=0):
                if rank == 0:
                    assert self.third.weight.numel() == 0  # a look-up on one rank gathers nothing
                    self.first.bias.data.fill_(5.0)

    with Init():
        model = Model()
    return _whole(model.first)


@pytest.mark.parametrize("world_size", WORLDS)
def test_one_rank_may_initialise_alone_inside_gathered_parameters(world_size: int) -> None:
    for got in run_ranks(_init_on_rank_0_alone, world_size):
        assert got["weight"].unique().tolist() == [4.0]
        assert got["bias"].unique().tolist() == [5.0]


class Parametrized(nn.Module):
    """As speech models do: a convolution whose weight is computed from two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 3, 2)
        with GatheredParameters(self.conv.weight, modifier_rank=0):
            self.conv = nn.utils.parametrizations.weight_norm(self.conv, dim=2)
        deepspeed.zero.register_external_parameter(self, self.conv.parametrizations.weight.original0)


def _parametrize(rank: int, world_size: int) -> Tensor:
    torch.manual_seed(rank)
    with Init():
        model = Parametrized()
    originals = dict(model.conv.parametrizations.named_parameters())
    assert all(is_sharded(p) and p.shape == p.ds_shape for p in originals.values())
    assert model.conv.bias.numel() == 0
    computed = model.conv.weight.detach().clone()  # outside the context and any block
    with GatheredParameters(originals.values(), modifier_rank=0):
        if rank == 0:
            originals["weight.original0"].data.mul_(2.0)
    torch.testing.assert_close(model.conv.weight.detach(), 2.0 * computed)
    model.half()
    with GatheredParameters(originals.values(), modifier_rank=0):
        pass
    torch.testing.assert_close(model.conv.weight.detach().float(), 2.0 * computed, rtol=4 * 2**-11, atol=0)  # 4 roundings
    assert take_whole(originals["weight.original0"]).dtype is torch.float16
    return computed


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_computed_weight_can_be_computed_at_any_time(world_size: int) -> None:
    torch.manual_seed(0)
    want = Parametrized().conv.weight.detach()
    for got in run_ranks(_parametrize, world_size):
        torch.testing.assert_close(got, want)


# -- afterwards -------------------------------------------------------------------------------------------------------


def _copy_and_pickle(rank: int, world_size: int) -> None:
    with Init():
        model = TiedGpt()
    want = _whole(model)
    copied = copy.deepcopy(model)
    assert copied.head.weight is copied.embedding.weight
    assert {id(p) for p in copied.parameters()}.isdisjoint({id(p) for p in model.parameters()})
    with GatheredParameters(copied.parameters(), modifier_rank=0):
        for p in copied.parameters():
            p.data.zero_()
    _assert_equal(_whole(model), want)
    assert all(float(value.abs().sum()) == 0 for value in _whole(copied).values())
    with pytest.raises(UsageError, match="pickling a sharded parameter"):
        torch.save(model, io.BytesIO())
    file = io.BytesIO()
    with GatheredParameters(model.parameters()):
        model.embedding.weight.note = "mine"
        torch.save(model, file)
        ordinary = copy.deepcopy(model)
    file.seek(0)
    for loaded in (torch.load(file, weights_only=False), ordinary):
        assert not any(hasattr(p, "ds_id") or is_sharded(p) for p in loaded.parameters())
        _assert_equal({name: p.detach() for name, p in loaded.named_parameters()}, want)
    assert not any("ds_" in name for name in vars(ordinary.embedding.weight))


@pytest.mark.parametrize("world_size", [1, 2])
def test_copies_hold_their_own_values_and_pickles_hold_whole_ones_or_are_refused(world_size: int) -> None:
    run_ranks(_copy_and_pickle, world_size)


def _cast_and_take_over(rank: int, world_size: int) -> None:
    with Init():
        model = nn.Linear(3, 5)
    want = _whole(model)["weight"]
    model.to(torch.bfloat16)
    with whole_values(model.weight) as values:
        torch.testing.assert_close(values, want.to(torch.bfloat16), rtol=0, atol=0)
    assert model.weight.ds_tensor.dtype is torch.bfloat16
    with torch.inference_mode(), GatheredParameters(model.bias):
        assert not model.bias.is_inference()
    gathered = GatheredParameters(model.weight)
    with gathered:
        whole = take_whole(model.weight)
    assert whole.shape == (5, 3)
    assert not hasattr(model.weight, "ds_id")
    assert not is_sharded(model.weight)
    assert whole_shape(whole) == (5, 3)  # type: ignore[arg-type]
    model.weight.data = whole
    assert take_whole(model.weight).data_ptr() == whole.data_ptr()


@pytest.mark.parametrize("world_size", WORLDS)
def test_shards_follow_casts_and_an_engine_takes_parameters_over(world_size: int) -> None:
    run_ranks(_cast_and_take_over, world_size)


def _initialize_inside(rank: int, world_size: int) -> list[list[float]]:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "param_persistence_threshold": 10},
    }
    losses = []
    for is_inside in (False, True):
        torch.manual_seed(rank)
        with Init(config_dict_or_path=config):
            model = TiedGpt()
            if is_inside:
                engine = deepspeed.initialize(model=model, config=config)[0]
                assert nn.Linear(2, 2).weight.numel() == 4  # looked up; the context is in force again
        if not is_inside:
            engine = deepspeed.initialize(model=model, config=config)[0]
        losses.append([])
        for step in range(3):
            loss = engine(*model.batch(2, seed=step))
            engine.backward(loss)
            engine.step()
            losses[-1].append(float(loss.detach()))
        engine.destroy()
    return losses


def test_initialize_inside_the_context_gives_the_engine_that_it_gives_after_it() -> None:
    torch.manual_seed(0)
    model = TiedGpt()
    first = float(model(*model.batch(2, seed=0)).detach())
    for after, inside in run_ranks(_initialize_inside, 2):
        assert after == inside
        assert after[0] == pytest.approx(first, rel=1e-6)  # fp32, in other order


def _ids(rank: int, world_size: int) -> list[int]:
    with Init():
        model = TiedGpt()
    return [p.ds_id for p in model.parameters()]


def test_ids_are_different_in_a_model_and_the_same_on_all_ranks() -> None:
    first, *others = run_ranks(_ids, 3)
    assert len(set(first)) == len(first)
    assert others == [first, first]


def test_a_disabled_context_does_nothing_and_needs_no_process_group() -> None:
    zeros = torch.zeros
    with deepspeed.zero.Init(enabled=False, config_dict_or_path={"zero_optimization": {"stage": 1}}, remote_device="nvme"):
        model = nn.Linear(2, 2)
        assert torch.zeros is zeros
    assert model.weight.numel() == 4
    assert not comm.is_initialized()

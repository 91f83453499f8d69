"""`deepspeed.zero.coordinator` on one rank: whatever the model does, numbers are those of the model that is not sharded."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from deepspeed.errors import UsageError
from deepspeed.zero.external import register_external_parameter, unregister_external_parameter
from deepspeed.zero.prefetch import GatherSettings
from tests.support.sharded import Sharded, assert_same, gradients, plain_step, shard
from tests.support.sharded_models import BLOCK_NUMEL, Gpt, Output, Uses, inputs, tokens

EVERYTHING = GatherSettings()
NOTHING_KEPT = GatherSettings(max_reuse_numel=0)
NOTHING_LIVE = GatherSettings(max_live_numel=0)
SETTINGS = {
    "default": EVERYTHING,
    "no reuse": NOTHING_KEPT,
    "nothing live": NOTHING_LIVE,
    "little live": GatherSettings(max_live_numel=2 * BLOCK_NUMEL),
    "no prefetch": GatherSettings(prefetch_numel=0, max_reuse_numel=0),
    "sequential": GatherSettings(is_sequential=True, max_reuse_numel=0),
    "all-reduce": GatherSettings(by_all_reduce=True, max_reuse_numel=0),
    "not packed": GatherSettings(packs_saved=False, max_reuse_numel=0),
}
by_settings = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)


def _forward(sharded: Sharded, *args: Any) -> Any:
    with sharded.coordinator.forward_scope():
        return sharded.model(*args)


def _train_alike(model: nn.Module, sharded: Sharded, batches: list[Tensor], loss_of: Callable[[Any], Tensor]) -> None:
    """Train the plain `model` and the sharded copy on the same batches; every loss and gradient must be the same."""
    for batch in batches:
        got, want = loss_of(_forward(sharded, batch)), loss_of(model(batch))
        assert torch.equal(got, want)
        sharded.backward(got)
        want.backward()  # type: ignore[no-untyped-call]
        assert_same(gradients(sharded.model), gradients(model))
        sharded.step()
        plain_step(model)
    assert sharded.coordinator.live_numel == 0
    assert_same(sharded.whole(), {name: p.detach() for name, p in model.named_parameters()})


def _pair(model: nn.Module, settings: GatherSettings, **options: Any) -> tuple[nn.Module, Sharded]:
    return model, shard(copy.deepcopy(model), settings, is_late=True, **{"limit_numel": BLOCK_NUMEL, **options})


def _used(function: Callable[[Any, Tensor], Any], settings: GatherSettings) -> tuple[nn.Module, Sharded]:
    return _pair(Uses(function), settings, limit_numel=1)


# -- the same numbers -------------------------------------------------------------------------------------------------


@by_settings
@pytest.mark.parametrize("recompute", ["no", "reentrant", "not reentrant"])
def test_a_tied_model_trains_as_if_it_were_not_sharded(settings: GatherSettings, recompute: str) -> None:
    model, sharded = _pair(Gpt(recompute=recompute), settings)
    _train_alike(model, sharded, [tokens(seed) for seed in range(4)], lambda loss: loss)


@by_settings
def test_several_micro_batches_add_up(settings: GatherSettings) -> None:
    model, sharded = _pair(Gpt(), settings)
    for step in range(3):
        for micro in range(3):
            loss = _forward(sharded, tokens(3 * step + micro))
            sharded.backward(loss)
            model(tokens(3 * step + micro)).backward()
        assert_same(gradients(sharded.model), gradients(model))
        sharded.step()
        plain_step(model)
    assert_same(sharded.whole(), dict(model.named_parameters()))


@by_settings
def test_two_forwards_before_two_backwards(settings: GatherSettings) -> None:
    model, sharded = _pair(Gpt(), settings)
    for step in range(3):
        losses = [_forward(sharded, tokens(step)), _forward(sharded, tokens(step + 9))]
        for loss in losses:
            sharded.backward(loss)
        for loss in [model(tokens(step)), model(tokens(step + 9))]:
            loss.backward()
        assert_same(gradients(sharded.model), gradients(model))
        sharded.step()
        plain_step(model)


@by_settings
def test_tiny_neighbours_train_as_one_unit(settings: GatherSettings) -> None:
    model, sharded = _pair(Gpt(layers=5), settings, limit_numel=10**6)
    assert [plan.name for plan in sharded.plans] == ["", "wte", "h.0 to h.4", "head"]
    _train_alike(model, sharded, [tokens(seed) for seed in range(3)], lambda loss: loss)


def _twice(model: Any, x: Tensor) -> Tensor:
    return model.first(torch.tanh(model.first(torch.tanh(model.second(x))))).square().mean()


def _weight_elsewhere(model: Any, x: Tensor) -> Tensor:
    hidden = model.first(x)
    weight = model.second.weight
    return F.linear(torch.tanh(model.first(hidden)), weight).square().mean() + weight.sum()


def _only_a_bias(model: Any, x: Tensor) -> Tensor:
    return (model.first(x) + model.second.bias + model.second.weight[0]).square().mean()


def _side_channel(model: Any, x: Tensor) -> Tensor:
    model.first.saved = model.first(x).tanh()
    return model.second(x).square().mean() + F.linear(model.first.saved, model.first.weight).mean()


def _unused_output(model: Any, x: Tensor) -> Tensor:
    model.first(x)
    return model.second(x).square().mean()


def _in_place(model: Any, x: Tensor) -> Tensor:
    return model.second(model.first(x).relu_()).mul_(2).mean()


def _higher_order(model: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model.second(model.first(x).tanh()).sum(), x, create_graph=True)
    return slope.square().mean()


USES = [_twice, _weight_elsewhere, _only_a_bias, _side_channel, _unused_output, _in_place, _higher_order]


@by_settings
@pytest.mark.parametrize("function", USES, ids=[function.__name__.strip("_") for function in USES])
def test_parameters_may_be_used_in_any_way(settings: GatherSettings, function: Callable[[Any, Tensor], Tensor]) -> None:
    model, sharded = _used(function, settings)
    _train_alike(model, sharded, [inputs(seed) for seed in range(3)], lambda loss: loss)


@by_settings
def test_an_order_that_changes_every_step_only_costs_time(settings: GatherSettings) -> None:
    def function(model: Any, x: Tensor) -> Tensor:
        layers = [model.first, model.second, model.first]
        for layer in layers[: 1 + int(x[0, 0].item() * 100) % 3] if x[0, 0] > 0 else reversed(layers):
            x = torch.tanh(layer(x))
        return x.square().mean()

    model, sharded = _used(function, settings)
    _train_alike(model, sharded, [inputs(seed) for seed in range(6)], lambda loss: loss)


@by_settings
def test_frozen_parameters_are_gathered_and_get_no_gradient(settings: GatherSettings) -> None:
    model = Gpt()
    for name, param in model.named_parameters():
        param.requires_grad_("down" in name or name == "pos")
    model, sharded = _pair(model, settings)
    _train_alike(model, sharded, [tokens(seed) for seed in range(3)], lambda loss: loss)


def test_frozen_units_are_released_when_the_gradients_of_their_inputs_are_there() -> None:
    sharded = shard(Uses(lambda m, x: m.second(torch.tanh(m.first(x * m.scale)))), NOTHING_KEPT, limit_numel=1)
    sharded.model.requires_grad_(False)
    model = Uses(lambda m, x: m.second(torch.tanh(m.first(x))))
    model.requires_grad_(False)
    sharded = shard(model, NOTHING_KEPT, limit_numel=1)
    x = inputs().requires_grad_()
    hidden_states: list[str] = []
    model.function = lambda m, x: m.second(_note(torch.tanh(m.first(x)), lambda: hidden_states.append(sharded.states())))
    sharded.backward(_forward(sharded, x).sum())
    assert hidden_states == [""]  # second is done, first has not begun
    assert sharded.coordinator.live_numel == 0


def _note(tensor: Tensor, note: Callable[[], None]) -> Tensor:
    """`tensor`, calling `note` when its gradient has been passed on by what comes after it."""
    tensor.register_hook(lambda grad: note())  # type: ignore[no-untyped-call]
    return tensor * 1


@by_settings
def test_evaluation_between_steps_leaves_training_as_it_was(settings: GatherSettings) -> None:
    model, sharded = _pair(Gpt(), settings)
    for step in range(3):
        for mode in (torch.inference_mode, torch.no_grad):
            with mode():
                for seed in range(2):
                    assert torch.equal(_forward(sharded, tokens(seed)), model(tokens(seed)))
        loss = _forward(sharded, tokens(step))
        with torch.inference_mode():
            _forward(sharded, tokens(7))
        sharded.backward(loss)
        model(tokens(step)).backward()
        assert_same(gradients(sharded.model), gradients(model))
        sharded.step()
        plain_step(model)


@by_settings
def test_a_module_may_be_called_without_the_engine(settings: GatherSettings) -> None:
    model, sharded = _pair(Gpt(), settings)

    def loss_of(net: Any) -> Tensor:
        hidden = net.h[1](net.h[0](net.wte(tokens())))
        return F.cross_entropy(net.head(hidden).flatten(0, 1), tokens().flatten())

    for _ in range(3):
        got, want = loss_of(sharded.model), loss_of(model)
        sharded.backward(got)
        want.backward()  # type: ignore[no-untyped-call]
        assert_same(gradients(sharded.model), gradients(model))
        sharded.step()
        plain_step(model)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


@pytest.mark.parametrize("reentrant", [True, False])
@by_settings
def test_a_checkpoint_around_the_whole_model(settings: GatherSettings, reentrant: bool) -> None:
    model, sharded = _pair(Uses(_twice), settings, limit_numel=1)
    for seed in range(2):
        x = inputs(seed).requires_grad_()
        sharded.backward(checkpoint(lambda y: _forward(sharded, y), x, use_reentrant=reentrant))
        checkpoint(model, x, use_reentrant=reentrant).backward()
        assert_same(gradients(sharded.model), gradients(model))
        sharded.step()
        plain_step(model)


def test_parameters_of_every_shape_and_dtype() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.5))
            self.empty = nn.Parameter(torch.empty(0))
            self.cube = nn.Parameter(torch.randn(2, 3, 4))
            self.rounded = nn.Parameter(torch.randn(4, dtype=torch.bfloat16))
            self.wide = nn.Parameter(torch.randn(4, dtype=torch.float64))
            self.phase = nn.Parameter(torch.randn(4, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            cube = (self.cube * self.scale).sum((0, 1)) * self.rounded
            wave = torch.view_as_real(self.phase * self.phase.conj() * x[0, :4]).sum()
            return (cube * self.wide * x[:, :4]).square().sum().float() + self.empty.sum() + wave

    model, sharded = _pair(Odd(), NOTHING_KEPT)
    assert len(sharded.flats) == 4
    _train_alike(model, sharded, [inputs(seed) for seed in range(3)], lambda loss: loss)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda y: (y, [y * 2]),
        lambda y: {"a": y, "b": {"c": y * 2}},
        Output,
        lambda y: Output(y * 3),
        lambda y: {"nested": [Output(y)]},
    ],
)
@by_settings
def test_outputs_in_any_container_bring_their_unit_back_for_backward(settings: GatherSettings, wrap: Any) -> None:
    def tensor_of(tree: Any) -> Tensor:
        if isinstance(tree, Tensor):
            return tree
        if isinstance(tree, Output):
            return tree.value
        return tensor_of(next(iter(tree.values() if isinstance(tree, dict) else tree)))

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            return wrap(self.norm(self.linear(x)))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Wrapped() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                output = layer(x)
                assert type(output) is type(wrap(x))
                x = tensor_of(output)
            return x.square().mean()

    model, sharded = _pair(Model(), settings, limit_numel=100)
    _train_alike(model, sharded, [inputs(seed) for seed in range(3)], lambda loss: loss)


# -- memory -----------------------------------------------------------------------------------------------------------


def test_nothing_is_whole_outside_a_forward_when_nothing_may_be_kept() -> None:
    sharded = shard(Gpt(), NOTHING_KEPT, limit_numel=BLOCK_NUMEL)
    loss = _forward(sharded, tokens())
    assert sharded.coordinator.live_numel == 0
    assert all(p.shape == torch.Size([0]) for p in sharded.model.parameters())
    assert not sharded.coordinator.pool.storages
    sharded.backward(loss)
    assert sharded.coordinator.live_numel == 0


def test_units_stay_from_forward_to_backward_within_the_budgets() -> None:
    everything = shard(Gpt(), limit_numel=BLOCK_NUMEL)
    sharded = shard(Gpt(), GatherSettings(max_reuse_numel=2 * BLOCK_NUMEL + 1), limit_numel=BLOCK_NUMEL)
    for _ in range(2):
        loss = _forward(everything, tokens())
        assert everything.states() == "model wte h.0 h.1 h.2"
        everything.backward(loss)
        everything.step()
        loss = _forward(sharded, tokens())
        kept = sharded.states()
        sharded.backward(loss)
        sharded.step()
    assert kept == "model wte h.2"  # backward begins with the model itself, the head (tied to wte) and h.2


def test_the_live_limit_holds_with_one_unit_and_what_is_ahead_on_top() -> None:
    unit_numel = shard(Gpt(layers=1), limit_numel=BLOCK_NUMEL).coordinator.pool.units[2].numel
    settings = GatherSettings(max_live_numel=3 * unit_numel, prefetch_numel=unit_numel)
    sharded = shard(Gpt(layers=8), settings, limit_numel=BLOCK_NUMEL)
    most = 0
    for unit in sharded.coordinator.pool.units:
        for module in unit.modules:
            module.register_forward_pre_hook(lambda m, a: seen.append(sharded.coordinator.live_numel))
            module.register_full_backward_pre_hook(lambda m, g: seen.append(sharded.coordinator.live_numel))
    for _ in range(3):
        seen: list[int] = []
        sharded.backward(_forward(sharded, tokens()))
        sharded.step()
        most = max(most, *seen)
    assert most <= settings.max_live_numel
    assert len(seen) > 16  # every block forwards and backwards


def test_unpacked_weights_stay_until_their_backward() -> None:
    sharded = shard(Gpt(), GatherSettings(packs_saved=False, max_reuse_numel=0), limit_numel=BLOCK_NUMEL)
    loss = _forward(sharded, tokens())
    assert sharded.states() == "model wte h.0 h.1 h.2"
    sharded.backward(loss)
    assert sharded.states() == ""


def test_reduced_buckets_release_their_unit_at_once() -> None:
    sharded = shard(Gpt(), NOTHING_KEPT, limit_numel=BLOCK_NUMEL)
    coordinator, flat = sharded.coordinator, sharded.flats[0]
    after: list[str] = []
    numbers = {flat.members[flat.layout.slots[b.first_slot].index].unit: n for n, b in enumerate(flat.layout.buckets)}

    def report(unit: int) -> None:
        coordinator.bucket_reduced(flat, numbers[unit])
        after.append(sharded.states())

    loss = _forward(sharded, tokens())
    for layer, unit in ((2, 4), (1, 3)):
        param: Any = sharded.model.h[layer].norm.weight  # of each block, the last gradient but the bias's to arrive
        param.register_post_accumulate_grad_hook(lambda p, unit=unit: report(unit))
    loss.backward()
    assert "h.2" not in after[0].split()
    assert "h.1" not in after[1].split()
    coordinator.backward_over()
    assert coordinator.live_numel == 0


# -- prefetch and the ways to gather ----------------------------------------------------------------------------------


def _log(sharded: Sharded) -> list[Any]:
    return [entry for entry in sharded.flats[0].gatherer.log if entry[0] in ("launched", "arrived")]  # type: ignore[attr-defined]


def _ahead(settings: GatherSettings) -> int:
    """Most gathers that were under way together in the second forward of a Gpt."""
    sharded = shard(Gpt(), settings, limit_numel=BLOCK_NUMEL, is_late=True)
    for _ in range(2):
        before = len(_log(sharded))
        sharded.backward(_forward(sharded, tokens()))
        sharded.step()
    under_way = most = 0
    for entry in _log(sharded)[before:]:
        under_way += 1 if entry[0] == "launched" else -1
        most = max(most, under_way)
    return most


def test_prefetch_starts_as_many_gathers_as_its_bucket_holds() -> None:
    unit_numel = shard(Gpt(), limit_numel=BLOCK_NUMEL).coordinator.pool.units[2].numel
    assert _ahead(GatherSettings(prefetch_numel=0)) == 1
    assert _ahead(GatherSettings(prefetch_numel=2 * unit_numel)) == 2
    assert _ahead(GatherSettings()) == 4
    assert _ahead(GatherSettings(is_sequential=True)) == 1


def test_all_reduce_takes_the_place_of_gathers() -> None:
    sharded = shard(Gpt(), GatherSettings(by_all_reduce=True), limit_numel=BLOCK_NUMEL, is_late=True)
    sharded.backward(_forward(sharded, tokens()))
    assert not _log(sharded)


def test_a_changed_order_is_logged_when_asked_for(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(settings: GatherSettings) -> list[str]:
        caplog.clear()
        sharded = shard(Uses(lambda m, x: m.second(x).sum() if x[0, 0] > 0 else m.first(x).sum()), settings, limit_numel=1)
        with caplog.at_level(logging.WARNING, logger="DeepSpeed"):
            for sign in (1, 1, -1, -1):
                sharded.backward(_forward(sharded, inputs().abs() * sign))
                sharded.step()
        return [record.getMessage() for record in caplog.records]

    monkeypatch.setattr(logging.getLogger("DeepSpeed"), "propagate", True)  # caplog listens at the root
    assert run(GatherSettings()) == []
    (message,) = run(GatherSettings(logs_changes=True))
    assert "another order" in message


# -- parameters used elsewhere -----------------------------------------------------------------------------------------


def test_a_parameter_used_outside_its_module_is_gathered_with_its_user_from_then_on() -> None:
    class User(nn.Module):
        def __init__(self, other: nn.Linear) -> None:
            super().__init__()
            self.own = nn.Linear(8, 8)
            self.others = [other]

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.own(x), self.others[0].weight)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.users = nn.ModuleList([User(self.first)])

        def forward(self, x: Tensor) -> Tensor:
            output = self.users[0](self.first(x))
            output.register_hook(lambda grad: seen.append(len(first.buffers)))  # after the coordinator's, before backward
            return output.square().mean()

    sharded = shard(Model(), NOTHING_KEPT, limit_numel=10**6)
    first, user = sharded.coordinator.pool.units
    _forward(sharded, inputs())
    assert list(user.externals) == [first]
    seen: list[int] = []
    sharded.model.users[0].register_forward_pre_hook(lambda m, a: seen.append(first.users))
    sharded.backward(_forward(sharded, inputs()))
    assert seen == [1, 1]


def test_external_parameters_may_be_registered_and_taken_back() -> None:
    def function(model: Any, x: Tensor) -> Tensor:
        return (model.first(x) + held[0].sum()).square().mean()

    model = Uses(function)
    held = [model.second.weight]  # no look-up tells of this one
    sharded = shard(model, NOTHING_KEPT, limit_numel=1)
    assert _forward(sharded, inputs()).isfinite()  # an empty sum
    plain = _forward(sharded, inputs()).item()
    register_external_parameter(model, held[0])
    sharded.coordinator.register_external(model, nn.Parameter(torch.ones(1)))
    whole = sharded.whole()
    want = (F.linear(inputs(), whole["first.weight"], whole["first.bias"]) + whole["second.weight"].sum()).square().mean()
    loss = _forward(sharded, inputs())
    assert torch.equal(loss, want)
    sharded.backward(loss)
    assert gradients(model).keys() == {"first.weight", "first.bias", "second.weight"}
    unregister_external_parameter(model, held[0])
    assert _forward(sharded, inputs()).item() == plain


def test_external_parameters_registered_before_there_is_a_coordinator_count() -> None:
    model = Uses(lambda m, x: (m.first(x) + held[0].sum()).square().mean())
    held = [model.second.weight]
    register_external_parameter(model, held[0])
    whole, want = held[0].detach().clone(), model(inputs())
    sharded = shard(model, NOTHING_KEPT, limit_numel=1)
    assert whole.sum() != 0
    assert torch.equal(_forward(sharded, inputs()), want)


def test_a_parameter_returned_from_a_forward_is_whole_for_the_caller() -> None:
    class Giver(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x), self.weight

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.giver = Giver(8, 8)
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden, weight = self.giver(x)
            return F.linear(hidden * self.scale, weight), weight

    model, sharded = _pair(Model(), NOTHING_KEPT)

    def loss_of(output: tuple[Tensor, Tensor]) -> Tensor:
        assert output[1].shape == (8, 8)
        return output[0].square().mean() + output[1].mean()

    _train_alike(model, sharded, [inputs(seed) for seed in range(3)], loss_of)


# -- never silently wrong ---------------------------------------------------------------------------------------------


def test_writing_to_a_gathered_parameter_in_a_forward_is_refused() -> None:
    def function(model: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            model.first.weight.clamp_(-0.1, 0.1)
        return model.first(x).sum()

    sharded = shard(Uses(function), NOTHING_KEPT)
    with pytest.raises(UsageError, match=r"'first\.weight' was written to inside a forward.*GatheredParameters"):
        _forward(sharded, inputs())


def test_writing_to_an_empty_parameter_is_refused() -> None:
    sharded = shard(Uses(_twice), NOTHING_KEPT)
    nn.init.zeros_(sharded.model.second.bias)
    with pytest.raises(UsageError, match=r"'second\.bias' was written to while it was empty.*GatheredParameters"):
        _forward(sharded, inputs())
    assert _forward(sharded, inputs()).isfinite()  # said once; the shards are as they were


def test_shards_that_were_written_to_are_gathered_again() -> None:
    sharded = shard(Uses(lambda m, x: m.first(x)), EVERYTHING)
    with torch.no_grad():
        for _ in range(2):
            before = _forward(sharded, inputs()).clone()
        assert sharded.coordinator.live_numel > 0  # kept for the next evaluation
        sharded.flats[0].values.zero_()
        assert before.abs().sum() > 0
        assert _forward(sharded, inputs()).abs().sum() == 0


def test_an_announced_edit_releases_what_is_idle_now_and_the_rest_when_it_is_done() -> None:
    def function(model: Any, x: Tensor) -> Tensor:
        hidden = model.first(x)
        seen.append(sharded.states())
        sharded.coordinator.before_edit()
        seen.append(sharded.states())
        return model.second(hidden) + model.own

    model = Uses(function)
    model.own = nn.Parameter(torch.ones(8))
    sharded = shard(model, EVERYTHING, limit_numel=1)
    seen: list[str] = []
    loss = _forward(sharded, inputs().requires_grad_()).sum()
    assert seen == ["model first", "model"]
    assert sharded.states() == "second"
    with pytest.raises(UsageError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("is_late", [True, False])
def test_an_update_amid_a_forward_is_seen_by_the_modules_that_start_after_it(is_late: bool) -> None:
    def function(model: Any, x: Tensor) -> Tensor:
        hidden = model.first(x)
        sharded.coordinator.before_edit()
        for flat in sharded.flats:
            with flat.rewriting():
                flat.values.zero_()
        return model.own * (hidden + 1) + model.second(hidden)

    model = Uses(function)
    model.own = nn.Parameter(torch.full((8,), 3.0))  # of the module that runs
    want = 3 * (model.first(inputs()) + 1)
    sharded = shard(model, EVERYTHING, limit_numel=1, is_late=is_late)
    with torch.no_grad():
        assert torch.equal(_forward(sharded, inputs()), want)
        assert _forward(sharded, inputs()).count_nonzero() == 0


def test_a_graph_of_views_of_shards_is_refused_after_an_update() -> None:
    """Packed, `zero.saved` refuses it; otherwise autograd must, for what it has kept has changed."""
    sharded = shard(Uses(_twice), GatherSettings(packs_saved=False, max_reuse_numel=0), limit_numel=1)
    loss = _forward(sharded, inputs())
    sharded.coordinator.before_update()
    for flat in sharded.flats:
        with flat.rewriting():
            flat.values.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@by_settings
def test_a_rank_alone_trains_on_views_of_its_shards(settings: GatherSettings) -> None:
    model = Gpt()
    sharded = shard(copy.deepcopy(model), settings, limit_numel=BLOCK_NUMEL)
    storages = [flat.values.untyped_storage() for flat in sharded.flats]
    shown: set[bool] = set()

    def look(block: nn.Module, _args: Any) -> None:
        pointers = [p.data_ptr() for p in block.parameters()]
        shown.update(any(s.data_ptr() <= each < s.data_ptr() + s.nbytes() for s in storages) for each in pointers)

    for block in sharded.model.h:
        block.register_forward_pre_hook(look)
    _train_alike(model, sharded, [tokens(seed) for seed in range(4)], lambda loss: loss)
    assert shown == {True}


def test_a_unit_that_was_foreseen_but_not_used_does_not_stay_on_its_way() -> None:
    model = Uses(lambda m, x: m.second(m.first(x)) if x[0, 0] > 0 else m.first(x))
    sharded = shard(model, GatherSettings(max_reuse_numel=0), limit_numel=1, is_late=True)
    with torch.no_grad():
        for sign in (1, 1, -1, -1):
            _forward(sharded, sign * inputs().abs())
            first, second = sharded.coordinator.pool.units
            assert second.state.value == "sharded"
            assert sharded.coordinator.live_numel == len(first.buffers) * first.numel


def test_an_exception_in_a_forward_leaves_no_unit_in_use() -> None:
    def function(model: Any, x: Tensor) -> Tensor:
        hidden = model.first(x)
        if x[0, 0] > 0:
            raise ValueError("as the test wants it")
        return model.second(hidden).sum()

    sharded = shard(Uses(function), NOTHING_KEPT, limit_numel=1)
    for _ in range(2):
        with pytest.raises(ValueError, match="as the test"):
            _forward(sharded, inputs().abs())
        assert all(unit.users == 0 for unit in sharded.coordinator.pool.units)
        assert sharded.coordinator.live_numel == 0
        sharded.backward(_forward(sharded, -inputs().abs()))
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_a_keyboard_interrupt_in_a_forward_leaves_no_unit_in_use() -> None:
    def function(model: Any, x: Tensor) -> Tensor:
        model.first(x)
        raise KeyboardInterrupt

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Uses(function)

        def forward(self, x: Tensor) -> Any:
            return self.inner(x)

    sharded = shard(Inner(), NOTHING_KEPT, granularity_threshold=10**6)
    with pytest.raises(KeyboardInterrupt):
        _forward(sharded, inputs())
    assert all(unit.users == 0 for unit in sharded.coordinator.pool.units)
    assert sharded.coordinator.live_numel == 0


# -- with others' hooks -----------------------------------------------------------------------------------------------


def test_hooks_of_the_user_run_in_their_order_around_whole_parameters() -> None:
    model = Uses(lambda m, x: m.first(x).sum())
    seen: list[tuple[str, torch.Size]] = []
    model.first.register_forward_pre_hook(lambda m, a: seen.append(("before, early", m._parameters.copy()["weight"].shape)))
    sharded = shard(model, NOTHING_KEPT, limit_numel=1)
    handle = model.first.register_forward_pre_hook(lambda m, a: seen.append(("before, late", m.weight.shape)))
    model.first.register_forward_hook(lambda m, a, o: seen.append(("after", m.weight.shape)))
    _forward(sharded, inputs())
    whole = torch.Size([8, 8])
    assert seen == [("before, early", whole), ("before, late", whole), ("after", whole)]
    handle.remove()
    seen.clear()
    _forward(sharded, inputs())
    assert [name for name, _ in seen] == ["before, early", "after"]


def test_training_goes_on_when_somebody_wipes_all_module_hooks() -> None:
    model, sharded = _pair(Gpt(), NOTHING_KEPT)
    for module in sharded.model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks):
            hooks.clear()
    _train_alike(model, sharded, [tokens(seed) for seed in range(3)], lambda loss: loss)


def test_compiled_blocks_train_alike() -> None:
    from torch._dynamo.utils import counters

    model, sharded = _pair(Gpt(layers=2), NOTHING_KEPT)
    for block in sharded.model.h:
        block.compile(backend="aot_eager")
    _train_alike(model, sharded, [tokens(seed) for seed in range(3)], lambda loss: loss)
    compiled_frames = counters["frames"]["ok"]
    _train_alike(model, sharded, [tokens(seed) for seed in range(3)], lambda loss: loss)
    assert counters["frames"]["ok"] == compiled_frames  # no recompilation, whatever is whole


# -- the end ----------------------------------------------------------------------------------------------------------


def test_removing_the_coordinator_leaves_an_ordinary_model() -> None:
    model, sharded = _pair(Gpt(), NOTHING_KEPT)
    sharded.backward(_forward(sharded, tokens()))
    sharded.model.zero_grad()
    sharded.coordinator.remove(gather=True)
    assert_same(dict(sharded.model.named_parameters()), dict(model.named_parameters()))
    for module in sharded.model.modules():
        assert type(module._parameters) is dict
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    for param in sharded.model.parameters():
        assert param.untyped_storage().nbytes() == param.numel() * param.element_size()
        assert not vars(param).get("_ds_holder")
    assert torch.equal(sharded.model(tokens()), model(tokens()))
    again = shard(sharded.model, NOTHING_KEPT)
    assert torch.equal(_forward(again, tokens()), model(tokens()))


def test_removing_without_gathering_leaves_parameters_empty() -> None:
    sharded = shard(Gpt())
    _forward(sharded, tokens())
    sharded.coordinator.remove(gather=False)
    assert all(p.shape == torch.Size([0]) for p in sharded.model.parameters())

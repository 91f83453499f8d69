"""Plain modules cut by a user's rules or by structure; parts that are uneven, empty, copied, gathered."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deepspeed
from deepspeed.config.parallel import TensorParallelConfig
from deepspeed.errors import ArgumentError, UsageError
from deepspeed.module_inject.layers import EmbeddingLayer, GatherReplacedLayerParams, LinearAllreduce, LinearLayer
from deepspeed.tensor_parallel.auto import apply_auto_tp
from deepspeed.tensor_parallel.whole import whole_of
from deepspeed.topology.mesh import AxisGroup
from tests.ranks.test_tensor_parallel import ROUNDING, STEPS, compare, tensor_axis
from tests.support.cut_net import cuts_of
from tests.support.ranks import run_ranks

_WIDTH, _HIDDEN, _TOKENS = 6, 5, 7


class Net(nn.Module):
    """A gated MLP with one fused weight, a norm over single heads, and an embedding; names that nobody knows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(_TOKENS, _WIDTH, padding_idx=3)
        self.first = nn.Linear(_WIDTH, 2 * _HIDDEN)
        self.last = nn.Linear(_HIDDEN, _WIDTH)
        self.heads = nn.Linear(_WIDTH, 12, bias=False)
        self.norm = nn.LayerNorm(3)
        self.back = nn.Linear(12, _WIDTH)
        self.out = nn.Linear(_WIDTH, _TOKENS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        gate, up = self.first(x).chunk(2, -1)
        x = x + self.last(F.silu(gate) * up)
        x = x + self.back(self.norm(self.heads(x).unflatten(-1, (-1, 3))).flatten(-2))
        logits: Tensor = self.out(x)
        return logits


def net() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return Net().double()


def spec(pattern: str, kind: str, **keys: Any) -> dict[str, Any]:
    return {"patterns": [rf"{pattern}\.weight$"], "partition_type": kind, **keys}


RULES = [
    spec("first", "column", shape=[2, -1], partition_dim=0),
    spec("last", "row"),
    spec("heads", "column", shape=[[6, 6], -1], partition_dim=0),
    spec("back", "row", shape=[-1, [6, 6]], partition_dim=1),
    spec("norm", "skip", grad_allreduce=True),
]


def settings(size: int, specs: list[dict[str, Any]], **keys: Any) -> TensorParallelConfig:
    rules = {"layer_specs": specs, "use_default_specs": False, **keys.pop("rules", {})}
    return TensorParallelConfig.model_validate({"autotp_size": size, "partition_config": rules, **keys})


def train_alike(whole: nn.Module, config: TensorParallelConfig, axis: AxisGroup, steps: int = STEPS) -> nn.Module:
    cut = copy.deepcopy(whole)
    apply_auto_tp(cut, config, axis)
    cut = copy.deepcopy(cut)  # a copy is as good
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in (whole, cut)]
    for step in range(steps):
        ids = torch.randint(_TOKENS, (4, 3), generator=torch.Generator().manual_seed(step))
        outputs = [model(ids) for model in (whole, cut)]
        torch.testing.assert_close(outputs[1], outputs[0], rtol=ROUNDING, atol=ROUNDING)
        for each, optimizer in zip(outputs, optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(each.flatten(0, 1), ids.flatten()).backward()
        compare(whole, cut, axis.rank, "gradient")
        for optimizer in optimizers:
            optimizer.step()
    compare(whole, cut, axis.rank, "weight")
    return cut


def _all_rules(rank: int, world_size: int) -> None:
    axis = tensor_axis(world_size)
    for overlap in (False, True):
        whole_heads = {"tp_size": world_size, "tp_grain_size": 3}
        cut = train_alike(net(), settings(world_size, RULES, tp_overlap_comm=overlap, tp=whole_heads), axis)
        assert isinstance(cut.first, LinearLayer)
        assert isinstance(cut.first, nn.Linear)
        assert isinstance(cut.last, LinearAllreduce)
        assert type(cut.first).__name__ == "Linear"
        assert type(cut.out) is nn.Linear
    gathered = [
        spec("first", "column", gather_output=True, shape=[2, -1], partition_dim=0),
        spec("out", "column", gather_output=True),
    ]
    train_alike(net(), settings(world_size, gathered), axis, steps=3)
    for dim, kind in ((0, EmbeddingLayer), (1, nn.Embedding)):
        rules = [spec("table", "column"), spec("first", "column", gather_output=True)]
        cut = train_alike(net(), settings(world_size, rules, rules={"embedding_partition_dim": dim}), axis, steps=3)
        assert isinstance(cut.table, kind)
        assert cuts_of(cut)["table.weight"].dim == dim
    grains = train_alike(
        net(), settings(world_size, RULES[:2], tp={"tp_size": world_size, "tp_grain_size": 4}), axis, steps=2
    )
    assert [cuts_of(grains)["last.weight"].width(each) for each in range(2)] == [4, 1]


@pytest.mark.parametrize("size", [2, 3])
def test_a_users_rules_give_one_process_numbers(size: int) -> None:
    run_ranks(_all_rules, size, init=False)


def _structure(rank: int, world_size: int) -> None:
    axis = tensor_axis(world_size)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        chain = nn.Sequential(
            nn.Embedding(_TOKENS, _WIDTH),
            nn.Sequential(
                nn.Linear(_WIDTH, 3), nn.GELU(), nn.Linear(3, _WIDTH), nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _WIDTH)
            ),
            nn.Linear(_WIDTH, _TOKENS),
        ).double()
    cut = train_alike(chain, TensorParallelConfig(autotp_size=world_size), axis)
    assert sorted(cuts_of(cut)) == ["1.0.bias", "1.0.weight", "1.2.weight"]  # 3 inner values: some ranks have none


class Twice(nn.Module):
    """Two blocks of one pair of layers, which the second one has under other names."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(_TOKENS, _WIDTH), nn.Linear(_WIDTH, _TOKENS)
        self.blocks = nn.ModuleList([nn.Module(), nn.Module()])
        for block in self.blocks:
            block.fc1, block.fc2 = nn.Linear(_WIDTH, 8), nn.Linear(8, _WIDTH)
        self.blocks[1].fc1, self.blocks[1].fc2 = self.blocks[0].fc1, self.blocks[0].fc2

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = x + block.fc2(F.relu(block.fc1(x)))
        logits: Tensor = self.out(x)
        return logits


def _shared(rank: int, world_size: int) -> None:
    cut = train_alike(Twice().double(), TensorParallelConfig(autotp_size=world_size), tensor_axis(world_size))
    assert cut.blocks[1].fc1 is cut.blocks[0].fc1


def test_layers_that_two_blocks_share_are_cut_once() -> None:
    run_ranks(_shared, 2, init=False)


def _computed(rank: int, world_size: int) -> None:
    axis = tensor_axis(world_size)
    with torch.random.fork_rng():
        torch.manual_seed(4)
        pairs = [nn.Sequential(nn.Linear(_WIDTH, 8), nn.ReLU(), nn.Linear(8, _WIDTH)) for _ in range(2)]
        whole = nn.Sequential(nn.Embedding(_TOKENS, _WIDTH), *pairs, nn.Linear(_WIDTH, _TOKENS)).double()
    torch.nn.utils.parametrizations.weight_norm(pairs[0][0])
    cut = train_alike(whole, TensorParallelConfig(autotp_size=world_size), axis)
    assert sorted(cuts_of(cut)) == ["2.0.bias", "2.0.weight", "2.2.weight"]
    with pytest.raises(ArgumentError, match=r"'1.0' is of class ParametrizedLinear, whose forward or weight.*'skip'"):
        apply_auto_tp(whole, settings(world_size, [spec(r"^1\.0", "column"), spec(r"^1\.2", "row")]), axis)


def test_a_layer_whose_weight_is_computed_stays_whole() -> None:
    run_ranks(_computed, 2, init=False)


def test_pairs_of_layers_are_found_and_ranks_may_have_nothing_of_them() -> None:
    run_ranks(_structure, 4, init=False)


def _state(rank: int, world_size: int) -> None:
    axis = tensor_axis(world_size)
    whole, other = net(), copy.deepcopy(net())
    with torch.no_grad():
        for param in whole.parameters():
            param.add_(rank)  # ranks differ: the first one's count
        for param in other.parameters():
            param.mul_(2)
    cut = copy.deepcopy(whole)
    apply_auto_tp(cut, settings(world_size, RULES), axis)
    compare(net(), cut, rank, "weight")
    cut.load_state_dict(other.state_dict())
    compare(other, cut, rank, "weight")
    cut.load_state_dict({name: value.clone() for name, value in cut.state_dict().items()})
    compare(other, cut, rank, "weight")
    for name, cut_of in cuts_of(cut).items():
        assert torch.equal(whole_of(cut.get_parameter(name), cut_of, axis), other.get_parameter(name))
    part = cut.first.weight.detach().clone()
    with GatherReplacedLayerParams([cut.first.weight, cut.out.weight], cut.first):
        assert torch.equal(cut.first.weight, other.first.weight)
        assert cut.first.bias.shape != other.first.bias.shape, "was not asked for"
        cut.first.weight.data.mul_(3)
    assert torch.equal(cut.first.weight, 3 * part)
    with GatherReplacedLayerParams(cut.first.weight, cut.first, enabled=False):
        assert cut.first.weight.shape == part.shape
    with pytest.raises(UsageError, match=r"knows its ranks.*cannot be pickled"):
        pickle.dumps(cut)
    cut.first.weight.data = torch.empty(0, dtype=torch.float64)  # as at ZeRO stage 3
    with (
        pytest.raises(UsageError, match=r"has shape \(0,\) here.*GatheredParameters"),
        GatherReplacedLayerParams(cut.first.weight, cut.first),
    ):
        pass
    with pytest.raises(UsageError, match=r"'first' was cut by an earlier.*Build the model anew"):
        apply_auto_tp(cut, settings(world_size, RULES), axis)


def test_parts_are_taken_of_the_first_ranks_weights_and_of_whole_state_dicts() -> None:
    run_ranks(_state, 2, init=False)


def _set(rank: int, world_size: int) -> Tensor:
    model = net().float()
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "zero_optimization": {"stage": 1},
        "tensor_parallel": {
            "autotp_size": world_size,
            "partition_config": {"use_default_specs": False, "layer_specs": RULES},
        },
    }
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    layer = model.last
    with GatherReplacedLayerParams([layer.weight], layer):
        layer.weight.data.copy_(torch.arange(_HIDDEN * _WIDTH).view(_WIDTH, _HIDDEN))
    ids = torch.zeros(4, 3, dtype=torch.long)
    engine.backward(F.cross_entropy(engine(ids).float().flatten(0, 1), ids.flatten()))
    engine.step()
    return whole_of(layer.weight, cuts_of(model)["last.weight"], layer.axis).float()


def test_what_is_written_into_a_whole_weight_survives_a_step_of_16_bit_weights() -> None:
    for weight in run_ranks(_set, 2):
        assert torch.equal(weight, torch.arange(_HIDDEN * _WIDTH).view(_WIDTH, _HIDDEN).float())


_REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"specs": [{"patterns": [r"first\.bias$"], "partition_type": "column"}]},
        r"matches 'first.bias', but not the weight of a linear layer.*its bias goes with it",
    ),
    (
        {"specs": [spec("first", "column", partition_dim=1, shape=[2, -1])]},
        r"partition_dim=1 for 'first': partition_type 'column' cuts dimension 0 .*Write partition_dim=0",
    ),
    (
        {"specs": RULES, "injection_policy_tuple": (5,)},
        r"injection_policy_tuple has 5; needed names of layers",
    ),
    ({"specs": RULES, "vocab_parallel_ce_backend": "liger"}, r"vocab_parallel_ce_backend='liger'.*Use \"torch\""),
    (
        {"specs": RULES[:1]},
        r"layer_specs\[0\]: 'first' is a column, and no layer beside it is a row.*'row' for the layer that takes",
    ),
    ({"specs": [RULES[1]]}, r"'last' is a row, and no layer beside it is a column.*'column'.*'skip'"),
    ({"specs": []}, r"no layer of Net is cut.*Say which layers.*layer_specs"),
    ({"specs": [spec("nowhere", "column")]}, r"layer_specs\[0\]: .*nowhere.* matches no parameter of Net.*table.weight"),
    ({"specs": RULES[:2], "rules": {"strict_mode": True}}, r"strict_mode: no rule matches 'heads', 'back', 'out'.*'skip'"),
    ({"specs": RULES, "rules": {"tp_size": 3}}, r"partition_config.tp_size=3, but 2 ranks.*Leave it out"),
    ({"specs": RULES, "replace_with_kernel_inject": True}, r"replace_with_kernel_inject=True is for inference"),
    (
        {"specs": RULES, "vocab_parallel_lm_head": True},
        r"vocab_parallel_lm_head=True, but Net has no linear layer named lm_head",
    ),
]


_UNKNOWN = {
    ("proj", _WIDTH): r"does not say its number of heads. Let the block say it.* num_heads,.*or use",
    ("final", _WIDTH): r"has no projection of its 6 outputs.* Name its output layer one of these, or use",
}
"""(Name and inputs of the last layer) of attention whose fused projection a rule describes -> what is missing."""


def _refused(rank: int, world_size: int) -> None:
    axis = tensor_axis(world_size)
    for keys, message in _REFUSED:
        given = dict(keys)
        with pytest.raises(ArgumentError, match=f"(?s){message}"):
            apply_auto_tp(net(), settings(world_size, given.pop("specs"), **given), axis)
    sharded = net()
    sharded.out.weight.ds_shape, sharded.out.weight.data = sharded.out.weight.shape, torch.empty(0, dtype=torch.float64)
    with pytest.raises(UsageError, match=r"'out.weight' is sharded by deepspeed.zero.Init"):
        apply_auto_tp(sharded, settings(world_size, RULES), axis)
    tied = net()
    tied.out.weight = tied.table.weight
    with pytest.raises(ArgumentError, match=r"'out' is cut and shares 'weight' with 'table'.*cut both"):
        apply_auto_tp(tied, settings(world_size, [spec("out", "column", gather_output=True)]), axis)
    with torch.device("meta"):
        empty = Net()
    with pytest.raises(UsageError, match=r"'table.weight' is on the meta device.*to_empty.*load_state_dict"):
        apply_auto_tp(empty, settings(world_size, RULES), axis)
    for (name, width), message in _UNKNOWN.items():
        odd = net()
        odd.odd = nn.Module()
        odd.odd.qkv = nn.Linear(_WIDTH, 3 * _WIDTH)
        setattr(odd.odd, name, nn.Linear(width, _WIDTH))
        odd.odd.num_heads = 2 if name != "proj" else None
        rules = [spec("odd.qkv", "column", shape=[3, -1]), spec(f"odd.{name}", "row")]
        with pytest.raises(ArgumentError, match=rf"'odd.qkv' cannot be cut: 'odd' {message}.*'skip' for its layers"):
            apply_auto_tp(odd, settings(world_size, rules), axis)
    experts = net()
    experts.experts = nn.Module()
    experts.experts.weight = nn.Parameter(torch.zeros(2, 3, 4))
    with pytest.raises(ArgumentError, match=r"'experts.weight' has shape \(2, 3, 4\).*experts alone.*leave 'experts' out"):
        apply_auto_tp(experts, settings(world_size, [spec("experts", "column")]), axis)


def test_what_cannot_be_followed_is_refused_with_a_cure() -> None:
    run_ranks(_refused, 2, init=False)

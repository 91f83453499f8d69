"""Models cut into stages: every rank has its layers, under the names and with the values of the whole."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed import comm
from deepspeed.accelerator.seeds import set_random_seed
from deepspeed.errors import PipelineError
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.pipe.forward import pass_seed
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.topology.grid import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology
from tests.support.ranks import run_ranks

GUIDE = Path(__file__).parents[2] / "docs/guide/pipeline.md"
VOCABULARY, WIDTH = 11, 6


class Embedding(nn.Module):
    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.register_buffer("scale", torch.rand(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.words(tokens) * self.scale

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.words.weight.t()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.5)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.dropout(torch.tanh(self.linear(hidden))) + hidden


def _project(module: Embedding, hidden: torch.Tensor) -> torch.Tensor:
    return module.project(hidden)


def _double(hidden: torch.Tensor) -> torch.Tensor:
    return hidden * 2


def _layers() -> list[Any]:
    """Eight: a tied embedding at both ends, five blocks and a function."""
    return [
        TiedLayerSpec("embed", Embedding, VOCABULARY, WIDTH, tied_weight_attr="words.weight"),
        *(LayerSpec(Block, WIDTH) for _ in range(5)),
        _double,
        TiedLayerSpec("embed", Embedding, VOCABULARY, WIDTH, forward_fn=_project, tied_weight_attr=["words.weight"]),
    ]


def _tokens() -> torch.Tensor:
    return torch.arange(12).view(3, 4) % VOCABULARY


def _reference() -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """The same model in plain torch: its values by global name, its outputs in training, and the embedding's gradient."""
    set_random_seed(1234)
    embedding, blocks = Embedding(VOCABULARY, WIDTH), []
    for index in range(1, 6):
        set_random_seed(1234 + index)
        blocks.append(Block(WIDTH))
    values = {f"tied_modules.embed.{name}": value for name, value in embedding.state_dict().items()}
    for index, block in enumerate(blocks, start=1):
        values.update({f"{index}.{name}": value for name, value in block.state_dict().items()})
    hidden = embedding(_tokens())
    for index, block in enumerate(blocks, start=1):
        set_random_seed(pass_seed(1234, 0, index))
        hidden = block(hidden)
    outputs = embedding.project(_double(hidden))
    outputs.square().mean().backward()
    gradient = embedding.words.weight.grad
    assert gradient is not None
    return values, outputs.detach(), gradient


def _pass_through(net: PipelineModule) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """One forward and backward of one micro-batch by hand; the outputs, and the gradients of this stage by name."""
    pipe, inputs = net.mesh.axis("pipe"), _tokens()
    taken: list[tuple[torch.Tensor, torch.Tensor]] = []
    for part in range(net.num_stages * net.num_chunks):
        box: list[Any] = [None]
        if part % net.num_stages == net.stage_id:
            mine = inputs.requires_grad_(inputs.is_floating_point())
            outputs = net.forward_chunk(part // net.num_stages, mine)
            taken.append((mine, outputs))
            box = [outputs.detach()]
        comm.broadcast_object_list(box, src=pipe.ranks[part % net.num_stages], group=pipe.group)
        inputs = box[0]
    gradient: torch.Tensor | None = None
    for part in reversed(range(net.num_stages * net.num_chunks)):
        box = [None]
        if part % net.num_stages == net.stage_id:
            mine, outputs = taken.pop()
            if gradient is None:
                outputs.square().mean().backward()
            else:
                outputs.backward(gradient)
            box = [mine.grad]
        comm.broadcast_object_list(box, src=pipe.ranks[part % net.num_stages], group=pipe.group)
        gradient = box[0]
    net.allreduce_tied_weight_gradients()
    return inputs, {name: param.grad for name, param in net.named_parameters() if param.grad is not None}


def _seeded(rank: int, world_size: int, num_stages: int, num_chunks: int, interval: int) -> dict[str, Any]:
    set_random_seed(rank)  # what ranks drew before does not matter
    net = PipelineModule(
        _layers(),
        num_stages=num_stages,
        num_chunks=num_chunks,
        seed_layers=True,
        partition_method="uniform",
        activation_checkpoint_interval=interval,
    )
    values = {name: value.clone() for name, value in net.state_dict().items()}
    outputs, gradients = _pass_through(net)
    return {
        "values": values,
        "outputs": outputs,
        "gradients": gradients,
        "parts": net.parts,
        "ties": [(tie.key, tie.stages, tie.is_owner, tie.axis and tie.axis.ranks) for tie in net.tie_groups],
        "tied_groups": len(net.get_tied_weights_and_groups()),
        "funcs": len(net.forward_funcs),
    }


@pytest.mark.parametrize(
    ("world_size", "num_stages", "num_chunks", "interval"),
    [(1, 1, 1, 0), (2, 2, 1, 0), (3, 3, 1, 2), (4, 2, 1, 3), (2, 2, 2, 0), (2, 2, 4, 1)],
)
def test_a_seeded_model_is_the_one_of_one_process_however_it_is_cut(
    world_size: int, num_stages: int, num_chunks: int, interval: int
) -> None:
    """Values, dropout (also when recomputed) and the summed gradient of the tied embedding; bit by bit but for the sum."""
    values, outputs, gradient = _reference()
    found = run_ranks(_seeded, world_size, num_stages, num_chunks, interval)
    together: dict[str, torch.Tensor] = {}
    for each in found:
        for name, value in each["values"].items():
            torch.testing.assert_close(value, values[name], rtol=0, atol=0)
            together[name] = value
        torch.testing.assert_close(each["outputs"], outputs, rtol=0, atol=0)
        if "tied_modules.embed.words.weight" in each["gradients"]:
            # one float32 sum of two in another order
            torch.testing.assert_close(each["gradients"]["tied_modules.embed.words.weight"], gradient, rtol=1e-6, atol=1e-6)
    assert together.keys() == values.keys()
    assert sum(each["funcs"] for each in found) == 8 * world_size // num_stages
    assert all(len(each["ties"]) == (num_stages > 1) for each in found)


def test_copies_of_a_tied_module_are_joined_at_equal_places() -> None:
    """Four ranks, two stages: ranks 0 and 2 are one copy of the model, 1 and 3 the other. Three: the middle has none."""
    four = [each["ties"] for each in run_ranks(_seeded, 4, 2, 1, 0)]
    members = [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert four == [[("embed", (0, 1), rank < 2, members[rank])] for rank in range(4)]
    three = run_ranks(_seeded, 3, 3, 1, 0)
    held = [(True, (0, 2)), (False, None), (False, (0, 2))]
    assert [each["ties"] for each in three] == [[("embed", (0, 2), *place)] for place in held]
    assert [each["tied_groups"] for each in three] == [1, 0, 1]


def _unseeded_tie(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    set_random_seed(rank)
    return dict(PipelineModule(_layers(), num_stages=2).tied_modules["embed"].state_dict())


def test_copies_begin_with_the_first_stage_values_buffers_included() -> None:
    first, second = run_ranks(_unseeded_tie, 2)
    assert first.keys() == {"words.weight", "scale"}
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, rtol=0, atol=0)


def _places(rank: int, world_size: int) -> dict[str, Any]:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
    net = PipelineModule(
        [nn.Linear(2, 2), torch.tanh, nn.Linear(2, 2), nn.Linear(2, 1)], topology=topology, loss_fn=nn.MSELoss()
    )
    grid = net.mpu()
    axes = ("pipe", "pipeline_model", "data", "model", "slice", "tensor_model")
    found: dict[str, Any] = {}
    for axis in axes:
        there, size, group = (getattr(grid, f"get_{axis}_parallel_{what}")() for what in ("rank", "world_size", "group"))
        assert (comm.get_rank(group), comm.get_world_size(group)) == (there, size)
        found[axis] = comm.get_all_ranks_from_group(group)
    found["stage"] = grid.get_stage_id(), grid.is_first_stage, grid.is_last_stage, grid.get_data_parallel_id()
    found["other"] = grid.stage_to_global(1 - grid.get_stage_id()), grid.stage_to_global(1, model=0)
    found["names"] = sorted(net.state_dict()), net.partitions(), net.stage_owner(2), net.num_pipeline_stages()
    found["files"] = net.ckpt_prefix("saves", "step1"), net.ckpt_layer_path("saves", 1)
    found["losses"] = [type(child).__name__ for name, child in net.named_children() if name == "loss_fn"], type(net.loss_fn)
    return found


def test_a_rank_knows_its_place_and_groups() -> None:
    found = run_ranks(_places, 4)
    assert [each["pipe"] for each in found] == [each["pipeline_model"] for each in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [each["slice"] for each in found] == [each["tensor_model"] for each in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [each["data"] for each in found] == [[0], [1], [2], [3]]
    assert [each["model"] for each in found] == [[0, 1, 2, 3]] * 4
    assert [each["stage"] for each in found] == [(0, True, False, 0)] * 2 + [(1, False, True, 0)] * 2
    assert [each["other"] for each in found] == [(2, 2), (3, 2), (0, 2), (1, 2)]
    first, last = ["0.bias", "0.weight"], ["2.bias", "2.weight", "3.bias", "3.weight"]
    assert [each["names"] for each in found] == [(first, [0, 2, 4], 1, 2)] * 2 + [(last, [0, 2, 4], 1, 2)] * 2
    assert found[3]["files"] == (
        "saves/step1/module-pipe_01-model_01",
        "saves/layer_03-model_01-model_states.pt",
    )
    assert [each["losses"] for each in found] == [([], nn.MSELoss)] * 2 + [(["MSELoss"], nn.MSELoss)] * 2


def _without_parameters(rank: int, world_size: int) -> tuple[list[str], torch.Tensor]:
    net = PipelineModule([nn.Linear(2, 2), torch.tanh, _double], num_stages=3, partition_method=[1, 1, 1])
    return [name for name, _ in net.named_parameters()], net(torch.ones(1, 2))


def test_stages_may_have_functions_alone() -> None:
    (names, _), (none, hidden), (also_none, doubled) = run_ranks(_without_parameters, 3)
    assert (names, none, also_none) == (["0.weight", "0.bias"], [], [])
    torch.testing.assert_close(hidden, torch.tanh(torch.ones(1, 2)))
    torch.testing.assert_close(doubled, torch.full((1, 2), 2.0))


def _refusals(rank: int, world_size: int) -> list[str]:
    shared = nn.Linear(2, 2)
    layers = [nn.Linear(2, 2) for _ in range(4)]
    other = ProcessTopology(axes=["data", "pipe"], dims=[1, 2])
    attempts: list[Callable[[], Any]] = [
        lambda: PipelineModule(layers),
        lambda: PipelineModule(layers, num_stages=1, topology=PipeDataParallelTopology(2, 1)),
        lambda: PipelineModule(layers, num_stages=3),
        lambda: PipelineModule(layers, topology=PipeDataParallelTopology(2, 2)),
        lambda: PipelineModule(layers, topology=other),
        lambda: PipelineModule(layers, num_stages=2, num_chunks=3),
        lambda: PipelineModule([shared, *layers, shared], num_stages=2),
        lambda: PipelineModule([TiedLayerSpec("t", nn.Linear, 2, 2), TiedLayerSpec("t", nn.Embedding, 2, 2)], num_stages=2),
        lambda: PipelineModule([TiedLayerSpec("a.b", nn.Linear, 2, 2), *layers], num_stages=2),
        lambda: PipelineModule([TiedLayerSpec("t", nn.Linear, 2, 2, tied_weight_attr="wieght")] * 2, num_stages=2),
        lambda: PipelineModule(layers, num_stages=2, partition_method="best"),
        lambda: PipelineModule(layers, num_stages=2, partition_method=[1.0, 2.0]),
        lambda: PipelineModule(layers, num_stages=2, partition_method="profile"),
        lambda: PipelineModule(layers, num_stages=2, partition_method="profile", profile_input=torch.ones(1, 3)),
        lambda: PipelineModule(layers, num_stages=2, num_chunks=2)(torch.ones(1, 2)),
        lambda: PipelineModule(layers, num_stages=2).stage_owner(4),
    ]
    texts = []
    for attempt in attempts:
        with pytest.raises(PipelineError) as caught:
            attempt()
        texts.append(str(caught.value))
    return texts


def test_what_cannot_be_cut_is_refused_by_every_rank_alike() -> None:
    first, second = run_ranks(_refusals, 2)
    assert first == second
    expected = [
        "it needs one of the two",
        "it needs one of the two",
        "num_stages=3, but 2 ranks were started",
        "pipe=2xdata=2 has 4 ranks, and 2 were started",
        "the axes ['data', 'pipe']",
        "4 layers, num_stages=2, num_chunks=3: each of the 6 parts",
        "layer 0 (weight) and layer 5 (weight) share a parameter and lie on stages 0 and 1",
        "'t' are Linear and Embedding",
        "the keys ['a.b']",
        "Linear has no parameter 'wieght'. Its parameters are: weight, bias",
        "partition_method='best' is not known",
        "2 weights for 4 layers",
        "Give profile_input",
        "layer 0 failed on the example",
        "2 parts of the model with other stages between them",
        "layer 4 does not exist; the layers are 0 to 3",
    ]
    for text, part in zip(first, expected, strict=True):
        assert part in text


def _profiled(rank: int, world_size: int) -> list[int]:
    """Two slow layers among fast ones: each stage gets one, however many fast ones there are beside."""
    layers = [*(LayerSpec(nn.Linear, 2, 2) for _ in range(3)), _slow, _slow]
    before = torch.get_rng_state()
    net = PipelineModule(layers, num_stages=2, partition_method="profile", profile_input=torch.ones(1, 2))
    if net.stage_id == 1:
        assert torch.equal(torch.get_rng_state(), before)  # measuring draws nothing, and this stage builds nothing
    return net.parts


def _slow(hidden: torch.Tensor) -> torch.Tensor:
    total = hidden
    for _ in range(2000):
        total = total + hidden
    return total / 2001


def test_a_cut_by_measured_time_is_the_same_on_all_ranks() -> None:
    assert run_ranks(_profiled, 2) == [[0, 4, 5]] * 2


def _starts_by_itself(rank: int, world_size: int) -> int:
    return PipelineModule([nn.Linear(2, 2), nn.Linear(2, 2)], num_stages=2).stage_id


def test_the_process_group_is_started_where_there_is_none() -> None:
    assert run_ranks(_starts_by_itself, 2, init=False) == [0, 1]


def _files(rank: int, world_size: int, folder: str, num_stages: int, num_chunks: int, saves: bool) -> Any:
    set_random_seed(5 if saves else 6)
    net = PipelineModule(
        _layers(), num_stages=num_stages, num_chunks=num_chunks, partition_method="uniform", seed_layers=saves
    )
    files = TorchCheckpointEngine()
    if not saves:
        net.load_state_dir(folder, files)
    elif rank < world_size // num_stages:  # layers of the first stage are partly frozen
        net.get_submodule("1.linear").weight.requires_grad_(False)
    if saves:
        net.save_state_dict(folder, files, exclude_frozen_params=False)
        net.save_state_dict(f"{folder}/trained", files, exclude_frozen_params=True)
    return net.state_dict(), [Path(path).name for at in range(2) for path in net.ckpt_layer_path_list(folder, at)]


def test_layers_written_at_one_cut_are_read_at_another(tmp_path: Path) -> None:
    written = run_ranks(_files, 2, str(tmp_path), 2, 1, True)
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == [f"layer_{at:02d}-model_states.pt" for at in range(6)]
    assert [names for _, names in written] == [
        ["layer_00-model_states.pt", "layer_01-model_states.pt"],
        ["layer_04-model_states.pt", "layer_05-model_states.pt"],
    ]
    wanted = {name: value for values, _ in written for name, value in values.items()}
    for world_size, num_stages, num_chunks in ((1, 1, 1), (2, 2, 4), (3, 3, 1)):
        for values, _ in run_ranks(_files, world_size, str(tmp_path), num_stages, num_chunks, False):
            for name, value in values.items():
                torch.testing.assert_close(value, wanted[name], rtol=0, atol=0)
    trained = TorchCheckpointEngine().load(tmp_path / "trained" / "layer_01-model_states.pt")
    assert list(trained) == ["linear.bias"]


def _settings(rank: int, world_size: int) -> None:
    net = PipelineModule(_layers(), num_stages=1, checkpointable_layers=["Block"])
    net.set_checkpoint_interval(2)
    assert net.activation_checkpoint_interval == 2
    assert net.get_additional_losses() is None
    assert net._is_checkpointable(net.forward_funcs[1:3])
    assert not net._is_checkpointable(net.forward_funcs[0:2])
    compiled: list[Any] = []
    net.eval()
    plain = net(_tokens())
    net.compile(backend=lambda graph, inputs: compiled.append(graph) or graph.forward)
    torch.testing.assert_close(net(_tokens()), plain)
    assert compiled


def test_settings_can_be_changed_after_construction() -> None:
    run_ranks(_settings, 1)


def _guide_listing(rank: int, world_size: int) -> tuple[list[int], list[str]]:
    (listing,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(listing, names)
    net: PipelineModule = names["net"]
    assert not net(torch.ones(2, 3, dtype=torch.long) if rank == 0 else torch.ones(2, 3, 64)).isnan().any()
    return net.partitions(), list(net.state_dict())


def test_the_listing_of_the_guide_makes_the_model_that_it_describes() -> None:
    (parts, first), (also, last) = run_ranks(_guide_listing, 2)
    assert parts == also
    assert "3.linear1.weight" in first
    assert "tied_modules.embed.words.weight" in first
    assert "tied_modules.embed.words.weight" in last

"""The plan: the guide's worked example, totals, what fits, what is said."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import deepspeed
from deepspeed.config import DeepSpeedConfig
from deepspeed.errors import ArgumentError, ConfigError
from deepspeed.planning import RankPlan, Term, formula, plan, tracing
from deepspeed.planning.command import main, nbytes_of
from deepspeed.planning.gathered import most_gathered_numel
from deepspeed.planning.kept_state import kept_nbytes
from deepspeed.planning.page import page
from deepspeed.planning.traffic import sent_nbytes, transfer_seconds
from deepspeed.precision.formats import Formats
from deepspeed.zero.prefetch import GatherSettings

_BF16 = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


class Net(nn.Module):
    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.sum()


def build() -> Any:
    return Net(), (torch.empty(4, 64),), {}


def test_the_guides_worked_example() -> None:
    """13B on 16 GPUs: 208 GB; about 62, 37 and 13 at stages 1, 2 and 3 (the guide, "Worked example")."""
    found = plan(13e9, _BF16, 16, 80e9)
    by_label = {each.label: each.peak_nbytes() / 1e9 for each in found.others}
    assert [round(by_label[f"stage {stage}"]) for stage in range(4)] == [208, 62, 37, 13]
    lowest = found.lowest_that_fits()
    assert lowest is not None
    assert lowest.label == "stage 1"


def test_a_module_is_planned_without_being_touched() -> None:
    net = Net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    found = deepspeed.plan(net, {**_BF16, "zero_optimization": {"stage": 2}}, 4, batch=((torch.empty(4, 64),), {}))
    assert {name for name, _ in net.named_parameters()} == set(before)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(param.grad is None for param in net.parameters())
    assert len(net.layers) == 6
    names = {term.name for term in found.asked.terms}
    assert {"weights", "gradients", "masters", "optimizer state", "buckets", "activations"} <= names


def test_activations_of_repeated_blocks_are_those_of_the_whole() -> None:
    few, many = (plan(Net(layers), _BF16, 1, batch=((torch.empty(8, 64),), {})).asked for layers in (3, 12))
    [of_few], [of_many] = ([term.nbytes for term in each.terms if term.name == "activations"] for each in (few, many))
    assert of_many - of_few == 9 * 8 * 64 * 2  # per block autograd keeps tanh's output, which is the next block's input, too


def test_offload_moves_terms_to_the_host() -> None:
    on_host: dict[str, Any] = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    on_host["stage3_param_persistence_threshold"] = 100
    found = plan(Net(), {**_BF16, "zero_optimization": on_host}, 2).asked
    tiers = {(term.name, term.tier) for term in found.terms}
    for name in ("masters", "optimizer state", "gradients"):
        assert (name, "host") in tiers
        assert (name, "device") not in tiers
    assert {("weights", "host"), ("weights", "device"), ("gathered weights", "device")} <= tiers  # biases stay whole


def test_settings_that_do_not_start_are_left_out_with_the_reason() -> None:
    found = plan(Net(), {**_BF16, "bf16": {"enabled": True, "bf16_master_weights_and_grads": True}, **_stage(1)}, 2)
    assert "stage 0" not in [each.label for each in found.others]
    assert any(note.startswith("stage 0 is left out: ") and "bf16_master_weights_and_grads" in note for note in found.notes)


_NARROW = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


def _stage(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}}


def test_a_configuration_that_does_not_start_is_an_error() -> None:
    with pytest.raises(ConfigError, match="zero_optimization"):
        plan(Net(), {"zero_optimisation": {"stage": 1}}, 2)
    with pytest.raises(ArgumentError, match="autotp_size = 3"):
        plan(Net(), {"tensor_parallel": {"autotp_size": 3}}, 4)
    with pytest.raises(ArgumentError, match="no layer of Net is cut"):
        plan(Net(), {"tensor_parallel": {"autotp_size": 2}}, 4)
    with pytest.raises(ArgumentError, match="no model to plan for"):
        plan("no/such/folder/config.json", _BF16, 2)


def test_a_model_that_needs_values_says_so() -> None:
    class Odd(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if float(x.sum()) > 0 else x

    with pytest.raises(ArgumentError, match="Leave the batch out"):
        plan(Odd(3, 3), _BF16, 1, batch=((torch.empty(2, 3),), {}))


def test_a_plan_is_the_sum_of_its_terms() -> None:
    one = RankPlan(
        "x",
        (
            Term("a", 100, lower="less of a"),
            Term("b", 30, moment="pass"),
            Term("c", 40, moment="update", lower="less of c"),
            Term("d", 7, "host"),
        ),
    )
    assert (one.peak_nbytes(), one.peak_nbytes("host"), one.peak_nbytes("nvme")) == (140, 7, 0)
    assert one.fits(140)
    assert not one.fits(139)
    assert one.advice() == ("a: less of a", "c: less of c")


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.integers(0, 100), st.integers(1, 200))
def test_no_more_is_gathered_than_live_parameters_allow(numels: list[int], prefetch: int, live: int) -> None:
    settings = GatherSettings(prefetch_numel=prefetch, max_live_numel=live, max_reuse_numel=0)
    most, _ = most_gathered_numel(numels, settings)
    assert max(numels) <= most <= max(live, 2 * max(numels))  # one unit in use, one that is as near as the next


def test_with_default_budgets_small_models_stay_gathered_from_forward_to_backward() -> None:
    assert most_gathered_numel([10, 20, 30], GatherSettings()) == (60, True)


def test_traffic_is_that_of_the_paper() -> None:
    sent = {stage: sent_nbytes(stage, 100, 100, 4, 1, stays_gathered=False) for stage in range(4)}
    assert sent == {0: 150, 1: 150, 2: 150, 3: 225}
    assert sent_nbytes(3, 100, 100, 4, 1, stays_gathered=True) == 150
    assert transfer_seconds(3 * 10**9, 1.5) == 2


@pytest.mark.parametrize(("text", "size"), [("80GB", 80e9), ("141GiB", 141 * 2**30), ("8e10", 8e10), ("512 mb", 512e6)])
def test_sizes_are_read(text: str, size: float) -> None:
    assert nbytes_of(text) == size


def test_the_command_prints_tables(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    words = ["--params", "13e9", "--world-size", "16", "--device-memory", "40GB", "--bandwidth", "50"]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "The first that fits 40.0 GB: stage 2" in told
    assert "208 GB" in told
    assert "activations are not counted" in told


def test_the_command_reads_a_function_and_writes_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({**_BF16, "train_micro_batch_size_per_gpu": "auto"}))
    assert main(["tests.unit.planning.test_plan:build", "--config", str(config), "--world-size", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == 6 * 65 * 64
    assert "activations" in {term["name"] for term in found["asked"]["terms"]}
    assert main(["no.such:thing", "--world-size", "2"]) == 2
    assert "module:function" in capsys.readouterr().err


def _llama() -> Any:
    return pytest.importorskip("transformers").LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=5, num_attention_heads=4, vocab_size=64
    )


def test_a_hugging_face_configuration_is_read_from_a_file(tmp_path: Path) -> None:
    _llama().save_pretrained(tmp_path)
    found = plan(str(tmp_path), _BF16, 2, sequence_length=16)
    assert found.subject == "LlamaForCausalLM"
    [activations] = [term.nbytes for term in found.asked.terms if term.name == "activations"]
    assert found.recomputed_nbytes is not None
    assert found.recomputed_nbytes < activations


def _bytes(plan: RankPlan) -> dict[str, int]:
    return {term.name: term.nbytes for term in plan.terms}


def test_tensor_ranks_hold_parts_of_layers_and_of_their_activations() -> None:
    whole = plan(_llama(), {**_BF16, **_stage(1)}, 2, sequence_length=16)
    found = plan(_llama(), {**_BF16, **_stage(1), "tensor_parallel": {"autotp_size": 2}}, 4, sequence_length=16)
    assert not torch.distributed.is_initialized()
    assert (found.numel, found.ranks) == (whole.numel, 4)  # the model's, not a rank's
    ours, theirs = _bytes(found.asked), _bytes(whole.asked)
    for name in ("weights", "masters", "optimizer state"):  # norms stay whole
        assert 0.5 <= ours[name] / theirs[name] < 0.6
    assert 0.4 < ours["activations"] / theirs["activations"] < 0.9


def test_sequence_ranks_share_model_states_and_tokens() -> None:
    alone = _bytes(plan(_llama(), {**_BF16, **_stage(1)}, 4, sequence_length=64).asked)
    shared = _bytes(plan(_llama(), {**_BF16, **_stage(1), "sequence_parallel_size": 4}, 4, sequence_length=64).asked)
    assert {name: shared[name] for name in ("weights", "masters")} == {name: alone[name] for name in ("weights", "masters")}
    assert 0.2 < shared["activations"] / alone["activations"] < 0.3


@pytest.mark.parametrize(
    ("formats", "optimizer", "nbytes"),
    [
        ({"bf16": {"enabled": True}}, "AdamW", 16),
        ({}, "AdamW", 16),  # no master: 4 + 4 + 8
        ({"bf16": {"enabled": True}}, "Lion", 12),
        ({}, "SGD", 8),
        ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}, **_stage(1)}, "AdamW", 12),
        ({"bf16": {"enabled": True, **_NARROW}, **_stage(1)}, "AdamW", 8),  # 2 + 2 + 4, the masters are the weights
    ],
)
def test_a_bare_number_is_counted_in_the_configurations_formats(
    formats: dict[str, Any], optimizer: str, nbytes: int
) -> None:
    config = {**formats, "optimizer": {"type": optimizer, "params": {"lr": 0.1}}}
    assert plan(1e6, config, 1).asked.peak_nbytes() == nbytes * 10**6


def test_tensor_ranks_share_a_bare_number() -> None:
    found = plan(1e6 + 1, {"tensor_parallel": {"autotp_size": 2}}, 4)
    assert (found.numel, found.ranks) == (1_000_001, 4)
    assert found.asked.peak_nbytes() == 16 * 500_001


def test_what_the_formula_asks_of_names_is_what_it_asks_of_optimizers() -> None:
    for formats in ({}, {"bf16": {"enabled": True}}, {"bf16": {"enabled": True, **_NARROW}, **_stage(1)}):
        for name in ("AdamW", "Adam", "Lion", "Lamb"):
            config = DeepSpeedConfig({"train_batch_size": 1, "optimizer": {"type": name}, **formats})
            assert formula._state_nbytes(config, Formats.of(config)) == kept_nbytes(config)


def test_without_an_optimizer_adamw_is_counted_and_told() -> None:
    found = plan(Net(), {"bf16": {"enabled": True}}, 1)
    assert "optimizer state" in _bytes(found.asked)
    assert any("names no optimizer" in note for note in found.notes)


def test_batch_normalisation_keeps_its_format_and_no_mark_stays_behind() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten())
    found = plan(net, _BF16, 1, batch=((torch.empty(2, 3, 8, 8),), {}))
    assert _bytes(found.asked)["weights"] >= 2 * (4 * 27 + 4) + 4 * 8
    assert not any("deepspeed" in name for param in net.parameters() for name in vars(param))


def test_optimizer_state_on_a_disk_is_in_files_and_buffers() -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/nowhere"}, "sub_group_size": 4096}
    found = plan(Net(), {**_BF16, "zero_optimization": zero}, 2).asked
    numel = 6 * 65 * 64 // 2
    assert numel * 12 <= found.peak_nbytes("nvme") < numel * 12 * 1.05
    assert {"gradients", "state buffers", "staged weights"} == {term.name for term in found.terms if term.tier == "host"}


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_has_the_tables_escapes_names_and_asks_for_nothing(tmp_path: Path) -> None:
    found = replace(plan(13e9, _BF16, 16, 40e9), subject="<script>alert(1)</script>", notes=("a < b & c",))
    reader = _Reader()
    reader.feed(page(found, bandwidth=50))
    assert "script" not in {tag for tag, _ in reader.tags}
    assert not [attrs for _, attrs in reader.tags if attrs.keys() & {"src", "href"}]
    assert all(text in reader.text for text in ("<script>alert(1)</script>", "a < b & c", "208 GB", "stage 2", "0.975"))
    assert "url(" not in reader.text  # of style sheets
    assert [tag for tag, _ in reader.tags].count("tr") == 2 + len(found.asked.terms) + 1 + len(found.others)
    assert main(["--params", "13e9", "--world-size", "16", "--html", str(tmp_path / "plan.html")]) == 0
    assert "208 GB" in (tmp_path / "plan.html").read_text()


def test_a_configuration_and_what_stands_for_one_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--params", "1e9", "--world-size", "1", "--config", "x.json", "--dtype", "fp32"])
    assert "--dtype and --optimizer" in capsys.readouterr().err
    assert main(["--params", "1e9", "--world-size", "1", "--dtype", "fp32", "--optimizer", "SGD", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["asked"]["device_peak_nbytes"] == 8 * 10**9


class _Mixed(nn.Module):
    """Blocks of two kinds, so that not all are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=number % 2 == 0) for number in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.sum()


def _of_family(name: str) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "GPT2Config": {"n_embd": 32, "n_layer": 5, "n_head": 4, "vocab_size": 64, "n_positions": 32},
        "LlamaConfig": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5, "num_attention_heads": 4},
        "MixtralConfig": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 5,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_local_experts": 4,
        },
    }[name]
    return getattr(transformers, name)(**{"vocab_size": 64, **sizes})


@pytest.mark.parametrize("source", ["GPT2Config", "LlamaConfig", "MixtralConfig", "mixed"])
def test_three_blocks_of_many_give_the_plan_of_all(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def planned() -> Any:
        if source == "mixed":
            return plan(_Mixed(), _BF16, 2, batch=((torch.empty(4, 8),), {})).as_dict()
        return plan(_of_family(source), _BF16, 2, sequence_length=16).as_dict()

    few = planned()
    monkeypatch.setattr(tracing, "_repeated", lambda module: None)
    assert planned() == few

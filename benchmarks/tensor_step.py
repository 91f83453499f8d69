"""How long is one training step of a small Llama whose layers two ranks share?

Goals: at most 0.85 of the time of the original's AutoTP, and no more than that of torch's `parallelize_module` (columns and
rows, fused AdamW). Two cases of one shape:

- `tensor_step`: a model of our own with rules for it. Attention and MLPs are cut, alike for every contender; embedding and
  output layer are whole. `ours, no engine` is the cut model with torch's fused AdamW: what the layers alone cost.
- `tensor_step_defaults`: Transformers' Llama and `autotp_size` alone: each cuts what it cuts by itself. For torch that is
  the model's own plan, output layer included.

Model: width 512, 6 blocks, 8 query and 4 key/value heads, MLPs of 1408, vocabulary 4096; 4 rows of 128 tokens, fp32. The
interpreters need transformers for the second.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness.cases import ORIGINAL, OURS, Case, Goal, Measured
from benchmarks.harness.trainers import LEARNING_RATE, WEIGHT_DECAY, adamw

PARALLELIZED = "torch parallelize_module"
NO_ENGINE = "ours, no engine"
RANKS = 2
_WIDTH, _BLOCKS, _HEADS, _KEY_HEADS, _HIDDEN, _VOCABULARY = 512, 6, 8, 4, 1408, 4096
_ROWS, _TOKENS = 4, 128
_HEAD_DIM = _WIDTH // _HEADS
_COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
_RULES = {"column": _COLUMNS, "row": ("self_attn.o_proj", "mlp.down_proj")}


def _case(title: str, model: str, contenders: tuple[str, ...]) -> Case:
    return Case(
        title,
        benchmark=__name__.rpartition(".")[2],
        contenders=contenders,
        figures=("step_ms", "first_loss", "last_loss"),
        of=PARALLELIZED,
        ranks=RANKS,
        goals=(Goal("step_ms", 0.85, of=ORIGINAL), Goal("step_ms", 1.0, of=PARALLELIZED)),
        pairs=5,
        side_pairs=2,
        loss_tolerance=1e-4,
        arguments={"model": model, "warm": 2, "steps": 8},
    )


CASES = (
    _case("tensor_step", "own", (OURS, NO_ENGINE, PARALLELIZED, ORIGINAL)),
    _case("tensor_step_defaults", "transformers", (OURS, PARALLELIZED, ORIGINAL)),
)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim = _HEAD_DIM
        self.q_proj = nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.k_proj = nn.Linear(_WIDTH, _KEY_HEADS * _HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(_WIDTH, _KEY_HEADS * _HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(_WIDTH, _WIDTH, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (
            projection(x_BTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        mixed_BTD: Tensor = self.o_proj(seen.transpose(1, 2).flatten(2))
        return mixed_BTD


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(_WIDTH, _HIDDEN, bias=False)
        self.up_proj = nn.Linear(_WIDTH, _HIDDEN, bias=False)
        self.down_proj = nn.Linear(_HIDDEN, _WIDTH, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BTD: Tensor = self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))
        return y_BTD


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(_WIDTH), nn.RMSNorm(_WIDTH)
        self.self_attn, self.mlp = Attention(), Mlp()

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD))
        y_BTD: Tensor = x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))
        return y_BTD


class Llama(nn.Module):
    """Returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(_VOCABULARY, _WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(_BLOCKS))
        self.norm = nn.RMSNorm(_WIDTH)
        self.to_vocabulary = nn.Linear(_WIDTH, _VOCABULARY, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embed_tokens(tokens_BT[:, :-1])
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return F.cross_entropy(self.to_vocabulary(self.norm(x_BTD)).flatten(0, 1), tokens_BT[:, 1:].flatten())


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=_VOCABULARY,
            hidden_size=_WIDTH,
            intermediate_size=_HIDDEN,
            num_hidden_layers=_BLOCKS,
            num_attention_heads=_HEADS,
            num_key_value_heads=_KEY_HEADS,
            max_position_embeddings=_TOKENS,
            use_cache=False,
        )
    )


def _model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return Llama() if kind == "own" else _llama()


def _loss(kind: str, model: Callable[..., Any], tokens_BT: Tensor) -> Tensor:
    if kind == "own":
        own: Tensor = model(tokens_BT)
        return own
    loss: Tensor = model(input_ids=tokens_BT[:, :-1], labels=tokens_BT[:, :-1]).loss  # shifted by the model
    return loss


# -- contenders: each is one function `step(tokens) -> loss` ---------------------------------------------------------------


def _engine(kind: str) -> Callable[[Tensor], Tensor]:
    import deepspeed

    deepspeed.init_distributed("gloo")
    model = _model(kind)
    specs = [
        {"patterns": [rf".*{name.replace('.', '[.]')}[.]weight$" for name in names], "partition_type": cut}
        for cut, names in _RULES.items()
    ]
    rules = {"use_default_specs": False, "layer_specs": specs}
    config = {
        "train_micro_batch_size_per_gpu": _ROWS,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}},
        "tensor_parallel": {"autotp_size": RANKS, **({"partition_config": rules} if kind == "own" else {})},
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
    }
    engine: Any = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]

    def step(tokens_BT: Tensor) -> Tensor:
        loss = _loss(kind, engine, tokens_BT)
        engine.backward(loss)
        engine.step()
        return loss

    return step


def _plain_loop(kind: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
    def step(tokens_BT: Tensor) -> Tensor:
        loss = _loss(kind, model, tokens_BT)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def _no_engine(kind: str) -> Callable[[Tensor], Tensor]:
    import deepspeed
    from deepspeed.config.parallel import TensorParallelConfig
    from deepspeed.tensor_parallel.auto import apply_auto_tp
    from deepspeed.topology.mesh import ParallelMesh

    deepspeed.init_distributed("gloo")
    model = _model(kind)
    apply_auto_tp(model, TensorParallelConfig(autotp_size=RANKS), ParallelMesh.build(tensor=RANKS).axis("tensor"))
    return _plain_loop(kind, model, adamw(model))


def _parallelized(kind: str) -> Callable[[Tensor], Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    dist.init_process_group("gloo")
    model = _model(kind)
    styles = {"column": ColwiseParallel, "row": RowwiseParallel}
    prefix = "" if kind == "own" else "model."
    plan = {f"{prefix}layers.*.{name}": styles[cut]() for cut, names in _RULES.items() for name in names}
    if kind != "own":
        plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, init_device_mesh("cpu", (RANKS,)), plan)
    parameters = list(model.parameters())
    groups = [
        {"params": [param for param in parameters if isinstance(param, DTensor) == is_part]} for is_part in (True, False)
    ]
    return _plain_loop(kind, model, torch.optim.AdamW(groups, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True))


def _batches(count: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randint(_VOCABULARY, (_ROWS, _TOKENS + 1), generator=generator)


def measure(contender: str, arguments: Mapping[str, Any]) -> Measured:
    makers = {NO_ENGINE: _no_engine, PARALLELIZED: _parallelized}
    step = makers.get(contender, _engine)(arguments["model"])
    seconds, losses = [], []
    for tokens_BT in _batches(arguments["warm"] + arguments["steps"]):
        dist.barrier()
        began = time.perf_counter()
        losses.append(float(step(tokens_BT)))
        seconds.append(time.perf_counter() - began)
    step_ms = statistics.median(seconds[arguments["warm"] :]) * 1e3
    return Measured({"step_ms": step_ms}, {"first": losses[0], "last": losses[-1]})

"""Which of a client's own tests run: what is in each source distribution, and what each of those needs to run on a CPU.

accelerate    has `tests/test_*.py`, which run, without `tests/deepspeed`; the scripts which that folder starts are part of
              the package (`test_utils`) and run as well. Of the others in there, `test_distributed_data_loop.py` prepares a
              model without any batch size, which the client refuses for us before it calls us, and `test_sync.py` compares
              the scheduler after accumulation by the client, which with us is by the engine. `test_performance.py` fails,
              with the original alike, where 2 micro-batches make an update (it expects the client's schedule to move for
              both; the client moves it once) and where only the optimizer is in the configuration (it gives the schedule of
              transformers a `DummyOptim`, which has no `param_groups`): neither is run
transformers  has `tests/test_*.py`, without the folders of models and of trainers: the DeepSpeed tests of `ModelTesterMixin`
              run, on models of ours
peft          has `tests/`: the one test that uses us runs, and fails: it wants a warning that an adapter saved ungathered,
              between `initialize` and the first backward, is empty. Parameters up to the persistence threshold (its adapter
              is far below) are empty there with the original, and whole from that backward on; with us they are whole from
              `initialize` on, so that the file is complete and nothing is to warn of
              (`tests/clients/test_trainer_peft.py` tells when either holds); others imitate us with plain tensors
lightning     has no tests
trl           has no tests
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
_SCRIPTS = "src/accelerate/test_utils/scripts"
_ZERO_2 = ("--use_deepspeed", "--zero_stage", "2")
_ZERO_3 = ("--use_deepspeed", "--zero_stage", "3", "--zero3_init_flag", "true", "--zero3_save_16bit_model", "true")
_ONE_STEP = ("--gradient_accumulation_steps", "1", "--gradient_clipping", "1.0")  # scripts divide by it: no "auto"
_OFFLOAD = ("--offload_optimizer_device", "cpu")
_OPTIMIZER = '"optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}'
_SCHEDULER = (
    '"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": "auto", "warmup_num_steps": 1}}'
)


@dataclass(frozen=True)
class Script:
    """A script of the client that ranks run, two of them, under `accelerate launch`.

    Args:
        path: below the client's folder.
        launch: flags of `accelerate launch`.
        args: the script's own.
    """

    path: str
    launch: tuple[str, ...] = _ZERO_2
    args: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What the list of passes calls it."""
        return " ".join([self.path.rpartition("/")[2], *self.args, "under", *self.launch])


@dataclass(frozen=True)
class Client:
    """A client and the part of its tests that runs offline on a CPU.

    Args:
        name: on PyPI; the version is that of `constraints.txt`.
        tests: what pytest is given, in the client's folder.
        without_gpu: tests that skip for want of a GPU and need none.
        scripts: run by ranks.
        needs: packages of its tests only, installed without what they depend on.
        laid: files that the tests name and that the source distribution lacks, with their text.
        seconds: pytest may take in all.
    """

    name: str
    tests: tuple[str, ...] = ()
    without_gpu: tuple[str, ...] = ()
    scripts: tuple[Script, ...] = ()
    needs: tuple[str, ...] = ()
    laid: dict[str, str] = field(default_factory=dict)
    seconds: float = 510


def _config(stage: int, micro_batch: str, *blocks: str) -> str:
    """A configuration as clients write one; values that accelerate fills in are "auto"."""
    zero = f'"zero_optimization": {{"stage": {stage}, "stage3_gather_16bit_weights_on_model_save": true}}'
    batch = f'"train_batch_size": "auto", "train_micro_batch_size_per_gpu": {micro_batch}, "gradient_accumulation_steps": 1'
    return "{" + ", ".join([*blocks, zero, batch, '"bf16": {"enabled": "auto"}', '"gradient_clipping": "auto"']) + "}"


def _performance_scripts() -> tuple[Script, ...]:
    """The client's training test with its own optimizer and scheduler, and with ours."""
    path = f"{_SCRIPTS}/external_deps/test_performance.py"
    flags = [("--use_deepspeed", "--zero_stage", "1", *_ONE_STEP), (*_ZERO_3, *_ONE_STEP)]
    flags += [(*_ZERO_3, *_ONE_STEP, *_OFFLOAD), ("--mixed_precision", "bf16", *_ZERO_3, *_ONE_STEP)]
    for stage, pairing in ((2, "both"), (3, "both")):
        flags.append(
            ("--use_deepspeed", "--deepspeed_config_file", f"{{client}}/tests/deepspeed/zero{stage}_{pairing}.json")
        )
    return tuple(Script(path, each, ("--output_dir=.",)) for each in flags)


def _checkpoint_scripts() -> tuple[Script, ...]:
    """Save after each epoch, then resume from the first: the second run asserts what the first one wrote down."""
    path = f"{_SCRIPTS}/external_deps/test_checkpointing.py"
    resume = ("--output_dir=saved", "--resume_from_checkpoint=saved/epoch_0")
    launches = ((*_ZERO_2, *_ONE_STEP), (*_ZERO_3, *_ONE_STEP))
    return tuple(Script(path, launch, args) for launch in launches for args in (("--output_dir=saved",), resume))


_ACCELERATE = Client(
    "accelerate",
    tests=tuple(f"tests/test_{name}.py" for name in ("accelerator", "dataclasses", "optimizer", "scheduler", "grad_sync")),
    scripts=(
        *(Script(f"{_SCRIPTS}/test_{name}.py", flags) for name in ("script", "ops") for flags in (_ZERO_2, _ZERO_3)),
        Script(f"{_SCRIPTS}/external_deps/test_zero3_integration.py", ("--multi_gpu",)),
        Script(f"{_SCRIPTS}/external_deps/test_ds_multiple_model.py"),
        Script(f"{_SCRIPTS}/external_deps/test_ds_alst_ulysses_sp.py", _ZERO_3),
        *_performance_scripts(),
        *_checkpoint_scripts(),
    ),
    needs=("evaluate==0.4.6", "parameterized==0.9.0", "requests==2.34.2"),
    laid={
        "tests/deepspeed/ds_config_zero2_model_only.json": _config(2, '"auto"'),
        "tests/deepspeed/ds_config_zero3_model_only.json": _config(3, "1"),  # the client's test sets no other for NoiseModel
        "tests/deepspeed/zero2_both.json": _config(2, '"auto"', _OPTIMIZER, _SCHEDULER),
        "tests/deepspeed/zero3_both.json": _config(3, '"auto"', _OPTIMIZER, _SCHEDULER),
    },
)

_RESIZE = [
    f"test_resize_{what}_with_deepspeed{where}"
    for what in ("tokens_embeddings", "embeddings_untied")
    for where in ("", "_multi_gpu")
]
_MIXIN = 'class {}:\n    """Stand-in: the source distribution lacks this mix-in, and no test that runs here is of it."""\n'

_TRANSFORMERS = Client(
    "transformers",
    tests=("tests/test_held.py", "-k", "deepspeed"),
    without_gpu=tuple(_RESIZE),
    needs=("parameterized==0.9.0",),
    laid={
        "tests/__init__.py": "",
        "tests/exporters/__init__.py": "",
        "tests/exporters/test_export.py": _MIXIN.format("ExportTesterMixin"),
        "tests/generation/__init__.py": "",
        "tests/generation/test_utils.py": _MIXIN.format("GenerationTesterMixin"),
        "tests/test_held.py": (HERE / "held_models.py").read_text(),
    },
)

_PEFT = Client(
    "peft",
    tests=("tests/test_gpu_examples.py", "-k", "ZeRO3"),
    without_gpu=("test_zero3_ungathered_save_warns_and_gather_succeeds",),
    needs=("parameterized==0.9.0",),
    laid={"tests/__init__.py": ""},
)

CLIENTS = (_ACCELERATE, _TRANSFORMERS, _PEFT)

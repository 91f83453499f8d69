"""`examples/gpt`: its parts, and the whole job in a tiny configuration, run as a newcomer runs it."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.launching import ROOT, Job

EXAMPLE = ROOT / "examples" / "gpt"
TINY = (
    *("--data", str(ROOT / "deepspeed" / "config"), "--steps", "24", "--batch", "4", "--context", "32", "--vocab", "320"),
    *("--depth", "1", "--width", "32", "--heads", "2", "--validate-every", "12", "--sample-tokens", "20"),
)
PARTS = ("bpe", "corpus", "model", "plot", "progress")


@pytest.fixture(scope="module")
def gpt() -> Iterator[SimpleNamespace]:
    """The example's modules, which import one another as scripts in one folder do."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield SimpleNamespace(**{name: import_module(name) for name in PARTS})
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in PARTS:
            sys.modules.pop(name, None)


# -- tokens ---------------------------------------------------------------------------------------------------------------


@given(text=st.binary(max_size=200), learnt_on=st.binary(max_size=200), vocab_size=st.integers(256, 300))
def test_decoding_gives_back_the_exact_bytes(gpt: SimpleNamespace, text: bytes, learnt_on: bytes, vocab_size: int) -> None:
    tokenizer = gpt.bpe.Tokenizer(gpt.bpe.learn_merges([learnt_on * 3], vocab_size))
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.vocab_size <= vocab_size
    assert all(0 <= token < tokenizer.vocab_size for token in tokens)


def test_the_most_frequent_pair_is_merged_first_and_ties_go_to_the_lower(gpt: SimpleNamespace) -> None:
    merges = gpt.bpe.learn_merges([b"cd cd ab ab xyz xyz xyz"], 259)
    assert merges == [(ord(" "), ord("x")), (ord("y"), ord("z")), (256, 257)]
    assert gpt.bpe.learn_merges([b"ab"], 300) == []


@given(text=st.text("ab \n", max_size=60), count=st.integers(0, 8))
def test_merges_are_those_of_counting_anew_after_each(gpt: SimpleNamespace, text: str, count: int) -> None:
    words, expected = [list(word) for word in gpt.bpe.WORDS.findall(text.encode())], []
    for token in range(256, 256 + count):
        counts = Counter(pair for word in words for pair in pairwise(word))
        if not counts or max(counts.values()) < 2:
            break
        expected.append(min(counts, key=lambda pair: (-counts[pair], pair)))
        words = [gpt.bpe.merge_pair(word, expected[-1], token) for word in words]
    assert gpt.bpe.learn_merges([text.encode()], 256 + count) == expected


def test_a_frequent_word_becomes_one_token(gpt: SimpleNamespace) -> None:
    tokenizer = gpt.bpe.Tokenizer(gpt.bpe.learn_merges([b"return self\n" * 50 + b"other"], 300))
    assert len(tokenizer.encode(b"return")) == 1
    assert len(tokenizer.encode(b"other")) == 5


# -- text -----------------------------------------------------------------------------------------------------------------


def test_the_split_depends_on_contents_alone_and_keeps_about_a_twentieth(gpt: SimpleNamespace, tmp_path: Path) -> None:
    for number in range(200):
        (tmp_path / f"{number}.txt").write_text(f"text number {number}\n")
    (tmp_path / "copy.txt").write_text("text number 7\n")
    training, validation = gpt.corpus.split(gpt.corpus.read_texts(tmp_path))
    for number in range(200):
        (tmp_path / f"{number}.txt").rename(tmp_path / f"renamed-{number}")
    assert gpt.corpus.split(gpt.corpus.read_texts(tmp_path)) == (training, validation)
    assert training.count(b"number") + validation.count(b"number") == 200
    assert 2 <= validation.count(b"number") <= 25


def test_a_single_file_is_cut_in_two(gpt: SimpleNamespace, tmp_path: Path) -> None:
    text = bytes(range(1, 201))
    (tmp_path / "one").write_bytes(text)
    training, validation = gpt.corpus.split(gpt.corpus.read_texts(tmp_path / "one"))
    assert training + validation == text
    assert len(validation) == 10


def test_files_that_are_not_text_are_left_out_and_no_text_is_an_error(gpt: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"a\0b")
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(ValueError, match="holds no text"):
        gpt.corpus.read_texts(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        gpt.corpus.read_texts(tmp_path / "nothing")


def test_a_corpus_comes_back_from_its_file(gpt: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("to be or not to be, " * 40)
    corpus = gpt.corpus.prepare(tmp_path / "text", 270)
    corpus.save(tmp_path / "new" / "text.npz")
    loaded = gpt.corpus.Corpus.load(tmp_path / "new" / "text.npz")
    assert torch.equal(loaded.training, corpus.training)
    assert torch.equal(loaded.validation, corpus.validation)
    assert (loaded.merges, loaded.validation_nbytes) == (corpus.merges, corpus.validation_nbytes)


def test_unigram_entropy_is_that_of_the_token_frequencies(gpt: SimpleNamespace) -> None:
    tokens = torch.tensor([0, 0, 1, 2])
    corpus = gpt.corpus.Corpus(training=tokens, validation=tokens, validation_nbytes=8, merges=[])
    assert corpus.unigram_entropy() == pytest.approx(1.5 * math.log(2))
    assert corpus.unigram_entropy() * corpus.bits_per_byte_of_nat == pytest.approx(1.5 * 4 / 8)


def test_windows_overlap_by_the_one_token_that_is_target_of_one_and_input_of_the_next(gpt: SimpleNamespace) -> None:
    windows = gpt.corpus.Windows(torch.arange(10), 3)
    assert [w.tolist() for w in windows] == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    with pytest.raises(ValueError, match="no window of context=10"):
        gpt.corpus.Windows(torch.arange(10), 10)


# -- model ----------------------------------------------------------------------------------------------------------------


def _model(gpt: SimpleNamespace) -> torch.nn.Module:
    model = gpt.model.GPT(gpt.model.GPTConfig(vocab_size=50, context=16, depth=2, width=32, heads=2))
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.3)
    return model


def test_the_first_loss_is_that_of_a_uniform_guess(gpt: SimpleNamespace) -> None:
    model = gpt.model.GPT(gpt.model.GPTConfig(vocab_size=50, context=16, depth=2, width=32, heads=2))
    tokens = torch.randint(50, (8, 17))
    assert model(tokens[:, :-1], tokens[:, 1:]).item() == pytest.approx(math.log(50), abs=0.05)


def test_no_position_sees_a_later_one(gpt: SimpleNamespace) -> None:
    model = _model(gpt)
    tokens = torch.randint(50, (1, 16))
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 50
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert (before[:, 9:] - after[:, 9:]).abs().amax(-1).min() > 1e-3


def test_the_output_matrix_is_the_embedding(gpt: SimpleNamespace) -> None:
    names = {name for name, param in _model(gpt).named_parameters() if 50 in param.shape}
    assert names == {"embedding.weight"}


def test_attention_depends_on_distances_not_on_positions(gpt: SimpleNamespace) -> None:
    cosines, sines = gpt.model.rotary_tables(16, 8)
    q, k = torch.randn(8), torch.randn(8)
    turned_q, turned_k = (gpt.model.rotate(x.expand(1, 1, 16, 8), cosines, sines)[0, 0] for x in (q, k))
    scores = turned_q @ turned_k.T
    for distance in range(5):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


def test_generation_is_repeatable_and_goes_on_past_the_context(gpt: SimpleNamespace) -> None:
    model, start = _model(gpt), torch.tensor([1, 2, 3])
    first, second = (model.generate(start, 30, 1.0, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(first[:3], start)
    assert len(first) == 33


def test_a_width_that_heads_cannot_share_is_refused_with_one_that_they_can(gpt: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match="Try --width 102"):
        gpt.model.GPTConfig(vocab_size=50, width=100, heads=3)


# -- the whole job --------------------------------------------------------------------------------------------------------


def _run(folder: Path, command: list[str], words: list[str]) -> str:
    with Job(folder, words, command=command) as job:
        status = job.wait(240)
        output = job.output
        job.assert_gone(time.monotonic())
    assert status == 0, output
    return output


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Folder and output of the example in two launches."""
    folder = tmp_path_factory.mktemp("halves")
    return folder, _run(folder, [sys.executable, str(EXAMPLE / "run.py")], [*TINY, "--out", "out"])


def test_two_launches_leave_plot_metrics_checkpoints_and_a_sample(halves: tuple[Path, str]) -> None:
    folder, output = halves
    assert (folder / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "out" / "sample.txt").read_text().startswith("def ")
    assert list((folder / "out" / "tensorboard").rglob("events.out.tfevents.*"))
    assert {p.name for p in (folder / "out" / "checkpoints").iterdir()} >= {"global_step12", "global_step24", "latest"}
    assert output.count("unigram entropy") == 2
    assert "tokens/s" in output


def test_the_second_launch_begins_with_the_loss_that_the_first_ended_with(halves: tuple[Path, str]) -> None:
    line = next(line for line in halves[1].splitlines() if "when saved" in line)
    saved, now = (word for word in line.replace(",", "").split() if word[0].isdigit())
    assert saved == now


def test_a_run_in_two_launches_is_the_run_in_one(halves: tuple[Path, str], gpt: SimpleNamespace, tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner"]
    _run(tmp_path, launcher, ["--num_gpus", "2", str(EXAMPLE / "train.py"), *TINY, "--out", "out"])
    for metric in ("Train_Samples_train_loss.csv", "Train_Samples_lr.csv", "Validation_Samples_loss.csv"):
        once = gpt.plot.read_metric(tmp_path / "out" / "csv" / metric)
        assert gpt.plot.read_metric(halves[0] / "out" / "csv" / metric) == once
        assert len(once[0]) == (3 if "Validation" in metric else 24)
    samples, losses = gpt.plot.read_metric(tmp_path / "out" / "csv" / "Train_Samples_train_loss.csv")
    assert samples == [8 * step for step in range(1, 25)]
    assert losses[-1] < losses[0] - 0.3

"""Every model of the zoo, exported and held against PyTorch (slow); and that the zoo would notice a wrong archive."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from zoo import ZOO, selected
from zoo.check import check
from zoo.entry import Entry, PlainModule, token_ids
from zoo.pool import Worker
from zoo.reasons import FIXED, REASONS

PAGE = Path(__file__).resolve().parents[2] / "docs/zoo.md"


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as running:
        yield running


def assert_right(entry: Entry, worker: Worker, setting: str = "default") -> None:
    outcome = worker.check(entry, setting)
    if entry.name in FIXED:
        assert outcome.status == "fixed", f"{outcome.status}: {outcome.note}"
    elif entry.name in REASONS:
        assert outcome.status != "right", f"{entry.name} works: take it out of zoo/reasons.py"
        assert outcome.status != "wrong", outcome.note
    else:
        assert outcome.status == "right", f"{outcome.status}: {outcome.note}"


def models(*words: str) -> pytest.MarkDecorator:
    entries = selected(list(words))
    return pytest.mark.parametrize("entry", entries, ids=[entry.name for entry in entries])


# One class for each family: xdist gives a class to a process.
@pytest.mark.slow
@pytest.mark.tract
class TestDecoders:
    @models("decoder")
    def test_a_decoder_with_its_cache_equals_pytorch_without_one(self, entry: Entry, worker: Worker) -> None:
        assert_right(entry, worker)


@pytest.mark.slow
@pytest.mark.tract
class TestEncoders:
    @models("encoder")
    def test_an_encoder_equals_pytorch_under_padding(self, entry: Entry, worker: Worker) -> None:
        assert_right(entry, worker)


@pytest.mark.slow
@pytest.mark.tract
class TestEncoderDecoders:
    @models("encoder-decoder")
    def test_an_encoder_decoder_equals_pytorch(self, entry: Entry, worker: Worker) -> None:
        assert_right(entry, worker)


@pytest.mark.slow
@pytest.mark.tract
class TestVision:
    @models("vision")
    def test_a_model_of_pictures_equals_pytorch_at_other_batch_sizes(self, entry: Entry, worker: Worker) -> None:
        assert_right(entry, worker)


@pytest.mark.slow
@pytest.mark.tract
class TestAudio:
    @models("audio")
    def test_a_model_of_sound_equals_pytorch_at_other_lengths(self, entry: Entry, worker: Worker) -> None:
        assert_right(entry, worker)


@pytest.mark.slow
@pytest.mark.tract
class TestMultimodal:
    @models("multimodal")
    def test_a_model_of_pictures_and_text_equals_pytorch(self, entry: Entry, worker: Worker) -> None:
        assert_right(entry, worker)


class _Double(nn.Module):
    """Doubles, but not quite when it is captured."""

    def __init__(self, fault: float) -> None:
        super().__init__()
        self.fault = fault

    def forward(self, x: torch.Tensor, return_dict: bool) -> dict[str, torch.Tensor]:
        return {"y": x * (2.0 + (self.fault if torch.compiler.is_exporting() else 0.0))}


def _doubling(fault: float) -> Entry:
    return Entry(
        name="doubling",
        family="vision",
        make=lambda: PlainModule(
            model=_Double(fault),
            inputs=lambda sizes: {"x": torch.randn(sizes["B"], 3)},
            axes={"x": {0: "B"}},
            traced={"B": 2},
            tested=[{"B": 5}],
            outputs=("y",),
        ),
    )


@pytest.mark.tract
def test_an_archive_that_computes_something_else_is_called_wrong() -> None:
    outcome = check(_doubling(1e-3))
    assert outcome.status == "wrong"
    assert outcome.error == pytest.approx(5e-4, rel=0.01)


@pytest.mark.tract
def test_an_archive_that_computes_the_same_is_called_right() -> None:
    outcome = check(_doubling(0.0))
    assert (outcome.status, outcome.note) == ("right", "")
    assert outcome.error is not None
    assert outcome.error < 1e-6


def test_a_worker_that_dies_or_hangs_fails_its_model_and_is_replaced() -> None:
    missing = Entry(name="no_such_model", family="vision", make=lambda: None)  # type: ignore[arg-type, return-value]
    with Worker() as worker:
        assert "KeyError" in worker.check(missing).note
        assert "no answer within" in worker.check(ZOO["llama"], timeout_s=0.05).note


def test_every_model_of_the_zoo_is_on_the_page() -> None:
    text = PAGE.read_text()
    assert [name for name in ZOO if f"| {name} |" not in text] == []


def test_reasons_are_given_for_models_that_exist() -> None:
    assert set(REASONS) <= set(ZOO)
    assert set(REASONS) >= FIXED


def test_weights_are_the_same_each_time_and_large_enough() -> None:
    first, second = (ZOO["llama"].make().model for _ in range(2))
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, second.get_parameter(name))
    assert float(first.model.layers[0].mlp.up_proj.weight.std()) == pytest.approx(1 / 8, rel=0.05)
    assert token_ids(2, 5).min() >= 3

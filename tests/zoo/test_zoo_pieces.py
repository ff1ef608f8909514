"""Over the decoders of the zoo: a capture of every layer shows what pieces take for granted, in the same text."""

import pytest
import torch

from t2n_hf.errors import CaptureError, ConfigError, EmitError, MissingEmittersError
from t2n_hf.export.lower import lower
from t2n_hf.hf.tasks import interface_of
from t2n_hf.nnef.text import to_text
from t2n_hf.trace.capture import capture
from t2n_hf.trace.same_graph import describe_piece
from zoo import ZOO
from zoo.entry import Generator

pytestmark = pytest.mark.slow

DECODERS = [name for name, entry in ZOO.items() if entry.family == "decoder"]


@pytest.mark.parametrize("name", DECODERS)
def test_pieces_of_a_decoder_are_what_a_capture_of_every_layer_shows(name):
    subject = ZOO[name].make()
    if not isinstance(subject, Generator):
        pytest.skip("not a causal language model")
    try:
        face = interface_of(subject.model)
        pieces = capture(face, torch.float32, "pieces")
    except (CaptureError, ConfigError) as refusal:
        pytest.skip(f"its layers are no pieces: {refusal}")
    every = capture(face, torch.float32, "whole")
    for mine, other in zip(pieces.pieces, every.pieces, strict=True):
        (*parts, results), (*other_parts, other_results) = describe_piece(mine), describe_piece(other)
        assert parts == other_parts
        assert set(other_results) <= set(results)  # a piece also gives what the model does not use
    assert [call.piece for call in pieces.calls.values()] == [call.piece for call in every.calls.values()]
    if any(len(mine.outputs) != len(other.outputs) for mine, other in zip(pieces.pieces, every.pieces, strict=True)):
        return
    try:
        texts = [to_text(lower(captured, {}, dtype="f32").document) for captured in (pieces, every)]
    except (EmitError, MissingEmittersError) as missing:  # such as a piece that gives complex numbers
        pytest.skip(str(missing))
    assert texts[0] == texts[1]

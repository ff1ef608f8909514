"""Over the decoders of the zoo: a capture of every layer shows what pieces take for granted, and the text is the same."""

import pytest
import torch
from zoo import ZOO
from zoo.entry import Generator

from t2n_hf.errors import CaptureError, MissingEmittersError
from t2n_hf.export.lower import lower
from t2n_hf.hf.tasks import interface_of
from t2n_hf.nnef.text import to_text
from t2n_hf.trace.capture import capture
from t2n_hf.trace.same_graph import describe_piece

pytestmark = pytest.mark.slow

DECODERS = [name for name, entry in ZOO.items() if entry.family == "decoder"]


@pytest.mark.parametrize("name", DECODERS)
def test_pieces_of_a_decoder_are_what_a_capture_of_every_layer_shows(name):
    subject = ZOO[name].make()
    if not isinstance(subject, Generator):
        pytest.skip("not a causal language model")
    face = interface_of(subject.model)
    try:
        pieces = capture(face, torch.float32, "pieces")
    except CaptureError as refusal:
        pytest.skip(f"its layers are no pieces: {refusal}")
    every = capture(face, torch.float32, "whole")
    assert [describe_piece(piece) for piece in pieces.pieces] == [describe_piece(piece) for piece in every.pieces]
    assert [call.piece for call in pieces.calls.values()] == [call.piece for call in every.calls.values()]
    try:
        texts = [to_text(lower(captured, {}, dtype="f32").document) for captured in (pieces, every)]
    except MissingEmittersError as missing:
        pytest.skip(str(missing))
    assert texts[0] == texts[1]

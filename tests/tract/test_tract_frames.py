import io
import json
import struct

import numpy as np
import pytest

from t2n_hf.errors import FormatError
from t2n_hf.tract.frames import DTYPES, read_frame, write_frame


def sent(message, arrays=None):
    stream = io.BytesIO()
    write_frame(stream, message, arrays)
    stream.seek(0)
    return stream


def raw(header, payload=b""):
    return io.BytesIO(struct.pack("<4sI", b"T2NF", len(header)) + header + payload)


def listing(**item):
    return json.dumps({"arrays": [item]}).encode()


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_every_dtype_come_back(dtype):
    array = np.arange(6).reshape(2, 3).astype(dtype)
    message, arrays = read_frame(sent({"op": "run", "text": "é"}, {"x": array}))
    assert message == {"op": "run", "text": "é"}
    assert arrays["x"].dtype == array.dtype
    np.testing.assert_array_equal(arrays["x"], array)


def test_scalars_empty_and_transposed_arrays_come_back():
    given = {
        "scalar": np.float32(3).reshape(()),
        "empty": np.zeros((1, 2, 0, 4), np.float16),
        "turned": np.arange(6.0).reshape(2, 3).T,
    }
    arrays = read_frame(sent({}, given))[1]
    for name, array in given.items():
        assert arrays[name].shape == array.shape
        np.testing.assert_array_equal(arrays[name], array)


def test_frames_follow_each_other_until_the_stream_ends():
    stream = io.BytesIO(sent({"n": 1}).getvalue() + sent({"n": 2}, {"x": np.ones(3)}).getvalue())
    assert read_frame(stream)[0] == {"n": 1}
    assert read_frame(stream)[0] == {"n": 2}
    assert read_frame(stream) is None


def test_a_dtype_that_frames_do_not_carry_is_refused_before_anything_is_written():
    stream = io.BytesIO()
    with pytest.raises(FormatError, match="'x' is of dtype complex128"):
        write_frame(stream, {}, {"x": np.ones(2, np.complex128)})
    assert not stream.getvalue()


@pytest.mark.parametrize("cut", [3, 10, -1], ids=["prefix", "header", "array"])
def test_a_stream_that_ends_within_a_frame_is_an_error(cut):
    whole = sent({"op": "run"}, {"x": np.ones(4)}).getvalue()
    with pytest.raises(FormatError, match="ended after"):
        read_frame(io.BytesIO(whole[:cut]))


@pytest.mark.parametrize(
    "stream",
    [
        io.BytesIO(b"PK\x03\x04aaaa"),
        io.BytesIO(struct.pack("<4sI", b"T2NF", 0xFFFFFFFF)),
        raw(b"not json"),
        raw(b"[]"),
        raw(b"{}"),
        raw(listing(name="x", dtype="object", shape=[1])),
        raw(listing(name="x", dtype="float32", shape=[-1])),
        raw(listing(name="x", dtype="float32", shape=["S"])),
        raw(listing(name="x", dtype="float32", shape=[1] * 40)),
    ],
    ids=["magic", "huge-header", "json", "list", "no-arrays", "object", "negative", "text", "rank"],
)
def test_bytes_that_are_no_frame_are_refused(stream):
    with pytest.raises(FormatError):
        read_frame(stream)

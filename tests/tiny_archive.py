"""A causal language model of one attention layer, written by hand: NNEF text, `.dat` files, and the same in numpy."""

import struct

import numpy as np

VOCABULARY, WIDTH = 16, 4

TEXT = """version 1.0;

extension tract_registry tract_core;
extension tract_symbol S;
extension tract_symbol P;
extension tract_assert P >= 0;
extension tract_assert S >= 1;
extension tract_assert S+P < {limit};
extension tract_assert tg: S==1;
extension tract_assert pp: P==0;

graph network(input_ids, in_cache_key_0, in_cache_value_0) -> (outputs, out_cache_key_0, out_cache_value_0)
{{
    input_ids = tract_core_external(shape=[1, S], datum_type='i64');
    in_cache_key_0 = tract_core_external(shape=[1, 1, P, 4], datum_type='{dtype}');
    in_cache_value_0 = tract_core_external(shape=[1, 1, P, 4], datum_type='{dtype}');
    table = variable<scalar>(label='table', shape=[16, 4]);
    query = variable<scalar>(label='query', shape=[1, 4, 4]);
    key = variable<scalar>(label='key', shape=[1, 4, 4]);
    value = variable<scalar>(label='value', shape=[1, 4, 4]);
    head = variable<scalar>(label='head', shape=[1, 4, 16]);
    x = tract_core_gather(table, input_ids, axis=0);
    new_key = unsqueeze(matmul(x, key), axes=[1]);
    new_value = unsqueeze(matmul(x, value), axes=[1]);
    out_cache_key_0 = concat([in_cache_key_0, new_key], axis=2);
    out_cache_value_0 = concat([in_cache_value_0, new_value], axis=2);
    last = slice(x, axes=[1], begin=[S-1], end=[S]);
    q = unsqueeze(matmul(last, query), axes=[1]);
    scores = softmax(matmul(q, out_cache_key_0, transposeB=true), axes=[3]);
    mixed = squeeze(matmul(scores, out_cache_value_0), axes=[1]);
    outputs = matmul(mixed, head);
}}
"""


def weights(dtype="float32"):
    shapes = {
        "table": (VOCABULARY, WIDTH),
        "query": (1, WIDTH, WIDTH),
        "key": (1, WIDTH, WIDTH),
        "value": (1, WIDTH, WIDTH),
        "head": (1, WIDTH, VOCABULARY),
    }
    random = np.random.default_rng(0)
    return {name: random.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def dat(array):
    shape = [*array.shape, *[0] * (8 - array.ndim)]
    head = struct.pack("<2sBBII8IIHH76x", b"\x4e\xef", 1, 0, array.nbytes, array.ndim, *shape, array.itemsize * 8, 0, 0)
    return head + array.tobytes()


def write_archive(folder, dtype="float32", limit=64, text=TEXT):
    """Write the archive as an open folder; returns its path."""
    folder.mkdir(parents=True)
    (folder / "graph.nnef").write_text(text.format(dtype={"float32": "f32", "float16": "f16"}[dtype], limit=limit))
    for name, array in weights(dtype).items():
        (folder / f"{name}.dat").write_bytes(dat(array))
    return folder


def logits_of(tokens):
    """Logits [VOCABULARY] after `tokens`, in numpy."""
    w = weights()
    x = w["table"][np.asarray(tokens)]
    scores = (x[-1] @ w["query"][0]) @ (x @ w["key"][0]).T
    scores = np.exp(scores - scores.max())
    return (scores / scores.sum()) @ (x @ w["value"][0]) @ w["head"][0]


def greedy(tokens, count):
    """`tokens` continued by `count` of the likeliest."""
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(int(logits_of(tokens).argmax()))
    return tokens

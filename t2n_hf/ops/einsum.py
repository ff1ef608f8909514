"""Sums of products over named axes."""

import string

import torch

from t2n_hf.ops.dims import Length, same
from t2n_hf.ops.emit import Emit
from t2n_hf.ops.table import EMITTERS
from t2n_hf.ops.value import Value

__all__: list[str] = []

_aten = torch.ops.aten
_emits = EMITTERS.emits


@_emits(_aten.einsum.default)
def einsum(emit: Emit, equation: str, operands: list[Value], **_: object) -> Value:
    """A sum of products over named axes. Integers go through f32: exact to 2**24."""
    dtype = emit.dtype if emit.dtype.is_floating_point else torch.float32
    inputs, output = _letters(equation, [x.rank for x in operands])
    values = [emit.cast(x, dtype) for x in operands]
    for place, letters in enumerate(inputs):
        values[place], inputs[place] = _without_repeats(emit, values[place], letters)
    for place in range(len(values)):
        others = set(output).union(*inputs[:place], *inputs[place + 1 :])
        values[place], inputs[place] = _summed(emit, values[place], inputs[place], others)
    _drop_ones(emit, values, inputs)
    if len(values) == 1:
        result = _in_order(emit, values[0], inputs[0], output)
    else:
        result = _contracted(emit, values, inputs, output)
    return emit.cast(emit.broadcast(result, emit.shape), emit.dtype)


def _letters(equation: str, ranks: list[int]) -> tuple[list[str], str]:
    """The letters of each operand and of the result, an ellipsis spelt out in letters that are not used."""
    left, arrow, output = equation.replace(" ", "").partition("->")
    inputs = left.split(",")
    free = [letter for letter in string.ascii_letters if letter not in equation]
    widths = [rank - len(text.replace("...", "")) for text, rank in zip(inputs, ranks, strict=True)]
    widest = max([width for text, width in zip(inputs, widths, strict=True) if "..." in text], default=0)
    hidden = "".join(free[:widest])
    spelt = [
        text.replace("...", hidden[len(hidden) - width :] if width else "")
        for text, width in zip(inputs, widths, strict=True)
    ]
    if arrow:
        return spelt, output.replace("...", hidden)
    once = sorted(letter for letter in set(left) - set(",.") if left.count(letter) == 1)
    return spelt, hidden + "".join(once)


def _without_repeats(emit: Emit, x: Value, letters: str) -> tuple[Value, str]:
    """The diagonal of axes that have one letter."""
    for letter in letters:
        while letters.count(letter) > 1:
            first = letters.index(letter)
            second = letters.index(letter, first + 1)
            length = x.shape[first]
            rest = [axis for axis in range(x.rank) if axis not in (first, second)]
            flat = emit.transpose(x, [first, second, *rest])
            flat = emit.reshape(flat, (length * length, *flat.shape[2:]))
            places = emit.binary("mul", emit.range(0, length, torch.int64), length + 1, torch.int64)
            x = emit.gather(flat, places, 0)
            letters = letter + "".join(letters[axis] for axis in rest)
    return x, letters


def _summed(emit: Emit, x: Value, letters: str, others: set[str]) -> tuple[Value, str]:
    """Without the axes that nothing else has."""
    alone = [axis for axis, letter in enumerate(letters) if letter not in others]
    kept = "".join(letter for letter in letters if letter in others)
    return (emit.reduce("sum_reduce", x, alone, keepdim=False), kept) if alone else (x, kept)


def _drop_ones(emit: Emit, values: list[Value], inputs: list[str]) -> None:
    """Take away axes of length 1 that meet a longer one: torch broadcasts them."""
    lengths: dict[str, Length] = {}
    for x, letters in zip(values, inputs, strict=True):
        for letter, length in zip(letters, x.shape, strict=True):
            if same(lengths.get(letter, 1), 1):
                lengths[letter] = length
    for place, (x, letters) in enumerate(zip(values, inputs, strict=True)):
        ones = [a for a, letter in enumerate(letters) if same(x.shape[a], 1) and not same(lengths[letter], 1)]
        values[place] = emit.squeeze(x, ones)
        inputs[place] = "".join(letter for axis, letter in enumerate(letters) if axis not in ones)


def _in_order(emit: Emit, x: Value, letters: str, output: str) -> Value:
    return emit.transpose(x, [letters.index(letter) for letter in output])


def _contracted(emit: Emit, values: list[Value], inputs: list[str], output: str) -> Value:
    accumulator = "f64" if values[0].dtype is torch.float64 else "f32"
    expression = f"{','.join(inputs)}->{output}"
    out = (emit.shape, values[0].dtype)
    return emit.call("tract_core_einsum", values, out=out, expr=expression, acc=accumulator, output="")

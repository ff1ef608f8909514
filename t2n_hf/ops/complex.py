"""Complex numbers, as pairs of tensors."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import sympy
import torch

from t2n_hf.ops.comparison import compare
from t2n_hf.ops.emit import Emit
from t2n_hf.ops.special import angle_of, hypot
from t2n_hf.ops.table import COMPLEX_EMITTERS, EMITTERS, Emitter
from t2n_hf.ops.value import ComplexValue, Operand, Value
from t2n_hf.views import EXPANSIONS, PARTS, RESHAPES, SAME, TURNS, overloads_of

__all__ = ["parts_of"]

_aten = torch.ops.aten
_emits = COMPLEX_EMITTERS.emits

# Calls that do the same with both parts. What they take beside the tensors is the same too.
_BY_PARTS: Final = (
    *overloads_of((*RESHAPES, *TURNS, *EXPANSIONS, *PARTS, *SAME)),
    *(_aten.cat.default, _aten.stack.default, _aten.flip.default, _aten.roll.default, _aten.repeat.default),
    *(_aten.repeat_interleave.self_int, _aten.index.Tensor, _aten.index_select.default, _aten.where.self),
    *(_aten.sum.default, _aten.sum.dim_IntList, _aten.mean.default, _aten.mean.dim, _aten.neg.default),
    *(_aten.cumsum.default, _aten.constant_pad_nd.default, _aten.broadcast_tensors.default, _aten.gather.default),
    *(_aten.slice_scatter.default, _aten.select_scatter.default, _aten.diff.default, _aten.tile.default),
    *(_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default, _aten.copy.default),
    *(_aten.to.dtype, _aten.to.dtype_layout, _aten.to.device, _aten._to_copy.default, _aten.type_as.default),
    *(_aten.tril.default, _aten.triu.default, _aten.diagonal.default, _aten.embedding.default),
    *(_aten.transpose_.default, _aten.t_.default, _aten.squeeze_.default, _aten.squeeze_.dim),
    *(_aten.unsqueeze_.default, _aten.detach_.default),
)


def parts_of(emit: Emit, operand: Any, dtype: torch.dtype) -> tuple[Operand, Operand]:  # noqa: ANN401
    """Real and imaginary part of a tensor or a number; the second is 0 for those that are real."""
    if isinstance(operand, ComplexValue):
        return operand.real, operand.imag
    if isinstance(operand, complex):
        return operand.real, operand.imag
    return emit.cast(operand, dtype) if isinstance(operand, Value) else operand, 0


def _register(overload: Any, emitter: Emitter) -> None:  # noqa: ANN401 - an overload
    """An operator of complex numbers alone: that it is known is looked up in the table of all."""
    _emits(overload)(emitter)
    if overload not in EMITTERS:
        EMITTERS.emits(overload)(emitter)


def _of_complex(*overloads: Any) -> Callable[[Emitter], Emitter]:  # noqa: ANN401 - overloads
    def register(emitter: Emitter) -> Emitter:
        for overload in overloads:
            _register(overload, emitter)
        return emitter

    return register


# Both parts alike


def _by_parts(overload: Any) -> Emitter:  # noqa: ANN401 - an overload
    def emitter(emit: Emit, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - what the overload takes and gives
        known = _known(emit, overload)
        sides = [known(emit, *_part(emit, args, at), **_part(emit, kwargs, at)) for at in (0, 1)]
        gives_real = not any(value.dtype.is_complex for value in _leaves(emit.node.meta["val"]))
        if gives_real:
            return sides[0]
        if isinstance(sides[0], list):
            return [ComplexValue(real, imag) for real, imag in zip(*sides, strict=True)]
        return ComplexValue(*sides)

    return emitter


def _known(emit: Emit, overload: Any) -> Emitter:  # noqa: ANN401 - an overload
    """The emitter for real numbers."""
    emitter = EMITTERS.get(overload)
    if emitter is None:
        raise emit.refuse("it has no emitter")
    return emitter


def _leaves(value: Any) -> list[torch.Tensor]:  # noqa: ANN401 - a tensor, or several
    return list(value) if isinstance(value, list | tuple) else [value]


def _part(emit: Emit, argument: Any, at: int) -> Any:  # noqa: ANN401 - an argument of a call
    """The real (0) or imaginary (1) part of an argument; what is no floating point tensor is in both."""
    if isinstance(argument, ComplexValue):
        return argument.imag if at else argument.real
    if isinstance(argument, complex):
        return argument.imag if at else argument.real
    if isinstance(argument, list | tuple):
        return type(argument)([_part(emit, item, at) for item in argument])
    if isinstance(argument, dict):
        return {key: _part(emit, item, at) for key, item in argument.items()}
    if isinstance(argument, Value) and at and argument.dtype.is_floating_point:
        return emit.full(argument.shape, 0, argument.dtype)
    return argument


for _overload in _BY_PARTS:
    _emits(_overload)(_by_parts(_overload))


# Made of real numbers, and taken apart


@_of_complex(_aten.view_as_complex.default, _aten.view_as_complex_copy.default)
def view_as_complex(emit: Emit, x: Value) -> ComplexValue:
    """The two elements of the last axis as real and imaginary part."""
    axis = x.rank - 1
    real, imag = (emit.squeeze(emit.slice(x, axis, at, at + 1), [axis]) for at in (0, 1))
    return ComplexValue(real, imag)


@_of_complex(_aten.view_as_real.default, _aten.view_as_real_copy.default)
def view_as_real(emit: Emit, x: ComplexValue) -> Value:
    """Real and imaginary part along a new last axis."""
    sides = [emit.unsqueeze(side, [side.rank]) for side in (x.real, x.imag)]
    return emit.concat(sides, x.rank, x.dtype)


@_of_complex(_aten.complex.default)
def complex_(emit: Emit, real: Value, imag: Value) -> ComplexValue:
    """Numbers of a real and an imaginary part."""
    sides = [emit.broadcast(emit.tensor(side, emit.dtype), emit.shape) for side in (real, imag)]
    return ComplexValue(*sides)


@_of_complex(_aten.polar.default)
def polar(emit: Emit, size: Value, angle: Value) -> ComplexValue:
    """Numbers of a size and an angle."""
    size, angle = (emit.tensor(x, emit.dtype) for x in (size, angle))
    return ComplexValue(*(emit.binary("mul", size, emit.unary(op, angle), emit.dtype) for op in ("cos", "sin")))


@_of_complex(_aten.real.default)
def real(emit: Emit, x: Value | ComplexValue) -> Value:
    """The real part."""
    return x.real if isinstance(x, ComplexValue) else x


@_of_complex(_aten.imag.default)
def imag(emit: Emit, x: ComplexValue) -> Value:
    """The imaginary part."""
    return x.imag


@_of_complex(_aten._conj.default, _aten.conj.default, _aten._conj_physical.default, _aten.conj_physical.default)
def conj(emit: Emit, x: Value | ComplexValue) -> Value | ComplexValue:
    """The imaginary part with the other sign."""
    return ComplexValue(x.real, emit.unary("neg", x.imag)) if isinstance(x, ComplexValue) else x


@_of_complex(_aten.resolve_conj.default, _aten.resolve_neg.default)
def resolved(emit: Emit, x: Value | ComplexValue) -> Value | ComplexValue:
    """`x` itself."""
    return x


@_emits(_aten.abs.default)
def size(emit: Emit, x: ComplexValue) -> Value:
    """The distance from 0."""
    return hypot(emit, x.real, x.imag)


@_emits(_aten.angle.default)
def angle(emit: Emit, x: ComplexValue) -> Value:
    """The angle, from -pi to pi."""
    return angle_of(emit, x.imag, x.real)


# Arithmetic


def _both(emit: Emit, op: str, left: Operand, right: Operand) -> Operand:
    """`left op right`, of which nothing is written for two numbers."""
    if isinstance(left, Value) or isinstance(right, Value):
        return emit.binary(op, left, right, emit.dtype)
    operations: dict[str, Callable[[Any, Any], Any]] = {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul": lambda a, b: a * b,
    }
    return operations[op](left, right)


def _pair(emit: Emit, real: Operand, imag: Operand) -> ComplexValue:
    return ComplexValue(*(emit.broadcast(emit.tensor(side, emit.dtype), emit.shape) for side in (real, imag)))


def _linear(op: str) -> Emitter:
    def emitter(emit: Emit, left: Any, right: Any, alpha: Any = 1, **_: object) -> ComplexValue:  # noqa: ANN401
        (a, b), (c, d) = parts_of(emit, left, emit.dtype), parts_of(emit, right, emit.dtype)
        if alpha != 1:
            c, d = _product(emit, (c, d), parts_of(emit, alpha, emit.dtype))
        return _pair(emit, _both(emit, op, a, c), _both(emit, op, b, d))

    return emitter


_emits(_aten.add.Tensor, _aten.add.Scalar)(_linear("add"))
_emits(_aten.sub.Tensor, _aten.sub.Scalar)(_linear("sub"))


def _product(emit: Emit, left: tuple[Operand, Operand], right: tuple[Operand, Operand]) -> tuple[Operand, Operand]:
    (a, b), (c, d) = left, right

    def times(x: Operand, y: Operand) -> Operand:
        zero = any(not isinstance(side, Value | sympy.Expr) and side == 0 for side in (x, y))
        return 0 if zero else _both(emit, "mul", x, y)

    def joined(op: str, x: Operand, y: Operand) -> Operand:
        return x if not isinstance(y, Value | sympy.Expr) and y == 0 else _both(emit, op, x, y)

    return joined("sub", times(a, c), times(b, d)), joined("add", times(a, d), times(b, c))


@_emits(_aten.mul.Tensor, _aten.mul.Scalar, _aten.multiply.Tensor)
def mul(emit: Emit, left: Any, right: Any, **_: object) -> ComplexValue:  # noqa: ANN401 - tensors or numbers
    """`left * right`."""
    sides = _product(emit, parts_of(emit, left, emit.dtype), parts_of(emit, right, emit.dtype))
    return _pair(emit, *sides)


@_emits(_aten.div.Tensor, _aten.div.Scalar, _aten.true_divide.Tensor)
def div(emit: Emit, left: Any, right: Any, **_: object) -> ComplexValue:  # noqa: ANN401 - tensors or numbers
    """`left / right`."""
    kind = emit.dtype
    a, b = parts_of(emit, left, kind)
    if not isinstance(right, ComplexValue | complex):
        return _pair(emit, emit.binary("div", a, right, kind), emit.binary("div", b, right, kind))
    c, d = parts_of(emit, right, kind)
    over = _both(emit, "add", _both(emit, "mul", c, c), _both(emit, "mul", d, d))
    sides = _product(emit, (a, b), (c, _both(emit, "mul", d, -1)))
    return _pair(emit, *(emit.binary("div", emit.tensor(side, kind), over, kind) for side in sides))


@_emits(_aten.reciprocal.default)
def reciprocal(emit: Emit, x: ComplexValue) -> ComplexValue:
    """`1 / x`."""
    return div(emit, 1.0, x)


@_emits(_aten.square.default)
def square(emit: Emit, x: ComplexValue) -> ComplexValue:
    """`x * x`."""
    return mul(emit, x, x)


@_emits(_aten.pow.Tensor_Scalar)
def power(emit: Emit, x: ComplexValue, exponent: float) -> ComplexValue:
    """`x ** exponent`, for whole exponents."""
    if exponent != int(exponent) or not 1 <= exponent <= 8:
        raise emit.refuse(f"a complex number to the power {exponent}; whole powers from 1 to 8 have a form")
    result = x
    for _ in range(int(exponent) - 1):
        result = mul(emit, result, x)
    return result


@_emits(_aten.exp.default)
def exp(emit: Emit, x: ComplexValue) -> ComplexValue:
    """The exponential function."""
    return polar(emit, emit.unary("exp", x.real), x.imag)


@_emits(_aten.log.default)
def log(emit: Emit, x: ComplexValue) -> ComplexValue:
    """The logarithm whose imaginary part is from -pi to pi."""
    return ComplexValue(emit.unary("log", size(emit, x)), angle(emit, x))


def _bilinear(overload: Any) -> Emitter:  # noqa: ANN401 - an overload
    def emitter(emit: Emit, left: Any, right: Any) -> ComplexValue:  # noqa: ANN401 - tensors
        def product(x: Any, y: Any) -> Any:  # noqa: ANN401 - a value, or the number 0
            return _known(emit, overload)(emit, x, y) if isinstance(x, Value) and isinstance(y, Value) else 0

        (a, b), (c, d) = parts_of(emit, left, emit.dtype), parts_of(emit, right, emit.dtype)
        return _pair(
            emit,
            _both(emit, "sub", product(a, c), product(b, d)),
            _both(emit, "add", product(a, d), product(b, c)),
        )

    return emitter


for _overload in (_aten.matmul.default, _aten.mm.default, _aten.bmm.default):
    _emits(_overload)(_bilinear(_overload))


@_emits(_aten.einsum.default)
def einsum(emit: Emit, equation: str, operands: Sequence[Any], **options: Any) -> ComplexValue:  # noqa: ANN401
    """A sum of products of one or two tensors over named axes."""
    if len(operands) > 2:
        raise emit.refuse(f"einsum of {len(operands)} complex tensors; take two at a time")

    def product(*factors: Any) -> Any:  # noqa: ANN401 - a value, or the number 0
        return (
            _known(emit, _aten.einsum.default)(emit, equation, list(factors))
            if all(isinstance(x, Value) for x in factors)
            else 0
        )

    pairs = [parts_of(emit, x, emit.dtype) for x in operands]
    if len(pairs) == 1:
        return _pair(emit, product(pairs[0][0]), product(pairs[0][1]))
    (a, b), (c, d) = pairs
    real_part = _both(emit, "sub", product(a, c), product(b, d))
    return _pair(emit, real_part, _both(emit, "add", product(a, d), product(b, c)))


@_emits(_aten.eq.Tensor, _aten.eq.Scalar)
def eq(emit: Emit, left: Any, right: Any) -> Value:  # noqa: ANN401 - tensors or numbers
    """Whether both parts are equal."""
    kind = next(x.dtype for x in (left, right) if isinstance(x, ComplexValue))
    (a, b), (c, d) = parts_of(emit, left, kind), parts_of(emit, right, kind)
    return emit.binary("tract_core_bitand", compare(emit, "eq", a, c), compare(emit, "eq", b, d), torch.bool)


@_emits(_aten.ones.default, _aten.ones_like.default, _aten.full.default, _aten.full_like.default)
@_emits(_aten.scalar_tensor.default)
def full(emit: Emit, *args: Any, **_: object) -> ComplexValue:  # noqa: ANN401 - a shape or a tensor, and a number
    """One number everywhere."""
    numbers = [x for x in args[1:] or args[:1] if isinstance(x, int | float | complex)]
    number = complex(numbers[0]) if numbers else 1
    return _pair(emit, number.real, number.imag)

"""Complex numbers inside of a graph, and Fourier transforms, against PyTorch at lengths that were not traced."""

import pytest
import torch
from op_harness import Case, build_and_run, compare, floats, interface_for

from t2n_hf.errors import EmitError
from t2n_hf.export.lower import lower
from t2n_hf.trace.capture import capture

X = floats(2, 5, 8)
S = {(0, 1): "S"}
OTHERS = ((floats(2, 9, 8),), (floats(2, 2, 8),))


def one(name, function, **options):
    return Case(name, function, (X,), S, OTHERS, least=2, tolerance=1e-5, **options)


def paired(x):
    return torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))


def apart(z):
    return torch.view_as_real(z)


def rotated(x):
    angles = torch.outer(torch.arange(x.shape[1]).float(), 1.0 / torch.arange(1, 5))
    turns = torch.polar(torch.ones_like(angles), angles)
    return apart(paired(x) * turns[None]).flatten(2).type_as(x)


FIXED = torch.polar(torch.ones(4), torch.arange(4.0))

NUMBERS = [
    one("rotary_positions", rotated),
    one("there_and_back", lambda x: apart(paired(x))),
    one("parts", lambda x: (paired(x).real, paired(x).imag)),
    one("size_and_angle", lambda x: (paired(x).abs(), paired(x).angle())),
    one("sum_and_difference", lambda x: apart(paired(x) + paired(x * 2) - 1j)),
    one("with_real_tensor", lambda x: apart(paired(x) * x[..., :4] + x[..., 4:])),
    one("with_numbers", lambda x: apart((2 + 1j) * paired(x) / (1 - 3j) - 0.5)),
    one("real_times_imaginary_number", lambda x: apart(torch.exp(1j * x))),
    one("quotient", lambda x: apart(paired(x) / (paired(x.flip(-1)) + 5))),
    one("reciprocal", lambda x: apart(1 / (paired(x) + 5))),
    one("conjugate", lambda x: apart((paired(x).conj() * paired(x)).resolve_conj())),
    one("powers", lambda x: apart(paired(x) ** 3)),
    one("logarithm", lambda x: apart(torch.log(paired(x)))),
    one("constant", lambda x: apart(paired(x) * FIXED)),
    one("constant_number", lambda x: apart(paired(x) * torch.tensor(1 + 2j))),
    one("product_of_matrices", lambda x: apart(paired(x) @ paired(x).mT)),
    one("einsum", lambda x: apart(torch.einsum("bsd,btd->bst", paired(x), paired(x).conj()))),
    one(
        "views",
        lambda x: apart(paired(x).mT.reshape(2, 2, 2, -1)[:, 0, 1:].expand(3, 2, 1, -1)),
    ),
    one("joined_with_real", lambda x: apart(torch.cat([paired(x), x[..., :2].to(torch.complex64)], -1))),
    one("chosen", lambda x: apart(torch.where(x[..., :4] > 0, paired(x), paired(x * 2)))),
    one("sums", lambda x: (apart(paired(x).sum(1)), apart(paired(x).mean(-1, keepdim=True)))),
    one("complex_from_parts", lambda x: apart(torch.complex(x, x + 1))),
    one("equal", lambda x: paired(x) == paired(x.abs())),
]
FFTS = [
    one("fft", lambda x: apart(torch.fft.fft(x))),
    one("fft_of_free_length", lambda x: apart(torch.fft.fft(x, dim=1))),
    one("fft_of_complex_and_back", lambda x: torch.fft.ifft(torch.fft.fft(paired(x), dim=1), dim=1).real),
    one("fft_of_two_axes", lambda x: torch.fft.fftn(x, dim=(1, 2)).real),
    one("fft_normalized", lambda x: apart(torch.fft.fft(x, norm="ortho"))),
    one("fft_of_real", lambda x: apart(torch.fft.rfft(x))),
    one("fft_of_real_at_free_length", lambda x: torch.fft.rfft(x, dim=1).abs()),
    one("fft_of_real_two_axes", lambda x: apart(torch.fft.rfft2(x))),
    one("back_to_even_length", lambda x: torch.fft.irfft(paired(x), n=6)),
    one("back_to_odd_length", lambda x: torch.fft.irfft(paired(x), n=7, norm="forward")),
    one("there_and_back_of_real", lambda x: torch.fft.irfft(torch.fft.rfft(x), n=8)),
    one("fft_in_f64", lambda x: torch.fft.rfft(x.double()).abs()),
]
WINDOW = torch.hann_window(6)


def sounds(name, function):
    return Case(name, function, (floats(2, 30),), {(0, 1): "S"}, ((floats(2, 41),), (floats(2, 12),)), 1e-5, least=12)


SPECTRA = [
    sounds("stft", lambda x: torch.stft(x, 6, 2, window=WINDOW, return_complex=True).abs()),
    sounds(
        "stft_in_parts",
        lambda x: apart(torch.stft(x, 6, 4, 5, torch.hann_window(5), normalized=True, return_complex=True)),
    ),
    sounds(
        "stft_of_both_sides_from_the_start",
        lambda x: apart(torch.stft(x, 6, window=WINDOW, center=False, onesided=False, return_complex=True)),
    ),
    sounds(
        "stft_of_one", lambda x: apart(torch.stft(x[0], 6, 3, window=WINDOW, pad_mode="constant", return_complex=True))
    ),
    sounds(
        "stft_and_back",
        lambda x: torch.istft(torch.stft(x, 6, 2, window=WINDOW, return_complex=True), 6, 2, window=WINDOW),
    ),
    sounds("turned_in_place", lambda x: apart(torch.complex(x, x + 1).t_().unsqueeze_(0).transpose_(1, 2).squeeze_(0))),
]
CASES = NUMBERS + FFTS + SPECTRA


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    return build_and_run(CASES, tmp_path_factory.mktemp("complex"))


@pytest.mark.tract
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_agrees_with_torch(case, archives):
    compare(case, archives / case.name)


def lowered(function):
    return lower(capture(interface_for(Case("case", function, (X,))), torch.float32, "whole"), {}, dtype="f32")


def test_an_operator_without_a_complex_form_is_refused_by_name():
    with pytest.raises(EmitError, match=r"aten\.tan\.default.*complex"):
        lowered(lambda x: torch.tan(paired(x)).real)


def test_complex_inputs_are_refused():
    case = Case("case", lambda z: z.real, (paired(X),))
    with pytest.raises(EmitError, match="complex"):
        lower(capture(interface_for(case), torch.float32, "whole"), {}, dtype="f32")


def test_complex_results_are_refused():
    with pytest.raises(EmitError, match="complex"):
        lowered(paired)

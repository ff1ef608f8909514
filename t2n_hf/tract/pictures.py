"""What a model of images or sounds is given, taken apart: one call of the encoder's archive for each."""

import numpy as np
import torch

from t2n_hf.errors import ConfigError
from t2n_hf.tract.runner import TractRunner

__all__ = ["one_by_one", "patches_by_picture"]


def one_by_one(
    encoder: TractRunner, given: torch.Tensor, sizes: torch.Tensor | None = None
) -> list[dict[str, np.ndarray]]:
    """Each of `given` [I, ...] as the encoder takes it, cut to its (height, width) of `sizes` [I, 2] i64.

    Tiles of several pictures may come as [1, I, ...], where those of zeros stand for nothing. Raises ConfigError for
    another shape.
    """
    ((name, spec),) = encoder.inputs.items()
    array = _array(given, spec.dtype)
    if array.ndim == len(spec.shape) + 1 and array.shape[0] == 1:
        array = array[0]
        full = array.reshape(len(array), -1).any(axis=1)
        array = array[full] if full.any() else array[:1]
    images = [array[at : at + 1] for at in range(len(array))]
    if sizes is not None and any(isinstance(length, str) for length in spec.shape[2:]):
        if len(sizes) != len(images):
            raise ConfigError(f"image_sizes are of {len(sizes)} pictures; {name} are {len(images)}")
        images = [image[..., :high, :wide] for image, (high, wide) in zip(images, sizes.tolist(), strict=True)]
    for image in images:
        if not _fits(image.shape[1:], spec.shape[1:]):
            raise ConfigError(f"{name} has shape {list(array.shape)}; this archive takes [I, {_text(spec.shape[1:])}]")
    return [{name: np.ascontiguousarray(image)} for image in images]


def _fits(shape: tuple[int, ...], expected: tuple[int | str, ...]) -> bool:
    return len(shape) == len(expected) and all(
        isinstance(want, str) or want == got for got, want in zip(shape, expected, strict=True)
    )


def patches_by_picture(
    encoder: TractRunner, patches: torch.Tensor, grids: torch.Tensor | None
) -> list[dict[str, np.ndarray]]:
    """Each picture as [H, W, M*M, values], of `patches` [N, values] and `grids` [I, 3] i64, as a processor gives them.

    Raises ConfigError for other shapes, and for pictures of several moments.
    """
    ((name, spec),) = encoder.inputs.items()
    squares, values = int(spec.shape[2]), int(spec.shape[3])
    merge = round(squares**0.5)
    if grids is None:
        raise ConfigError(f"image_grid_thw is missing, which says how the patches of {name} lie")
    sizes = grids.to("cpu", torch.int64).reshape(-1, 3).tolist()
    if any(time != 1 or height % merge or width % merge for time, height, width in sizes):
        raise ConfigError(
            f"image_grid_thw is {sizes}; this archive takes pictures of one moment, whose height and width are "
            f"multiples of {merge} patches"
        )
    total = sum(height * width for _, height, width in sizes)
    array = _array(patches, spec.dtype)
    if array.shape != (total, values):
        raise ConfigError(f"{name} has shape {list(array.shape)}; image_grid_thw asks for [{total}, {values}]")
    ends = np.cumsum([height * width for _, height, width in sizes])[:-1]
    shapes = [(height // merge, width // merge, squares, values) for _, height, width in sizes]
    return [
        {name: np.ascontiguousarray(part.reshape(shape))}
        for part, shape in zip(np.split(array, ends), shapes, strict=True)
    ]


def _array(given: torch.Tensor, dtype: str) -> np.ndarray:
    return given.detach().to("cpu", getattr(torch, dtype)).numpy()


def _text(shape: tuple[int | str, ...]) -> str:
    return ", ".join(map(str, shape))

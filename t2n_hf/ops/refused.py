"""Operators that an archive cannot have, and why. A distribution may declare an emitter for one all the same."""

from typing import Any, Final

import torch

__all__ = ["REFUSED"]

_aten = torch.ops.aten

_COUNTED_BY_VALUES: Final = (
    _aten.nonzero.default,
    _aten.nonzero_numpy.default,
    _aten.argwhere.default,
    _aten.masked_select.default,
    _aten._unique2.default,
    _aten.unique_dim.default,
    _aten.unique_consecutive.default,
    _aten.bincount.default,
    _aten.combinations.default,
)
_FACTORS_OF_MATRICES: Final = (
    _aten.cholesky.default,
    _aten.cholesky_inverse.default,
    _aten.cholesky_solve.default,
    _aten.linalg_cholesky.default,
    _aten.linalg_cholesky_ex.default,
    _aten.det.default,
    _aten.linalg_det.default,
    _aten._linalg_det.default,
    _aten.slogdet.default,
    _aten.linalg_slogdet.default,
    _aten._linalg_slogdet.default,
    _aten.logdet.default,
    _aten.linalg_eig.default,
    _aten.linalg_eigh.default,
    _aten._linalg_eigh.default,
    _aten.linalg_eigvals.default,
    _aten.linalg_eigvalsh.default,
    _aten.inverse.default,
    _aten.linalg_inv.default,
    _aten.linalg_inv_ex.default,
    _aten.linalg_tensorinv.default,
    _aten.pinverse.default,
    _aten.linalg_pinv.default,
    _aten.linalg_ldl_factor.default,
    _aten.linalg_ldl_factor_ex.default,
    _aten.linalg_ldl_solve.default,
    _aten.linalg_lstsq.default,
    _aten.linalg_lu.default,
    _aten.linalg_lu_factor.default,
    _aten.linalg_lu_factor_ex.default,
    _aten.linalg_lu_solve.default,
    _aten._lu_with_info.default,
    _aten.lu_solve.default,
    _aten.lu_unpack.default,
    _aten.matrix_exp.default,
    _aten.linalg_matrix_exp.default,
    _aten.linalg_matrix_rank.default,
    _aten.linalg_cond.default,
    _aten.linalg_householder_product.default,
    _aten.geqrf.default,
    _aten.ormqr.default,
    _aten.qr.default,
    _aten.linalg_qr.default,
    _aten.linalg_solve.default,
    _aten.linalg_solve_ex.default,
    _aten._linalg_solve_ex.default,
    _aten.linalg_solve_triangular.default,
    _aten.triangular_solve.default,
    _aten.linalg_tensorsolve.default,
    _aten.svd.default,
    _aten.linalg_svd.default,
    _aten._linalg_svd.default,
    _aten.linalg_svdvals.default,
    _aten.linalg_pinv.atol_rtol_tensor,
    _aten.linalg_pinv.atol_rtol_float,
    _aten.linalg_pinv.rcond_tensor,
    _aten.linalg_matrix_rank.atol_rtol_tensor,
    _aten.linalg_matrix_rank.atol_rtol_float,
    _aten.linalg_cond.p_str,
    _aten.linalg_matrix_rank.tol_tensor,
)

REFUSED: Final[dict[Any, str]] = {
    **dict.fromkeys(
        _COUNTED_BY_VALUES,
        "how many results it has depends on values; keep all elements, and choose by a mask (torch.where, a product)",
    ),
    **dict.fromkeys(
        _FACTORS_OF_MATRICES,
        "tract has no operator that factors matrices; compute it outside, and make it a weight or an input",
    ),
    _aten.embedding_renorm.default: (
        "it shortens the rows of a table that it reads (max_norm); shorten all of them before the export"
    ),
}
"""Overload -> why there is no emitter, and what to do."""

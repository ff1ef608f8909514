"""Operators that an archive cannot have, and why."""

from typing import NoReturn

import torch

from t2n_hf.ops.emit import Emit
from t2n_hf.ops.table import EMITTERS

__all__: list[str] = []

_aten = torch.ops.aten
_emits = EMITTERS.emits


@_emits(_aten.nonzero.default, _aten.nonzero_numpy.default, _aten.argwhere.default, _aten.masked_select.default)
@_emits(_aten._unique2.default, _aten.unique_dim.default, _aten.unique_consecutive.default, _aten.bincount.default)
@_emits(_aten.combinations.default)
def counted_by_values(emit: Emit, *_: object, **__: object) -> NoReturn:
    """Refused."""
    raise emit.refuse(
        "how many results it has depends on values; keep all elements, and choose by a mask (torch.where, a product)"
    )


@_emits(_aten.cholesky.default, _aten.cholesky_inverse.default, _aten.cholesky_solve.default)
@_emits(_aten.linalg_cholesky.default, _aten.linalg_cholesky_ex.default, _aten.det.default, _aten.linalg_det.default)
@_emits(_aten._linalg_det.default, _aten.slogdet.default, _aten.linalg_slogdet.default, _aten._linalg_slogdet.default)
@_emits(_aten.logdet.default, _aten.linalg_eig.default, _aten.linalg_eigh.default, _aten._linalg_eigh.default)
@_emits(_aten.linalg_eigvals.default, _aten.linalg_eigvalsh.default, _aten.inverse.default, _aten.linalg_inv.default)
@_emits(_aten.linalg_inv_ex.default, _aten.linalg_tensorinv.default, _aten.pinverse.default)
@_emits(_aten.linalg_pinv.default, _aten.linalg_ldl_factor.default, _aten.linalg_ldl_factor_ex.default)
@_emits(_aten.linalg_ldl_solve.default, _aten.linalg_lstsq.default, _aten.linalg_lu.default)
@_emits(_aten.linalg_lu_factor.default, _aten.linalg_lu_factor_ex.default, _aten.linalg_lu_solve.default)
@_emits(_aten._lu_with_info.default, _aten.lu_solve.default, _aten.lu_unpack.default, _aten.matrix_exp.default)
@_emits(_aten.linalg_matrix_exp.default, _aten.linalg_matrix_rank.default, _aten.linalg_cond.default)
@_emits(_aten.linalg_householder_product.default, _aten.geqrf.default, _aten.ormqr.default, _aten.qr.default)
@_emits(_aten.linalg_qr.default, _aten.linalg_solve.default, _aten.linalg_solve_ex.default)
@_emits(_aten._linalg_solve_ex.default, _aten.linalg_solve_triangular.default, _aten.triangular_solve.default)
@_emits(_aten.linalg_tensorsolve.default, _aten.svd.default, _aten.linalg_svd.default, _aten._linalg_svd.default)
@_emits(_aten.linalg_svdvals.default)
@_emits(_aten.linalg_pinv.atol_rtol_tensor, _aten.linalg_pinv.atol_rtol_float, _aten.linalg_pinv.rcond_tensor)
@_emits(_aten.linalg_matrix_rank.atol_rtol_tensor, _aten.linalg_matrix_rank.atol_rtol_float, _aten.linalg_cond.p_str)
@_emits(_aten.linalg_matrix_rank.tol_tensor)
def factors_matrices(emit: Emit, *_: object, **__: object) -> NoReturn:
    """Refused."""
    raise emit.refuse(
        "tract has no operator that factors matrices; compute it outside, and make it a weight or an input"
    )


@_emits(_aten.embedding_renorm.default)
def renorms(emit: Emit, *_: object, **__: object) -> NoReturn:
    """Refused."""
    raise emit.refuse("it shortens the rows of a table that it reads (max_norm); shorten all of them before the export")

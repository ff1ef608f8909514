"""The same call on an opaque weight and on its values: by keyword, with `out=`, and under torch.func."""

import pytest
import torch
import torch.nn.functional as F

from t2n_hf.tensor import NamedTensor, OffloadedTensor, QTensorTractScaleOnly, TensorResidencyPool
from t2n_hf.tensor.transposed import TransposedTensor

# torch's own, when it is first asked for forward-mode derivatives.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
X = torch.randn(2, 32)


def packed():
    return QTensorTractScaleOnly.quantize(torch.randn(32, 32))


def pooled():
    weight = OffloadedTensor.from_original_tensor(torch.randn(32, 32), "weight")
    weight.bind_pool(TensorResidencyPool())
    return weight


WEIGHTS = {
    "packed": packed,
    "offloaded": lambda: OffloadedTensor.from_original_tensor(torch.randn(32, 32), "weight"),
    "pooled": pooled,
    "offloaded packed": lambda: OffloadedTensor.from_original_tensor(packed(), "weight"),
    "turned": lambda: TransposedTensor.over(packed()),
}
CALLS = {
    "transpose by keyword": lambda w: torch.transpose(input=w, dim0=0, dim1=1),
    "method transpose by keyword": lambda w: w.transpose(dim0=0, dim1=-1),
    "t by keyword": lambda w: torch.t(input=w),
    "mm by keyword": lambda w: torch.mm(input=X, mat2=w),
    "matmul by keyword": lambda w: torch.matmul(input=X, other=w),
    "matmul into out": lambda w: torch.matmul(X, w, out=torch.empty(2, 32)),
    "mm into out": lambda w: torch.mm(X, w, out=torch.empty(2, 32)),
    "addmm by keyword": lambda w: torch.addmm(input=torch.ones(32), mat1=X, mat2=w, beta=2, alpha=3),
    "embedding by keyword": lambda w: F.embedding(input=torch.tensor([1]), weight=w, padding_idx=None),
    "jacrev": lambda w: torch.func.jacrev(lambda x: F.linear(x, w))(X),
    "jacfwd": lambda w: torch.func.jacfwd(lambda x: F.linear(x, w))(X),
    "jvp of the input": lambda w: torch.func.jvp(lambda x: F.linear(x, w), (X,), (X,))[1],
    "jvp of the bias": lambda w: torch.func.jvp(lambda b: F.linear(X, w, b), (X[0],), (X[1],))[1],
    "hessian": lambda w: torch.func.hessian(lambda x: F.linear(x, w).square().sum())(X[0]),
    "vmap of embedding": lambda w: torch.func.vmap(lambda i: F.embedding(i, w))(torch.tensor([0, 3])),
    "vmap of indices": lambda w: torch.func.vmap(lambda i: w[i])(torch.tensor([0, 3])),
    "vmap beside a row": lambda w: torch.func.vmap(lambda x: x * w[0])(X),
}


@pytest.mark.parametrize("make", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_gives_what_it_gives_for_the_values(make, call):
    weight = make()
    values = weight.to_base_tensor().clone()
    found = call(weight)
    found = found if type(found) is torch.Tensor else torch.add(found, 0)
    torch.testing.assert_close(found, call(values), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("indices", [torch.tensor([1.0]), torch.tensor([True])], ids=["float", "bool"])
def test_rows_are_looked_up_by_whole_numbers_alone(make, indices):
    with pytest.raises(RuntimeError, match="scalar types"):
        F.embedding(indices, make())


def test_what_was_loaded_under_a_transform_serves_afterwards():
    weight = pooled()
    torch.func.jacfwd(lambda x: F.linear(x, weight))(X)
    assert weight.pool.is_resident(weight)
    x = X.clone().requires_grad_()
    F.linear(x, weight).sum().backward()
    assert torch.allclose(x.grad, weight.to_base_tensor().sum(0).expand(2, 32), atol=1e-5)


def test_a_named_tensor_keeps_its_name_when_it_is_copied_by_keyword():
    named = NamedTensor(torch.ones(2), "bias")
    assert torch.clone(input=named).nnef_name == "bias"
    assert type(torch.zeros(2).to(named)) is torch.Tensor

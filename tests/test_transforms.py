"""Transforms of torch.func and forward-mode differentiation over every form of a rewritten module."""

from __future__ import annotations

import pytest
import torch
from test_offloaded_parts import FORMS, X
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

import fxplug

OF_TORCH = ("`torch.jit.script` is deprecated", "Attempted to insert a get_attr")  # forward mode, linearize
pytestmark = [pytest.mark.filterwarnings(f"ignore:{text}") for text in OF_TORCH]
V = torch.randn(X.shape, generator=torch.Generator().manual_seed(1))
BOTH = torch.stack([X, V])


def squares(module):
    return lambda x: module(x).square().sum()


def dual(module):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(module(forward_ad.make_dual(X, V))).tangent


def of_weights(module):
    """The gradient of one weight: the base's, which every form has."""
    weights = {name: value.detach() for name, value in module.named_parameters()}
    return lambda x: grad(lambda w: functional_call(module, w, (x,)).square().sum())(weights)["0.norm.weight"]


OF_INPUTS = {
    "jvp": lambda m: jvp(m, (X,), (V,))[1],
    "vjp": lambda m: vjp(m, X)[1](V)[0],
    "grad": lambda m: grad(squares(m))(X),
    "jacrev": lambda m: jacrev(lambda x: m(x).sum(1))(X[:1]),
    "jacfwd": lambda m: jacfwd(lambda x: m(x).sum(1))(X[:1]),
    "hessian": lambda m: hessian(squares(m))(X[:1, :1]),
    "vmap": lambda m: vmap(m)(BOTH),
    "gradients of samples": lambda m: vmap(grad(squares(m)))(BOTH),
    "linearize": lambda m: linearize(m, X)[1](V),
    "dual numbers": dual,
    "double backward": lambda m: torch.autograd.functional.jvp(m, (X,), (V,))[1],
    "weights": lambda m: of_weights(m)(X),
    "weights of samples": lambda m: vmap(of_weights(m))(X[:, None]),
}


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_transforms_see_what_a_form_computes(form, frozen):
    plain = "traced" if form == "traced" else "slots" if form in ("slots", "fused slots", "live") else "adapted"
    module, expected = (FORMS[kind]().requires_grad_(not frozen) for kind in (form, plain))
    for name, transform in OF_INPUTS.items():
        torch.testing.assert_close(transform(module), want := transform(expected), rtol=1e-4, atol=1e-4, msg=name)
        assert want.abs().max() > 0.01, name


def penalised(module):
    """Gradients of a gradient's size: of the input, and of all that is trained."""
    trained = {"x": X.clone().requires_grad_(), **{n: p for n, p in module.named_parameters() if p.requires_grad}}
    given = list(trained.values())
    first = torch.autograd.grad(squares(module)(given[0]), given, create_graph=True, allow_unused=True)
    size = sum((one**2).sum() for one in first if one is not None)
    return dict(zip(trained, torch.autograd.grad(size, given, materialize_grads=True), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["fused", "blas", "fused slots", "outlined", "both"])
def test_gradients_of_a_gradient(form):
    found, wanted = penalised(FORMS[form]()), penalised(FORMS["slots" if form == "fused slots" else "adapted"]())
    assert found.keys() == wanted.keys()
    off = {name: float((found[name] - want).norm() / want.norm()) for name, want in wanted.items()}
    assert max(off.values()) < 1e-5, off


@pytest.mark.slow
@pytest.mark.parametrize("form", ["fused", "blas"])
def test_a_transform_that_is_compiled(form):
    module, expected = FORMS[form](), FORMS["adapted"]()
    compiled = torch.compile(grad(squares(module)), backend="aot_eager")
    torch.testing.assert_close(compiled(X), grad(squares(expected))(X), rtol=1e-4, atol=1e-4)


def test_a_level_that_is_left_is_none():
    module = fxplug.lower(FORMS["adapted"](), fuse="fused").requires_grad_(False)
    before = module(X)
    dual(module)
    assert torch.equal(module(X), before)

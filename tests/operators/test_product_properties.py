"""Random products, attentions and norms of random shapes, masks and plans: all equal one device."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from exactness import seeded_input
from random_cases import check_on, deep, quick

Case = tuple[nn.Module, tuple[torch.Tensor, ...]]


class Call(nn.Module):
    """A function of inputs and of parameters of these shapes, between layers that are split too."""

    def __init__(self, function: Any, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        first, *others = inputs
        return self.function(first * 2, *others, *self.weights) * 0.5


def random_inputs(*shapes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(seeded_input(shape, seed) for seed, shape in enumerate(shapes))


@st.composite
def equations(draw: Any) -> Case:
    """Two or three operands with some of a few letters each, dots in front, and sizes of one."""
    sizes = {letter: draw(st.integers(1, 6)) for letter in "abcde"}
    num, dots = draw(st.integers(1, 3)), draw(st.integers(0, 2))
    terms = [draw(st.permutations("abcde"))[: draw(st.integers(1, 4))] for _ in range(num)]
    known = sorted({letter for term in terms for letter in term})
    result = draw(st.permutations(known))[: draw(st.integers(1, len(known)))]
    batch = [draw(st.integers(1, 4)) for _ in range(dots)]
    shapes = []
    for term in terms:
        lead = batch[draw(st.integers(0, dots)) :]  # broadcast from the right
        body = [sizes[letter] if draw(st.integers(0, 5)) else 1 for letter in term]
        shapes.append((*lead, *body))
    text = ",".join("..." + "".join(term) for term in terms) + "->..." + "".join(result)
    num_inputs = draw(st.integers(1, num))
    module = Call(lambda *operands: torch.einsum(text, *operands), *shapes[num_inputs:])
    return module, random_inputs(*shapes[:num_inputs])


@st.composite
def matmuls(draw: Any) -> Case:
    """Vectors, matrices and batches that are broadcast against each other."""
    rows, inner, columns = (draw(st.integers(1, 6)) for _ in range(3))
    batch = [draw(st.integers(1, 4)) for _ in range(2)]

    def lead(num: int) -> list[int]:
        return [1 if draw(st.integers(0, 3)) == 0 else size for size in batch[2 - num :]]

    first = (*lead(draw(st.integers(0, 2))), rows, inner)
    second = (*lead(draw(st.integers(0, 2))), inner, columns)
    if draw(st.integers(0, 4)) == 0:
        second = (inner,)
    is_weight = draw(st.booleans())
    return (
        (Call(torch.matmul, second), random_inputs(first))
        if is_weight
        else (Call(torch.matmul), random_inputs(first, second))
    )


@st.composite
def attentions(draw: Any) -> Case:
    """Self- and cross-attention, with every kind of mask, fewer heads of keys, and dropout."""
    samples, rows, keys = draw(st.integers(1, 4)), draw(st.integers(1, 7)), draw(st.integers(1, 7))
    size, values = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    sharing, key_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    has_heads = draw(st.booleans())
    heads, fewer = ((sharing * key_heads,), (key_heads,)) if has_heads else ((), ())
    kind = draw(st.sampled_from(["none", "causal", "bool", "float", "weight"]))
    options = {
        "is_causal": kind == "causal",
        "enable_gqa": has_heads and sharing > 1,
        "dropout_p": draw(st.sampled_from([0.0, 0.0, 0.3])),
        "scale": draw(st.sampled_from([None, 0.7])),
    }
    q, k, v = (samples, *heads, rows, size), (samples, *fewer, keys, size), (samples, *fewer, keys)
    whole = (samples, *heads, rows, keys)
    cut = whole[draw(st.integers(0, len(whole) - 2)) :]
    mask = tuple(1 if draw(st.integers(0, 3)) == 0 else size for size in cut)
    given_masks = [seeded_input(mask, 9)] if kind in ("bool", "float") else []
    given_masks = [m > 0.0 for m in given_masks] if kind == "bool" else given_masks
    attend = functional.scaled_dot_product_attention
    module = Call(lambda *operands: attend(*operands, **options), *[mask] * (kind == "weight"))
    return module, (*random_inputs(q, k, (*v, values)), *given_masks)


@st.composite
def norms(draw: Any) -> Case:
    """RMS norms, norms of vectors, variances and deviations over any dimensions."""
    shape = tuple(draw(st.integers(2, 6)) for _ in range(draw(st.integers(2, 5))))
    kind = draw(st.sampled_from(["rms", "norm", "var", "std", "normalize"]))
    if kind == "rms":
        behind = shape[draw(st.integers(0, len(shape) - 1)) :]
        function = Call(
            lambda x, *w: functional.rms_norm(x, behind, *w), *[behind] * draw(st.integers(0, 1))
        )
        return function, random_inputs(shape)
    dims = sorted(draw(st.sets(st.integers(0, len(shape) - 1), min_size=1)))
    keepdim, order = draw(st.booleans()), draw(st.sampled_from([1, 2, 3, 1.5, 0.5, 0, inf, -inf]))
    correction = draw(st.sampled_from([0, 1, 0.5]))
    functions = {
        "norm": lambda x: torch.linalg.vector_norm(x, order, dims, keepdim),
        "var": lambda x: x.var(dims, correction=correction, keepdim=keepdim),
        "std": lambda x: x.std(dims, correction=correction, keepdim=keepdim),
        "normalize": lambda x: functional.normalize(x, 2.0, dims[0]),
    }
    return Call(functions[kind]), random_inputs(shape)


ALL = {"equation": equations(), "matmul": matmuls(), "attention": attentions(), "norm": norms()}


@pytest.mark.parametrize("kind", ALL)
def test_a_random_product_under_random_plans_equals_one_device(kind: str) -> None:
    given(ALL[kind], st.integers(0, 10_000))(quick(lambda case, seed: check_on(*case, seed)))()


@pytest.mark.deep
@pytest.mark.parametrize("kind", ALL)
def test_many_more_random_products_equal_one_device(kind: str) -> None:
    given(ALL[kind], st.integers(0, 10_000))(deep(lambda case, seed: check_on(*case, seed)))()

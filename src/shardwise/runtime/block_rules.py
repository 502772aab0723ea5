"""Which functions of a block are right: what is done to its elements one by one, and its form."""

from __future__ import annotations

# Everything else is refused: nobody can list all that would be wrong.
BY_ELEMENT = """
    abs absolute acos add addcdiv addcmul asin atan atan2 bfloat16 bitwise_and bitwise_not
    bitwise_or bool ceil clamp clamp_max clamp_min clip clone contiguous copysign cos cosh cpu cuda
    detach div divide double empty_like eq erf exp exp2 expm1 float floor floor_divide fmod frac
    full_like ge gelu greater gt half hardtanh hypot int isclose isfinite isinf isnan le leaky_relu
    lerp less log log10 log1p log2 logical_and logical_not logical_or logical_xor long lt
    masked_fill maximum minimum mul multiply nan_to_num ne neg negative not_equal
    ones_like positive pow reciprocal relu remainder requires_grad_ round rsqrt rsub sgn sigmoid
    sign silu sin sinh softplus sqrt square sub subtract tan tanh threshold to true_divide trunc
    type type_as where xlogy zeros_like
    __abs__ __add__ __and__ __div__ __eq__ __floordiv__ __ge__ __gt__ __invert__ __le__ __lt__
    __mod__ __mul__ __ne__ __neg__ __or__ __pos__ __pow__ __radd__ __rmul__ __rpow__ __rsub__
    __rtruediv__ __sub__ __truediv__ __xor__
"""
KEEPING = frozenset(BY_ELEMENT.split())

IN_PLACE = """
    __iadd__ __imul__ __ipow__ __isub__ __itruediv__ constant_ copy_ fill_ zero_ share_memory_
"""
OF_FORM = """
    backward data_ptr dim element_size get_device has_names is_complex is_contiguous
    is_floating_point is_inference is_pinned is_same_size is_shared is_signed ndimension new_empty
    new_full new_ones new_tensor new_zeros register_hook register_post_accumulate_grad_hook
    result_type retain_grad size storage_offset stride untyped_storage __delete__ __format__
    __hash__ __len__ __repr__ _has_compatible_shallow_copy_type _is_view
"""
ALLOWED = frozenset((IN_PLACE + OF_FORM).split())
FUSED = ("_foreach_", "_fused_")  # what optimizers do to many tensors at once
OTHER_TENSORS = ("T", "mT", "H", "mH", "real", "imag")  # that are attributes

# Ends of the names of what draws random numbers.
DRAWING = (
    *("normal_", "uniform_", "orthogonal_", "sparse_", "bernoulli_", "cauchy_", "exponential_"),
    *("geometric_", "random_", "rand_like", "randn_like", "randint_like", "dropout"),
)


def is_right(name: str) -> bool:
    """Whether what a function makes of a block is the block of what it makes of the whole."""
    if name in ALLOWED or name in KEEPING or name.removesuffix("_") in KEEPING:
        return True
    return name.startswith(FUSED) and name != "_foreach_max"

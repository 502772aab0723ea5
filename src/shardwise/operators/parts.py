"""Operators that are computed by others: as torch itself does it, or as it is said here.

While a model is exported, a call of such an operator becomes the calls that it is made of, and each
of these can be split. What somebody has described (`operator`) stays one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from math import inf
from typing import Any

import torch
from torch import Tensor, fx

from shardwise.operators.calls import aten_name
from shardwise.operators.notation import einsum_notation
from shardwise.operators.pointwise import is_called_pointwise
from shardwise.operators.strategy import READERS

aten = torch.ops.aten
NONE, MEAN, SUM = range(3)  # what torch calls reductions of losses

# Made of others as well, but of too many, of others on other devices, or with checks of values.
KEPT = frozenset(
    """
    scaled_dot_product_attention lstm gru rnn_tanh rnn_relu ctc_loss embedding_bag native_batch_norm
    _batch_norm_impl_index rrelu matrix_exp pin_memory requires_grad set data retain_grad
    """.split()  # noqa: SIM905
)


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    return torch.cat([tensor.unsqueeze(dim) for tensor in tensors], dim)


def _repeat(x: Tensor, repeats: Sequence[int]) -> Tensor:
    """Before a dimension comes another one, which is expanded and then joined with it."""
    pairs = [*zip(repeats, [1] * (len(repeats) - x.ndim) + [*x.shape], strict=True)]
    once = [() if isinstance(times, int) and times == 1 else (1,) for times, _ in pairs]
    apart = x.reshape([n for one, (_, size) in zip(once, pairs, strict=True) for n in (*one, size)])
    wanted = [
        n for one, (times, s) in zip(once, pairs, strict=True) for n in (*(times for _ in one), s)
    ]
    return apart.expand(wanted).reshape([times * size for times, size in pairs])


def _rot90(x: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    a, b = dims
    if k % 4 in (0, 2):
        return x.flip(a, b) if k % 4 else x.clone()
    return x.flip(b if k % 4 == 1 else a).transpose(a, b)


def _loss(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The loss of every element, then their mean or sum."""
    names = (argument.name for argument in op._schema.arguments)
    given = dict(zip(names, args, strict=False)) | kwargs
    how = given.pop("reduction", MEAN)
    if how == NONE:
        return NotImplemented
    each = op(**given, reduction=NONE)
    return each.mean() if how == MEAN else each.sum()


def _loss_of_classes(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The same, but the mean is over the weights of those classes that are not to be ignored."""
    names = [argument.name for argument in op._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    if given.get("reduction", MEAN) != MEAN:
        return _loss(op, *args, **kwargs)
    each = op(**(given | {"reduction": NONE}))
    target, weight = given["target"], given.get("weight")
    if target.is_floating_point():  # probabilities of classes
        return each.mean()
    counts = target != given.get("ignore_index", -100)
    if weight is not None:
        counts = weight.detach()[target.where(counts, 0)] * counts
    return each.sum() / counts.sum()


def _any(x: Tensor) -> Tensor:
    return _as_flag(x, (x != 0).sum() > 0)


def _all(x: Tensor) -> Tensor:
    return _as_flag(x, (x == 0).sum() == 0)


def _as_flag(x: Tensor, flag: Tensor) -> Tensor:
    return flag.to(torch.uint8) if x.dtype is torch.uint8 else flag  # bytes stay bytes


def _count_nonzero(x: Tensor, dim: int | list[int] | None = None) -> Tensor:
    return (x != 0).sum(dim)


def _nansum(
    x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    return x.masked_fill(x.isnan(), 0).sum(dim, keepdim, dtype=dtype)


def _einsum(equation: str, tensors: Sequence[Tensor], *, path: Any = None) -> Any:
    """Where a product ends in one number, its last sum apart; diagonals as torch takes them."""
    notation = einsum_notation(equation, [tuple(tensor.shape) for tensor in tensors])
    if notation is None:
        return aten.einsum.default.decompose(equation, tensors, path=path)
    if notation.result or not notation.terms[0]:
        return NotImplemented
    left = equation.replace(" ", "").partition("->")[0]
    each = torch.einsum(f"{left}->{left.partition(',')[0]}", _wide(*tensors))
    return each.sum(dtype=each.dtype).to(tensors[0].dtype)


def _dot(x: Tensor, y: Tensor) -> Tensor:
    a, b = _wide(x, y)
    return (a * b).sum(dtype=a.dtype).to(x.dtype)


def _matmul(x: Tensor, y: Tensor) -> Any:
    return _dot(x, y) if x.ndim == y.ndim == 1 else NotImplemented


def _wide(*tensors: Tensor) -> list[Tensor]:
    """Factors whose products are added: torch rounds these sums to 16 bits, but not products."""
    narrow = torch.bfloat16, torch.float16
    return [tensor.float() if tensor.dtype in narrow else tensor for tensor in tensors]


def _vector_norm(
    x: Tensor,
    ord: float = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    if dtype is None:
        return NotImplemented
    return torch.linalg.vector_norm(x.to(dtype), ord, dim, keepdim)


def _matrix_norm(x: Tensor, ord: Any, *args: Any, **kwargs: Any) -> Any:
    """Largest or smallest sums of rows or columns; others need matrices whole."""
    if ord not in (1, -1, inf, -inf):
        return NotImplemented
    return aten.linalg_matrix_norm.default.decompose(x, ord, *args, **kwargs)


PARTS: dict[Any, Callable[..., Any]] = {
    aten.stack.default: _stack,
    aten.repeat.default: _repeat,
    aten.rot90.default: _rot90,
    aten.trace.default: lambda x: x.diagonal().sum(),
    aten.any.default: _any,
    aten.all.default: _all,
    aten.count_nonzero.default: _count_nonzero,
    aten.count_nonzero.dim_IntList: _count_nonzero,
    aten.nansum.default: _nansum,
    aten.cross_entropy_loss.default: partial(_loss_of_classes, aten.cross_entropy_loss.default),
    aten.nll_loss_nd.default: partial(_loss_of_classes, aten.nll_loss_nd.default),
}
# The same where torch.autocast, if it is on, leaves their types alone.
TYPED_PARTS: dict[Any, Callable[..., Any]] = {
    aten.einsum.default: _einsum,
    aten.dot.default: _dot,
    aten.vdot.default: lambda x, y: _dot(x.conj(), y),
    aten.matmul.default: _matmul,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.linalg_matrix_norm.default: _matrix_norm,
    aten.dist.default: lambda x, y, p=2: torch.linalg.vector_norm(x - y, p),
}
LOSSES = """
    mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits
    soft_margin_loss multi_margin_loss multilabel_margin_loss
""".split()  # noqa: SIM905
PARTS |= {op: partial(_loss, op) for op in (getattr(aten, name).default for name in LOSSES)}


@cache
def _composites() -> tuple[Any, ...]:
    """All operators of torch that it computes by others."""
    names = (n[6:] for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::"))
    pairs = (name.split(".") if "." in name else (name, "default") for name in names)
    found = (getattr(getattr(aten, name), overload, None) for name, overload in pairs)
    return tuple(op for op in found if op is not None and op._can_decompose() and _is_plain(op))


def _is_plain(op: Any) -> bool:
    """Whether an operator makes tensors of tensors, and is not told where to put them."""
    given = [str(argument.type) for argument in op._schema.arguments]
    made = [str(argument.type) for argument in op._schema.returns]
    tensors = ("Tensor", "List[Tensor]")
    takes = any(kind in given for kind in tensors)
    return takes and all(kind in tensors for kind in made) and "out" not in op._overloadname


def table() -> dict[Any, Callable[..., Any]]:
    """What computes each operator that is made of others, as torch's exporter wants it."""
    found = {op: partial(_as_torch_does, op) for op in _composites() if _is_unknown(op)}
    typed = {op: partial(_unless_cast, op, parts) for op, parts in TYPED_PARTS.items()}
    return found | PARTS | typed


def _is_unknown(op: Any) -> bool:
    name = op._schema.name.split("::")[1]
    name = name if name.startswith("_") else name.rstrip("_")
    return name not in READERS and name not in KEPT and not is_called_pointwise(name)


def is_known(node: fx.Node) -> bool:
    """Whether a call can be split, or is no operator on tensors."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    made = [str(argument.type) for argument in node.target._schema.returns]
    name = aten_name(node)
    drawn = torch.Tag.nondeterministic_seeded in node.target.tags
    return "Tensor" not in str(made) or name in READERS or drawn or is_called_pointwise(name)


def _as_torch_does(op: Any, *args: Any, **kwargs: Any) -> Any:
    return _unless_cast(op, op.decompose, *args, **kwargs)


def _unless_cast(op: Any, parts: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if any(_casts(op, kind) for kind in ("cpu", "cuda")):
        return NotImplemented
    return parts(*args, **kwargs)


def _casts(op: Any, kind: str) -> bool:
    """Whether torch.autocast now gives the operator other types than its parts would get."""
    key = f"Autocast{kind.upper()}"
    has = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)
    return has and torch.is_autocast_enabled(kind)

"""Weights that know that they are blocks, and of what.

Every rank holds a block of a split weight, and of its gradient. What is done element by element is
right on blocks. A sum, a norm or the like of all elements is found together with the other ranks,
so that torch's own clip_grad_norm_, a penalty or a gradient scaler mean the whole tensor. What is
not known to be right on a block is refused. As with all parallel models, all ranks do the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _foreach_supported_types as _optimizers_types
from torch.utils._foreach_utils import _foreach_supported_types as _utils_types

from shardwise.comm import About
from shardwise.errors import ShardwiseError
from shardwise.runtime.agreement import together
from shardwise.runtime.block_rules import DRAWING, KEEPING, OTHER_TENSORS, is_right
from shardwise.runtime.place import Place, by_ranks


class Block(torch.Tensor):
    """This rank's block of a tensor that lies on several ranks."""

    _place: Place

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What an optimizer keeps is saved as a plain tensor; it notes the box itself."""
        return plain(self).__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        whole = WHOLE.get(name)
        with torch._C.DisableTorchFunctionSubclass():
            if whole is not None:
                return whole(func, args, kwargs)
            attribute = func.__self__.__name__ if name == "__get__" else ""
            if attribute in OTHER_TENSORS or not (attribute or is_right(name)):
                raise _refusal(attribute or name, _places((*args, *kwargs.values())))
            result = func(*args, **kwargs)
        return _kept(name, result, args) if name in KEEPING or func in DATA else result


class BlockParameter(Block, nn.Parameter):
    """A parameter of which this rank holds a block; so is its gradient."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, requires_grad: bool, place: Place) -> BlockParameter:
        made = torch.Tensor._make_subclass(cls, data, requires_grad)
        made._place = place
        return made

    def __init__(self, *_: Any) -> None:
        pass

    @property
    def grad(self) -> torch.Tensor | None:
        found = _GRAD.__get__(self)
        if found is not None and type(found) is not Block:
            found = as_block(found, self._place)
            _GRAD.__set__(self, found)  # the same memory, and from now on the same object
        return found

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:  # type: ignore[override]
        _GRAD.__set__(self, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockParameter:
        if id(self) not in memo:
            memo[id(self)] = BlockParameter(plain(self).clone(), self.requires_grad, self._place)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardwiseError(
            f"{self._place.name!r} of a parallel model is one rank's block and cannot be pickled; "
            "save the model's state_dict(), which is whole"
        )


_GRAD: Any = torch.Tensor.grad

# As DTensor does it: optimizers and clipping take these as they take plain parameters.
for known in (_optimizers_types, _utils_types):
    known += [kind for kind in (Block, BlockParameter) if kind not in known]


def as_block(tensor: torch.Tensor, place: Place) -> Block:
    """The same memory, as a block."""
    made = tensor.as_subclass(Block)
    made._place = place
    return made


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory without gradients, as a tensor that knows nothing."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(torch.Tensor)  # type: ignore[return-value]


DATA = {torch.Tensor.data.__get__}  # type: ignore[attr-defined]


def _kept(name: str, result: Any, args: tuple[Any, ...]) -> Any:
    """What is made of a block element by element is a block of what would be made of the whole."""
    places = _places(args)
    if isinstance(result, tuple):  # where, of a condition alone
        raise _refusal(name, places)
    if type(result) is not torch.Tensor:
        return result
    first = places[0]
    for place in places[1:]:
        if not place.fits(first):
            raise ShardwiseError(
                f"{first.name!r} and {place.name!r} are split in other ways, and their blocks on "
                "one rank do not belong together; use shardwise.of(model).full_tensors()"
            )
    block = next(value for value in args if isinstance(value, Block))
    if result.shape != block.shape:
        raise ShardwiseError(
            f"{name} of one rank's block of {first.name!r}, {list(block.shape)}, and a tensor of "
            f"another shape gave {list(result.shape)}; use shardwise.of(model).full_tensors()"
        )
    return as_block(result, first)


def _places(args: Any) -> list[Place]:
    found = []
    for value in args:
        if isinstance(value, Block):
            found.append(value._place)
        elif isinstance(value, (list, tuple)):
            found += _places(value)
    return found


def _refusal(name: str, places: Sequence[Place]) -> ShardwiseError:
    of = places[0].name
    if name.endswith(DRAWING):
        return ShardwiseError(
            f"{name} would draw the same random numbers for every rank's block of {of!r}; do it on "
            "the original before parallelize, or load the result with load_state_dict"
        )
    if name == "chunk":  # what fully_shard does with every parameter
        return ShardwiseError(
            f"{of!r} is split by the plan, and one rank's block of it cannot be cut again (chunk), "
            "by fully_shard say; use DDP outside, or a plan over n, d, h and w only"
        )
    return ShardwiseError(
        f"{name} of {of!r} would be that of one rank's block of it; use full_tensors() or "
        "full_gradients() of shardwise.of(model)"
    )


# -- what all ranks find together ------------------------------------------------------------------


class _SumOfAll(torch.autograd.Function):
    """Sums of numbers that each rank has of its own blocks; every rank's loss is the same."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, places: Sequence[Place], what: str) -> torch.Tensor:
        counted = torch.tensor([place.counts for place in places], device=own.device)
        total = torch.where(counted, own, 0)
        comm = places[0].comm
        with together(comm, what):
            comm.all_reduce(tuple(range(comm.size)), total, About(what)).wait()
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient, None, None


def _sums(values: Sequence[torch.Tensor], places: Sequence[Place], what: str) -> torch.Tensor:
    return _SumOfAll.apply(torch.stack(list(values)), places, what)  # type: ignore[return-value]


def _extremes(blocks: Sequence[Any], largest: bool, what: str) -> torch.Tensor:
    """The largest or smallest element of each whole tensor."""
    nothing = -inf if largest else inf
    own = [
        (b.amax() if largest else b.amin()).double() if b.numel() else b.new_tensor(0.0).double()
        for b in blocks
    ]
    own = [value if b.numel() else value + nothing for b, value in zip(blocks, own, strict=True)]
    if torch.is_grad_enabled() and any(value.requires_grad for value in own):
        raise ShardwiseError(
            f"{what} of {blocks[0]._place.name!r} has no gradient where the tensor lies on several "
            "ranks; use a sum or a norm of finite order"
        )
    comm, mine = blocks[0]._place.comm, torch.stack(own)
    every = [torch.empty_like(mine) for _ in range(comm.size)]
    with together(comm, what):
        comm.all_gather(tuple(range(comm.size)), every, mine, About(what)).wait()
    stacked = torch.stack(every)
    return stacked.amax(0) if largest else stacked.amin(0)


def exact(x: torch.Tensor) -> torch.Tensor:
    """In float64, or more."""
    return x.to(torch.promote_types(x.dtype, torch.float64))


def norms(blocks: Sequence[Any], p: float, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """The norm of each whole tensor; one message for all that lie on the same ranks."""
    found: dict[int, torch.Tensor] = {}
    for indices in by_ranks([block._place for block in blocks]):
        own = _norms([blocks[index] for index in indices], p, dtype)
        found |= zip(indices, own, strict=True)
    return [found[index] for index in range(len(blocks))]


def _norms(blocks: Sequence[Any], p: float, dtype: torch.dtype | None) -> list[torch.Tensor]:
    places = [block._place for block in blocks]
    if p in (inf, -inf):
        found = _extremes([as_block(b.abs(), b._place) for b in blocks], p > 0, "the norms")
    else:
        own = [_power_sum(block, p) for block in blocks]
        found = _sums(own, places, "the norms")
        found = found if p == 0 else found ** (1.0 / p)
    kinds = [dtype or block.abs().dtype for block in blocks]
    return [norm.to(kind) for norm, kind in zip(found, kinds, strict=True)]


def _power_sum(block: torch.Tensor, p: float) -> torch.Tensor:
    values = exact(block.as_subclass(torch.Tensor))  # type: ignore[arg-type]
    if not values.numel():
        return values.abs().sum()
    norm = torch.linalg.vector_norm(values, p)
    return norm if p == 0 else norm**p


def _norm(name: str, order: int) -> Callable[..., Any]:
    """A function of a tensor, the order of the norm, dims and more."""

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(zip(("input", "order", "dim", "keepdim"), args, strict=False)) | kwargs
        p = given.pop("order", given.pop("p", given.pop("ord", None)))
        block = given.pop("input", None)
        whole_vector = p in (None, "fro") or (order and isinstance(p, (int, float)))
        if not isinstance(block, Block) or given.get("dim") is not None or not whole_vector:
            raise _refusal(name, _places((*args, *kwargs.values())))
        return norms([block], 2.0 if isinstance(p, str) or p is None else p, given.get("dtype"))[0]

    return run


def _foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors, *rest = args
    others = [t.new_zeros(1) if isinstance(t, Block) else t for t in tensors]
    found = list(func(others, *rest, **kwargs))
    places = [i for i, t in enumerate(tensors) if isinstance(t, Block)]
    p = rest[0] if rest else kwargs.get("ord", 2)
    whole = norms([tensors[i] for i in places], float(p), kwargs.get("dtype"))
    for i, norm in zip(places, whole, strict=True):
        found[i] = norm
    return tuple(found)


def _sum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    block = _only(func, args, kwargs)
    dtype = kwargs.get("dtype") or func(block.new_zeros(1)).dtype
    own = exact(block.as_subclass(torch.Tensor)) if block.is_floating_point() else block
    total = _sums([own.sum()], [block._place], "the sum")[0]
    return (total / block._place.numel if func.__name__ == "mean" else total).to(dtype)


def _extreme(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) == 2 and isinstance(args[1], torch.Tensor):  # element by element
        return _kept(func.__name__, func(*args), args)
    block = _only(func, args, kwargs)
    found = _extremes([block], func.__name__ in ("max", "amax"), func.__name__)[0]
    return found.to(block.dtype)


def _truth(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    block = _only(func, args, kwargs)
    own = as_block((block != 0).as_subclass(torch.Tensor).to(torch.float64), block._place)
    return _extremes([own], func.__name__ == "any", func.__name__)[0].bool()


def _same(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Whether two tensors are the same on all ranks, of which one at least is a block."""
    places = _places(args[:2])
    fits = places[0].fits(places[-1]) and args[0].shape == args[1].shape
    own = torch.tensor(float(func(*args, **kwargs)) if fits else -1.0)
    found = int(_extremes([as_block(own, places[0])], False, func.__name__)[0])
    if found < 0:  # on one rank at least: one that has the whole would find that it fits
        raise _refusal(func.__name__, places)
    return bool(found)


def _number(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The only element, which one rank has."""
    block = _only(func, args, kwargs)
    if block._place.numel != 1:
        raise _refusal(func.__name__, [block._place])
    return func(_sum(torch.sum, args, {}).to(block.dtype))


def _gradients(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of torch.autograd.grad: those of blocks are blocks."""
    given = dict(zip(("outputs", "inputs"), args, strict=False)) | kwargs
    inputs = given["inputs"]
    each = inputs if isinstance(inputs, (list, tuple)) else [inputs]
    return tuple(
        as_block(g, x._place) if isinstance(x, Block) and g is not None else g
        for x, g in zip(each, func(*args, **kwargs), strict=True)
    )


def _set_masked(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Elements chosen by a mask; an index would be counted from where this rank's block begins."""
    block, mask, *_ = args
    is_mask = isinstance(mask, torch.Tensor) and mask.dtype is torch.bool
    if not is_mask or not isinstance(block, Block) or mask.shape != block.shape:
        raise _refusal("an index", _places(args))
    return func(*args, **kwargs)


def _set_attribute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    block, value = args
    if func.__self__.__name__ == "data" and value.shape != block.shape:
        raise ShardwiseError(
            f"the data of {block._place.name!r} is this rank's block, {list(block.shape)}, and not "
            f"{list(value.shape)}; load whole weights with load_state_dict"
        )
    return func(*args, **kwargs)


def _only(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The one tensor that a function is given, which is a block."""
    if len(args) != 1 or set(kwargs) - {"dtype"} or not isinstance(args[0], Block):
        raise _refusal(func.__name__, _places((*args, *kwargs.values())))
    return args[0]


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A gradient scaler leaves out the step on all ranks where a gradient of one is not finite."""
    tensors, found, *_ = args
    place, *others = _places(tensors)
    with together(place.comm, "a gradient scaler's step"):
        _check_ranks(place, others)
    func(*args, **kwargs)
    found.copy_(_extremes([as_block(found.detach(), place)], True, "what is not finite")[0])


def _check_ranks(place: Place, others: Sequence[Place]) -> None:
    if any(other.comm.members() != place.comm.members() for other in others):
        raise ShardwiseError(
            f"{place.name!r} and others of one optimizer lie on different groups of ranks, some of "
            "which would leave out a step that others make; use an optimizer for each group"
        )


def _count(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    place = args[0]._place
    if isinstance(args[0], nn.Parameter):
        warnings.warn(
            f"{func.__name__}() of {place.name!r} counts this rank's block, of {place.numel} "
            "elements in all; count the parameters of the original, or of "
            "shardwise.of(model).full_tensors()",
            stacklevel=3,
        )
    return func(*args, **kwargs)


WHOLE: dict[str, Callable[..., Any]] = {
    "norm": _norm("norm", 1),
    "frobenius_norm": _norm("frobenius_norm", 0),
    "linalg_vector_norm": _norm("linalg_vector_norm", 1),
    "linalg_norm": _norm("linalg_norm", 0),
    "_foreach_norm": _foreach_norm,
    "sum": _sum,
    "mean": _sum,
    **dict.fromkeys(("max", "min", "amax", "amin"), _extreme),
    **dict.fromkeys(("any", "all"), _truth),
    **dict.fromkeys(("equal", "allclose"), _same),
    **dict.fromkeys(("item", "__float__", "__int__", "__bool__", "__index__"), _number),
    "grad": _gradients,
    "__setitem__": _set_masked,
    "__set__": _set_attribute,
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
    **dict.fromkeys(("numel", "nelement"), _count),
}

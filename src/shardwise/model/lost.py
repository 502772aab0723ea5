"""A tensor that is not where forward leaves it on one device."""

from __future__ import annotations

from typing import Any

from torch.utils import _pytree as pytree

from shardwise.errors import ShardwiseError


class LeftBehind:
    """Stands where forward leaves a tensor on one device; whoever uses it is told so."""

    def __init__(self, name: str, where: str) -> None:
        self.__dict__["_why"] = (
            f"forward leaves tensors, or what depends on the batch, in {name!r} of {where}, where "
            "a parallel model does not keep them; let it return them"
        )

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise ShardwiseError(self._why)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by Python itself, which takes no for an answer
            raise AttributeError(name)
        raise ShardwiseError(self.__dict__["_why"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        held = pytree.tree_leaves([args, kwargs])
        raise ShardwiseError(next(value for value in held if isinstance(value, LeftBehind))._why)

    def __deepcopy__(self, memo: Any) -> LeftBehind:
        return self

    def __repr__(self) -> str:
        return f"({self._why})"


USES = """
    add radd sub rsub mul rmul truediv rtruediv floordiv mod pow neg abs matmul lt le gt ge
    len iter getitem setitem contains bool float int call setattr
"""
for _name in USES.split():
    setattr(LeftBehind, f"__{_name}__", LeftBehind._refuse)

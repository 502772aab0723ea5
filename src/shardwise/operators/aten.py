"""From ATen calls to the operators of the layer graph.

Each entry of `OPERATORS` turns the named arguments of one ATen call into a `Request`: the
operator's name, its tensor arguments in a fixed order and its attributes. What is not listed
becomes an "opaque" layer, which runs whole on one worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.errors import CaptureError


@dataclass(frozen=True)
class Request:
    """An operator with its tensor arguments (graph nodes, or None) and its attributes."""

    op: str
    tensors: tuple[Any, ...]
    attrs: dict[str, Any] = field(default_factory=dict)
    batch_missing: bool = False  # its first tensor is a single sample


Args = dict[str, Any]
Shapes = Callable[[Any], tuple[int, ...]]  # the shape of a tensor argument


def per_dim(value: int | Sequence[int], num_dims: int) -> tuple[int, ...]:
    """An attribute given once or per spatial dimension, as one number per dimension."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * num_dims if len(values) == 1 else values


def _conv(args: Args, shape: Shapes) -> Request:
    kernel = shape(args["weight"])[2:]
    num_dims = len(kernel)
    dilation = per_dim(args["dilation"], num_dims)
    return Request(
        "conv",
        (args["input"], args["weight"], args["bias"]),
        {
            "kernel": kernel,
            "stride": per_dim(args["stride"], num_dims),
            "pads": _pads(args["padding"], kernel, dilation),
            "dilation": dilation,
            "groups": args["groups"],
        },
        batch_missing=len(shape(args["input"])) == num_dims + 1,
    )


def _pads(
    padding: str | int | Sequence[int], kernel: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    if padding == "same":  # torch puts the odd one on the right
        totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    if padding == "valid":
        return ((0, 0),) * len(kernel)
    assert not isinstance(padding, str)
    return tuple((p, p) for p in per_dim(padding, len(kernel)))


def _conv_transpose(args: Args, shape: Shapes) -> Request:
    kernel = shape(args["weight"])[2:]
    num_dims = len(kernel)
    return Request(
        "conv_transpose",
        (args["input"], args["weight"], args["bias"]),
        {
            "kernel": kernel,
            "stride": per_dim(args["stride"], num_dims),
            "padding": per_dim(args["padding"], num_dims),
            "dilation": per_dim(args["dilation"], num_dims),
            "groups": args["groups"],
        },
        batch_missing=len(shape(args["input"])) == num_dims + 1,
    )


def _linear(args: Args, shape: Shapes) -> Request | None:
    if len(shape(args["weight"])) != 2:  # one filter, of an output without a dimension for it
        return None
    tensors = (args["input"], args["weight"], args["bias"])
    return Request("linear", tensors, batch_missing=len(shape(args["input"])) == 1)


def _batch_norm(args: Args, shape: Shapes) -> Request | None:
    if len(shape(args["input"])) < 2:
        return None
    names = ("input", "weight", "bias", "running_mean", "running_var")
    return Request("batch_norm", tuple(args[n] for n in names), {"eps": args["eps"]})


def _instance_norm(args: Args, shape: Shapes) -> Request | None:
    if args["running_mean"] is not None:  # running statistics of instances: kept whole
        return None
    tensors = (args["input"], args["weight"], args["bias"])
    return Request("instance_norm", tensors, {"eps": args["eps"]})


def _group_norm(args: Args, shape: Shapes) -> Request:
    tensors = (args["input"], args["weight"], args["bias"])
    return Request("group_norm", tensors, {"groups": args["num_groups"], "eps": args["eps"]})


def _layer_norm(args: Args, shape: Shapes) -> Request:
    num_dims = len(args["normalized_shape"])
    tensors = (args["input"], args["weight"], args["bias"])
    return Request("layer_norm", tensors, {"num_dims": num_dims, "eps": args["eps"]})


def _pool(op: str, num_dims: int) -> Callable[[Args, Shapes], Request | None]:
    def request(args: Args, shape: Shapes) -> Request | None:
        kernel = per_dim(args["kernel_size"], num_dims)
        attrs = {
            "kernel": kernel,
            "stride": per_dim(args["stride"], num_dims) if args["stride"] else kernel,
            "padding": per_dim(args["padding"], num_dims),
            "dilation": per_dim(args.get("dilation", 1), num_dims),
            "ceil_mode": args["ceil_mode"],
        }
        if op == "avg_pool":
            attrs["count_include_pad"] = args["count_include_pad"]
            attrs["divisor"] = args.get("divisor_override")
        missing = _is_one_sample(shape(_first(args)), num_dims)
        return Request(op, (_first(args),), attrs, batch_missing=missing)

    return request


def _adaptive_pool(op: str, num_dims: int) -> Callable[[Args, Shapes], Request | None]:
    def request(args: Args, shape: Shapes) -> Request | None:
        x = _first(args)
        size = per_dim(args["output_size"], num_dims)
        if op == "adaptive_avg_pool" and set(size) == {1}:  # a mean: it can be summed in parts
            last = len(shape(x))
            dims = tuple(range(last - num_dims, last))
            return Request("reduce", (x,), {"kind": "mean", "dims": dims, "keepdim": True})
        return Request(op, (x,), batch_missing=_is_one_sample(shape(x), num_dims))

    return request


def _is_one_sample(shape: Sequence[int], num_dims: int) -> bool:
    """Whether the first dimension of what is pooled is channels, of which there must be some."""
    missing = len(shape) == num_dims + 1
    if missing and shape[0] == 0:
        raise CaptureError(f"a sample of {'x'.join(map(str, shape))} has no channels to pool")
    return missing


def _reduce(kind: str) -> Callable[[Args, Shapes], Request | None]:
    def request(args: Args, shape: Shapes) -> Request | None:
        if args.get("dtype") is not None:
            return None
        num_dims = len(shape(_first(args)))
        dims = args.get("dim")
        dims = (dims,) if isinstance(dims, int) else dims
        dims = tuple(sorted(d % num_dims for d in dims)) if dims else tuple(range(num_dims))
        keepdim = args.get("keepdim", False)
        return Request("reduce", (_first(args),), {"kind": kind, "dims": dims, "keepdim": keepdim})

    return request


def _whole_dim(args: Args, shape: Shapes) -> Request:
    num_dims = len(shape(_first(args)))
    return Request("whole_dim", (_first(args),), {"dim": args["dim"] % num_dims})


def _cat(args: Args, shape: Shapes) -> Request | None:
    tensors = tuple(args["tensors"])
    if any(len(shape(t)) != len(shape(tensors[0])) for t in tensors):
        return None  # legacy empty tensors
    return Request("cat", tensors, {"dim": args["dim"] % len(shape(tensors[0]))})


def _slice(args: Args, shape: Shapes) -> Request:
    x = args["self"]
    dim = args["dim"] % len(shape(x))
    start, _, step = slice(args["start"], args["end"], args["step"]).indices(shape(x)[dim])
    return Request("slice", (x,), {"dim": dim, "start": start, "step": step})


def _narrow(args: Args, shape: Shapes) -> Request:
    dim = args["dim"] % len(shape(args["self"]))
    start = args["start"] % shape(args["self"])[dim]
    return Request("slice", (args["self"],), {"dim": dim, "start": start, "step": 1})


def _view(args: Args, shape: Shapes) -> Request:
    return Request("view", (_first(args),))


def _permute(args: Args, shape: Shapes) -> Request:
    return _ordered(args["self"], [d % len(shape(args["self"])) for d in args["dims"]])


def _transpose(args: Args, shape: Shapes) -> Request:
    order = list(range(len(shape(args["self"]))))
    if order:
        a, b = args["dim0"], args["dim1"]
        order[a], order[b] = order[b], order[a]
    return _ordered(args["self"], order)


def _matrix_transpose(args: Args, shape: Shapes) -> Request:
    return _ordered(args["self"], list(range(len(shape(args["self"]))))[::-1])


def _ordered(tensor: Any, order: list[int]) -> Request:
    """A number without dimensions counts as one element of one dimension."""
    return Request("permute", (tensor,), {"order": tuple(order) or (0,)})


def _pad(args: Args, shape: Shapes) -> Request | None:
    if args.get("mode") == "circular" and min(args["pad"]) < 0:  # torch cuts off, then wraps
        return None
    num_dims = len(shape(args["self"]))
    flat = [*args["pad"], *[0] * (2 * num_dims - len(args["pad"]))]
    pads = tuple((flat[2 * i], flat[2 * i + 1]) for i in reversed(range(num_dims)))
    mode = args.get("mode", "constant")
    return Request(
        "pad", (args["self"],), {"pads": pads, "mode": mode, "value": args["value"] or 0}
    )


def _upsample(mode: str) -> Callable[[Args, Shapes], Request]:
    def request(args: Args, shape: Shapes) -> Request:
        attrs = {
            "mode": mode,
            "scales": tuple(args["scale_factors"]) if args["scale_factors"] else None,
            "align_corners": args.get("align_corners"),
        }
        return Request("interpolate", (args["input"],), attrs)

    return request


def _dropout(op: str) -> Callable[[Args, Shapes], Request]:
    def request(args: Args, shape: Shapes) -> Request:
        return Request(op, (_first(args),), {"p": args["p"]})

    return request


def _expand(args: Args, shape: Shapes) -> Request:
    return Request("expand", (args["self"],))


def _pixel_shuffle(args: Args, shape: Shapes) -> Request | None:
    if len(shape(args["self"])) != 4:
        return None
    return Request("pixel_shuffle", (args["self"],), {"factor": args["upscale_factor"]})


def _prelu(args: Args, shape: Shapes) -> Request:
    return Request("prelu", (args["self"], args["weight"]))


def _first(args: Args) -> Any:
    return args["input"] if "input" in args else args["self"]


UNARY = """
    abs acos acosh asin asinh atan atanh ceil celu clamp clamp_max clamp_min cos cosh elu erf erfc
    exp expm1 floor frac gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu log log10 log1p
    log2 log_sigmoid logit logical_not mish nan_to_num neg reciprocal relu relu6 round rsqrt selu
    sigmoid sign silu sin sinh softplus softshrink sqrt square tan tanh threshold trunc to clone
    contiguous type_as bitwise_not detach isnan isinf isfinite
""".split()  # noqa: SIM905 (a word list reads better)
BINARY = """
    add sub rsub mul div maximum minimum pow where eq ne lt le gt ge logical_and logical_or
    logical_xor atan2 fmod remainder lerp addcmul addcdiv masked_fill
    bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__ fill zero
""".split()  # noqa: SIM905
POINTWISE = frozenset(UNARY + BINARY)
# What depends only on shapes, and is computed wherever it is wanted.
MADE = frozenset(
    """
    zeros ones full empty arange eye linspace logspace scalar_tensor zeros_like ones_like full_like
    empty_like new_zeros new_ones new_full new_empty tril_indices triu_indices
    """.split()  # noqa: SIM905
)

# Operators that fill a tensor with random numbers, whatever was in it.
OVERWRITING = frozenset(
    "bernoulli uniform normal exponential cauchy log_normal geometric random".split()  # noqa: SIM905
)
# Operators whose derivative is another one in place: from the result, or none at all.
OTHERWISE_IN_PLACE = frozenset(
    """
    elu selu celu leaky_relu rrelu eq ne lt le gt ge logical_and logical_or logical_xor logical_not
    """.split()  # noqa: SIM905
)

OPERATORS: dict[str, Callable[[Args, Shapes], Request | None]] = {
    "linear": _linear,
    "batch_norm": _batch_norm,
    "instance_norm": _instance_norm,
    "group_norm": _group_norm,
    "layer_norm": _layer_norm,
    "mean": _reduce("mean"),
    "sum": _reduce("sum"),
    "amax": _reduce("amax"),
    "amin": _reduce("amin"),
    "softmax": _whole_dim,
    "log_softmax": _whole_dim,
    "cumsum": _whole_dim,
    "cat": _cat,
    "slice": _slice,
    "narrow": _narrow,
    "permute": _permute,
    "transpose": _transpose,
    "t": _matrix_transpose,
    "pad": _pad,
    "constant_pad_nd": _pad,
    "dropout": _dropout("dropout"),
    "feature_dropout": _dropout("feature_dropout"),
    "expand": _expand,
    "expand_as": _expand,
    "pixel_shuffle": _pixel_shuffle,
    "prelu": _prelu,
    "upsample_nearest1d": _upsample("nearest"),
    "upsample_nearest2d": _upsample("nearest"),
    "upsample_nearest3d": _upsample("nearest"),
    "upsample_linear1d": _upsample("linear"),
    "upsample_bilinear2d": _upsample("linear"),
    "upsample_trilinear3d": _upsample("linear"),
}
for _name in (
    "view",
    "reshape",
    "flatten",
    "unflatten",
    "squeeze",
    "unsqueeze",
    "_unsafe_view",
    "view_as",
    "reshape_as",
):
    OPERATORS[_name] = _view
ITEMS: dict[str, Callable[[Args, Shapes], Request | None]] = {}  # the first of several results
for _n in (1, 2, 3):
    ITEMS[f"adaptive_max_pool{_n}d"] = _adaptive_pool("adaptive_max_pool", _n)
    OPERATORS[f"conv{_n}d"] = _conv
    OPERATORS[f"conv_transpose{_n}d"] = _conv_transpose
    OPERATORS[f"max_pool{_n}d"] = _pool("max_pool", _n)
    OPERATORS[f"avg_pool{_n}d"] = _pool("avg_pool", _n)
    OPERATORS[f"adaptive_avg_pool{_n}d"] = _adaptive_pool("adaptive_avg_pool", _n)

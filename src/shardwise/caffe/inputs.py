"""What a net is given: the tops of its data layers, or the inputs that its file names."""

from __future__ import annotations

from dataclasses import dataclass

from .messages import ProtoMessage

DATA = ("Data", "ImageData", "HDF5Data", "DummyData", "Input")


@dataclass(frozen=True)
class NetInput:
    name: str
    shape: tuple[int, ...]  # samples first


def net_inputs(
    net: ProtoMessage, layers: list[ProtoMessage], shape: tuple[int, ...] | None
) -> tuple[NetInput, ...]:
    """All inputs; the first has this shape where it is given, samples left out."""
    found = _named(net)
    for layer in layers:
        if layer.type in DATA:
            shapes = _shapes(layer, None if found else shape)
            found += [NetInput(name, own) for name, own in zip(layer.top, shapes, strict=False)]
    if not found:
        raise net.wrong("there is no input and no data layer")
    if shape is not None:
        found[0] = NetInput(found[0].name, (found[0].shape[0], *shape))
    return tuple(found)


def _named(net: ProtoMessage) -> list[NetInput]:
    dims, names = list(net.input_dim), net.input
    shapes = [tuple(each.dim) for each in net.input_shape]
    shapes = shapes or [tuple(dims[i : i + 4]) for i in range(0, len(dims), 4)]
    if len(shapes) != len(names):
        raise net.wrong(f"there are {len(names)} inputs and {len(shapes)} shapes", "input")
    return [NetInput(name, shape) for name, shape in zip(names, shapes, strict=True)]


def _shapes(layer: ProtoMessage, given: tuple[int, ...] | None) -> list[tuple[int, ...]]:
    """The shapes of a data layer's tops: samples, and labels where it has them."""
    if layer.type in ("Input", "DummyData"):
        param = layer.input_param if layer.type == "Input" else layer.dummy_data_param
        shapes = [tuple(each.dim) for each in param.shape]
        if layer.type == "DummyData" and not shapes:
            sizes = (param.num, param.channels, param.height, param.width)
            if len(set(map(len, sizes))) != 1:
                raise layer.wrong(
                    f"layer {layer.name!r} needs as many num as channels, height and width"
                )
            shapes = list(zip(*sizes, strict=True))
        if not shapes:
            raise layer.wrong(f"layer {layer.name!r} has no shape")
        return shapes * (len(layer.top) if len(shapes) == 1 else 1)
    names = {"Data": "data", "ImageData": "image_data", "HDF5Data": "hdf5_data"}
    param, change = getattr(layer, f"{names[layer.type]}_param"), layer.transform_param
    size, batch = (
        change.crop_size or getattr(param, "crop_size", 0) if layer.type != "HDF5Data" else 0,
        param.batch_size,
    )
    if given is None:
        if not size or not batch:
            raise layer.wrong(
                f"the size of the samples of layer {layer.name!r} is not known: it has no "
                "crop_size; give an input shape"
            )
        given = (1 if change.force_gray else 3, size, size)
    return [(batch or 1, *given), (batch or 1,)]

"""Which fields the messages of nets have: facts of the format, as a table.

`int`, `float`, `bool` and `str` are scalars, `A|B` an enum in the order of its numbers, other words
messages; `*` says that a field may stand several times, ` = ` gives a default.
"""

from __future__ import annotations

Fields = dict[str, str]

FILLER = {
    "type": "str = constant",
    "value": "float = 0",
    "min": "float = 0",
    "max": "float = 1",
    "mean": "float = 0",
    "std": "float = 1",
    "sparse": "int = -1",
    "variance_norm": "FAN_IN|FAN_OUT|AVERAGE = FAN_IN",
}
ENGINE = "DEFAULT|CAFFE|CUDNN = DEFAULT"
CONVOLUTION = {
    "num_output": "int",
    "bias_term": "bool = true",
    "pad": "int*",
    "kernel_size": "int*",
    "stride": "int*",
    "dilation": "int*",
    **{f"{what}_{side}": "int" for what in ("pad", "kernel", "stride") for side in "hw"},
    "group": "int = 1",
    "weight_filler": "FillerParameter",
    "bias_filler": "FillerParameter",
    "engine": ENGINE,
    "axis": "int = 1",
    "force_nd_im2col": "bool = false",
}
POOLING = {
    "pool": "MAX|AVE|STOCHASTIC = MAX",
    "pad": "int = 0",
    "kernel_size": "int",
    "stride": "int = 1",
    **{f"{what}_{side}": "int" for what in ("pad", "kernel", "stride") for side in "hw"},
    "engine": ENGINE,
    "global_pooling": "bool = false",
    "round_mode": "CEIL|FLOOR = CEIL",
}
TRANSFORMATION = {
    "scale": "float = 1",
    "mirror": "bool = false",
    "crop_size": "int = 0",
    "mean_file": "str",
    "mean_value": "float*",
    "force_color": "bool = false",
    "force_gray": "bool = false",
}
OF_DATA = {  # of old files, where it stands outside transform_param
    "scale": "float = 1",
    "mean_file": "str",
    "crop_size": "int = 0",
    "mirror": "bool = false",
}
LAYER_PARAMETERS: Fields = {
    "transform_param": "TransformationParameter",
    "loss_param": "LossParameter",
    **{
        f"{name}_param": f"{''.join(part.title() for part in name.split('_'))}Parameter"
        for name in (
            "accuracy",
            "batch_norm",
            "bias",
            "concat",
            "convolution",
            "crop",
            "data",
            "dropout",
            "dummy_data",
            "eltwise",
            "elu",
            "exp",
            "flatten",
            "hdf5_data",
            "image_data",
            "inner_product",
            "input",
            "log",
            "lrn",
            "pooling",
            "power",
            "prelu",
            "relu",
            "reshape",
            "scale",
            "sigmoid",
            "slice",
            "softmax",
            "tanh",
        )
    },
}
LAYER: Fields = {
    "name": "str = ",
    "bottom": "str*",
    "top": "str*",
    "loss_weight": "float*",
    "include": "NetStateRule*",
    "exclude": "NetStateRule*",
}
OLD_TYPES = (  # in the order of their numbers
    "NONE|ACCURACY|BNLL|CONCAT|CONVOLUTION|DATA|DROPOUT|EUCLIDEAN_LOSS|FLATTEN|HDF5_DATA|"
    "HDF5_OUTPUT|IM2COL|IMAGE_DATA|INFOGAIN_LOSS|INNER_PRODUCT|LRN|MULTINOMIAL_LOGISTIC_LOSS|"
    "POOLING|RELU|SIGMOID|SOFTMAX|SOFTMAX_LOSS|SPLIT|TANH|WINDOW_DATA|ELTWISE|POWER|"
    "SIGMOID_CROSS_ENTROPY_LOSS|HINGE_LOSS|MEMORY_DATA|ARGMAX|THRESHOLD|DUMMY_DATA|SLICE|MVN|"
    "ABSVAL|SILENCE|CONTRASTIVE_LOSS|EXP|DECONVOLUTION"
)
NET: Fields = {
    "name": "str = ",
    "input": "str*",
    "input_shape": "BlobShape*",
    "input_dim": "int*",
    "force_backward": "bool = false",
    "state": "NetState",
    "debug_info": "bool = false",
    "layer": "LayerParameter*",
    "layers": "V1LayerParameter*",
}
PHASE = "TRAIN|TEST"

MESSAGES: dict[str, Fields] = {
    "NetParameter": NET,
    "NetState": {"phase": PHASE, "level": "int = 0", "stage": "str*"},
    "NetStateRule": {
        "phase": PHASE,
        "min_level": "int",
        "max_level": "int",
        "stage": "str*",
        "not_stage": "str*",
    },
    "LayerParameter": LAYER
    | LAYER_PARAMETERS
    | {
        "type": "str = ",
        "phase": PHASE,
        "param": "ParamSpec*",
        "propagate_down": "bool*",
    },
    "V1LayerParameter": LAYER
    | LAYER_PARAMETERS
    | {
        "type": OLD_TYPES,
        "param": "str*",
        "blob_share_mode": "STRICT|PERMISSIVE*",
        "blobs_lr": "float*",
        "weight_decay": "float*",
    },
    "ParamSpec": {
        "name": "str = ",
        "share_mode": "STRICT|PERMISSIVE = STRICT",
        "lr_mult": "float = 1",
        "decay_mult": "float = 1",
    },
    "FillerParameter": FILLER,
    "BlobShape": {"dim": "int*"},
    "TransformationParameter": TRANSFORMATION,
    "LossParameter": {
        "ignore_label": "int",
        "normalization": "FULL|VALID|BATCH_SIZE|NONE = VALID",
        "normalize": "bool",
    },
    "AccuracyParameter": {"top_k": "int = 1", "axis": "int = 1", "ignore_label": "int"},
    "BatchNormParameter": {
        "use_global_stats": "bool",
        "moving_average_fraction": "float = 0.999",
        "eps": "float = 1e-5",
    },
    "BiasParameter": {"axis": "int = 1", "num_axes": "int = 1", "filler": "FillerParameter"},
    "ConcatParameter": {"axis": "int = 1", "concat_dim": "int"},
    "ConvolutionParameter": CONVOLUTION,
    "CropParameter": {"axis": "int = 2", "offset": "int*"},
    "DataParameter": {
        "source": "str",
        "batch_size": "int",
        "rand_skip": "int = 0",
        "backend": "LEVELDB|LMDB = LEVELDB",
        "force_encoded_color": "bool = false",
        "prefetch": "int = 4",
        **OF_DATA,
    },
    "DropoutParameter": {"dropout_ratio": "float = 0.5", "scale_train": "bool = true"},
    "DummyDataParameter": {
        "data_filler": "FillerParameter*",
        "shape": "BlobShape*",
        **dict.fromkeys(("num", "channels", "height", "width"), "int*"),
    },
    "EltwiseParameter": {
        "operation": "PROD|SUM|MAX = SUM",
        "coeff": "float*",
        "stable_prod_grad": "bool = true",
    },
    "EluParameter": {"alpha": "float = 1"},
    "ExpParameter": {"base": "float = -1", "scale": "float = 1", "shift": "float = 0"},
    "FlattenParameter": {"axis": "int = 1", "end_axis": "int = -1"},
    "Hdf5DataParameter": {"source": "str", "batch_size": "int", "shuffle": "bool = false"},
    "ImageDataParameter": {
        "source": "str",
        "batch_size": "int = 1",
        "rand_skip": "int = 0",
        "shuffle": "bool = false",
        "new_height": "int = 0",
        "new_width": "int = 0",
        "is_color": "bool = true",
        "root_folder": "str = ",
        **OF_DATA,
    },
    "InnerProductParameter": {
        "num_output": "int",
        "bias_term": "bool = true",
        "weight_filler": "FillerParameter",
        "bias_filler": "FillerParameter",
        "axis": "int = 1",
        "transpose": "bool = false",
    },
    "InputParameter": {"shape": "BlobShape*"},
    "LogParameter": {"base": "float = -1", "scale": "float = 1", "shift": "float = 0"},
    "LrnParameter": {
        "local_size": "int = 5",
        "alpha": "float = 1",
        "beta": "float = 0.75",
        "norm_region": "ACROSS_CHANNELS|WITHIN_CHANNEL = ACROSS_CHANNELS",
        "k": "float = 1",
        "engine": ENGINE,
    },
    "PoolingParameter": POOLING,
    "PowerParameter": {"power": "float = 1", "scale": "float = 1", "shift": "float = 0"},
    "PreluParameter": {"filler": "FillerParameter", "channel_shared": "bool = false"},
    "ReluParameter": {"negative_slope": "float = 0", "engine": ENGINE},
    "ReshapeParameter": {"shape": "BlobShape", "axis": "int = 0", "num_axes": "int = -1"},
    "ScaleParameter": {
        "axis": "int = 1",
        "num_axes": "int = 1",
        "filler": "FillerParameter",
        "bias_term": "bool = false",
        "bias_filler": "FillerParameter",
    },
    "SigmoidParameter": {"engine": ENGINE},
    "SliceParameter": {"axis": "int = 1", "slice_point": "int*", "slice_dim": "int"},
    "SoftmaxParameter": {"axis": "int = 1", "engine": ENGINE},
    "TanhParameter": {"engine": ENGINE},
}

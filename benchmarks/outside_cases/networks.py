"""Networks of torchvision, timm and MONAI, without their weights, at the smallest size that works.

Of each family the smallest members; no pure transformers, and no detectors, whose inputs are lists.
"""

from __future__ import annotations

from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import nn

from outside_cases.case import Case, number, seed_everything
from outside_cases.importing import uncompiled_torchvision

SIZES = (32, 64, 96, 128, 192, 224, 256, 299)  # of images, in the order in which they are tried
SECONDS = 240.0  # of computing that a network may take

TORCHVISION = """
alexnet convnext_tiny deeplabv3_mobilenet_v3_large deeplabv3_resnet50 densenet121 densenet169
efficientnet_b0 efficientnet_b1 efficientnet_v2_s fcn_resnet50 googlenet inception_v3
lraspp_mobilenet_v3_large maxvit_t mc3_18 mnasnet0_5 mnasnet1_0 mobilenet_v2 mobilenet_v3_large
mobilenet_v3_small r2plus1d_18 r3d_18 raft_small regnet_x_400mf regnet_x_800mf regnet_y_400mf
regnet_y_800mf resnet18 resnet34 resnet50 resnext50_32x4d s3d shufflenet_v2_x0_5
shufflenet_v2_x1_0 squeezenet1_0 squeezenet1_1 vgg11 vgg11_bn vgg13 wide_resnet50_2
"""
VIDEO = {  # frames come before the image
    "mc3_18": (3, 16, 32, 32),
    "r2plus1d_18": (3, 16, 32, 32),
    "r3d_18": (3, 16, 32, 32),
    "s3d": (3, 16, 224, 224),
}
SEGMENTATION = ("deeplabv3", "fcn", "lraspp")

TIMM = """
bat_resnext26ts botnet26t_256 caformer_s18 coat_lite_tiny coat_tiny coatnet_nano_cc_224
coatnet_pico_rw_224 coatnet_rmlp_nano_rw_224 coatnext_nano_rw_224 convformer_s18 convmixer_768_32
convnext_atto convnextv2_atto cpubone_nano cpubone_t0 cs3darknet_focus_s csatv2 cspdarknet53
cspresnet50 cspresnext50 darknet17 darknetaa53 davit_tiny densenet121 densenetblur121d dla46_c
dla46x_c dpn48b dpn68 eca_botnext26ts_256 eca_halonext26ts eca_nfnet_l0 eca_resnext26ts
ecaresnet26t ecaresnetlight ecaresnext26t_32x4d edgenext_x_small edgenext_xx_small
efficientformer_l1 efficientformerv2_s0 efficientnet_b0 efficientnet_lite0 efficientvim_m1
efficientvim_m1_dist efficientvit_b0 efficientvit_b1 efficientvit_m0 efficientvit_m1
ese_vovnet19b_slim ese_vovnet19b_slim_dw fasternet_t0 fasternet_t1 fastvit_t12 fastvit_t8
fbnetv3_b focalnet_tiny_srf gcresnext26ts gcvit_xxtiny gernet_s ghostnet_050 ghostnet_100
ghostnetv3_050 halo2botnet50ts_256 halonet26t halonet_h1 haloregnetz_b hardcorenas_a hardcorenas_b
hgnetv2_b0 hgnetv2_b1 hrnet_w18_small iformer_s iformer_t inception_next_atto inception_resnet_v2
inception_v3 inception_v4 lambda_resnet26t lamhalobotnet50ts_256 lcnet_035 lcnetv2_small
legacy_seresnet18 legacy_xception levit_128s levit_conv_128s lowformer_b0 mambaout_femto
maxvit_nano_rw_256 maxvit_pico_rw_256 maxvit_rmlp_pico_rw_256 maxxvit_rmlp_nano_rw_256
maxxvitv2_nano_rw_256 mixnet_s mnasnet_050 mnasnet_small mobilenet_edgetpu_100 mobilenetv2_035
mobilenetv3_small_050 mobilenetv5_base mobileone_s1 mobilevit_xxs mobilevitv2_050 mvitv2_tiny
nasnetalarge nextvit_small nf_ecaresnet26 nf_regnet_b0 nf_resnet26 nf_seresnet26 pit_ti_224
pit_ti_distilled_224 pnasnet5large poolformer_s12 poolformerv2_s12 pvt_v2_b0 pvt_v2_b1 rdnet_tiny
regnetv_040 regnetx_002 regnety_002 regnetz_005 regnetz_b16 regnetz_c16 repghostnet_050
repghostnet_058 repvgg_a0 repvgg_b0 repvit_m0_9 repvit_m1 res2next50 resnest14d resnet10t
resnet14t resnet26d resnetaa34d resnetblur18 resnetrs50 resnetv2_18 resnext26ts resnext50_32x4d
rexnet_100 rexnetr_100 sebotnet33ts_256 sedarknet21 sehalonet33ts selecsls42 semnasnet_050
seresnet18 seresnetaa50d seresnext26t_32x4d seresnext26ts shvit_s1 skresnet18 starnet_s050
starnet_s100 swiftformer_xs test_byobnet test_convnext test_convnext3 test_efficientnet
test_mambaout test_nfnet test_resnet tf_mixnet_s tf_mobilenetv3_small_075 tiny_vit_5m_224
tinynet_b tinynet_c tinynet_d tinynet_e tresnet_m visformer_tiny vit_tiny_r_s16_p8_224
vitamin_small_224 xception41p
"""

# MONAI's: the class, its arguments, and the shape of one sample.
MONAI: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "unet 2d": (
        "UNet",
        {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "channels": (4, 8, 16),
         "strides": (2, 2), "num_res_units": 2},
        (1, 32, 24),
    ),
    "unet 3d": (
        "UNet",
        {"spatial_dims": 3, "in_channels": 1, "out_channels": 2, "channels": (4, 8, 16),
         "strides": (2, 2), "num_res_units": 1, "norm": "batch", "dropout": 0.1},
        (1, 16, 16, 12),
    ),
    "basic unet": (
        "BasicUNet",
        {"spatial_dims": 3, "features": (4, 4, 8, 8, 16, 4)},
        (1, 32, 32, 16),
    ),
    "basic unet plus plus": (
        "BasicUNetPlusPlus",
        {"spatial_dims": 2, "features": (4, 4, 8, 8, 16, 4)},
        (1, 32, 32),
    ),
    "attention unet": (
        "AttentionUnet",
        {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "channels": (4, 8, 16),
         "strides": (2, 2)},
        (1, 32, 32),
    ),
    "dyn unet": (
        "DynUNet",
        {"spatial_dims": 3, "in_channels": 1, "out_channels": 2, "kernel_size": (3, 3, 3),
         "strides": (1, 2, 2), "upsample_kernel_size": (2, 2), "filters": (4, 8, 16)},
        (1, 16, 16, 16),
    ),
    "dyn unet deep supervision": (
        "DynUNet",
        {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "kernel_size": (3, 3, 3, 3),
         "strides": (1, 2, 2, 2), "upsample_kernel_size": (2, 2, 2), "filters": (4, 8, 8, 8),
         "deep_supervision": True, "deep_supr_num": 2, "res_block": True},
        (1, 32, 32),
    ),
    "segresnet": (
        "SegResNet",
        {"spatial_dims": 3, "init_filters": 8, "blocks_down": (1, 2), "blocks_up": (1,)},
        (1, 16, 16, 16),
    ),
    "segresnet ds": (
        "SegResNetDS",
        {"spatial_dims": 2, "init_filters": 8, "blocks_down": (1, 2, 2), "dsdepth": 2},
        (1, 32, 32),
    ),
    "segresnet vae": (
        "SegResNetVAE",
        {"spatial_dims": 2, "input_image_size": (16, 16), "init_filters": 8,
         "blocks_down": (1, 2), "blocks_up": (1,)},
        (1, 16, 16),
    ),
    "vnet": ("VNet", {"spatial_dims": 3}, (1, 16, 16, 16)),
    "highresnet": ("HighResNet", {"spatial_dims": 2}, (1, 24, 24)),
    "ahnet": ("AHNet", {"spatial_dims": 2, "psp_block_num": 0}, (1, 64, 64)),
    "densenet 2d": (
        "DenseNet",
        {"spatial_dims": 2, "in_channels": 1, "out_channels": 3, "init_features": 8,
         "growth_rate": 4, "block_config": (2, 2)},
        (1, 32, 32),
    ),
    "densenet 3d": (
        "DenseNet",
        {"spatial_dims": 3, "in_channels": 1, "out_channels": 3, "init_features": 8,
         "growth_rate": 4, "block_config": (2, 2), "dropout_prob": 0.1},
        (1, 16, 16, 16),
    ),
    "resnet10 3d": (
        "ResNet",
        {"block": "basic", "layers": [1, 1, 1, 1], "block_inplanes": [4, 8, 8, 16],
         "spatial_dims": 3, "n_input_channels": 1, "num_classes": 3},
        (1, 16, 16, 16),
    ),
    "senet": (
        "SEResNet50",
        {"spatial_dims": 2, "in_channels": 1, "num_classes": 3, "layers": (1, 1, 1, 1)},
        (1, 64, 64),
    ),
    "efficientnet b0": (
        "EfficientNetBN",
        {"model_name": "efficientnet-b0", "pretrained": False, "in_channels": 1,
         "num_classes": 3},
        (1, 32, 32),
    ),
    "flexible unet": (
        "FlexibleUNet",
        {"in_channels": 1, "out_channels": 2, "backbone": "efficientnet-b0"},
        (1, 32, 32),
    ),
    "autoencoder": (
        "AutoEncoder",
        {"spatial_dims": 2, "in_channels": 1, "out_channels": 1, "channels": (4, 8),
         "strides": (2, 2), "inter_channels": (8, 8), "inter_dilations": (1, 2)},
        (1, 16, 16),
    ),
    "variational autoencoder": (
        "VarAutoEncoder",
        {"spatial_dims": 2, "in_shape": (1, 16, 16), "out_channels": 1, "latent_size": 2,
         "channels": (4, 8), "strides": (2, 2)},
        (1, 16, 16),
    ),
    "regressor": (
        "Regressor",
        {"in_shape": (1, 16, 16), "out_shape": (3,), "channels": (4, 8), "strides": (2, 2)},
        (1, 16, 16),
    ),
    "classifier": (
        "Classifier",
        {"in_shape": (1, 16, 16), "classes": 3, "channels": (4, 8), "strides": (2, 2)},
        (1, 16, 16),
    ),
    "discriminator": (
        "Discriminator",
        {"in_shape": (1, 16, 16), "channels": (4, 8), "strides": (2, 2)},
        (1, 16, 16),
    ),
    "critic": (
        "Critic",
        {"in_shape": (1, 16, 16), "channels": (4, 8), "strides": (2, 2)},
        (1, 16, 16),
    ),
    "generator": (
        "Generator",
        {"latent_shape": (6,), "start_shape": (4, 4, 4), "channels": (8, 4), "strides": (2, 2)},
        (6,),
    ),
    "fully connected": (
        "FullyConnectedNet",
        {"in_channels": 6, "out_channels": 3, "hidden_channels": (8, 8), "dropout": 0.2},
        (6,),
    ),
    "patch discriminator": (
        "PatchDiscriminator",
        {"spatial_dims": 2, "channels": 8, "in_channels": 1, "num_layers_d": 2},
        (1, 32, 32),
    ),
    "multi scale discriminator": (
        "MultiScalePatchDiscriminator",
        {"num_d": 2, "num_layers_d": 1, "spatial_dims": 2, "channels": 8, "in_channels": 1,
         "out_channels": 1, "minimum_size_im": 32},
        (1, 32, 32),
    ),
    "vqvae": (
        "VQVAE",
        {"spatial_dims": 2, "in_channels": 1, "out_channels": 1, "channels": (8, 8),
         "num_res_layers": 1, "num_res_channels": (8, 8), "num_embeddings": 8,
         "downsample_parameters": ((2, 4, 1, 1), (2, 4, 1, 1)),
         "upsample_parameters": ((2, 4, 1, 1, 0), (2, 4, 1, 1, 0)), "embedding_dim": 4},
        (1, 16, 16),
    ),
    "autoencoder kl": (
        "AutoencoderKL",
        {"spatial_dims": 2, "in_channels": 1, "out_channels": 1, "channels": (8, 8),
         "latent_channels": 2, "num_res_blocks": (1, 1), "norm_num_groups": 4,
         "attention_levels": (False, False)},
        (1, 16, 16),
    ),
    "mednext": (
        "MedNeXt",
        {"spatial_dims": 2, "init_filters": 8, "in_channels": 1, "out_channels": 2,
         "blocks_down": (1, 1), "blocks_up": (1, 1), "blocks_bottleneck": 1},
        (1, 32, 32),
    ),
    "hovernet": ("HoVerNet", {"mode": "fast", "out_classes": 3}, (3, 256, 256)),
    "quicknat": ("Quicknat", {"num_classes": 3, "num_channels": 1, "num_filters": 8}, (1, 32, 32)),
    "reg unet": (
        "RegUNet",
        {"spatial_dims": 2, "in_channels": 2, "num_channel_initial": 4, "depth": 2},
        (2, 32, 32),
    ),
    "local net": (
        "LocalNet",
        {"spatial_dims": 2, "in_channels": 2, "num_channel_initial": 4, "extract_levels": (0, 1)},
        (2, 32, 32),
    ),
    "voxelmorph unet": (
        "VoxelMorphUNet",
        {"spatial_dims": 2, "in_channels": 2, "unet_out_channels": 4, "channels": (4, 4, 4, 4),
         "final_conv_channels": (4,)},
        (2, 32, 32),
    ),
    "swin unetr": (
        "SwinUNETR",
        {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "feature_size": 12,
         "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2)},
        (1, 64, 64),
    ),
    "unetr": (
        "UNETR",
        {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "img_size": 32,
         "feature_size": 4, "hidden_size": 16, "mlp_dim": 16, "num_heads": 2},
        (1, 32, 32),
    ),
}  # fmt: skip


@cache
def _packages() -> tuple[Any, Any, Any]:
    """torchvision, timm and monai."""
    with uncompiled_torchvision():
        import monai.networks.nets
        import timm
        import torchvision
    return torchvision, timm, monai.networks.nets


def groups() -> list[str]:
    named = {"torchvision": TORCHVISION.split(), "timm": TIMM.split(), "monai": MONAI}
    return [f"{package}/{name}" for package, names in named.items() for name in names]


def most(group: str) -> int:
    return 1


def cases(group: str) -> list[Case]:
    build = partial(_build, group)
    name = f"networks:{group}:0"
    return [Case(name, build, and_eval=True, num_plans=3, seconds=SECONDS)]


def _build(group: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    package, name = group.split("/")
    seed_everything(number(group))
    torchvision, timm, nets = _packages()
    if package == "monai":
        kind, arguments, shape = MONAI[name]
        return _with_input(getattr(nets, kind)(**arguments), [shape])
    if package == "timm":
        return _with_input(timm.create_model(name, num_classes=10), [(3, s, s) for s in SIZES])
    extra = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    kinds = {"weights_backbone": None} if name.startswith(SEGMENTATION) else {}
    model = torchvision.models.get_model(name, weights=None, **extra, **kinds)
    if name in VIDEO:
        return _with_input(model, [VIDEO[name]])
    return _with_input(model, [(3, s, s) for s in SIZES], 2 if name.startswith("raft") else 1)


def _with_input(
    model: nn.Module, shapes: list[tuple[int, ...]], num_inputs: int = 1
) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The model with inputs of the first shape that it takes, in float64 if it can."""
    error: Exception | None = None
    for dtype, shape in product((torch.float64, torch.float32), shapes):
        model, samples = model.to(dtype), [torch.randn(2, *shape) for _ in range(num_inputs)]
        inputs = tuple(x.to(dtype) for x in samples)
        try:
            with torch.no_grad():
                model(*inputs)
            return model, inputs
        except (RuntimeError, ValueError, AssertionError, IndexError) as refused:
            error = refused
    raise RuntimeError(f"takes none of {shapes}: {error}")

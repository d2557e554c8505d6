"""Models of torchvision and timm, as small as their constructors make them."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from tests.campaigns.architectures.architecture import entry, floats

Built = tuple[nn.Module, dict[str, Any]]


def _torchvision(name: str, **options: Any) -> Built:
    from torchvision import models

    return models.get_model(name, weights=None, **options), {"x": floats(3, 32, 32)}


@entry("torchvision")
def torchvision_vit() -> Built:
    from torchvision.models import VisionTransformer

    made = VisionTransformer(32, 8, num_layers=4, num_heads=4, hidden_dim=32, mlp_dim=48, num_classes=5)
    nn.init.normal_(made.heads.head.weight)  # torchvision begins with zeros there
    return made, {"x": floats(3, 32, 32)}


@entry("torchvision")
def torchvision_swin() -> Built:
    from torchvision.models import SwinTransformer

    made = SwinTransformer([2, 2], 16, [2, 2], [2, 4], [4, 4], num_classes=5)
    return made, {"x": floats(3, 32, 32)}


@entry("torchvision")
def torchvision_convnext() -> Built:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    made = ConvNeXt([CNBlockConfig(8, 16, 1), CNBlockConfig(16, 24, 2), CNBlockConfig(24, None, 1)], num_classes=5)
    return made, {"x": floats(3, 32, 32)}


@entry("torchvision")
def efficientnet() -> Built:
    from torchvision.models.efficientnet import EfficientNet, MBConvConfig

    blocks = [MBConvConfig(1, 3, 1, 16, 16, 1, 1.0, 1.0), MBConvConfig(4, 3, 2, 16, 24, 2, 1.0, 1.0)]
    return EfficientNet([*blocks, MBConvConfig(4, 5, 2, 24, 40, 1, 1.0, 1.0)], 0.0, 0.0, 5), {"x": floats(3, 32, 32)}


@entry("torchvision")
def regnet() -> Built:
    from torchvision.models.regnet import BlockParams, RegNet

    blocks = BlockParams.from_init_params(depth=5, w_0=16, w_a=8.0, w_m=2.0, group_width=8, se_ratio=0.25)
    return RegNet(blocks, num_classes=5), {"x": floats(3, 32, 32)}


@entry("torchvision")
def densenet() -> Built:
    from torchvision.models import DenseNet

    return DenseNet(8, (2, 2, 2), 16, num_classes=5), {"x": floats(3, 64, 64)}


def _segmentation(name: str) -> Built:
    from torchvision import models

    made = models.get_model(name, weights=None, weights_backbone=None, num_classes=3)
    return made, {"input": floats(3, 64, 64)}


def _timm(name: str, **options: Any) -> Built:
    import timm

    return timm.create_model(name, pretrained=False, num_classes=5, **options), {"x": floats(3, 32, 32)}


@entry("timm")
def timm_mixer() -> Built:
    from timm.models.mlp_mixer import MlpMixer

    return MlpMixer(5, 32, patch_size=8, num_blocks=4, embed_dim=32), {"x": floats(3, 32, 32)}


@entry("timm")
def timm_convmixer() -> Built:
    from timm.models.convmixer import ConvMixer

    return ConvMixer(24, 4, num_classes=5), {"x": floats(3, 32, 32)}


_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_heads": 4}
_SWIN = {"img_size": 32, "patch_size": 2, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4}
for _name, _build in {
    "resnet18": partial(_torchvision, "resnet18", num_classes=5),
    "mobilenet_v2": partial(_torchvision, "mobilenet_v2", num_classes=5, width_mult=0.35),
    "mobilenet_v3": partial(_torchvision, "mobilenet_v3_small", num_classes=5),
    "shufflenet": partial(_torchvision, "shufflenet_v2_x0_5", num_classes=5),
    "lraspp": partial(_segmentation, "lraspp_mobilenet_v3_large"),
    "timm_vit": partial(_timm, "vit_tiny_patch16_224", depth=4, **_VIT),
    "timm_beit": partial(_timm, "beit_base_patch16_224", depth=4, **_VIT),
    "timm_swin_v2": partial(_timm, "swinv2_tiny_window8_256", **_SWIN),
    "timm_resnet": partial(_timm, "resnet10t"),
    "timm_eva02": partial(_timm, "eva02_tiny_patch14_224", depth=3, **_VIT),
}.items():
    entry("timm" if _name.startswith("timm") else "torchvision", name=_name)(_build)

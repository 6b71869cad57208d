"""Networks of many families are understood by structure, not by name lists."""

import pytest
import torch
from torch import nn
from torchvision import models

import ompq
from ompq.network.graph import trace

# name, input size, expected: units, tied groups of more than one, blocks of more than
# one unit. The expectations were counted from the architectures' definitions.
ZOO = [
    ("resnet18", 64, 21, 3, 8),
    ("resnet34", 64, 37, 3, 16),
    ("resnet50", 64, 54, 4, 16),
    ("resnext50_32x4d", 64, 54, 4, 16),
    ("wide_resnet50_2", 64, 54, 4, 16),
    ("mobilenet_v2", 64, 53, 0, 17),
    ("mobilenet_v3_small", 64, 54, 0, 11),
    ("mobilenet_v3_large", 64, 64, 0, 15),
    ("efficientnet_b0", 64, 82, 0, 16),
    ("efficientnet_v2_s", 64, 171, 0, 38),
    ("regnet_y_400mf", 64, None, 4, 16),
    ("regnet_x_400mf", 64, None, 4, 22),
    ("densenet121", 64, 121, 0, 58),
    ("vgg11", 64, 11, 0, 0),
    ("vgg16_bn", 64, 16, 0, 0),
    ("squeezenet1_1", 64, 26, 0, 8),
    ("shufflenet_v2_x0_5", 64, 57, 0, 16),
    ("mnasnet0_5", 64, 53, 0, None),
    ("convnext_tiny", 64, 59, 0, 18),
    ("vit_b_32", 224, 50, 0, 12),
    ("swin_t", 64, 53, 0, 12),
    ("googlenet", 64, 58, 0, 9),
    ("inception_v3", 96, 95, 0, 11),
    ("alexnet", 64, 8, 0, 0),
]
TIMM = [
    ("resnet18", 64, 21, 3, 8),
    ("mixer_s32_224", 224, 34, 0, 8),
    ("deit_tiny_patch16_224", 224, 50, 0, 12),
    ("mobilenetv3_small_050", 64, 54, 0, None),
    ("tf_efficientnet_lite0", 64, 50, 0, None),
    ("repvgg_a0", 64, None, None, None),
    ("convmixer_768_32", 64, None, 0, None),
]


def check(network, size, units, tied, blocks):
    graph = trace(network, torch.randn(1, 3, size, size))
    many = [members for members in graph.groups.values() if len(members) > 1]
    big = [members for members in graph.blocks.values() if len(members) > 1]
    assert units is None or len(graph) == units
    assert tied is None or len(many) == tied
    assert blocks is None or len(big) == blocks
    # Every stored number is accounted for: a unit's, folded, or left float.
    counted = sum(
        u.weights + u.bias_parameters + 2 * u.norm_parameters for u in graph.units
    )
    state = network.state_dict().items()
    stored = {
        v.data_ptr(): v.numel() * (4 if v.is_floating_point() else 1 + (v.max() > 255))
        for k, v in state
        if "num_batches" not in k
    }
    unused = sum(
        p.numel()
        for entry in graph.skipped
        if entry.reason.startswith("never called")
        for p in network.get_submodule(entry.name).parameters()
    )
    assert 4 * counted + graph.float_bytes == sum(stored.values())
    assert 4 * unused <= graph.float_bytes
    assert all(unit.macs > 0 for unit in graph.units)


@pytest.fixture(autouse=True)
def cheap_initialisation(monkeypatch):
    """Random values are not the point here, and drawing them takes the most time."""
    for name in ("kaiming_normal_", "kaiming_uniform_", "trunc_normal_", "normal_"):
        monkeypatch.setattr(
            nn.init, name, lambda tensor, *a, **k: tensor.data.fill_(0.01)
        )


@pytest.mark.parametrize(("name", "size", "units", "tied", "blocks"), ZOO)
def test_torchvision_network(name, size, units, tied, blocks):
    quick = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    check(models.get_model(name, weights=None, **quick), size, units, tied, blocks)


@pytest.mark.parametrize(("name", "size", "units", "tied", "blocks"), TIMM)
def test_timm_network(name, size, units, tied, blocks):
    timm = pytest.importorskip("timm")
    network = timm.create_model(name, pretrained=False)
    check(network, size, units, tied, blocks)


class Dense(nn.Module):
    """What of a detector takes a batch."""

    def __init__(self, detector):
        super().__init__()
        self.backbone, self.head = detector.backbone, detector.head

    def forward(self, images):
        found = self.head(list(self.backbone(images).values()))
        return found["cls_logits"], found["bbox_regression"]


@pytest.mark.slow
def test_a_detector_is_quantized_whole_or_by_the_part_that_takes_a_batch(  # noqa: PLR0915
    caplog, tmp_path
):
    network = models.detection.ssdlite320_mobilenet_v3_large
    detector = network(weights=None, weights_backbone=None, num_classes=3).eval()
    whole, images = torch.rand(2, 3, 64, 64), torch.randn(4, 3, 64, 64)
    config = ompq.PlanConfig(score="orm_distortion")
    says = "by the part that takes a batch: its backbone and head, see Detectors"
    with pytest.raises(ompq.errors.TraceError, match=says):
        ompq.plan(detector, whole, "5bits", config)

    # The default score lets the weights alone decide, and says so.
    plan = ompq.plan(detector, whole, "5bits")
    alone = ompq.plan(detector, whole, "5bits", ompq.PlanConfig(score="weight_noise"))
    assert "returns detections, which have no useful gradients" in caplog.text
    assert plan.score_name == "weight_noise" and plan.allocation == alone.allocation
    both = ompq.quantize(detector, plan, whole)
    ompq.save(both, tmp_path / "detector", plan=plan)
    again = ompq.load(tmp_path / "detector", detector)
    with torch.no_grad():
        for one, other in zip(both(whole), again(whole), strict=True):
            assert torch.equal(one["boxes"], other["boxes"])

    dense = Dense(detector)
    plan = ompq.plan(dense, images, "5bits", config)
    layers = [m for m in dense.modules() if isinstance(m, nn.Conv2d)]
    assert len(plan.graph) == len(layers)
    small = ompq.quantize(dense, plan, images)
    quantized = network(weights=None, weights_backbone=None, num_classes=3).eval()
    quantized.backbone, quantized.head = small.backbone, small.head

    # Boxes of two networks differ in number: they are matched, or a metric is given.
    counts = {"boxes": lambda found, _: sum(len(one["boxes"]) for one in found)}
    batches = [(whole, [{}, {}])]
    result = ompq.evaluate(quantized, batches, reference=detector, metrics=counts)
    assert result.agreement is None and result.output == "detections"
    assert 0 <= result.divergence <= 1
    with torch.no_grad():
        assert result.metrics["boxes"] == counts["boxes"](quantized(whole), None)
        assert result.reference_metrics["boxes"] == counts["boxes"](
            detector(whole), None
        )

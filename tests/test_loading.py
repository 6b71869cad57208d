"""Networks and data, as options name them."""

from ompq.cli.loading import plan_count


def test_the_papers_number_of_samples_goes_with_its_protocol():
    assert plan_count(None, "torchvision:resnet18") == 64
    assert plan_count("ours", "torchvision:mobilenet_v2") == 64
    assert plan_count("paper-ptq", "torchvision:mobilenet_v2") == 32
    assert plan_count("paper-ptq", "timm:mobilenetv2_100") == 32

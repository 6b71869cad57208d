"""What several files of tests share: see test_graph.py."""

NAMES = ("stem", "layer1.conv1", "layer1.conv2", "layer2.conv1", "head")

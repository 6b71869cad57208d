"""What several files of tests share: see test_pipeline.py."""

from nets import scenes

SAMPLES = scenes(48)

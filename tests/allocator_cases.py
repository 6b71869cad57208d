"""What several files of tests share: see test_allocator.py."""

METHODS = ("exact", "relax-round", "relax-dfs", "genetic")

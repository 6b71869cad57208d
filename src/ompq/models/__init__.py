"""Names of networks, and the weights that go with them."""

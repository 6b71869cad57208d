"""Names of data sets, and the images in them."""

"""What a researcher needs and an engineer does not."""

"""Data by name: images, texts, arrays, and your own."""

"""Core ML packages (.mlpackage)."""

"""Packed files: the small network on disk."""

from typing import TYPE_CHECKING

from ompq.lazy_names import lazy_names

if TYPE_CHECKING:
    from ompq.packed.embedded_graph import unpack as unpack
    from ompq.packed.packed_files import add_onnx as add_onnx

__getattr__, __dir__, __all__ = lazy_names(__name__)

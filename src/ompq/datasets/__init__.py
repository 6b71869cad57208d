"""Data by name: images, texts, arrays, and your own."""

from typing import TYPE_CHECKING

from ompq.lazy_names import lazy_names

if TYPE_CHECKING:
    from ompq.datasets.distillation import distilled_samples as distilled_samples
    from ompq.datasets.images import image_views as image_views
    from ompq.datasets.training_sets import training_data as training_data

__getattr__, __dir__, __all__ = lazy_names(__name__)

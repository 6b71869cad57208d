"""The heat map on the page holds the whole matrix."""

import base64
import io
import math
import struct

import numpy as np
import pytest
from PIL import Image

from ompq.report.heat_maps import heat_map


def test_the_heat_map_holds_the_matrix():
    rng = np.random.default_rng(0)
    half = rng.uniform(0.4, 1, (7, 7))
    matrix = np.maximum(half, half.T)
    heat = heat_map(matrix, [f"f{i}" for i in range(7)])
    codes = base64.b64decode(heat.values)
    values = np.array(struct.unpack(f">{len(codes) // 2}H", codes)) / 65535
    np.testing.assert_allclose(values, matrix[np.triu_indices(7)], atol=1e-5)
    picture = Image.open(io.BytesIO(base64.b64decode(heat.image.partition(",")[2])))
    assert picture.size == (7, 7)
    assert heat.low == pytest.approx(math.floor(10 * matrix.min()) / 10)
    darkness = 255 - np.asarray(picture.convert("L"), dtype=float)
    order = np.argsort(matrix.ravel())
    assert (np.diff(darkness.ravel()[order]) >= -1).all()


def test_a_large_matrix_is_averaged():
    matrix = np.arange(1201.0**2).reshape(1201, 1201) / 1201**2
    heat = heat_map(matrix, [str(i) for i in range(1201)])
    assert heat.pooled == 4
    assert len(heat.labels) == 301
    assert heat.labels[0] == "0 … 3"
    codes = base64.b64decode(heat.values)
    assert struct.unpack(">H", codes[:2])[0] / 65535 == pytest.approx(
        matrix[:4, :4].mean(), abs=1e-5
    )

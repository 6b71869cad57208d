import numpy as np
import pytest

from ompq.report.figures import legend_above, plain_axes, styled_figure
from ompq.report.heat_maps import draw_heat


@pytest.mark.parametrize(("count", "matrices"), [(6, 4), (50, 4), (18, 1), (6, 3)])
def test_names_of_layers_stay_inside_the_figure(count, matrices):
    pytest.importorskip("matplotlib")
    names = [f"stage{n}.downsample.conv" for n in range(count)]
    titles = [f"N = {n}" for n in range(matrices)]
    with styled_figure() as figure:
        matrix = np.linspace(0, 1, count * count).reshape(count, count)
        draw_heat(figure, [matrix] * matrices, names, titles)
        assert inside(figure)
    with styled_figure() as figure:
        axes = plain_axes(figure, "bits", "top-1, %")
        for name in names[:6]:
            axes.plot([0, 1], label=name)
        legend_above(figure)
        assert inside(figure)


def inside(figure):
    figure.draw_without_rendering()
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    return box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height

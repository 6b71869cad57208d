import builtins
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ompq.errors import MissingExtraError
from ompq.report.figures import legend_above, plain_axes, styled_figure, write_figures
from ompq.report.heat_maps import draw_heat
from ompq.report_sections import (
    StageTime,
    Versions,
)
from ompq.score_tables import ScoreTable
from reports import every_section, toy_plan


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


@pytest.fixture(scope="module")
def plan():
    return toy_plan()


# ---- figures
def test_figures_are_written_as_png_and_svg(plan, tmp_path):
    written = write_figures(tmp_path / "figures", plan, every_section())
    names = [path.name for path in written]
    assert names == [
        f"{name}.{kind}"
        for name in ("orm", "bits", "accuracy")
        for kind in ("png", "svg")
    ]
    assert sorted(p.name for p in (tmp_path / "figures").iterdir()) == sorted(names)
    for path in written:
        if path.suffix == ".png":
            with Image.open(path) as picture:
                assert min(picture.size) > 300
        else:
            assert "<svg" in path.read_text()
    again = write_figures(tmp_path / "again", plan, every_section())
    assert [p.read_bytes() for p in written] == [p.read_bytes() for p in again]


def test_figures_without_orm_or_sizes_are_left_out(plan, tmp_path):
    unmeasured = replace(plan, scores=ScoreTable(plan.scores.damage))
    written = write_figures(tmp_path, unmeasured, [StageTime("plan", 1.0), Versions()])
    assert [path.name for path in written] == ["bits.png", "bits.svg"]


def test_missing_matplotlib_names_the_extra(plan, tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=r"pip install 'ompq\[figures\]'"):
        write_figures(tmp_path, plan)
    assert list(Path(tmp_path).iterdir()) == []

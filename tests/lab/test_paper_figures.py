"""Tables and figures of reproduced rows."""

from html import unescape

import pytest

from ompq.lab.paper_figures import draw, markdown
from ompq.lab.paper_tables import EXPERIMENTS


@pytest.mark.parametrize("name", ["table-ptq-resnet18", "table-qat-resnet50"])
def test_rows_stand_beside_the_papers_numbers(name):
    experiment = EXPERIMENTS[name]
    table = markdown(experiment, {}, {"network": experiment.network, "quick": False})
    header, _, *lines = [
        t.strip("| ").split(" | ") for t in table.splitlines() if "|" in t
    ]
    for row, cells in zip(experiment.rows, lines, strict=True):
        line = dict(zip(header, cells, strict=False))
        if row.published is not None:
            drop = experiment.float_top1 - row.published
            assert line["top-1, paper"] == f"{row.published:.2f}"
            assert line["drop, paper"] == f"{drop:.2f}"
            assert line["MiB, paper"] == f"{row.paper['mib']:.2f}"


# As the paper prints them. The recipe of FracBits learns weights alone, and
# OneBitwidth has one width of weights, where the paper prints * as well.
WIDTHS = {
    "table-qat-resnet18": "32/32 8/8 8/8 */8 5/5 4/32 */* */6",
    "table-qat-resnet50": "32/32 5/5 4/32 5/5 */32 4/8 */* */5 */5",
    "table-ptq-resnet18": "32/32 */8 */4 */8 4/4 4/4 4/4 4/4 */8 */4 */8 */8",
    "table-ptq-mobilenetv2": "32/32 */8 */8 */8 */8 */8",
}


@pytest.mark.parametrize("name", WIDTHS)
def test_widths_are_written_as_in_the_paper(name):
    about = {"network": EXPERIMENTS[name].network, "quick": False}
    table = markdown(EXPERIMENTS[name], {}, about)
    lines = [line.strip("| ").split(" | ") for line in table.splitlines()]
    place = next(line for line in lines if "W/A" in line).index("W/A")
    rows = [row for row in EXPERIMENTS[name].rows if not row.bits]
    published = {row.name for row in rows if row.published}
    found = [line[place] for line in lines if line[0] in published]
    assert not any(" */" in line or "/* " in line for line in table.splitlines())
    found = [cell.replace("\\*", "*") for cell in found]
    assert found == WIDTHS[name].split()
    assert ("GBOPs, paper" in table) == ("qat" in name)
    assert (" 1,858 |" in table) == (name == "table-qat-resnet18")


def test_bits_of_activations_have_lines_of_their_own(tmp_path):
    pytest.importorskip("matplotlib")
    table = EXPERIMENTS["table-ptq-resnet18"]
    names = ("ompq-4.5-a4", "ompq-5.5-a4", "ompq-4.5", "ompq-4", "baseline")
    results = {
        name: {"mib": at, "top1": 0.6, "drop_error": 0.01}
        for at, name in enumerate(names)
    }
    labels = ("OMPQ", "OMPQ, A4", "the paper's")
    for published in (True, False):
        draw(table, results, tmp_path, published=published)
        text = unescape((tmp_path / f"{table.name}.svg").read_text())
        assert [text.count(f">{label}<") for label in labels] == [1, 1, published]
        assert "Baseline" not in text  # far to the right


def test_another_network_stands_beside_no_numbers_of_the_paper():
    experiment = EXPERIMENTS["table-ptq-resnet18"]
    for network, shown in ((experiment.network, True), ("cifar:resnet20", False)):
        page = markdown(experiment, {}, {"network": network, "quick": False})
        assert ("69.41" in page) == shown

from ompq.notebook_tables import html_table


def test_values_are_escaped_and_long_tables_are_cut():
    rows = [{"layer": f"<b>{n}</b>", "bits": n} for n in range(120)]
    text = html_table("a & b", rows)
    assert text.startswith("<b>a &amp; b</b>")
    assert "&lt;b&gt;7&lt;/b&gt;" in text and "<b>7" not in text
    assert text.count("<tr>") == 101 and "and 20 more" in text
    assert html_table("none", []) == "<b>none</b><table><tr></tr></table>"

"""ompq run: a command with the options of a file."""

import sys

import pytest

from cli_tools import network_file, run


@pytest.fixture(scope="module")
def net(tmp_path_factory) -> tuple[str, ...]:
    return (network_file(tmp_path_factory.mktemp("net")), "--data", "random")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("command = ", "is not TOML"),
        ('command = "walk"', "for example command = \"quantize\"; there is no 'walk'"),
        ('command = "scores"\nbudgets = 3', "no such option: --budgets"),
        ('command = ["plan"]', "must name its command, for example command ="),
        ("# " + "x" * (1 << 16), "is not TOML: it has more than 65,536 bytes"),
        ("command = 3", "must name its command, for example command ="),
        ('command = "scores"\njson = {a = 1}', "json must be a text, a number, true"),
        ('command = "scores"\njson = [[1]]', "json must be a text, a number, true"),
    ],
)
def test_files_that_cannot_be_run_say_why(tmp_path, text, message):
    (tmp_path / "c.toml").write_text(text)
    result = run("run", tmp_path / "c.toml")
    assert result.exit_code == 2
    assert message in result.stderr


# Ten lists of nine references each: nine to the ninth values in 355 bytes.
YAML_BOMB = b"a0: &a0 [x]\n" + b"".join(
    b"a%d: &a%d [%s]\n" % (n, n, b",".join([b"*a%d" % (n - 1)] * 9))
    for n in range(1, 10)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"command: [", "is not YAML"),
        (b"command: \xff", "is not YAML"),
        (b"a: !!python/object/apply:os.getcwd []", "is not YAML"),
        (b"", "must hold options by name, like command: quantize"),
        (b"command: walk", "for example command: quantize; there is no 'walk'"),
        (b"command: scores\nbudgets: 3", "no such option: --budgets"),
        (YAML_BOMB, "is not YAML: it holds an alias (*name); write the value out"),
        (b"command: scores\njson: {a: 1}", "json must be a text, a number, true"),
        (b"[" * 5000, "is not YAML: it is nested deeper than 16 levels"),
        (b"{" * 60_000, "is not YAML: it is nested deeper than 16 levels"),
        (b"- " * 5000, "is not YAML: it is nested deeper than 16 levels"),
    ],
)
def test_yaml_files_that_cannot_be_run_say_why(tmp_path, text, message):
    (tmp_path / "c.yml").write_bytes(text)
    result = run("run", tmp_path / "c.yml")
    assert result.exit_code == 2
    assert message in result.stderr


def test_what_is_no_ordinary_file_is_not_run():
    result = run("run", "/dev/zero")
    assert result.exit_code == 2
    assert "/dev/zero is not TOML: it is not an ordinary file" in result.stderr


def test_a_yaml_file_says_what_a_toml_file_says(net, tmp_path):
    (tmp_path / "c.toml").write_text(
        f'command = "budget"\nnetwork = "{net[0]}"\nactivation-bits = 8\n'
        'pin = ["@first=8", "@last=8"]\nstrict = false\njson = true\n'
    )
    (tmp_path / "c.yaml").write_text(
        f"command: budget\nnetwork: {net[0]}\nactivation-bits: 8\n"
        "pin: ['@first=8', '@last=8']\nstrict: no\njson: yes\nthreads:\n"
    )
    toml, yaml = run("run", tmp_path / "c.toml"), run("run", tmp_path / "c.yaml")
    assert toml.exit_code == yaml.exit_code == 0, yaml.output
    assert toml.stdout == yaml.stdout


def test_yaml_without_its_library_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "c.yaml").write_text("command: scores")
    result = run("run", tmp_path / "c.yaml")
    assert result.exit_code == 2
    assert "PyYAML is not installed. Run: pip install 'ompq[yaml]'" in result.stderr

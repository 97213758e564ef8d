"""The oldest and the newest packages that pyproject.toml allows, and those that hosts of notebooks have installed.

uv resolves them: `pip install uv`. Environments are made of wheels alone, as on a machine without a compiler.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = [
    pytest.mark.skipif(find_spec("uv") is None, reason="uv is not installed: pip install uv"),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]
ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = ("test", "hub")
# Quick tests, at least one for each dependency with a bound of its own.
TESTS = [
    "tests/core/test_shared_cache.py",
    "tests/images/test_metadata.py",
    "tests/images/test_picture.py",
    "tests/notebook/test_panel.py",
    "tests/programs/test_store.py",
    "tests/serve/test_real_clients.py",
    "tests/structured/test_grammars.py",
    "tests/text/test_tokenizer.py",
]


class Host(NamedTuple):
    """What a host of notebooks publishes about its image."""

    python: str
    packages: dict[str, str]


# Colab: pip-freeze.gpu.txt of github.com/googlecolab/backend-info, June 2026. Kaggle: github.com/Kaggle/docker-python,
# whose image is Colab's with ipywidgets of its own; it freezes jax, and not numpy.
COLAB = {
    "jax": "0.7.2", "jaxlib": "0.7.2", "numpy": "2.0.2", "flax": "0.11.2", "anyio": "4.13.0",
    "orbax-checkpoint": "0.12.0", "tokenizers": "0.22.2", "safetensors": "0.7.0", "jinja2": "3.1.6",
    "ipywidgets": "7.7.1", "anywidget": "0.9.21", "prompt-toolkit": "3.0.52", "scipy": "1.16.3", "ml-dtypes": "0.5.4",
    "pillow": "11.3.0", "huggingface-hub": "1.17.0", "starlette": "0.52.1", "uvicorn": "0.48.0", "h11": "0.16.0",
    "httptools": "0.8.0", "prometheus-client": "0.25.0", "fsspec": "2025.3.0", "pandas": "2.2.2",
    "matplotlib": "3.10.0", "protobuf": "5.29.6", "tensorstore": "0.1.84", "ipython": "7.34.0",
}  # fmt: skip
HOSTS = {"Colab": Host("3.12", COLAB), "Kaggle": Host("3.12", COLAB | {"ipywidgets": "8.1.5"})}
# Older than what rekindle needs: an installation replaces these, and tutorials/guide/install.md says so.
REPLACED = {"Colab": {"jax", "jaxlib", "flax", "ipywidgets"}, "Kaggle": {"jax", "jaxlib", "flax"}}
PLATFORMS = {
    "linux-x86_64": "x86_64-manylinux_2_28",
    "linux-aarch64": "aarch64-manylinux_2_28",
    "macos-arm64": "aarch64-apple-darwin",
    "windows-x86_64": "x86_64-pc-windows-msvc",
}


def uv(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["UV_PYTHON_DOWNLOADS"] = "never"
    return subprocess.run(
        [sys.executable, "-m", "uv", "--quiet", *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip


def resolved(*options: str, python: str) -> dict[str, str]:
    """The versions that uv chooses for rekindle, of wheels alone."""
    plain = ["--no-header", "--no-annotate", "--only-binary", ":all:", "--python-version", python]
    done = uv("pip", "compile", "pyproject.toml", *plain, *options)
    assert done.returncode == 0, done.stderr
    return dict(line.split("==") for line in done.stdout.splitlines() if "==" in line)


def interpreter(version: str) -> str:
    """A Python of this version, which its own name, this process or pyenv knows."""
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        return sys.executable
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for found in (*sorted(home.glob(f"versions/{version}.*/bin/python{version}")), shutil.which(f"python{version}")):
        if found is not None and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
            return str(found)
    pytest.skip(f"there is no Python {version} here")


@pytest.mark.parametrize(("python", "resolution"), [("3.11", "lowest-direct"), ("3.13", "highest")])
def test_an_environment_of_these_versions_works(python: str, resolution: str, tmp_path: Path) -> None:
    program = interpreter(python)
    extras = [option for name in EXTRAS for option in ("--extra", name)]
    versions = resolved("--resolution", resolution, *extras, python=python)
    if resolution == "lowest-direct":
        assert versions["jax"] == re.search(r"jax>=([\d.]+)", " ".join(PROJECT["dependencies"]))[1]  # type: ignore[index]
    listed = tmp_path / "versions.txt"
    listed.write_text("".join(f"{name}=={version}\n" for name, version in versions.items()))
    place = tmp_path / "environment"
    for command in (["venv", "--python", program, str(place)], ["pip", "install", "--python", str(place)]):
        wheels = ["--only-binary", ":all:", "-r", str(listed)] if command[0] == "pip" else []
        done = uv(*command, *wheels)
        assert done.returncode == 0, done.stderr
    own = str(place / "bin/python")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "toolkit"), str(ROOT / "kernels")])}
    environment.pop("XLA_FLAGS", None)  # conftest.py's, for the jax that runs this test: others don't know them all
    story = [own, "-m", "rekindle", "generate", "Once upon a time", "--max-tokens", "8"]
    done = subprocess.run(story, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and len(done.stdout.split()) > 3, done.stderr
    # Old packages use what new ones of others call deprecated.
    warnings = ["-W", "ignore::DeprecationWarning"] if resolution == "lowest-direct" else []
    tests = [own, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider", *warnings, *TESTS]
    done = subprocess.run(tests, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout[-400:])
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.parametrize("name", HOSTS)
def test_a_host_of_notebooks_keeps_its_numpy_and_gets_one_jax(name: str, tmp_path: Path) -> None:
    """The host keeps packages that are new enough, and all parts of JAX have one version, the GPU plugin included."""
    host, replaced = HOSTS[name], REPLACED[name]
    constraints = tmp_path / "host.txt"
    kept = {package: version for package, version in host.packages.items() if package not in replaced}
    constraints.write_text("".join(f"{package}=={version}\n" for package, version in kept.items()))
    options = ["-c", str(constraints), "--python-platform", "x86_64-manylinux_2_35", "--extra", "cuda"]
    versions = resolved(*options, "--extra", "hub", "--extra", "structured", python=host.python)
    assert versions["numpy"] == host.packages["numpy"]
    assert {package: versions[package] for package in kept.keys() & versions.keys()} == {
        package: kept[package] for package in kept.keys() & versions.keys()
    }
    parts = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda12-pjrt")
    assert {versions[part].rsplit(".post", 1)[0] for part in parts} == {versions["jax"]}
    install = (ROOT / "tutorials/guide/install.md").read_text()
    assert f"jax {host.packages['jax']}" in install and name in install, "what is replaced there is said"


@pytest.mark.parametrize("name", HOSTS)
def test_what_a_host_has_to_replace_is_older_than_the_lower_bound(name: str, tmp_path: Path) -> None:
    """Fails once a package in `REPLACED` no longer has to be replaced."""
    host = HOSTS[name]
    for package in REPLACED[name] - {"jaxlib"}:  # which jax asks for
        constraints = tmp_path / f"{package}.txt"
        constraints.write_text(f"{package}=={host.packages[package]}\n")
        done = uv(
            "pip", "compile", "pyproject.toml", "--python-version", host.python, "-c", str(constraints),
        )  # fmt: skip
        assert done.returncode != 0 and f"rekindle depends on {package}>=" in re.sub(r"\s+", " ", done.stderr)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_no_platform_with_a_wheel_needs_a_compiler(platform: str) -> None:
    versions = resolved("--python-platform", PLATFORMS[platform], "--extra", "images", python="3.12")
    assert versions["jaxlib"].startswith(versions["jax"].rsplit(".", 1)[0])


def test_jax_has_no_wheel_for_macs_with_intels_processors() -> None:
    """When this fails, docs/pages/processors.md and the workflows have to change."""
    done = uv(
        "pip", "compile", "pyproject.toml", "--python-platform", "x86_64-apple-darwin", "--python-version", "3.12",
        "--only-binary", ":all:",
    )  # fmt: skip
    assert done.returncode != 0 and "no wheels with a matching platform tag" in re.sub(r"\s+", " ", done.stderr)

"""`python tests/accelerator/fetch.py FOLDER`: the compilers for GPU and TPU that belong to the installed jax.

They come as wheels, 470 MB of them, and are unpacked into FOLDER/gpu and FOLDER/tpu, outside the environment: installed
next to jax, the CUDA plugin would be loaded by every process. `REKINDLE_COMPILERS=FOLDER` lets the tests find them.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib.metadata import requires, version
from pathlib import Path

CUDA = "13"  # the version of the plugin and of ptxas; tests/helpers/compilers.py names the same driver


def libtpu() -> str:
    """The libtpu that the installed jax asks for, such as "libtpu==0.0.42.*"."""
    wanted = (line.partition(";") for line in requires("jax") or ())
    return next(name.strip() for name, _, when in wanted if name.startswith("libtpu") and "tpu" in when)


def wheels() -> dict[str, list[str]]:
    """What each platform's compiler consists of, as pip takes it."""
    jax = version("jax")
    plugin = [f"jax-cuda{CUDA}-pjrt=={jax}", f"jax-cuda{CUDA}-plugin=={jax}"]
    return {"gpu": [*plugin, f"nvidia-cuda-nvcc=={CUDA}.*", f"nvidia-nvvm=={CUDA}.*"], "tpu": [libtpu()]}


def fetch(platform: str, names: list[str], folder: Path) -> str | None:
    """Download and unpack one compiler, unless it is there; the reason if it can't be had."""
    stamp, target = folder / f"{platform}.txt", folder / platform
    if stamp.exists() and stamp.read_text().split() == names:
        return None
    downloads = folder / "wheels" / platform
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "-d"]
    done = subprocess.run([*pip, str(downloads), *names], capture_output=True, text=True, check=False)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["pip failed"])[-1]
    for wheel in sorted(downloads.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)
        wheel.unlink()
    for tool in target.glob("nvidia/*/bin/*"):
        tool.chmod(0o755)
    stamp.write_text("\n".join(names))
    return None


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for platform, names in wheels().items():
        reason = fetch(platform, names, folder)
        print(f"{platform}: {reason or ', '.join(names)}")
    return 0  # tests are skipped where a compiler is missing


if __name__ == "__main__":
    raise SystemExit(main())

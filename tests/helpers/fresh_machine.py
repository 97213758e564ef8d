"""As a script: a session on a machine with an installation that brought no kernels.

Arguments: the option `precompile`, a folder for programs and kernels; with --without-compiler, numba and llvmlite can't
be imported; with --busy, other programs keep the machine so busy that kernels are compiled once there is a file `go` in
that folder, and the session waits half a second. Prints a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "toolkit"), str(ROOT / "kernels"), str(ROOT / "tests")]
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["REKINDLE_BACKGROUND_BUILD"] = "1"
    os.environ["REKINDLE_CACHE"] = sys.argv[2]
    if "--without-compiler" in sys.argv:
        sys.argv.remove("--without-compiler")
        sys.modules.update(dict.fromkeys(("numba", "llvmlite", "llvmlite.binding")))  # type: ignore[arg-type]

import rekindle  # noqa: E402
from helpers.sessions import engine_of  # noqa: E402
from helpers.small import MODEL, OPTIONS, plain, prompt  # noqa: E402
from rekindle._src.opening import programs as opened_programs  # noqa: E402
from rekindle._src.programs import warming  # noqa: E402
from rekindle._src.session.session import Session  # noqa: E402
from rekindle_kernels.native import background_build, build  # noqa: E402

if __name__ == "__main__" and "--busy" in sys.argv:
    sys.argv.remove("--busy")
    warming.KERNEL_SECONDS = opened_programs.KERNEL_SECONDS = 0.5
    waiting = "import pathlib; any(iter(lambda: b.time.sleep(0.1) or pathlib.Path({folder!r}, 'go').exists(), True))"
    background_build._CODE = background_build._CODE.replace(
        "b.main()", f"{waiting.format(folder=sys.argv[2])}; b.main()"
    )


def native(session: Session) -> dict[str, bool]:
    """Whether each step program that is ready calls native kernels."""
    programs: Any = engine_of(session).runner.programs
    ready = [(key, programs.get(key)) for key in programs.ledger.ready if hasattr(key, "rows")]
    return {key.name: 'custom_call_target="rekindle_' in str(program.as_text()) for key, program in ready}


def main(mode: str, folder: str) -> dict[str, Any]:
    ids = prompt(1, 20)
    with rekindle.open_sync(MODEL, **OPTIONS | {"precompile": mode, "cache_dir": folder}) as session:
        first = session.generate_sync(ids, max_tokens=4, ignore_eos=True)
        at_first = native(session), "numba" in sys.modules
        answers = [(ids, first.token_ids)]
        for seed in range(4):
            done = session.generate_sync(prompt(seed, 20), max_tokens=30, ignore_eos=True)
            answers.append((prompt(seed, 20), done.token_ids))
        numba = at_first[1] or "numba" in sys.modules  # before the plain loop, which traces with kernels
        wrong = sum(tokens != plain(asked, len(tokens)) for asked, tokens in answers)
        session.check_integrity()
        programs: Any = engine_of(session).runner.programs
        foreseen = programs.recipes.kernels()
        return {
            "at_first": at_first[0],
            "at_last": native(session),
            "numba": numba,
            "unforeseen": sorted(build._ready - {*foreseen, *build.PYTHON}),
            "wrong": wrong,
            "refused": sorted(build._failed),
            "origins": sorted({program.origin for program in session.programs()}),
        }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))

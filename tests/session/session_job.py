"""A whole session that serves, saves and captures while its process is ended or the power fails."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helpers.disk_calls import Mark

PROMPTS = 2


class Serving:
    """Prompts are answered and kept, plainly, with a capture and with an intervention. JAX starts in the child."""

    def load(self) -> None:
        import rekindle  # noqa: F401
        from rekindle._src.core.atomic_checkpoint import orbax
        from rekindle._src.session import session  # noqa: F401

        orbax()

    def prepare(self, folder: Path) -> None:
        shutil.copytree(os.environ["REKINDLE_TEST_PROGRAMS"], folder / "cache" / "programs")

    def answers(self, session: Any) -> list[tuple[int, ...]]:
        import rekindle
        from helpers.tiered import MODEL, NEW, prompt

        steer = rekindle.Steer(layer=1, vector=[1.0] * MODEL.config.hidden_size, scale=0.5)
        options: tuple[dict[str, Any], ...] = (
            {}, {"capture": rekindle.Capture({"residual": [1]}, keep=True)}, {"steer": [steer]},
        )  # fmt: skip
        return [
            session.generate_sync(list(prompt(index)), max_tokens=NEW, ignore_eos=True, **given).token_ids
            for index in range(PROMPTS)
            for given in options
        ]

    def expected(self, programs: Path) -> list[tuple[int, ...]]:
        """Return the answers of a session with an empty cache; its programs are left in a folder."""
        from helpers.tiered import opened

        with opened(programs.parent) as session:
            answers = self.answers(session)
            session.save("mine").result_sync()
        shutil.rmtree(programs.parent / "pages")
        shutil.rmtree(programs.parent / "snapshots")
        return answers

    def work(self, folder: Path, mark: Mark) -> None:
        from helpers.tiered import opened
        from rekindle.errors import StoreError

        with opened(folder / "cache") as session:
            for _ in range(2):
                self.answers(session)
                try:
                    mark(str(session.save("mine").result_sync().pages))
                except StoreError as error:
                    print(error)

    def check(self, folder: Path, marks: Sequence[str], *, cut: bool, expected: Any = None) -> None:
        from helpers.tiered import opened

        with opened(folder / "cache", restore="mine" if marks else "auto") as session:
            nodes = session.stats().cache.nodes
            assert not marks or nodes >= int(marks[-1]), f"{nodes} of {marks[-1]} saved pages are there"
            assert expected is None or self.answers(session) == expected, "another text"
            disk = session.cache.stats().disk
            assert disk is not None and disk.damaged == 0, "damage where nothing was damaged"
            session.check_integrity()


SERVING = Serving()

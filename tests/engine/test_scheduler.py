"""The scheduler with a fake runner: outputs equal the plain loop's, whatever shares a step."""

from __future__ import annotations

import pytest

from fakes import FakeModel, make_request
from scheduling import Loop


@pytest.mark.parametrize("overlap", [False, True])
def test_a_batch_gives_what_each_gives_alone(overlap: bool) -> None:
    loop = Loop(overlap=overlap, model=FakeModel(eos_rate=0.05))
    requests = [make_request(f"prompt {index} " * (index + 1), max_tokens=5 + index) for index in range(10)]
    for request in requests:
        loop.submit(request)
    loop.run()
    for request in requests:
        assert loop.output(request) == loop.model.generate(request)

"""Sessions in inspect_ai: `inspect eval TASK --model rekindle/FOLDER -M dtype=float32`.

In code, over a session that is open: `inspect_ai.model.get_model("rekindle/tiny", session=session)`. Needs the extra
`inspect`: `pip install "rekindle[inspect]"`.
"""

from __future__ import annotations

from rekindle._src.integrations.inspect_ai import RekindleAPI, provider

__all__ = ["RekindleAPI", "provider"]

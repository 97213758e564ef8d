"""Sessions in inspect_ai: `inspect eval TASK --model rekindle/FOLDER -M dtype=float32`.

In code, over a session that is open: `inspect_ai.model.get_model("rekindle/tiny", session=session)`. Needs the extra
`inspect`: `pip install "rekindle[inspect]"`.
"""

from rekindle._src.session.inspect_model import RekindleAPI as RekindleAPI
from rekindle._src.session.inspect_model import provider as provider

__all__ = ["RekindleAPI", "provider"]

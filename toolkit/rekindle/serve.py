"""Sessions as OpenAI's API over HTTP; see also `session.serve()` and `rekindle serve MODEL`.

Needs the extra `serve`: `pip install "rekindle[serve]"`.
"""

from rekindle._src.serve.app import app as app
from rekindle._src.serve.server import Server as Server

__all__ = ["Server", "app"]

"""Live views of a session: widgets while the kernel lives, and static HTML that stays in the notebook.

Every view draws itself from its own thread, so the cell that made it ends at once: the session generates in its own
thread anyway, and a button's click reaches the kernel only while no cell runs.
"""

from __future__ import annotations

from rekindle._src.core.activity import Progress
from rekindle._src.notebook.chat import ChatView
from rekindle._src.notebook.dashboard import Dashboard
from rekindle._src.notebook.live import StreamView
from rekindle._src.notebook.tree import TreeView

__all__ = ["ChatView", "Dashboard", "Progress", "StreamView", "TreeView"]

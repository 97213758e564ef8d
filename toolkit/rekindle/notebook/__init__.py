"""Live views of a session: what ipywidgets shows while the kernel lives, and static HTML that stays in the notebook.

Every view draws itself from a thread of its own, so that the cell that made it ends at once: the session generates in
its own thread anyway, and a button's click reaches the kernel only while no cell runs.
"""

from __future__ import annotations

from rekindle.notebook.chat import ChatView
from rekindle.notebook.dashboard import Dashboard
from rekindle.notebook.streaming import StreamView
from rekindle.notebook.tree import TreeView
from rekindle.progress import Progress

__all__ = ["ChatView", "Dashboard", "Progress", "StreamView", "TreeView"]

"""Orbax saves one checkpoint at a time.

Its operations signal each other through counters of the whole process: two saves in two threads, even to different
paths, were seen to create each other's folders or to wait for one another until a timeout. Loading is not affected.
"""

from __future__ import annotations

import threading

ONE_AT_A_TIME = threading.Lock()

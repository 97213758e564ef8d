"""Ports and connections are opened in the places that SECURITY.md names, and nowhere else."""

from __future__ import annotations

import re

from project.sources import ROOT, package_files

_LISTENS = re.compile(
    r"create_server\(|socket\.socket\(\w|create_(?:tcp|unix)_listener\(|start_server\(|\.listen\(|http\.server|socketserver|"
    r"uvicorn\.Config\(|ray\.init\(|jax\.distributed\.initialize\("
)
_CONNECTS = re.compile(
    r"create_connection\(|connect_tcp\(|open_connection\(|\.connect\(\(|urlopen|urllib\.request|http\.client|"
    r"import (?:requests|httpx|aiohttp|websockets|fsspec)|import_module\(\"huggingface_hub\"\)|ray\.init\("
)


def places(pattern: re.Pattern[str]) -> set[str]:
    sources = ((path, path.read_text()) for path in package_files())
    return {
        path.relative_to(ROOT / "toolkit/rekindle/_src").as_posix() for path, text in sources if pattern.search(text)
    }


def test_ports_are_opened_by_what_is_asked_for_only() -> None:
    assert places(_LISTENS) == {
        "serve/listening.py",  # session.serve(), rekindle serve
        "kvcache/sharing.py",  # session.cache.share()
        "processes/joining.py",  # open(processes=…)
        "replicas/on_ray.py",  # rekindle.fleet
    }


def test_nothing_else_uses_the_network() -> None:
    assert places(_CONNECTS) == {
        "models/loading/hub.py",  # a hub id
        "kvcache/sharing.py",  # session.cache.pull()
        "processes/joining.py",  # open(processes=…), rekindle follow
        "replicas/on_ray.py",  # rekindle.fleet
        "core/shared_cache.py",  # an object store
        "serve/fetching.py",  # --allow-urls
        "integrations/mcp/transports.py",  # rekindle.mcp_tools
    }

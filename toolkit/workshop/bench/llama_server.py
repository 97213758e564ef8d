"""llama.cpp's server as the other side of a benchmark: started on a GGUF file, and asked over HTTP."""

from __future__ import annotations

import concurrent.futures
import json
import os
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PATIENCE = 120.0  # seconds until it has to answer


class LlamaServer:
    """A server process with a place for each of `rows` requests."""

    def __init__(self, program: Path, file: Path, *, rows: int, context: int, options: Sequence[str] = ()) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{self.port}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        threads = str(len(os.sched_getaffinity(0)))
        places = ["-np", str(rows), "-c", str(rows * context), "-t", threads, "-tb", threads]
        command = [str(program), "-m", str(file), "--port", str(self.port), "--no-webui", *places, *options]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)
        self._callers = concurrent.futures.ThreadPoolExecutor(rows)

    def __enter__(self) -> LlamaServer:
        end = time.monotonic() + PATIENCE
        while True:
            try:
                with urllib.request.urlopen(f"{self._url}/health", timeout=5):
                    return self
            except (urllib.error.URLError, ConnectionError):
                if self._process.poll() is not None or time.monotonic() > end:
                    said = self.said()
                    self.__exit__()
                    raise SystemExit(f"llama.cpp's server did not start: {said}") from None
                time.sleep(0.2)

    def __exit__(self, *error: object) -> None:
        self._callers.shutdown(cancel_futures=True)
        self._process.kill()
        self._process.wait()
        self._log.close()

    def said(self) -> str:
        """The end of its log."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-1500:]

    def rate(self, prompts: Sequence[str], tokens: int, seed: int, schema: dict[str, Any] | None) -> float:
        """Generated tokens per second of requests that come at once, drawn at temperature 1."""
        fields = {
            "n_predict": tokens, "temperature": 1.0, "seed": seed, "ignore_eos": True, "cache_prompt": False,
            "samplers": ["temperature"], **({} if schema is None else {"json_schema": schema}),
        }  # fmt: skip
        start = time.perf_counter()
        answers = self.answers([{"prompt": prompt, **fields} for prompt in prompts])
        return sum(answer["tokens_predicted"] for answer in answers) / (time.perf_counter() - start)

    def answers(self, asked: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """What it says to requests that come at once."""
        return list(self._callers.map(self._ask, asked))

    def chat(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return its reply to a chat, in OpenAI's form."""
        return self._ask(fields, "/v1/chat/completions")

    def processor_seconds(self) -> float:
        """Seconds of processors that it has used."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _ask(self, fields: dict[str, Any], path: str = "/completion") -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self._url}{path}", json.dumps(fields).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=600) as reply:
                found: dict[str, Any] = json.load(reply)
                return found
        except urllib.error.HTTPError as error:
            raise SystemExit(f"llama.cpp's server refused a request: {error.read().decode()[:500]}") from None
        except (urllib.error.URLError, ConnectionError) as error:
            raise SystemExit(f"llama.cpp's server is gone ({error}): {self.said()}") from None

"""The report of `first_contact.sh`: first_contact.json, and a table of measured and predicted figures.

    python first_contact_report.py FOLDER

FOLDER has a log of each part, and files that say how parts ended. Only decode steps of one row are predicted, from the
bytes and kernels that `predicted_steps.py` counts for an H100, at the memory speed of the GPU that the device's part
names. A line without a prediction is measured alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import harness

REACHED = 0.7  # of the slower prediction: below it, a figure is called below prediction
SECONDS = re.compile(r"^(fresh machine|second process|kernels, no programs) +median ([\d.]+)", re.MULTILINE)


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """Return each part's exit status, seconds and last lines, and its figures where its log ends in JSON."""
    report = {}
    for part in sorted(folder.glob("*.part")):
        name, rc, seconds = part.read_text().split()
        text = (folder / f"{name}.log").read_text(errors="replace")
        entry: dict[str, Any] = {"exit": int(rc), "seconds": int(seconds), "tail": text.splitlines()[-25:]}
        with contextlib.suppress(ValueError):  # no JSON
            entry["figures"] = json.loads(text[text.index("{") :])
        found = SECONDS.findall(text)
        if found:
            entry["figures"] = {f"{when}_s": float(value) for when, value in found}
        report[name] = entry
    return report


def predicted_rates(device: str, shape: str, quantize: str | None) -> tuple[float, float] | None:
    """Return the least and the most tokens/s of one stream; None for a GPU or a shape that is not planned for."""
    import predicted_steps

    from rekindle._src.bench.plan import DEVICES

    names = [name for name in DEVICES if re.search(rf"\b{name}\b", device)]
    if not names or shape not in predicted_steps.COUNTED:
        return None
    counted, scale = predicted_steps.COUNTED[shape], DEVICES["H100"].read / DEVICES[names[0]].read
    on_h100 = predicted_steps.predicted(shape, 1, counted, context=256, quantize=quantize)
    one = dataclasses.replace(on_h100, byte_seconds=on_h100.byte_seconds * scale)
    return 1 / one.most, 1 / one.least


def lines(report: dict[str, dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Return rows of part, figure, measured and predicted."""
    device = str(report.get("device", {}).get("figures", {}).get("device_kind", ""))
    rows = []
    for name, part in report.items():
        figures = part.get("figures", {})
        if part["exit"]:
            rows.append((name, "exit status", str(part["exit"]), ""))
        shape, quantize = str(figures.get("model", "")), figures.get("quantize")
        for key, value in figures.items():
            if isinstance(value, float):
                rows.append((name, key, f"{value:.2f}", ""))
            elif isinstance(value, dict) and re.fullmatch(r"W\d", key):
                rates = predicted_rates(device, shape, quantize) if key == "W1" else None
                for figure, number in value.items():
                    said = ""
                    if rates is not None and figure == "decode_tok_s":
                        said = f"{rates[0]:.0f} to {rates[1]:.0f}"
                        said += ", below prediction" if number < REACHED * rates[0] else ""
                    rows.append((name, f"{key} {figure}", f"{number:.4g}", said))
    return rows


def main() -> int:
    folder = harness.options(__doc__, "folder", folder=Path).folder
    report = read(folder)
    (folder / "first_contact.json").write_text(json.dumps(report, indent=1))
    harness.table("part", "figure", "measured", "predicted")
    for row in lines(report):
        print(f"| {' | '.join(row)} |")
    print(folder / "first_contact.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())

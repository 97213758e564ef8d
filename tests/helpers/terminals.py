"""A model of a terminal's screen, which handles text, line ends, cursor movement and erasing."""

from __future__ import annotations

import re


class Screen:
    """Rows of a terminal of some width, from the first on; what would have broken a word is an error."""

    def __init__(self, columns: int) -> None:
        self.lines, self.row, self.column, self.columns = [""], 0, 0, columns

    def feed(self, text: str) -> list[str]:
        for piece in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[^\x1b]", text):
            if piece == "\n":
                self.row, self.column = self.row + 1, 0
                self.lines += [""] * (self.row == len(self.lines))
            elif piece == "\r":
                self.column = 0
            elif piece.startswith("\x1b["):
                self._steer(piece[-1], piece[2:-1])
            else:
                line = self.lines[self.row]
                self.lines[self.row] = line[: self.column].ljust(self.column) + piece + line[self.column + 1 :]
                self.column += 1
                assert self.column < self.columns, "the terminal would have broken a word itself"
        return [line.rstrip() for line in self.lines]

    def _steer(self, name: str, value: str) -> None:
        if name == "D":
            self.column -= int(value or 1)
        elif name == "A":
            self.row -= int(value or 1)
            assert self.row >= 0
        elif name == "K":
            self.lines[self.row] = self.lines[self.row][: self.column]
        elif name == "J":
            self.lines[self.row :] = [self.lines[self.row][: self.column]]

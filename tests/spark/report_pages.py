"""Reads a report's page as a program does: its tables by their captions, and all tags and attributes in it."""

from html.parser import HTMLParser


class ReportPage(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self._rows: list[list[str]] = []
        self.feed(text)
        self.close()
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in ("meta",):
            self._open.append(tag)
        if tag == "table":
            self._rows = []
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, f"</{tag}> is not expected here"

    def handle_data(self, data: str) -> None:
        if "style" in self._open:
            return
        self.text.append(data)
        if self._open and self._open[-1] == "caption":
            self.tables[data] = self._rows
        elif any(tag in self._open for tag in ("td", "th")) and "title" not in self._open:
            self._rows[-1][-1] += data

    def column(self, caption: str, name: str) -> dict[str, str]:
        """Returns a column of a table, by the first cells of its rows."""
        header, *rows = self.tables[caption]
        place = header.index(name)
        return {row[0]: row[place] for row in rows}

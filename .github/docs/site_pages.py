"""A mkdocs hook: README, the course, the guide, decisions and the papers of .github become linked pages.

Every page is read where it lies in the repository, with the links that GitHub follows. A link to a file that has
a page leads to the page; any other leads to the repository, or becomes plain text where `repo_url` is not set.
"""

from __future__ import annotations

import hashlib
import html
import io
import json
import posixpath
import re
import runpy
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = ".github/docs/pages"
COURSE = "tutorials/course"
PICTURES = "tutorials/source/pictures"
PAPERS = {
    "README.md": "index.md",
    "tutorials/README.md": "course/index.md",
    ".github/CONTRIBUTING.md": "contributing.md",
    ".github/SECURITY.md": "security.md",
    ".github/CHANGELOG.md": "changelog.md",
}
PICTURE = re.compile(r'((?:src|srcset)=")([^":]+\.(?:png|webp))(")')
FORMULA = re.compile(r"^\$\$(.+?)\$\$$|(?<![\w$`])\$([^$`\n]+)\$(?![\w$])", re.MULTILINE)
IMAGE = re.compile(r"(!\[[^\[\]]*\]\()([^()\s:]+)(\))")
PAGE_LINK = re.compile(r'href="(\d\d_\w+)\.ipynb"')  # of an output, whose page is a folder of its own
PREDICTION = re.compile(r"(\*\*Predict\.\*\*.*?)<details><summary>Answer</summary>(.*?)</details>", re.DOTALL)
FIGURE = re.compile(r"\*\*([\d.,]+)\*\*")  # of an answer, which its cell asserts
JUPYTERS = "Output:"  # what JupyterLab shows of a folded output, which has a summary here
FOLDED = {"solution": "Solution", "check": "Check"}  # cells whose code would tell a reader too much
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")


def sources() -> dict[str, str]:
    """Each file of the repository that becomes a page, and its path in the site."""
    pages = dict(PAPERS)
    for path in sorted((ROOT / ".github/decisions").glob("*.md")):
        pages[f".github/decisions/{path.name}"] = f"decisions/{path.name}"
    for path in sorted((ROOT / COURSE).glob("[0-9][0-9]_*.ipynb")):
        pages[f"{COURSE}/{path.name}"] = f"course/{path.stem}.md"
    for path in sorted((ROOT / "tutorials/guide").glob("*.md")):
        pages[f"tutorials/guide/{path.name}"] = f"guide/{path.name.replace('README', 'index')}"
    for path in sorted((ROOT / DOCS).rglob("*.md")):
        pages[f"{DOCS}/{path.relative_to(ROOT / DOCS)}"] = str(path.relative_to(ROOT / DOCS))
    return pages


def relink(text: str, source: str, pages: dict[str, str], repository: str | None) -> str:
    """`text` of the file `source` with its relative links as the site needs them."""

    def one(match: re.Match[str]) -> str:
        words, link = match.groups()
        if re.match(r"[a-z]+:|#", link):
            return match[0]
        if link.startswith("../../issues") and source == "README.md":  # on its host, next to the files
            return f"[{words}]({repository.rstrip('/')}/issues)" if repository else words
        path, _, anchor = link.partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        here = posixpath.dirname(pages[source]) or "."
        if target == ".github/decisions":
            target = next(name for name in pages if name.startswith(target))
        if target in pages:
            return f"[{words}]({posixpath.relpath(pages[target], here)}{'#' * bool(anchor)}{anchor})"
        if not (ROOT / target).exists():
            return match[0]  # mkdocs warns of it, which is an error in strict mode
        if repository:
            return f"[{words}]({repository.rstrip('/')}/tree/HEAD/{target})"
        return words

    def picture(match: re.Match[str]) -> str:
        """HTML stays as it is in a page, whose address is a folder of its own."""
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        target = target.replace(PICTURES, "pictures", 1)
        folder = "." if pages[source] == "index.md" else pages[source].removesuffix(".md")
        return match[1] + posixpath.relpath(target, folder) + match[3]

    def image(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        here = posixpath.dirname(pages[source]) or "."
        return match[1] + posixpath.relpath(target.replace(PICTURES, "pictures", 1), here) + match[3]

    outside_code: list[str] = re.split(r"(^```.*?^```)", text, flags=re.MULTILINE | re.DOTALL)
    outside_code[::2] = [PICTURE.sub(picture, IMAGE.sub(image, LINK.sub(one, part))) for part in outside_code[::2]]
    return "".join(outside_code)


def drawn(match: re.Match[str]) -> str:
    """A formula as an SVG in the text's colour: pages load no scripts to set it."""
    from matplotlib import rc_context
    from matplotlib.font_manager import FontProperties
    from matplotlib.mathtext import math_to_image

    block, inline = match.groups()
    target = io.StringIO()
    with rc_context({"svg.fonttype": "path", "mathtext.fontset": "cm"}):
        math_to_image(f"${block or inline}$", target, prop=FontProperties(size=15 if block else 12), format="svg")
    svg = target.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<\?xml.*?\?>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="patch_1">.*?</g>', "", svg, flags=re.DOTALL)  # a white background
    name = hashlib.sha256((block or inline).encode()).hexdigest()[:8]  # identifiers are the whole page's
    svg = re.sub(r'((?:id=|href=)"#?)', rf"\g<1>f{name}-", svg)
    svg = re.sub(r"\s*\n\s*", " ", svg).replace("<svg ", '<svg style="fill: currentColor; vertical-align: middle" ', 1)
    return f"<p>{svg}</p>" if block else svg


def folded(source: str) -> str:
    """Markdown of a cell for the site: answers fold with Markdown inside, formulas are drawn, guesses have a field."""
    source = PREDICTION.sub(guess, source)
    return FORMULA.sub(drawn, source.replace("<details>", '<details markdown="1">'))


def guess(match: re.Match[str]) -> str:
    """A prediction with a field that compares the reader's numbers with the answer's. `site.js` shows and reads it."""
    figures = " ".join(figure.replace(",", "") for figure in FIGURE.findall(match[2]))
    if not figures:
        return match[0]
    field = '<label>Your guess: <input size="12"></label> <output></output>'
    asked = f'{match[1]}<p class="guess" data-figures="{figures}" hidden>{field}</p>'
    return f"{asked}\n\n{match[0].removeprefix(match[1])}"


def raw(output: str) -> str:
    """An output as HTML: in a fold, Markdown would read the scripts of views."""
    text = re.fullmatch(r"```text\n(.*)\n```", output, re.DOTALL)
    return f"<pre><code>{html.escape(text[1]).replace(chr(10), '&#10;')}</code></pre>" if text else output


def notebook(path: Path, repository: str | None = None) -> str:
    """A notebook with its outputs as Markdown."""
    links = f'<a href="../{path.name}" download>Download the notebook</a>'  # beside the page's folder
    if repository and (match := re.match(r"https://github\.com/([^/]+/[^/]+?)/?$", repository)):
        colab = f"https://colab.research.google.com/github/{match[1]}/blob/HEAD/{COURSE}/{path.name}"
        binder = f"https://mybinder.org/v2/gh/{match[1]}/HEAD?labpath={COURSE}/{path.name}"
        links += f" · [Open in Colab]({colab}); there, `%pip install git+{match[0].rstrip('/')}` comes first"
        links += f" · [Open in Binder]({binder})"
    parts, before = [], ""
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            before = source
            parts.append(folded(source))
            if len(parts) == 1:
                title, _, rest = parts[0].partition("\n")
                parts[0] = f"{title}\n\n{links}\n{rest}"
            continue
        if "yours" in cell["metadata"].get("tags", ()):
            continue  # to write in, which a site's reader can't
        asked, code = "**Predict.**" in before, f"```python\n{source}\n```"
        for tag in cell["metadata"].get("tags", ()):
            if tag in FOLDED:
                code = f'<details markdown="1"><summary>{FOLDED[tag]}</summary>\n\n{code}\n\n</details>'
        parts.append(code)
        shown = []
        for output in cell["outputs"]:
            if "".join(output.get("data", {}).get("text/plain", "")) == JUPYTERS:
                continue
            data = {kind: "".join(value) for kind, value in output.get("data", {}).items() if "json" not in kind}
            if "image/png" in data:
                shown.append(f'<img alt="a plot" src="data:image/png;base64,{data["image/png"].strip()}">')
            elif "text/html" in data:
                linked = PAGE_LINK.sub(r'href="../\1/"', data["text/html"])
                shown.append("<div>" + re.sub(r"\n\s*\n", "\n", linked) + "</div>")
            else:
                text = "".join(output.get("text", "")) or data.get("text/plain", "")
                shown.append(f"```text\n{text.rstrip()}\n```")
        if shown and ("solution" in cell["metadata"].get("tags", ()) or asked):
            shown = ["".join(['<details class="output"><summary>Output</summary>', *map(raw, shown), "</details>"])]
        parts += shown
    return "\n\n".join(parts)


def on_config(config: Any) -> Any:
    """The repository's address, and the navigation's folders, one entry for each of their pages."""
    config.repo_url = config.repo_url or runpy.run_path(str(ROOT / ".ci/address.py"))["address"](ROOT)
    pages = sources().values()
    for section in config.nav:
        inside = next(iter(section.values()))
        for entry in (section, *(inside if isinstance(inside, list) else ())):
            for title, value in entry.items() if isinstance(entry, dict) else ():
                if isinstance(value, str) and value.endswith("/"):
                    entry[title] = [page for page in pages if page.startswith(value)]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds what does not lie in docs_dir."""
    from mkdocs.structure.files import File

    for source, page in sources().items():
        if not source.startswith(DOCS):
            path = ROOT / source
            text = notebook(path, config.repo_url) if path.suffix == ".ipynb" else path.read_text()
            files.append(File.generated(config, page, content=text))
            if path.suffix == ".ipynb":
                files.append(File.generated(config, f"course/{path.name}", abs_src_path=str(path)))
    for picture in sorted((ROOT / PICTURES).iterdir()):
        files.append(File.generated(config, f"pictures/{picture.name}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Links of every page."""
    pages = sources()
    source = next(name for name, target in pages.items() if target == page.file.src_uri)
    return relink(markdown, source, pages, config.repo_url)

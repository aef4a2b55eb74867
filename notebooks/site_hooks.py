"""What the site adds to MkDocs: notebooks as pages with their outputs, doctests as code blocks."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.config_options import DocsDir
from mkdocs.structure.files import File, Files

# MkDocs wants its pages in a folder below the configuration, so as not to publish what else is in
# that folder; here `exclude_docs` lists it.
DocsDir.post_validation = lambda self, config, key_name: None

DOCTEST = re.compile(r"^( *)>>> .*?(?=\n\s*\n(?! *>>> )|\Z)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Replace each notebook by a Markdown page and its pictures, and add the changelog."""
    changelog = Path(__file__).parents[1] / "CHANGELOG.md"
    files.append(File.generated(config, "changelog.md", content=changelog.read_text("utf-8")))
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(file)
        name = Path(file.src_uri).stem
        page, pictures = as_markdown(name, json.loads(file.content_string))
        files.append(File.generated(config, f"{name}.md", content=page))
        for picture, content in pictures.items():
            files.append(File.generated(config, picture, content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let links to notebooks lead to their pages."""
    return re.sub(r"\]\(([\w/.]+)\.ipynb\)", r"](\1.md)", markdown)


def as_markdown(name: str, notebook: dict[str, Any]) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as Markdown, and its pictures by file name."""
    parts, pictures = [], {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else fenced("python", source))
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                picture = f"{name}_{len(pictures)}.png"
                pictures[picture] = base64.b64decode("".join(data["image/png"]))
                parts.append(f"![Output of the cell above]({picture})")
            elif text := "".join(output.get("text", data.get("text/plain", []))):
                parts.append(fenced("text", text.rstrip()))
    return "\n\n".join(parts), pictures


def fenced(language: str, text: str) -> str:
    """Return text as a fenced block."""
    return f"```{language}\n{text}\n```"


class FencedDoctests(griffe.Extension):
    """Shows the doctests of docstrings as code; Markdown takes `>>>` for quotations."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence the doctests of an object's docstring."""
        if obj.docstring:
            obj.docstring.value = DOCTEST.sub(
                lambda found: fenced("pycon", found.group()), obj.docstring.value
            )

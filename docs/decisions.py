"""A hook of mkdocs: every file of docs/decisions is in the navigation, and a page lists them with what was decided."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

FOLDER = Path(__file__).parent / "decisions"
INDEX = "decisions/index.md"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the decisions to the end of the navigation, in their order."""
    pages = [f"decisions/{path.name}" for path in sorted(FOLDER.glob("*.md"))]
    config.nav = [*(config.nav or []), {"Decisions": [INDEX, *pages]}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page that lists them."""
    files.append(File.generated(config, INDEX, content=index()))
    return files


def index() -> str:
    """A line per decision: its title, and the sentence that states it."""
    lines = ["# Decisions", "", "Why things are as they are, with the numbers that settled it.", ""]
    for path in sorted(FOLDER.glob("*.md")):
        text = path.read_text()
        title = text.partition("\n")[0].removeprefix("# ")
        stated = re.search(r"\*\*Decision\.\*\*\s+(.+?)\.(?:\s|$)", text, re.DOTALL)
        sentence = f": {' '.join(stated[1].split())}." if stated else ""
        lines.append(f"* [{title}]({path.name}){sentence}")
    return "\n".join(lines) + "\n"

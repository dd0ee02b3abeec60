"""The figures in README are those of the committed records."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def report(*arguments: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "bench" / "report.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_readme_is_what_the_records_say() -> None:
    done = report("--check")
    assert done.returncode == 0, done.stderr


def test_an_edited_figure_is_noticed(tmp_path: Path) -> None:
    for name in ("README.md", "bench/report.py", "bench/records.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    results = tmp_path / "bench" / "results"
    results.mkdir()
    for file in (ROOT / "bench" / "results").glob("*.jsonl"):
        (results / file.name).write_bytes(file.read_bytes())
    readme = tmp_path / "README.md"
    assert report("--check", root=tmp_path).returncode == 0
    begin = readme.read_text().index("<!-- begin step -->")
    text = readme.read_text()
    digit = next(i for i in range(begin, len(text)) if text[i] == "0" and text[i + 1] == ".")
    readme.write_text(text[:digit] + "9" + text[digit + 1 :])
    done = report("--check", root=tmp_path)
    assert done.returncode == 1
    assert "differs from the records" in done.stderr
    assert report(root=tmp_path).returncode == 0
    assert readme.read_text() == text

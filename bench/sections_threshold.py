"""Tables of what TopK and Threshold leave behind; None where there are no records."""

import re
import statistics

from book import Book, Key, Record, markdown, origin

CASES = {
    "logreg": "logistic regression, images sorted by label",
    "logreg_shuffled": "logistic regression, images in random order",
    "digits_threshold": "a perceptron",
}
_COMPARED = (
    (r"dense", "dense"),
    (r"topk([\d.]+)", "TopK({})"),
    (r"threshold_rule([\d.]+)", "Threshold.from_density({})"),
    (r"threshold_bytes_of_topk([\d.]+)", "Threshold, at most the bytes of TopK({})"),
    (r"threshold_entries_of_topk([\d.]+)", "Threshold, at most the entries of TopK({})"),
)


def runs(book: Book, case: str) -> dict[str, list[Record]]:
    """Provider -> the accumulated errors of its seeds."""
    providers = dict.fromkeys(
        row["provider"] for row in book.rows if (row["case"], row["metric"]) == (case, "accumulated_error")
    )
    found = {p: book.series(case, Key("training", p, "accumulated_error"), "seed") for p in providers}
    return {provider: rows for provider, rows in found.items() if rows}


def title(provider: str) -> str | None:
    """A row of the table in words; None: a run that is only a point on the way to a match."""
    matches = ((re.fullmatch(pattern, provider), words) for pattern, words in _COMPARED)
    return next((words.format(*match.groups()) for match, words in matches if match), None)


def table(book: Book) -> str | None:
    """What is left behind, of as many bytes or entries."""
    tables = [_table(book, case) for case in CASES]
    return "\n\n".join(one for one in tables if one) or None


def _table(book: Book, case: str) -> str | None:
    found = {words: rows for p, rows in runs(book, case).items() if (words := title(p))}
    if not found:
        return None
    found = dict(sorted(found.items(), key=lambda item: item[0] != "dense"))
    metric, words = ("accuracy", "test accuracy") if case == "digits_threshold" else ("suboptimality", "f - f*")
    lines = []
    for name, rows in found.items():
        scores = book.series(case, Key("training", rows[0]["provider"], metric), "seed")
        mean = statistics.mean(row["value"] for row in scores)
        lines.append([
            name,
            "-" if rows[0]["threshold"] is None else f"{rows[0]['threshold']:.3g}",
            f"{rows[0]['lr']:.3g}",
            f"{statistics.mean(row['bytes_sent'] for row in rows) / 1e6:.2f} MB",
            "-" if name == "dense" else f"{statistics.mean(row['entries'] for row in rows) / 1e3:.1f} k",
            f"{statistics.mean(row['value'] for row in rows):.4g}",
            f"{100 * mean:.2f} %" if metric == "accuracy" else f"{mean:.5f}",
        ])  # fmt: skip
    used = [row for rows in found.values() for row in rows]
    one = used[0]
    note = (
        f"{CASES[case].capitalize()}: scikit-learn's digits, {one['parameters']} parameters, {one['steps']} steps, "
        f"{one['world_size']} ranks, Residual(), momentum {one['momentum']:g}; "
        f"{len({r['seed'] for r in used})} seed(s). {origin(used)}"
    )
    header = ["", "threshold", "lr", "sent per rank", "entries per rank", "accumulated error", words]
    return markdown(header, lines) + "\n\n" + note

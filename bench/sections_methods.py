"""What each method's compress side costs an element; None where there are no records."""

from book import CASES, Book, Key, Record, markdown, origin

WORDS = {
    "topk": "TopK(0.001)",
    "topk_sampled": "the same, sampled selection",
    "topk_tensor": "the same, tensor by tensor",
    "threshold": "Threshold, of TopK's own threshold",
    "randomk": "RandomK(0.001)",
}


def table(book: Book) -> str | None:
    """A table for each case."""
    return "\n\n".join(one for case in book.cases("methods") if (one := _table(book, case))) or None


def _table(book: Book, case: str) -> str | None:
    lines, used = [], []
    for provider, words in WORDS.items():
        found: dict[str, Record | None] = {
            metric: book.find(case, Key("methods", provider, metric)) for metric in ("ms", "of_pass", "kernels")
        }
        ms, of_pass, kernels = found.values()
        if ms is None or of_pass is None:
            continue
        used += [ms, of_pass]
        lines.append([
            words, f"{ms['value']:.3f}", f"{1e9 * ms['value'] / ms['elements']:.2f}",
            f"{ms['bytes'] / ms['elements']:.0f}", f"{of_pass['value']:.2f}x",
            "-" if kernels is None else f"{kernels['value']:.0f}", f"{ms['payload_bytes'] / 1e3:.0f} kB",
            f"{4 * ms['elements'] / ms['payload_bytes']:.0f}x",
        ])  # fmt: skip
    if not lines:
        return None
    header = [
        CASES.get(case, case), "ms", "ps an element", "bytes an element", "of the pass", "launches", "payload",
        "fewer bytes",
    ]  # fmt: skip
    return markdown(header, lines) + f"\n\n{origin(used)}"

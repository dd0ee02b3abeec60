"""What each method's compress side costs an element, and what JointSpar saves; None where there are no records."""

from book import CASES, Book, Key, Record, markdown, origin

WORDS = {
    "topk": "TopK(0.001)",
    "topk_sampled": "the same, sampled selection",
    "topk_sidco": "the same, SIDCo's threshold",
    "topk_tensor": "the same, tensor by tensor",
    "block_topk": "BlockTopK(0.001)",
    "cat": "CAT(PacketCost())",
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


def jointspar(book: Book) -> str | None:
    """Time and FLOPs of forward and backward against the budget."""
    return "\n\n".join(one for case in book.cases("jointspar") if (one := _jointspar(book, case))) or None


def _jointspar(book: Book, case: str) -> str | None:
    metrics = ("flops_of_dense", "forward_ms", "backward_ms", "ms", "ms_of_dense")
    rows = [row for row in book.rows if (row["bench"], row["case"], row["metric"]) == ("jointspar", case, metrics[-1])]
    lines, used = [], []
    for provider in sorted({row["provider"] for row in rows}, reverse=True):
        found = [book.find(case, Key("jointspar", provider, metric)) for metric in metrics]
        flops, forward, backward, whole, of_dense = found
        if flops is None or forward is None or backward is None or whole is None or of_dense is None:
            continue
        used += [of_dense]
        lines.append([
            f"{of_dense['budget']:g}", f"{100 * of_dense['active_share']:.0f} %", f"{flops['value']:.2f}",
            f"{forward['value']:.1f}", f"{backward['value']:.1f}", f"{whole['value']:.1f}", f"{of_dense['value']:.2f}",
        ])  # fmt: skip
    if not lines:
        return None
    header = [
        f"{CASES.get(case, case)}: budget", "of the gradient's bytes", "FLOPs, of dense", "forward, ms", "backward, ms",
        "both", "of dense",
    ]  # fmt: skip
    return markdown(header, lines) + f"\n\n{origin(used)}"

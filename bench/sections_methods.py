"""What each method's compress side costs an element, and what JointSpar saves; None where there are no records."""

from book import CASES, Book, Key, Record, markdown, origin

WORDS = {
    "topk": "TopK(0.001)",
    "topk_sampled": "the same, sampled selection",
    "topk_sidco": "the same, SIDCo's threshold",
    "topk_tensor": "the same, tensor by tensor",
    "block_topk": "BlockTopK(0.001)",
    "cat": "CAT(PacketCost())",
    "cat_quantized": "the same, signs",
    "cat_stochastic": "the same, drawn",
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


BLOCKS = {
    "": "layers",
    "stages": "stages",
    "most": "all but the last stage, the last",
    "early": "all but the last stage",
}
SIZES = CASES | {"resnet50_256": "ResNet-50, 256 images", "gpt2_16": "GPT-2 small, 16 x 1024 tokens"}


def jointspar(book: Book) -> str | None:
    """Time and FLOPs of a step against the budget and the blocks."""
    return "\n\n".join(one for case in book.cases("jointspar") if (one := _jointspar(book, case))) or None


def _jointspar(book: Book, case: str) -> str | None:
    rows = [row for row in book.rows if (row["bench"], row["case"], row["metric"]) == ("jointspar", case, "ms")]
    lines, used = [], []
    for provider in sorted({row["provider"] for row in rows}, key=_order):
        whole, flops, of_dense, forward, backward, update = (
            book.find(case, Key("jointspar", provider, metric))
            for metric in ("ms", "flops_of_dense", "ms_of_dense", "forward_ms", "backward_ms", "update_ms")
        )
        if whole is None or forward is None or backward is None:
            continue
        used += [whole]
        budget, blocks, optimizer = _parts(provider)
        optimizer = optimizer if update else "-"  # not in the times
        lines.append([
            "dense" if budget is None else BLOCKS[blocks], "-" if budget is None else f"{budget:g}", optimizer,
            f"{100 * whole['active_share']:.0f} %", *(f"{r['value']:.2f}" if r else "-" for r in (flops, of_dense)),
            f"{whole['value']:.1f}", f"{forward['value']:.1f}", f"{backward['value']:.1f}",
            f"{update['value']:.1f}" if update else "-",
        ])  # fmt: skip
    if not lines:
        return None
    header = [
        f"{SIZES.get(case, case)}: blocks", "budget", "SGD", "of the gradient's bytes", "FLOPs, of dense",
        "time, of dense", "ms", "forward", "backward", "draw and step",
    ]  # fmt: skip
    return markdown(header, lines) + f"\n\n{origin(used)}"


def _parts(provider: str) -> tuple[float | None, str, str]:
    """Budget, blocks and whose SGD it is of "dense", "jointspar0.5", "jointspar0.5_stages", "jointspar0.5_torch"."""
    first, *more = provider.split("_")
    optimizer = "torch's" if "torch" in more else "ours"
    budget = None if first == "dense" else float(first.removeprefix("jointspar"))
    return budget, next((word for word in more if word != "torch"), ""), optimizer


def _order(provider: str) -> tuple[bool, bool, int, float]:
    budget, blocks, optimizer = _parts(provider)
    return optimizer != "ours", budget is not None, list(BLOCKS).index(blocks), -(budget or 0.0)

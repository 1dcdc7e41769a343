"""Source lines without docstrings, comments and blanks, by package: ``python -m tests.suite.sizes``."""

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("flotilla", "services", "shared")
SILENT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def source_lines(text: str) -> tuple[set[int], set[int]]:
    """Return the numbers of the lines that hold source, and of those among them that import."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SILENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    imports: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(_span(node))
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.update(_span(node))
    return lines, imports & lines


def _span(node: ast.stmt) -> range:
    assert node.end_lineno is not None
    return range(node.lineno, node.end_lineno + 1)


def main() -> None:
    """Print lines and the share of imports of each package, then of the services, the product and the benchmarks."""
    lines, imports = Counter[str](), Counter[str]()
    for top in (*PRODUCT, "benchmarks"):
        for path in (ROOT / top).rglob("*.py"):
            found, importing = source_lines(path.read_text(encoding="utf-8"))
            for name in {"/".join(path.relative_to(ROOT).parts[:-1][:2]), top, "product" if top in PRODUCT else top}:
                lines[name] += len(found)
                imports[name] += len(importing)
    for name in sorted(lines):
        print(f"{name:24} {lines[name]:6,} lines, {imports[name] / max(1, lines[name]):5.1%} of them imports")


if __name__ == "__main__":
    main()

"""Cut a shell script into commands of raw words: quotes, brackets, comments, here-documents and redirections."""

import re
from collections.abc import Iterator

from flotilla.importers.hydra import problem
from flotilla.importers.shell_flow import BRANCH_ENDS, JOINS

ASSIGNMENT = re.compile(r"^([A-Za-z_]\w*)(\+?)=")


def commands(text: str, source: str) -> Iterator[tuple[int, list[str]]]:
    """Cut a script into commands of raw words, with the line where each begins; what joins two, and
    what ends a branch of ``case``, is one by itself.

    Raises:
        InvalidSpec: a quote, a bracket or a here-document has no end, or there is a function; ``errors`` has the line.
    """
    words: list[str] = []
    word = ""
    position, number, first = 0, 1, 1
    while position <= len(text):
        letter = text[position : position + 1]
        if letter == "\\" and text[position + 1 : position + 2] == "\n":
            letter, position, number = " ", position + 1, number + 1
        if (letter and letter in "'\"$(`") or (letter == "\\" and position + 1 < len(text)):
            end = atom(text, position, f"{source}:{number}", in_assignment=bool(ASSIGNMENT.match(word)))
            word, number = word + text[position:end], number + text.count("\n", position, end)
            position = end
            continue
        if letter == "#" and not word:
            position = _end_of_line(text, position)
            continue
        if text.startswith("<<", position) and not text.startswith("<<<", position):
            body, position, number = _heredoc(text, position, number, source)
            words += ["<<", body]
            continue
        is_end = not letter or letter in "\n;|&<>"
        if is_end or letter.isspace():
            if word and (first := first if words else number):
                words.append(word)
            word = ""
        else:
            word += letter
        if letter and letter in "<>":
            if words and words[-1].isdigit() and text[position - 1].isdigit():
                words.pop()  # the descriptor of 2>&1
            position = _redirection(text, position)
        elif is_end:
            if words:
                yield first, words
            words = []
            if letter and text[position : position + 2] in JOINS | BRANCH_ENDS:
                yield number, [text[position : position + 2]]
                position += 1
        number += letter == "\n"
        position += 1


def _end_of_line(text: str, position: int) -> int:
    end = text.find("\n", position)
    return len(text) if end < 0 else end


def _redirection(text: str, position: int) -> int:
    """Skip ``> file``, ``>> file``, ``>&1``; gives the last position of it."""
    match = re.compile(r"[<>]+&?[ \t]*[^\s;|&]*").match(text, position)
    assert match is not None
    return match.end() - 1


def _heredoc(text: str, position: int, number: int, source: str) -> tuple[str, int, int]:
    match = re.compile(r"<<-?[ \t]*['\"]?(\w+)['\"]?[^\n]*\n").match(text, position)
    if match is None:
        raise problem(f"{source}:{number}", "<<", "a here-document needs its word")
    end = re.compile(rf"^[ \t]*{match[1]}[ \t]*$", re.MULTILINE).search(text, match.end())
    if end is None:
        raise problem(f"{source}:{number}", match[1], "a here-document needs its end")
    body = text[match.end() : end.start()].replace("\\\n", " ")
    return body, end.end(), number + text.count("\n", position, end.end())


def atom(text: str, position: int, where: str, *, in_assignment: bool) -> int:
    """Find the end of a quoted or bracketed piece that starts here."""
    letter = text[position]
    if letter == "\\":
        return position + 2
    if letter == "$":
        follows = text[position + 1 : position + 2]
        if follows in {"(", "{"}:
            return matching(text, position + 1, follows, {"(": ")", "{": "}"}[follows], where) + 1
        return position + 1
    if letter == "(":
        if not in_assignment:
            raise problem(where, "(", "functions and subshells are not followed: give the final values")
        return matching(text, position, "(", ")", where) + 1
    end = position + 1
    while end < len(text) and text[end] != letter:
        end += 2 if text[end] == "\\" and letter == '"' else 1
    if end >= len(text):
        raise problem(where, text[position : position + 20], f"a {letter} needs its end")
    return end + 1


def matching(text: str, start: int, opening: str, closing: str, where: str) -> int:
    """Find the bracket that closes the one at ``start``.

    Raises:
        InvalidSpec: there is none.
    """
    depth = 0
    for position in range(start, len(text)):
        depth += (text[position] == opening) - (text[position] == closing)
        if depth == 0:
            return position
    raise problem(where, text, f"a {opening} needs its {closing}")

"""Messages in Python sources: the texts of exceptions, warnings and log lines, and of the functions
that print errors and hints of a command."""

import ast
import re

from c_source import FIELD, HINT, WORDS_OF_A_PART, Text

# Functions whose arguments are messages. An exception is a message where it is raised.
ALL = {"fail", "misuse"}  # hints follow the message
FIRST = {"complain", "hint", "warn", "warning", "info", "error", "exit"}
REASONS = {"Damaged", "_damaged"}  # a caller says what is damaged
NO_PARTS = {"model_options.py", "structs.py", "masks.py"}


def field(node):
    """How the page shows a value: by its name, or as "…"."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        return field(node.args[0]) if node.func.attr == "join" else "…"
    if isinstance(node, ast.Call) and len(node.args) == 1:
        return field(node.args[0])
    if isinstance(node, (ast.GeneratorExp, ast.ListComp)):
        return field(node.generators[0].iter)
    if isinstance(node, ast.Subscript):
        return field(node.value)
    if isinstance(node, ast.IfExp):
        found = [texts(branch) for branch in (node.body, node.orelse)]
        if all(len(each) == 1 for each in found):
            return "{" + "|".join(each[0] for each in found) + "}"
    name = getattr(node, "id", None) or getattr(node, "attr", None)
    return f"<{name.strip('_').lower()}>" if name and len(name) > 1 else "…"


def texts(node):
    """The texts that an expression can be; none if it is no text."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.JoinedStr):
        return [
            "".join(p.value if isinstance(p, ast.Constant) else field(p.value) for p in node.values)
        ]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = texts(node.left), texts(node.right)
        if left or right:
            return [a + b for a in left or [field(node.left)] for b in right or [field(node.right)]]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        values = node.right.elts if isinstance(node.right, ast.Tuple) else [node.right]
        return [formatted(text, values) for text in texts(node.left)]
    if isinstance(node, ast.IfExp):
        return texts(node.body) + texts(node.orelse)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr == "format":
            return [text.replace("{}", "…") for text in texts(node.func.value)]
    return []


def formatted(text, values):
    left = list(values)
    return FIELD.sub(lambda m: "%" if m[3] == "%" else field(left.pop(0)) if left else "…", text)


def name_of(function):
    return getattr(function, "attr", None) or getattr(function, "id", "")


def of_call(node):
    name = name_of(node.func)
    if name == "write" and ast.unparse(node.func) == "sys.stderr.write":
        yield from (text for argument in node.args[:1] for text in texts(argument))
    elif name == "print" and any(k.arg == "file" for k in node.keywords):
        yield from (text for argument in node.args[:1] for text in texts(argument))
    elif name in ALL:
        for number, argument in enumerate(node.args):
            yield from ((HINT if number else "") + text for text in texts(argument))
    elif name in FIRST and node.args:
        for text in texts(node.args[0]):
            yield (HINT if name == "hint" else "") + formatted(text, node.args[1:])


def of_exception(call):
    """kvant.Error(what, status, reason) reads "what: reason"."""
    name, values = name_of(call.func), call.args
    if name == "Error" and len(values) == 3:
        what, reason = (texts(values[i]) or [field(values[i])] for i in (0, 2))
        yield from (Text(f"{w}: {r}", False) for w in what for r in reason)
    else:
        for value in values[:1]:
            yield from (Text(text, name in REASONS) for text in texts(value))


def messages(path):
    """Yields a Text for each message of a file, in order."""
    tree = ast.parse(path.read_text())
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            found += [(node, Text(text, False)) for text in of_call(node)]
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            if name_of(node.exc.func) != "Leave":
                found += [(node, text) for text in of_exception(node.exc)]
        elif isinstance(node, (ast.Return, ast.Assign)) and path.name not in NO_PARTS:
            value = node.value
            found += [(node, Text(text, True)) for text in texts(value) if is_part(text)]
    for _, text in sorted(found, key=lambda pair: (pair[0].lineno, pair[0].col_offset)):
        if re.search("[A-Za-z]", re.sub("<[^>]*>", "", text.text)):
            yield text


def is_part(text):
    words = re.sub("<[^>]*>", "", text).split()
    return (
        len(words) >= WORDS_OF_A_PART and "\n" not in text and not text.startswith(("<kvant", " "))
    )

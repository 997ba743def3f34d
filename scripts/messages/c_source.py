"""Messages in C sources: the texts that functions such as kvant_fail() or complain() receive.

A text is a joined literal, or a choice between literals. Its fields (%s, %u) are shown by the names
of their arguments. The script finds functions that only pass a `const char *` on to such a function
("damaged", "invalid"). Each text in a call of such a function becomes a whole message.
"""

import re
from typing import NamedTuple

# Functions that receive a message, and which argument it is.
MESSAGES = {
    "kvant_fail": 2,
    "kvant_cuda_refuse": 2,
    "kvp_error": 0,
    "kvp_info": 0,
    "kvp_note": 0,
    "kvp_kv_refuse": 1,
    "complain": 0,
    "hint": 0,
    "report_line": 1,
}
HINT = "hint: "
STANDARD_ERROR = "fprintf"  # a message if it begins with "kvant: "
# Functions that receive a part of a message, most often its reason.
PARTS = {"snprintf": 2, "kvant_append": 2, "refuse": 1, "test_note": 1, "gpu_add": 2, "stop": 1}
# Functions and macros whose texts are no messages: help (docs/kvant.1 has it), results on standard
# output, tables of codecs (reference/codecs.md has them), assembly, and checks of the compiler.
OTHERS = re.compile(
    r"ARG_\w+|ENGINE_OPTION_\w+|KVANT_(FAMILY|CHOICE|NUMBER|FLAG)|CHOICE|NUMBER|FLAG|printf|puts"
    r"|fputs|volatile|asm|_?[Ss]tatic_assert|_Pragma|put|take|CELL_TEXT|progress_add|strstr|strncmp"
    r"|sscanf"
    r"|fscanf|text_check|print_option|row|calls|reads|gpu_did|ok|args_unknown_word"
)
WORDS_OF_A_PART = 3

TOKEN = re.compile(
    r"//[^\n]*|/\*.*?\*/|\#[ \t]*(?:define|include|pragma|if|elif|endif|else|undef|error)"
    r"(?:[^\n\\]|\\.|\\\n)*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'"
    r"|[A-Za-z_]\w*|\d[\w.]*|\s+|->|.",
    re.DOTALL,
)
DEFINE = re.compile(
    r"^[ \t]*#[ \t]*define[ \t]+([A-Z]\w*)(?:[ \t]|\\\n)+(\"(?:[^\n\\]|\\.|\\\n)*)", re.MULTILINE
)
FIELD = re.compile(r"%[-+ #0]*(\*|\d+)?(?:\.(\*|\d+))?(?:hh|h|ll|l|z|j|t)?([a-zA-Z%])")
NAME = re.compile(r"[A-Za-z_]\w*$")


class Text(NamedTuple):
    text: str
    is_part: bool


def tokens_of(text):
    found = (match.group() for match in TOKEN.finditer(text))
    return [t for t in found if not t.isspace() and not t.startswith(("//", "/*", "#"))]


def macros_of(text):
    """{name: tokens} of macros that are texts."""
    return {
        define[1]: tokens_of(define[2].replace("\\\n", " ")) for define in DEFINE.finditer(text)
    }


def unquoted(literal):
    text = literal[1:-1].replace("\\n", "\n").replace("\\t", "\t")
    return re.sub(r"\\(.)", r"\1", text, flags=re.DOTALL)


def split(tokens, separator=","):
    """Parts of a list of tokens between separators that are in no bracket."""
    parts, depth = [[]], 0
    for token in tokens:
        depth += (token in "([{") - (token in ")]}")
        if token == separator and depth == 0:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def closing(tokens, opening):
    """The position of the bracket that closes the one at `opening`."""
    depth = 0
    for at in range(opening, len(tokens)):
        depth += (tokens[at] in "([{") - (tokens[at] in ")]}")
        if depth == 0:
            return at
    return len(tokens) - 1


def closings(tokens):
    """{position of a bracket: position of the bracket that closes it}."""
    found, opened = {}, []
    for at, token in enumerate(tokens):
        if token in "([{":
            opened.append(at)
        elif token in ")]}" and opened:
            found[opened.pop()] = at
    return found


def bare(tokens):
    """Without brackets around everything."""
    while tokens and tokens[0] == "(" and closing(tokens, 0) == len(tokens) - 1:
        tokens = tokens[1:-1]
    return tokens


def branches(tokens):
    """The values of a ? b : c, or the tokens alone."""
    tokens = bare(tokens)
    depth, questions, colon = 0, [], 0
    for at, token in enumerate(tokens):
        depth += (token in "([{") - (token in ")]}")
        if depth == 0 and token == "?":
            questions.append(at)
        elif depth == 0 and token == ":" and questions:
            if len(questions) == 1:
                colon = at
                break
            questions.pop()
    if not colon:
        return [tokens]
    return branches(tokens[questions[0] + 1 : colon]) + branches(tokens[colon + 1 :])


class Wrapper(NamedTuple):
    place: int  # the argument that is the text
    is_static: bool
    templates: list  # texts with a \0 where the argument goes
    calls: set  # positions of the calls that pass the text on


class Source:
    """A file, with the text macros of the whole tree."""

    def __init__(self, text, macros):
        self.tokens = tokens_of(text)
        self.macros = {**macros, **macros_of(text)}
        self.closings = closings(self.tokens)
        self.calls = list(self.find_calls())

    def literal(self, tokens):
        """The text of joined literals, or None if the tokens are something else."""
        text = ""
        for token in bare(tokens):
            if token.startswith('"'):
                text += unquoted(token)
            elif token.startswith("PRI"):
                text += token[3]
            elif token in self.macros:
                inner = self.literal(self.macros[token])
                text += f"<{token.lower()}>" if inner is None else inner
            elif token.isupper() or re.fullmatch(r"[A-Z][A-Z0-9_]+", token):
                text += f"<{token.lower()}>"
            else:
                return None
        return text if any(t.startswith('"') or t in self.macros for t in tokens) else None

    def name(self, tokens):
        """How the page shows an argument: by its name, by the texts that it may be, or as "…"."""
        tokens = bare(tokens)
        while tokens and tokens[0] == "(" and closing(tokens, 0) < len(tokens) - 1:
            tokens = tokens[closing(tokens, 0) + 1 :]  # a cast
        texts = [self.literal(branch) for branch in branches(tokens)]
        if len(texts) > 1 and None not in texts:
            return texts[0] if texts[0] == texts[1] else "{" + "|".join(texts) + "}"
        if len(texts) > 1 and any(texts):
            return "{" + "|".join("…" if t is None else t for t in texts) + "}"
        if texts[0] is not None:
            return texts[0]
        if all(NAME.match(t) or t in ("->", ".", "*", "&") for t in tokens) and tokens:
            last = re.sub("^kvant_(max_)?", "", tokens[-1].lower())
            return f"<{last}>" if len(last) > 1 else "…"
        return "…"

    def formatted(self, text, arguments):
        """The text with its fields as names. An argument that is a text may have no field in it."""
        left = list(arguments)

        def field(match):
            for star in match.group(1, 2):
                if star == "*" and left:
                    left.pop(0)
            if match[3] == "%":
                return "%"
            return self.name(left.pop(0)) if left else "…"

        return FIELD.sub(field, text)

    def find_calls(self):
        """(position, name, arguments) of what may be a call."""
        for at, token in enumerate(self.tokens[:-1]):
            if self.tokens[at + 1] == "(" and NAME.match(token) and token not in ("if", "while"):
                end = self.closings.get(at + 1, at + 1)
                yield at, token, split(self.tokens[at + 2 : end])

    def functions(self):
        """(name, whether it is static, names of the parameters that are texts by position, where
        its body begins and ends) of definitions."""
        for at, name, arguments in self.calls:
            end = self.closings.get(at + 1, at + 1)
            if self.tokens[end + 1 : end + 2] == ["{"]:
                texts = {
                    i: a[-1] for i, a in enumerate(arguments) if a[:3] == ["const", "char", "*"]
                }
                before = self.tokens[max(0, at - 8) : at]
                is_static = "static" in before and "inline" not in before
                yield name, is_static, texts, (end + 1, self.closings.get(end + 1, end + 1))

    def wrappers(self, known):
        """{name: Wrapper} of functions that pass a text on to a known function, or to a wrapper in
        `known`, {name: Wrapper}."""
        found = {}
        for name, is_static, texts, (first, last) in self.functions():
            inside = [call for call in self.calls if first < call[0] < last]
            for position, text in texts.items():
                passed = [
                    (call[0], t) for call in inside for t in self.passed_on(call, text, known)
                ]
                if passed and name not in MESSAGES and name not in PARTS:
                    templates = [template for _, template in passed]
                    found[name] = Wrapper(position, is_static, templates, {at for at, _ in passed})
        return found

    def passed_on(self, call, text, known):
        """The templates by which a call makes a message of the variable `text`."""
        _, called, arguments = call
        if called in MESSAGES and [text] in arguments[MESSAGES[called] + 1 :]:
            for template in self.texts(arguments, MESSAGES[called], {text: "\0"}):
                yield (HINT if called == "hint" else "") + template
        elif called in known and arguments[known[called].place : known[called].place + 1] == [
            [text]
        ]:
            yield from known[called].templates

    def texts(self, arguments, place, named=None):
        """The messages of a call, whose text is argument `place`."""
        if place >= len(arguments):
            return
        further = [
            [f'"{named[a[0]]}"'] if named and len(a) == 1 and a[0] in named else a
            for a in arguments[place + 1 :]
        ]
        for branch in branches(arguments[place]):
            text = self.literal(branch)
            if text is not None:
                yield self.formatted(text, further)

    def loose(self):
        """Texts of three words and more that a function returns or a variable is set to."""
        for at, token in enumerate(self.tokens):
            if token == "return" or token == "=":
                end = at + 1
                while end < len(self.tokens) and self.tokens[end] not in (";", "{"):
                    end += 1
                if end < len(self.tokens) and self.tokens[end] == ";":
                    for branch in branches(self.tokens[at + 1 : end]):
                        text = self.literal(branch)
                        if text and len(text.split()) >= WORDS_OF_A_PART:
                            yield at, text

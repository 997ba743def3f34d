"""Collects the messages of the tree by door: the library, the plug-in, the command, Python."""

import re
from typing import NamedTuple

import c_source
import python_source

DOORS = {
    "library": ("src",),
    "plugin": ("integrations/llama.cpp",),
    "command": ("tools", "integrations/python/kvant/commands"),
    "python": ("integrations/python/kvant",),
}
C_ENDINGS = (".c", ".h", ".cu", ".cuh")
DEEPEST = 3  # wrappers of wrappers of wrappers
NO_MESSAGES = ("needle_text.c", "progress.c")  # texts for a model; a bar that shows progress
FROM_WORDS = 4  # an unknown function with a text of so many words may be one that prints messages


class Message(NamedTuple):
    file: str
    text: str
    is_part: bool


def files(root, folders, endings):
    return [
        path
        for folder in folders
        for path in sorted((root / folder).rglob("*"))
        if path.suffix in endings and path.name not in NO_MESSAGES
    ]


def message(name, text):
    """A Message of one line, or None if the text consists of fields only."""
    line = re.sub(r"\s+", " ", text.text).strip()
    words = re.sub(r"<[^>]*>|…|hint:|kvant:", "", line)
    return Message(name, line, text.is_part) if re.search("[A-Za-z]{2}", words) else None


def of_c(source, wrappers, passed_on):
    """(position, Text) of a C source, and what no rule covers: (function, text). The calls at the
    positions passed_on pass texts on that are in the calls of their wrapper."""
    found, unknown = list(loose(source)), []
    for at, name, arguments in source.calls:
        if at in passed_on:
            continue
        hint = c_source.HINT if name == "hint" else ""
        if name == c_source.STANDARD_ERROR:
            texts = (text for text in source.texts(arguments, 1) if text.startswith("kvant: "))
            found += [(at, c_source.Text(text, False)) for text in texts]
        elif name in c_source.MESSAGES:
            texts = source.texts(arguments, c_source.MESSAGES[name])
            found += [(at, c_source.Text(hint + text, False)) for text in texts]
        elif name in c_source.PARTS:
            texts = source.texts(arguments, c_source.PARTS[name])
            found += [(at, c_source.Text(text, True)) for text in texts if is_part(text)]
        elif name in wrappers:
            found += [(at, each) for each in whole(source, wrappers, name, arguments)]
        elif not c_source.OTHERS.fullmatch(name):
            for argument in arguments:
                text = source.literal(argument)
                if text and len(text.split()) >= FROM_WORDS:
                    unknown.append((name, text))
    return found, unknown


def is_part(text):
    return len(text.split()) >= c_source.WORDS_OF_A_PART


def whole(source, wrappers, name, arguments):
    """The messages of a call of a wrapper."""
    for text in source.texts(arguments, wrappers[name].place):
        for template in wrappers[name].templates:
            yield c_source.Text(template.replace("\0", text), False)


def loose(source):
    return ((at, c_source.Text(text, True)) for at, text in source.loose())


def known_wrappers(sources):
    """{path: {name: Wrapper}} of the wrappers in each file, and of those that it can call."""
    own = {path: {} for path in sources}
    for _ in range(DEEPEST):
        shared = {
            name: wrapper
            for found in own.values()
            for name, wrapper in found.items()
            if not wrapper.is_static
        }
        own = {path: source.wrappers({**shared, **own[path]}) for path, source in sources.items()}
    return own, {path: {**shared, **found} for path, found in own.items()}


def called_with_texts(sources, wrappers):
    """{(path, name)} of static wrappers, and {name} of others, that are called with a text."""
    found = set()
    for path, source in sources.items():
        for _, name, arguments in source.calls:
            wrapper = wrappers[path].get(name)
            if wrapper and any(whole(source, wrappers[path], name, arguments)):
                found.add((path, name) if wrapper.is_static else name)
    return found


def of_folder(root, folders, macros):
    """(messages, what no rule covers) of C sources."""
    paths = files(root, folders, C_ENDINGS)
    sources = {path: c_source.Source(path.read_text(), macros) for path in paths}
    own, wrappers = known_wrappers(sources)
    used = called_with_texts(sources, wrappers)
    messages, unknown = [], []
    for path, source in sources.items():
        passed_on = {
            at
            for name, wrapper in own[path].items()
            if name in used or (path, name) in used
            for at in wrapper.calls
        }
        name = path.relative_to(root).as_posix()
        texts, odd = of_c(source, wrappers[path], passed_on)
        in_order = sorted(texts, key=lambda pair: pair[0])
        messages += [message(name, text) for _, text in in_order]
        unknown += [(name, *each) for each in odd]
    return messages, unknown


def everything(root):
    """({door: [Message]}, [(file, function, text) that no rule covers])."""
    found, unknown = {}, []
    macros = {}
    every = [folder for folders in DOORS.values() for folder in folders]
    for path in files(root, every, C_ENDINGS):
        macros.update(c_source.macros_of(path.read_text()))
    for door, folders in DOORS.items():
        messages, odd = of_folder(root, folders, macros)
        unknown += odd
        for path in files(root, folders, (".py",)):
            name = path.relative_to(root).as_posix()
            if door != "python" or "/commands/" not in name:
                messages += [message(name, text) for text in python_source.messages(path)]
        found[door] = [each for each in messages if each]
    return found, unknown

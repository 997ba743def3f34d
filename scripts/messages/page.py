"""Lays out docs/reference/messages.md."""

PATH = "docs/reference/messages.md"

HEAD = """<!-- This page answers:
    Which messages does kvant print, and from which part?
    Which source file makes a message?
-->
# Messages

For people who look up a message, and for those who write one. `python3 scripts/messages` writes
this page from the sources. [Troubleshooting](../troubleshooting.md#messages) says what to do about
the messages that people ask about. Help texts are on the [man page](../kvant.1).

- A message is one line. It begins with its subject: an option, a file, a tensor, an argument. It
  says what happened and why. Last it says what to do, or a second line `hint:` says so.
- `<name>` stands for a value, `…` for a value without a name, and `{one|other}` for one of two
  texts. The end of a message after a colon is often a part, or the text of a system error.
- Arguments of C and Python have the names that headers and signatures have.
"""
TITLES = {
    "library": (
        "The library",
        "`kvant_error_message()` returns these, and so does the `err` of functions that have one.\n"
        "The library prints nothing. Python raises them as `kvant.Error`; the plug-in and the\n"
        "command print them.",
    ),
    "plugin": (
        "The plug-in for llama.cpp",
        "Lines on standard error that begin with `kvant:`. `KVANT_QUIET=1` leaves out lines that\n"
        "are neither errors nor warnings; `KVANT_VERBOSE=1` adds some.",
    ),
    "command": (
        "The command `kvant`",
        "Lines on standard error that begin with `kvant:`, and hints below them.",
    ),
    "python": (
        "The Python package",
        "Texts of exceptions, warnings and log lines.",
    ),
}
PARTS = "Parts of messages, most often the reason at the end:"


def groups(messages):
    """{folder: {text: [names of files]}}, in the order of the messages."""
    found = {}
    for message in messages:
        folder, _, name = message.file.rpartition("/")
        texts = found.setdefault(folder, {})
        names = texts.setdefault(message.text, [])
        if name not in names:
            names.append(name)
    return found


def cell(text):
    return text.replace("|", "\\|").replace("`", "'")


def table(texts):
    lines = ["| message | file |", "|---|---|"]
    lines += [f"| `{cell(text)}` | {', '.join(names)} |" for text, names in texts.items()]
    return lines


def door(name, messages):
    title, about = TITLES[name]
    lines = [f"## {title}", "", about, ""]
    whole = groups([m for m in messages if not m.is_part])
    parts = groups([m for m in messages if m.is_part])
    for folder in sorted(whole.keys() | parts.keys()):
        lines += [f"### {folder}", ""]
        if folder in whole:
            lines += [*table(whole[folder]), ""]
        if folder in parts:
            lines += [PARTS, "", *table(parts[folder]), ""]
    return lines


def written(found):
    lines = [HEAD]
    for name, messages in found.items():
        lines += door(name, messages)
    return "\n".join(lines).rstrip("\n") + "\n"

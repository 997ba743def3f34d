#!/usr/bin/env python3
"""Writes docs/kvant.1 and share/completion from the option tables and share/reference.txt.

    scripts/reference.py [--kvant PROGRAM] [--check]

PROGRAM (build/bin/kvant) must be a build with llama.cpp and all codecs. --check writes nothing and
ends with 1 if a file would change; a test does that."""

import argparse
import os
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "integrations" / "python"))

import completion  # noqa: E402
import option_tables as tables  # noqa: E402

END = ["Environment", "Exit status", "Output", "Examples"]


def sections():
    """{heading: text} of share/reference.txt."""
    parts = re.split(r"(?m)^## (.*)\n", (ROOT / "share" / "reference.txt").read_text())
    return dict(zip(parts[1::2], (text.strip("\n") for text in parts[2::2])))


def common_options(read):
    """Options that several commands have with the same words. The page describes them once."""
    count = {}
    for table in read:
        for option in table.options:
            count[option] = count.get(option, 0) + 1
    return [option for option, n in count.items() if n >= 3 and option.name != "json"]


def written(option):
    """-k, --codec-k SPEC"""
    letter = f"-{option.letter}, " if option.letter else ""
    return f"{letter}--{option.name}" + (f" {option.value}" if option.value else "")


def common_words(table, common):
    """A sentence on the common options of a command."""
    has = [option for option in common if option in table.options]
    if not has:
        return ""
    if len(has) == len(common):
        return "All common options."
    return "Common options: " + ", ".join(f"`--{option.name}`" for option in has) + "."


def one_line(text):
    return " ".join(text.split())


def blocks(text):
    """Yields the parts of a text in order: ("code", lines), ("list", [(terms, text)]) and ("text",
    text). A line that begins with blanks is code."""
    for part in re.split(r"\n\n+", text):
        lines = part.split("\n")
        if lines[0].startswith("- "):
            items = re.split(r"(?m)^- ", part)[1:]
            yield "list", [re.match(r"(?s)(.*?): (.*)", item).groups() for item in items]
            continue
        plain = [line for line in lines if not line.startswith("  ")]
        if plain:
            yield "text", one_line(" ".join(plain))
        code = [
            line[4 if line.startswith("    ") and not plain else 2 :]
            for line in lines
            if line.startswith("  ")
        ]
        if code:
            yield "code", code


# ---- man ----


def roff(text):
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"(?m)^([.'])", r"\\&\1", text)


def spoken(text):
    """A paragraph: `code` is bold."""
    return re.sub(r"`([^`]*)`", r"\\fB\1\\fR", roff(one_line(text)))


def man_text(text):
    out = []
    for kind, content in blocks(text):
        if kind == "code":
            out += [".PP", ".nf", ".RS", *map(roff, content), ".RE", ".fi"]
        elif kind == "list":
            for terms, what in content:
                out += [".TP", spoken(terms), spoken(what)]
        else:
            out += [".PP", spoken(content)]
    return out


def man_options(options):
    lines = []
    for option in options:
        name, _, value = written(option).partition(f"--{option.name}")
        lines += [
            ".TP",
            f"\\fB{roff(name)}\\-\\-{roff(option.name)}\\fR"
            + (f" \\fI{roff(value.strip())}\\fR" if value else ""),
            spoken(option.help),
        ]
    return lines


def usages(table):
    """(name, usage) of a command, and of others that begin a line of its usage: kvant search has
    four."""
    name = f"kvant {table.name}"
    return [(name, usage) for usage in re.split(rf"\n *{name} ", table.usage)]


def man(read, text):
    common, version = (
        common_options(read),
        re.search(r"project\(kvant VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text())[1],
    )
    lines = [
        f'.TH KVANT 1 "" "kvant {version}" "User Commands"',
        ".SH NAME",
        "kvant \\- compressed key\\-value cache for llama.cpp, and what it costs and gains",
        ".SH SYNOPSIS",
    ]
    for table in read:
        for name, usage in usages(table):
            lines += [f"\\fB{roff(name)}\\fR {roff(one_line(usage))}", ".br"]
    lines += [
        "\\fBkvant \\-\\-version\\fR | \\fB\\-\\-help\\fR | \\fBhelp\\fR \\fICOMMAND\\fR",
        ".SH DESCRIPTION",
        *man_text(text["Description"])[1:],
        ".SH COMMANDS",
    ]
    for table in read:
        own = [option for option in table.options if option not in common]
        lines += [f".SS kvant {roff(table.name)}", spoken(table.about), *man_options(own)]
        lines += [
            line
            for more in (
                common_words(table, common),
                table.notes,
                text.get(f"kvant {table.name}", ""),
            )
            if more
            for line in man_text(more)
        ]
    lines += [".SH COMMON OPTIONS", *man_options([*common, tables.CPU])]
    for heading in END:
        body = man_text(text[heading])
        lines += [f".SH {heading.upper()}", *(body[1:] if body[0] == ".PP" else body)]
    lines += [".SH SEE ALSO", ".BR llama\\-server (1),", ".BR llama\\-perplexity (1)"]
    return "\n".join(lines) + "\n"


def files():
    read, text = tables.read(), sections()
    unknown = {heading[6:] for heading in text if heading.startswith("kvant ")} - {
        table.name for table in read
    }
    if unknown:
        sys.exit(
            "share/reference.txt has sections of commands that do not exist: "
            f"{', '.join(sorted(unknown))}"
        )
    return {
        "docs/kvant.1": man(read, text),
        "share/completion/kvant.bash": completion.bash(read),
        "share/completion/_kvant": completion.zsh(read),
        "share/completion/kvant.fish": completion.fish(read),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kvant", default=str(ROOT / "build" / "bin" / "kvant"))
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    os.environ["KVANT_COMMAND"] = given.kvant
    changed = 0
    for name, content in files().items():
        path = ROOT / name
        if path.exists() and path.read_text() == content:
            continue
        changed += 1
        reason = "is not what the option tables say: scripts/reference.py writes it"
        print(f"{name} {reason if given.check else 'written'}")
        if not given.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
    return 1 if given.check and changed else 0


if __name__ == "__main__":
    sys.exit(main())

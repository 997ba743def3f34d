"""Pages and figures name files and functions that exist, architecture.md says which folder may use
which, and constants have their reasons next to them.
"""

import pathlib
import re
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SUFFIXES = (".c", ".h", ".cu", ".cuh", ".py", ".sh")
FOLDERS = ("src", "include", "integrations", "tools", "tests", "scripts", "bench", "examples")
FILE = re.compile(r"(?<![\w*])[\w./]*\w\.(?:cuh|cu|c|h)\b(?!\.)")
WORDS_OF_A_PAGE = 500
MOST_PAGES = 4


def code(root):
    """{path from the root: text} of all files of code."""
    files = (file for folder in FOLDERS for file in sorted((root / folder).rglob("*")))
    return {
        str(file.relative_to(root)): file.read_text(errors="replace")
        for file in files
        if file.suffix in SUFFIXES
    }


def pages(root):
    found = [*sorted((root / "docs" / "internals").glob("*.md")), root / "CONTRIBUTING.md"]
    return [page for page in found if page.exists()]


def find(sources, name):
    """The paths that end with a name."""
    return [path for path in sources if f"/{path}".endswith(f"/{name}")]


def files_in_pages(root):
    """Pages for contributors write the names of files, often without their folders, as `code`."""
    sources = code(root)
    for page in pages(root):
        for words in re.findall(r"`([^`\n]+)`", page.read_text()):
            for name in FILE.findall(words):
                if "NAME" not in name and not find(sources, name):
                    yield f"{page.relative_to(root)}: there is no {name}"


def symbols_in_pages(root):
    """`symbol` in `path`: the file has this symbol. `function()` is defined there."""
    sources = code(root)
    for page in pages(root):
        text = " ".join(page.read_text().split())
        for symbol, path in re.findall(r"`(\w+(?:\(\))?)` in `([\w./]+)`", text):
            name = re.escape(symbol.removesuffix("()"))
            pattern = r"^\w[\w *]*\b%s\(" if symbol.endswith("()") else r"\b%s\b"
            if path not in sources:
                yield f"{page.relative_to(root)}: there is no {path}"
            elif not re.search(pattern % name, sources[path], re.MULTILINE):
                yield f"{page.relative_to(root)}: {path} has no {symbol}"


def sections_in_comments(root):
    """Comments name sections of pages: (format.md, "Records"). A section is a heading, or the first
    words of a paragraph in italics. test_pages.py checks the names of pages."""
    texts = {}
    folders = (root / name for name in ("docs", *FOLDERS))
    found = (page for folder in folders for page in folder.rglob("*.md"))
    for page in (*root.glob("*.md"), *found):
        texts[page.name] = texts.get(page.name, "") + page.read_text().replace("`", "")
    for path, text in code(root).items():
        if path == "tests/docs/test_code.py":  # its faults are made
            continue
        words = re.sub(r"\n\s*(?:\*|//|#)?\s*", " ", text)
        for page, section in re.findall(r'(\w+\.md), "([^"]+)"', words):
            there = texts.get(page, "")
            if not re.search(rf"^(?:#+ |\*){re.escape(section)}", there, re.MULTILINE):
                yield f"{path}: {page} has no section {section}"


def names_of_python(root):
    """The first column of the table in integrations/python/README.md has names of the package, and
    its section about Cache has functions."""
    folder = root / "integrations" / "python"
    page = folder / "README.md"
    if not page.exists():
        return
    text = page.read_text()
    files = {str(f.relative_to(folder)): f.read_text() for f in folder.rglob("*.py")}
    every = "\n".join(files.values())
    cells = "\n".join(re.findall(r"^\| (`.*?) \|", text, re.MULTILINE))
    for name in re.findall(r"`([\w.]+)(?=[(`])", cells):
        found = (
            name.replace(".", "/") + ".py" in files
            or name.replace(".", "/") + "/__init__.py" in files
        )
        if not found and not re.search(rf"\b(?:class|def) {name.split('.')[-1]}\b", every):
            yield f"integrations/python/README.md: there is no {name}"
    for name in re.findall(
        r"`([a-z]+(?:_[a-z]+)*)`", text.partition("## Cache")[2].partition("\n## ")[0]
    ):
        if not re.search(rf"\bdef {name}\(|\b{name}\b *[:=]", every):
            yield f"integrations/python/README.md: there is no {name}()"


def names_in_figures(root):
    """Figures that show a way through the code name files, without src/ and
    integrations/llama.cpp/, and functions."""
    sources = code(root)
    everything = "\n".join(sources.values())
    for figure in sorted((root / "docs" / "figures").glob("way_of_*-light.svg")):
        text = " ".join(re.findall(r"<text[^>]*>(.*?)</text>", figure.read_text()))
        for name in FILE.findall(text):
            if not any((root / at / name).exists() for at in ("src", "integrations/llama.cpp")):
                yield f"{figure.name}: there is no {name}"
        for name in re.findall(r"\b(\w+)\(\)", text):
            if not re.search(r"\b%s\(" % name, everything):
                yield f"{figure.name}: there is no {name}()"


def folders(root):
    """architecture.md has the arrows that tests/unit/headers.sh checks."""
    script = (root / "tests" / "unit" / "headers.sh").read_text()
    checked = {}
    for name, uses in re.findall(r"^    (\w+)\) ?(?:echo)?([\w ]*);;$", script, re.MULTILINE):
        checked[name] = set(uses.split())
    page = (root / "docs" / "internals" / "architecture.md").read_text()
    shown = {}
    for name, uses in re.findall(r"^\| `(\w+)` \|.*\|([^|]*)\|$", page, re.MULTILINE):
        if name in checked:
            shown[name] = {use.strip() for use in uses.split(",") if use.strip()}
    if not checked:
        yield "headers.sh has no arrows: this test is broken"
    for name in checked:
        if checked[name] != shown.get(name):
            uses = f"headers.sh allows {checked[name]}, architecture.md {shown.get(name)}"
            yield f"src/{name}: {uses}"


def length_of_architecture(root):
    """Four pages of 500 words, without the comment and without markup."""
    text = (root / "docs" / "internals" / "architecture.md").read_text()
    words = len(re.sub(r"<[^>]*>", "", re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)).split())
    if words > MOST_PAGES * WORDS_OF_A_PAGE:
        yield f"architecture.md has {words} words"


# A number as a constant: #define NAME 4, enum { NAME = 4 }, constexpr int NAME = 4. Not -1, which
# stands for nothing, and not a list of flags.
CONSTANT = re.compile(
    r"^#define [A-Z]\w* +(?:\(\(\w+\))?\(*\d"
    r"|^(?:static )?(?:const|constexpr) (?:int|float|unsigned|u?int\d+_t|size_t) [A-Z]\w* ="
    r"|^enum \{ [A-Z]\w* = \d\w* \};"
)
FEATURE_MACRO = re.compile(r"^#define _\w+")
# Folders whose constants decide something. Kernels have the shapes of registers and tables, which
# the head comments of their files explain.
DECIDING = (
    *("src/store", "src/cache", "src/attention", "src/codec", "src/calibration", "src/settings"),
    *("src/base", "src/device", "src/blocks", "src/page", "src/math", "src/index"),
    *("include", "integrations/llama.cpp"),
)


def has_reason(lines, number):
    """Whether a constant has a comment: on its line, or above the run of definitions that it is
    part of."""
    if "/*" in lines[number]:
        return True
    while number > 1 and (
        lines[number - 1].startswith(("#define ", "constexpr ")) or lines[number - 2].endswith("\\")
    ):
        number -= 1
    return number > 0 and lines[number - 1].rstrip().endswith("*/")


def constants(root):
    for path, text in code(root).items():
        if not path.startswith(tuple(f"{folder}/" for folder in DECIDING)):
            continue
        lines = text.splitlines()
        for number, line in enumerate(lines):
            if CONSTANT.match(line) and not FEATURE_MACRO.match(line):
                if not has_reason(lines, number):
                    yield f"{path}:{number + 1}: no reason: {line}"


class Tree(unittest.TestCase):
    def check(self, rule):
        self.assertEqual(list(rule(ROOT)), [])

    def test_files_in_pages(self):
        self.check(files_in_pages)

    def test_symbols_in_pages(self):
        self.check(symbols_in_pages)

    def test_sections_in_comments(self):
        self.check(sections_in_comments)

    def test_names_of_python(self):
        self.check(names_of_python)

    def test_names_in_figures(self):
        self.check(names_in_figures)

    def test_folders(self):
        self.check(folders)

    def test_length_of_architecture(self):
        self.check(length_of_architecture)

    def test_constants(self):
        self.check(constants)


class Rules(unittest.TestCase):
    """Each rule finds its fault, in a tree that is made for it."""

    def found(self, rule, **files):
        paths = {
            "page": "CONTRIBUTING.md",
            "architecture": "docs/internals/architecture.md",
            "figure": "docs/figures/way_of_all-light.svg",
            "script": "tests/unit/headers.sh",
            "source": "src/store/plan.c",
            "python": "integrations/python/README.md",
            "package": "integrations/python/kvant/cache.py",
            "torch": "integrations/python/kvant/torch.py",
        }
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name, text in files.items():
                (root / paths[name]).parent.mkdir(parents=True, exist_ok=True)
                (root / paths[name]).write_text(text)
            return len(list(rule(root)))

    def test_files_in_pages(self):
        page = "`plan.c`, `store/plan.c`, `src/store/plan.c`, `NAME.c`, `cmd_*.c`"
        self.assertEqual(self.found(files_in_pages, page=page, source=""), 0)
        page = "`other.c`, `cache/plan.c` and `an.c`"
        self.assertEqual(self.found(files_in_pages, page=page, source=""), 3)

    def test_symbols_in_pages(self):
        source = "#define ONE 1\nstatic bool two(int x)\n{\n    return three(x);\n}\n"
        page = "`ONE` in `src/store/plan.c`,\n`two()` in\n`src/store/plan.c`"
        self.assertEqual(self.found(symbols_in_pages, page=page, source=source), 0)
        page = "`four` in `src/store/plan.c`, `ONE` in `plan.c`, `three()` in `src/store/plan.c`"
        self.assertEqual(self.found(symbols_in_pages, page=page, source=source), 3)

    def test_names_of_python(self):
        source = "class Cache:\n    def fork(self):\n        self.status = 0\n"
        page = "| `Cache` | a |\n| `kvant.torch` | b |\n\n## Cache\n\n`fork`, `status`\n"
        files = {"python": page, "package": source, "torch": ""}
        self.assertEqual(self.found(names_of_python, **files), 0)
        page = "| `Store(path)` | a |\n| `kvant.vllm` | b |\n\n## Cache\n\n`export_block`\n"
        self.assertEqual(self.found(names_of_python, **{**files, "python": page}), 3)

    def test_sections_in_comments(self):
        page = "# Pages\n\n## Records (`KVNREC`)\n\n*Rows* (`f16`). Words.\n"
        source = '/* (CONTRIBUTING.md,\n * "Records"), CONTRIBUTING.md, "Rows", CONTRIBUTING.md */'
        self.assertEqual(self.found(sections_in_comments, page=page, source=source), 0)
        source = '/* (CONTRIBUTING.md, "Words") */'
        self.assertEqual(self.found(sections_in_comments, page=page, source=source), 1)

    def test_names_in_figures(self):
        figure = '<text x="1">store/plan.c, two()</text>'
        self.assertEqual(self.found(names_in_figures, figure=figure, source="two(x)"), 0)
        figure = '<text x="1">plan.c</text><text x="1">three()</text>'
        self.assertEqual(self.found(names_in_figures, figure=figure, source="two(x)"), 2)

    def test_folders(self):
        script = "    base) ;;\n    math) echo base ;;\n    page) echo base math ;;\n"
        page = "| `base` | a | |\n| `math` | b | base |\n| `page` | c | d | math, base |\n"
        self.assertEqual(self.found(folders, script=script, architecture=page), 0)
        page = "| `base` | a | math |\n| `math` | b | |\n"
        self.assertEqual(self.found(folders, script=script, architecture=page), 3)
        self.assertEqual(self.found(folders, script="", architecture=page), 1)

    def test_length_of_architecture(self):
        page = "<!-- a comment -->" + "word " * 2000 + '<img src="a" alt="words">'
        self.assertEqual(self.found(length_of_architecture, architecture=page), 0)
        self.assertEqual(self.found(length_of_architecture, architecture=page + " more"), 1)

    def test_constants(self):
        source = (
            "#define _POSIX_C_SOURCE 200809L\n"
            "#define ONE 1 /* a reason */\n"
            "/* A reason for two. */\n#define TWO 2u\n#define SUM(x) \\\n    ((x) + 1)\n"
            "#define THREE ((size_t)1 << 3)\n"
        )
        self.assertEqual(self.found(constants, source=source), 0)
        source = "\n#define ONE 1\n\nenum { TWO = 2 };\n\nconstexpr int THREE = 3;\n"
        self.assertEqual(self.found(constants, source=source), 3)


if __name__ == "__main__":
    unittest.main()

"""README, docs/ and all further pages: their size, questions, readers and links, and the names by
which comments call a page.
"""

import pathlib
import re
import tempfile
import unittest

import blocks

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCREEN = 45  # lines
MOST_QUESTIONS = 7
READER = re.compile(r"^(For |Read this page if|This page is for )")
LINK = re.compile(r"\]\(([^)\s]+)\)")
EXEMPT = ("manual.txt", "test_pages.py")  # a text that never changes; this file
SOURCES = ("src", "include", "tests", "tools", "integrations", "bench", "scripts", "cmake")


def pages(root):
    return sorted((root / "docs").rglob("*.md"))


def everywhere(root):
    return [
        *root.glob("*.md"),
        *pages(root),
        *(root / "src").rglob("*.md"),
        *(root / "integrations").rglob("*.md"),
    ]


def prose(text):
    """The text without its code: indented blocks become empty lines, `code` becomes nothing."""
    lines = (("" if line.startswith("    ") else line) for line in text.splitlines())
    return re.sub(r"`[^`]*`", "", "\n".join(lines))


def anchors(text):
    """The anchors that GitHub makes from the headings of a page."""
    headings = (line.lstrip("#").strip() for line in text.splitlines() if re.match(r"#+ ", line))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def screens(text):
    """Screens of prose: lines without comments, tables and code, which nobody reads line by line.
    README's picture counts as one line.
    """
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    lines = [line for line in text.splitlines() if not line.startswith(("    ", "|", "  <"))]
    return len(re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).splitlines()) / SCREEN


def sizes(root):
    """A guide page has at most two screens of prose, README two and a half."""
    guides = ((page, 2) for page in (root / "docs" / "start").glob("*.md"))
    for page, most in ((root / "README.md", 2.5), *guides):
        found = screens(page.read_text())
        if found > most:
            yield f"{page.relative_to(root)} has {found:.1f} screens of prose, of {most} at most"


def questions(root):
    """A comment before a page's title says which questions the page answers."""
    for page in [root / "README.md", *pages(root)]:
        comment = re.match(r"<!--(.*?)-->\n# ", page.read_text(), re.DOTALL)
        n = comment.group(1).count("?") if comment else 0
        if not 1 <= n <= MOST_QUESTIONS:
            name = page.relative_to(root)
            yield f"{name} begins with {n} questions in a comment, of 1 to {MOST_QUESTIONS}"


def readers(root):
    for page in pages(root):
        text = re.sub(r"^<!--.*?-->\n", "", page.read_text(), flags=re.DOTALL)
        if not any(READER.search(line) for line in text.splitlines()[:5]):
            name = page.relative_to(root)
            yield f'{name} does not say in its first lines for whom it is ("For ...")'


def markers(root):
    """A test runs the marked commands of pages (blocks.py). A figure in a sentence does not begin
    its line: Markdown would show the rest of the line as HTML.
    """
    for page in [root / "README.md", *pages(root)]:
        if re.search(r"^<!-- value:", page.read_text(), re.MULTILINE):
            yield f"{page.relative_to(root)}: a line begins with the marker of a value"
        try:
            blocks.marked(page.read_text())
        except ValueError as error:
            yield f"{page.relative_to(root)}: {error}"


def links(root):
    for page in everywhere(root):
        text = page.read_text()
        targets = LINK.findall(text) + re.findall(r'(?:src|srcset|href)="([^"]+)"', text)
        for target in targets:
            path, _, anchor = target.partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            file = page.parent / path if path else page
            if not file.exists():
                yield f"{page.relative_to(root)}: there is no {path}"
            elif anchor and file.suffix == ".md" and anchor not in anchors(file.read_text()):
                yield f"{page.relative_to(root)}: {file.name} has no heading #{anchor}"


def numbers(root):
    for page in [root / "README.md", *pages(root)]:
        for found in re.findall(r"(?<![\w.)])\.\d+", prose(page.read_text())):
            yield f"{page.relative_to(root)}: {found} lacks its leading zero"


def files(root):
    """Paths in `code`, and tables of results, in all pages."""
    results = root / "bench" / "results"
    for page in [root / "README.md", root / "CONTRIBUTING.md", *pages(root)]:
        text = page.read_text() if page.exists() else ""
        for path in re.findall(
            r"`((?:%s)/[\w./-]*[\w/])`" % "|".join((*SOURCES, "examples")), text
        ):
            if "NAME" not in path and not (root / path).exists():
                yield f"{page.relative_to(root)}: there is no {path}"
        for table in re.findall(r"(?<![\w/.*-])(\w+\.csv)\b", text):
            if not (results / table).exists() and table not in ("papers.csv", "speed.csv"):
                yield f"{page.relative_to(root)}: there is no {table} in bench/results"


def names(root):
    """Comments name a page only by its file name, so that it can move."""
    known = {page.name for page in [*everywhere(root), *(root / "tools").rglob("*.md")]}
    known.add("RELEASE_NOTES.md")  # make release writes it
    for folder in SOURCES:
        for file in (root / folder).rglob("*"):
            if (
                file.suffix in (".c", ".h", ".cu", ".cuh", ".in", ".py", ".sh", ".txt")
                and file.name not in EXEMPT
            ):
                for path, name in re.findall(
                    r"((?:docs/[\w/]*)?)\b([A-Za-z][\w.-]*\.md)\b",
                    file.read_text(errors="replace"),
                ):
                    if name not in known or (path and not (root / path / name).exists()):
                        yield f"{file.relative_to(root)} names {path}{name}, which does not exist"


def jobs(root):
    """Hosted CI runs targets of the Makefile, and actions by their commit."""
    targets = set(re.findall(r"^([a-z0-9-]+):", (root / "Makefile").read_text(), re.MULTILINE))
    for workflow in sorted((root / ".github" / "workflows").glob("*.yml")):
        text = workflow.read_text()
        wanted = re.findall(r"^ *- run: make ([a-z0-9-]+)$", text, re.MULTILINE)
        for listed in re.findall(r"target: \[([^\]]*)\]", text):
            wanted += [target.strip() for target in listed.split(",")]
        for target in wanted:
            if target not in targets:
                yield f"{workflow.name}: the Makefile has no target {target}"
        for action in re.findall(r"uses: (\S+)", text):
            if not re.search(r"@[0-9a-f]{40}$", action):
                yield f"{workflow.name}: {action} is not pinned to a commit"


class Pages(unittest.TestCase):
    def check(self, rule):
        self.assertEqual(list(rule(ROOT)), [])

    def test_sizes(self):
        self.check(sizes)

    def test_every_page_says_what_it_answers(self):
        self.check(questions)

    def test_every_page_says_for_whom_it_is(self):
        self.check(readers)

    def test_markers(self):
        self.check(markers)

    def test_links(self):
        self.check(links)

    def test_leading_zeros(self):
        self.check(numbers)

    def test_files_named_in_pages(self):
        self.check(files)

    def test_pages_named_in_sources(self):
        self.check(names)

    def test_jobs_of_hosted_ci(self):
        self.check(jobs)


class Rules(unittest.TestCase):
    """Each rule finds its fault, in a tree that is made for it."""

    def found(self, rule, readme="", page="For users.\n", source="", workflow=""):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for path, text in (
                ("README.md", readme),
                ("docs/start/page.md", page),
                ("src/file.c", source),
                ("Makefile", "test:\n\ttrue\n"),
                (".github/workflows/ci.yml", workflow),
            ):
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_text(text)
            return len(list(rule(root)))

    def test_sizes(self):
        self.assertEqual(self.found(sizes, readme="line\n" * 112, page="line\n" * 90), 0)
        self.assertEqual(self.found(sizes, readme="line\n" * 113, page="line\n" * 91), 2)
        page = "line\n" * 90 + "    code\n" * 9 + "| a |\n" * 9
        self.assertEqual(self.found(sizes, page=page), 0)
        self.assertEqual(self.found(sizes, page="line\n" * 90 + "<!--\na?\n-->\n"), 0)

    def test_questions(self):
        page = "<!-- This page answers:\n    %s\n-->\n# Title\n"
        self.assertEqual(self.found(questions, readme=page % "a?", page=page % ("a?" * 7)), 0)
        self.assertEqual(self.found(questions, readme=page % "a", page=page % ("a?" * 8)), 2)
        late = "# Title\n" + page % "a?"
        self.assertEqual(self.found(questions, readme=page % "a?", page=late), 1)

    def test_readers(self):
        page = "<!--\na\nb\nc?\n-->\n# Title\n\nFor users.\n"
        self.assertEqual(self.found(readers, page=page), 0)
        self.assertEqual(self.found(readers, page="# Title\n\nA page.\n\nMore.\nFor users.\n"), 1)

    def test_markers(self):
        good = "<!-- runnable -->\n    true\n\n<!-- prints -->\n    1 MiB\n"
        self.assertEqual(self.found(markers, page=good), 0)
        bad = (
            "<!-- runnable: perl -->\n    true\n",
            "<!-- runnable -->\ntrue\n",
            "<!-- prints -->\n    1\n",
            "It is\n<!-- value: one -->1<!-- end --> GiB.\n",
        )
        for page in bad:
            self.assertEqual(self.found(markers, page=page), 1, page)

    def test_blocks(self):
        page = "<!-- runnable -->\n    a\n\n      b\n\ntext\n<!-- prints -->\n    1\n"
        self.assertEqual(blocks.marked(page), [("shell", "a\n\n  b\n"), ("prints", "1\n")])
        shown = "kvant: 4.25 bits, 30 of 30 layers, ...\n"
        printed = "a\nkvant: 4.1 bits, 4 of 4 layers, 2 MiB\n"
        self.assertEqual(blocks.not_printed(shown, printed), [])
        self.assertEqual(blocks.not_printed("a    1\n", "b\n  a  2.5\n"), [])
        self.assertEqual(len(blocks.not_printed(shown, "kvant: 4.1 bits, no layers, 2 MiB\n")), 1)
        self.assertEqual(len(blocks.not_printed(shown, printed, exactly=True)), 1)
        self.assertEqual(blocks.not_printed("a    1.5\n", "b\n  a 1.5\n", exactly=True), [])

    def test_links(self):
        page = (
            "For all.\n# A heading\n[a](#a-heading) [b](../../README.md) [c](https://example.org)\n"
        )
        self.assertEqual(self.found(links, page=page), 0)
        self.assertEqual(self.found(links, page="[a](#no-heading) [b](missing.md)"), 2)
        self.assertEqual(self.found(links, readme='<img src="missing.svg">'), 1)

    def test_leading_zeros(self):
        self.assertEqual(self.found(numbers, page="`.5` is 0.5\n\n    code .5\n"), 0)
        self.assertEqual(self.found(numbers, page="it loses .5"), 1)

    def test_files(self):
        self.assertEqual(self.found(files, page="`src/file.c`, `src`, `bench/x/*`"), 0)
        self.assertEqual(self.found(files, page="`src/other.c` and results.csv"), 2)

    def test_names(self):
        self.assertEqual(self.found(names, source="/* page.md, docs/start/page.md */"), 0)
        self.assertEqual(self.found(names, source="/* other.md, docs/page.md */"), 2)

    def test_jobs(self):
        self.assertEqual(
            self.found(
                jobs, workflow=f"target: [test]\n- run: make test\nuses: a/b@{'0' * 40} # v1\n"
            ),
            0,
        )
        self.assertEqual(
            self.found(jobs, workflow="target: [test, tset]\n- run: make tset\nuses: a/b@v1\n"), 3
        )


if __name__ == "__main__":
    unittest.main()

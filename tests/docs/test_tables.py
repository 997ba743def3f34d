"""scripts/pages: pages are up to date, and the script finds each fault of a page."""

import json
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
import unittest.mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "pages"
sys.path[:0] = [str(SCRIPT), str(ROOT / "bench")]

import age  # noqa: E402
import caches  # noqa: E402
import fill  # noqa: E402
import papers  # noqa: E402
import record  # noqa: E402
import speed  # noqa: E402
from results import Line, Missing, Results, has, like, one_of, starts  # noqa: E402
from tables import archs, cards, claims, doors  # noqa: E402
from text import divergence, significant, table  # noqa: E402


class Pages(unittest.TestCase):
    def test_pages_are_what_the_script_writes(self):
        command = [sys.executable, str(SCRIPT), "--check"]
        done = subprocess.run(command, capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stderr.strip()), (0, ""))

    def test_a_script_writes_every_table_of_measurements(self):
        self.assertEqual(list(typed_tables(ROOT)), [])

    def test_every_maker_says_what_it_shows(self):
        for name, maker in fill.makers().items():
            self.assertTrue(maker.__doc__, name)


class Cards(unittest.TestCase):
    """Files of kvant selftest, as owners of GPUs send them."""

    @staticmethod
    def report(states, version=1):
        result = {"device": 1, "encode": "right", "decode": "right", "attention": "right"}
        speed = {
            "device": 1,
            "k": "int-4",
            "encoded_rows_per_second": 2.5e7,
            "attention_gbytes_read_per_second": 500.0,
            "copy_gbytes_read_and_written_per_second": 800.0,
            "attention_tokens_per_second_of_one_layer": 12345.0,
        }
        gpu = {
            "kind": "gpu",
            "name": "NVIDIA GeForce RTX 4090",
            "compute_capability": "8.9",
            "why": None,
            "driver_cuda_version": 12040,
        }
        return {
            "kvant_selftest": version,
            "shared_memory_limit_kib": 0,
            "kvant_version": "0.1.0",
            "devices": [{"kind": "cpu"}, gpu],
            "results": [result | {"attention": state} for state in states]
            + [result | {"device": 0}],
            "speeds": [speed, speed | {"device": 0}],
        }

    def made(self, maker, report):
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "selftest").mkdir()
            (pathlib.Path(folder) / "selftest" / "4090.json").write_text(json.dumps(report))
            return maker(Results(pathlib.Path(folder)))

    def test_counts(self):
        lines = self.made(
            cards.cards, self.report(["right", "right", "wrong", "not done", "no kernel on GPUs"])
        )
        self.assertIn("| NVIDIA GeForce RTX 4090 | 8.9 | 2 | 2 | 1 | 0.1.0, CUDA 12.4 |", lines)
        self.assertIn("| RTX 5090 | 12.0 | not reported yet | | | |", lines)
        self.assertFalse(any("| RTX 4090 |" in line for line in lines))

    def test_speeds(self):
        lines = self.made(cards.cards_speed, self.report(["right"]))
        self.assertEqual(
            lines[2:], ["| NVIDIA GeForce RTX 4090 | `int-4` | 25.0 | 500 | 800 | 0.62 | 12,345 |"]
        )

    def test_other_files_are_refused(self):
        for report in (
            self.report([], version=2),
            self.report([]) | {"shared_memory_limit_kib": 99},
        ):
            with self.assertRaises(ValueError):
                self.made(cards.cards, report)


# Pages whose tables of measurements come from a maker. Pages of reference define numbers.
GENERATED = ("README.md", "docs/start/*.md", "docs/decide/*.md", "docs/evidence/*.md")
# matches 0.0114 and 12.5, but not the version 0.5.0
MEASURED = re.compile(r"(?<![\w.])\d*\.\d+\b(?!\.)")


REPEATED = 3  # a table of words may repeat the few measurements that decide something


def typed_tables(root):
    """Tables of measurements outside of markers. A row with a link may have figures of other
    projects.
    """
    for page in (page for pattern in GENERATED for page in sorted(root.glob(pattern))):
        text = re.sub(r"<!-- table: .*?<!-- end -->", "", page.read_text(), flags=re.DOTALL)
        for typed in re.findall(r"(?:^ *\|.*\n)+", text, re.MULTILINE):
            own = (row for row in typed.splitlines() if "](http" not in row)
            cells = [cell for row in own for cell in re.sub(r"`[^`]*`", "", row).split("|")]
            if sum(bool(MEASURED.search(cell)) for cell in cells) > REPEATED:
                yield f"{page.relative_to(root)}: no script writes {typed.splitlines()[0]}"


class Tree(unittest.TestCase):
    """Faults of pages, in a tree that is made for them."""

    def faults(self, text, makers):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / "docs").mkdir()
            (root / "README.md").write_text(text)
            results = Results(root / "bench")
            found = fill.faults(root, results, makers)
            return [fault if isinstance(fault, str) else fault[1] for fault in found]

    def test_a_table_is_written(self):
        text = "a\n<!-- table: one -->\nold\n<!-- end -->\nb\n"
        new = "a\n<!-- table: one -->\n| x |\n|---|\n<!-- end -->\nb\n"
        maker = {"one": lambda results: table(["x"])}
        self.assertEqual(self.faults(text, maker), [new])
        self.assertEqual(self.faults(new, maker), [])

    def test_a_table_in_a_list_is_indented(self):
        text = "- a\n\n  <!-- table: one -->\n  <!-- end -->\n"
        new = "- a\n\n  <!-- table: one -->\n  | x |\n  |---|\n  <!-- end -->\n"
        self.assertEqual(self.faults(text, {"one": lambda results: table(["x"])}), [new])

    def test_a_value_stays_in_its_line(self):
        text = "It is <!-- value: one -->2<!-- end --> GiB.\n"
        self.assertEqual(self.faults(text, {"one": lambda results: "3"}), [text.replace("2", "3")])

    def test_faults(self):
        one = {"one": lambda results: ["| x |"]}
        good = "<!-- table: one -->\n| x |\n<!-- end -->\n"
        self.assertEqual(self.faults(good, one), [])
        end = "<!-- end -->\n"
        for text in (
            "",
            good + good.replace("one", "two"),
            good.replace(end, ""),
            good + end,
            good + good.replace(end, "<!-- end-->\n"),
            good.replace("table", "value"),
            "a " + good,
            "<!-- table: one -->\n" + good,
        ):
            self.assertEqual(len(self.faults(text, one)), 1, text)

    def test_typed_tables_are_found(self):
        measured = "| a | 0.5 | 1.5 | 12.5 | 0.01 |\n"
        others = "| `0.5` | v0.5.0 | 0.25.1 | 4 | 0.1 | 0.2 | 0.3 |\n"
        generated = f"<!-- table: one -->\n{measured}<!-- end -->\n"
        theirs = measured.replace("a", "[a](https://example.org)")
        for text, count in (
            (measured, 1),
            (others + theirs, 0),
            (generated, 0),
            (generated + measured, 1),
        ):
            with tempfile.TemporaryDirectory() as folder:
                (pathlib.Path(folder) / "README.md").write_text(text)
                self.assertEqual(len(list(typed_tables(pathlib.Path(folder)))), count, text)

    def test_missing_data_is_a_fault(self):
        def one(results):
            return [str(results.newest("none.csv", {}))]

        found = self.faults("<!-- table: one -->\n<!-- end -->\n", {"one": one})
        self.assertEqual(len(found), 1)
        self.assertIn("table one: none.csv", found[0])


class Lines(unittest.TestCase):
    """Which line of a CSV a table uses."""

    def results(self, text, file="a.csv"):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        (pathlib.Path(folder.name) / file).write_text(text)
        return Results(pathlib.Path(folder.name))

    def test_the_latest_date_wins_then_the_last_line(self):
        results = self.results(
            "name,value,date\na,1,2026-02-01\na,2,2026-03-01\n"
            "a,3,2026-01-01\na,4,2026-03-01\nb,5,2026-09-01\n"
        )
        self.assertEqual(results.newest("a.csv", {"name": "a"}).number("value"), 4)
        self.assertEqual([line["value"] for line in results.used[0][1]], ["3", "1", "2"])

    def test_without_dates_the_last_line_wins(self):
        self.assertEqual(self.results("name,value\na,1\na,2\n").newest("a.csv", {})["value"], "2")

    def test_a_pair_is_of_one_run(self):
        results = self.results(
            "name,value,run\nf16,1,x\nours,2,x\nf16,3,y\nours,4,y\nours,5,z\nf16,6,y\n"
        )
        ours, rival = results.pair("a.csv", {"name": "ours"}, {"name": "f16"}, ("run",))
        self.assertEqual((ours["value"], rival["value"]), ("4", "3"))
        self.assertIsNone(results.pair("a.csv", {"name": "none"}, {"name": "f16"}, ("run",)))

    def test_a_run_of_several_processes_shows_its_median_ratio(self):
        machine, f16, ours = "CPU, 8 threads", "llama.cpp,f16,f16", "llama.cpp,q8_0,q8_0"
        runs = [(8, 30, 100), (8, 40, 100), (8, 20, 100), (4, 10, 1000)]
        lines = ["cache,k,v,depth,decode_tps,prefill_tps,machine,commit,command"]
        for threads, q8_0, stock in runs:
            rest = f'"{machine}",c,SmolLM2 -t {threads} -r 3'
            lines += [f"{f16},0,{stock},,{rest}", f"{ours},0,{q8_0},,{rest}"]
        results = self.results("\n".join(lines) + "\n", "speed_presets.csv")
        pair = speed.cpu_pair(results, "q8_0", machine, 0, "decode_tps")
        self.assertEqual([line["decode_tps"] for line in pair], ["30", "100"])
        self.assertIsNone(speed.cpu_pair(results, "q8_0", machine, 0, "prefill_tps"))

    def test_conditions(self):
        results = self.results("name\nabc\nabd\nxbc\n")
        for condition in (starts("ab"), has("bc"), one_of("abc", "xbc"), like("ab.")):
            self.assertEqual(len(results.lines("a.csv", {"name": condition})), 2)
        self.assertEqual(len(results.lines("a.csv", {"name": "abc"})), 1)

    def test_what_is_missing_is_named(self):
        results = self.results("name,value\na,\n")
        for words, file, wanted in (
            ("a.csv.* name=b", "a.csv", {"name": "b"}),
            ("b.csv: No such file", "b.csv", {}),
            ("a.csv.* nom", "a.csv", {"nom": "a"}),
        ):
            with self.assertRaisesRegex(Missing, words):
                results.newest(file, wanted)
        with self.assertRaisesRegex(Missing, "a.csv, line 2: .* value"):
            results.newest("a.csv", {}).number("value")


class Architectures(unittest.TestCase):
    """A model's answer is one of the answers in the results, in words that the page explains."""

    def known(self, names, outcome):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / "models.csv").write_text(f"models,architecture\n{names}\n")
            (root / "archs.csv").write_text(
                "architecture,model,cache,compressed,layers,int-8/q8_0,balanced/q4_0,outcome\n"
                f"a,dense,recurrent state,1,2,,,right\nb,dense,,,,,,{outcome}\nb,moe,,,,,,right\n"
            )
            with unittest.mock.patch.object(archs, "NAMES", root / "models.csv"):
                return archs.known_models(Results(root))

    def test_answers(self):
        rows = self.known('"A, B",a\nC,b', "right")
        self.assertEqual(rows[2], "| A, B | `a` | keys and values; the state stays llama.cpp's |")
        self.assertEqual(rows[3], "| C | `b` | all layers |")

    def test_unknown_answers_are_faults(self):
        for names, outcome, words in (
            ("A,c", "right", "c has 0 answers"),
            ("A,b", "refused: x", "b has 2 answers"),
            ("A,b", "wrong", "line 3: no words for the outcome 'wrong'"),
        ):
            with self.assertRaisesRegex(Missing, words):
                self.known(names, outcome)


class Quality(unittest.TestCase):
    """The first table of README compares presets with llama.cpp's own caches."""

    def test_the_caches_of_a_model_are_of_one_run(self):
        results = Results(ROOT / "bench" / "results")
        for model in caches.MODELS:
            lines = [caches.quality(results, model, cache) for cache in caches.BY_SIZE]
            for run in ("date", "machine", "commit", "command", "text", "from", "to", "chunks"):
                self.assertEqual(len({line[run] for line in lines}), 1, f"{model}: {run}")


class Papers(unittest.TestCase):
    """Tables of the papers' codecs."""

    LINE = "group,k,v,config,model,bits,kld_mean,from,to\ng,int-4,int-4,,SmolLM2,4.5,0.1,512,1022\n"

    def made(self, file, text, make):
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / file).write_text(text)
            return make(Results(pathlib.Path(folder)))

    def test_a_column_has_figures_of_the_same_positions(self):
        wanted = [("int-4", "int-4"), ("bdr-4", "bdr-4")]

        def make(results):
            return claims._by_model(results, ["g"], wanted)

        for last, right in (("1022", True), ("2046", False)):
            text = f"{self.LINE}g,bdr-4,bdr-4,,SmolLM2,4.5,0.05,512,{last}\n"
            if right:
                heading = "| keys / values | true bits | KLD, SmolLM2-135M, 511 positions |"
                self.assertEqual(self.made("quality_papers.csv", text, make)[0], heading)
            else:
                with self.assertRaises(Missing):
                    self.made("quality_papers.csv", text, make)

    def test_a_column_has_no_settings_files_next_to_specs(self):
        text = f"{self.LINE}g,a.kvant,a.kvant,a.kvant,SmolLM2,4.5,0.05,512,1022\n"
        pairs = [("int-4", "int-4"), ("a.kvant", "a.kvant")]
        for wanted in pairs[:1], pairs[1:]:
            self.made("quality_papers.csv", text, lambda r: claims._by_model(r, ["g"], wanted))
        with self.assertRaisesRegex(Missing, "settings files"):
            self.made("quality_papers.csv", text, lambda r: claims._by_model(r, ["g"], pairs))

    def test_codecs_without_a_gpu(self):
        text = (
            'codec,door,answer\nint-4,"a, CPU",\nint-4,"a, GPU",\nint-4,"b, GPU",no\n'
            'kivi-2,"a, CPU",\nkivi-2,"a, GPU",no\nkivi-2,"b, GPU",no\n'
        )
        self.assertEqual(self.made("doors.csv", text, doors.doors_cpu_only), "`kivi-2`")
        rows = self.made("doors.csv", text, doors.doors)
        self.assertEqual(rows[2:], ["| `int-4` | yes | yes | no |", "| `kivi-2` | yes | no | no |"])


class Records(unittest.TestCase):
    """bench/record.py --append."""

    def test_new_columns_are_empty_in_old_rows(self):
        old, new = [{"a": "1", "c": "2"}], [{"a": "3", "b": "4", "c": "5"}]
        self.assertEqual(record.together(old, new), [{"a": "1", "b": "", "c": "2"}, *new])
        self.assertEqual(record.together([], new), new)

    def test_rows_of_another_command_are_refused(self):
        self.assertIsNone(record.together([{"a": "1", "b": "2"}], [{"a": "3"}]))


class Orders(unittest.TestCase):
    """bench/papers.py: only SmolLM2 of its models needs order=halves for the papers' order."""

    def test_options_beside_the_order_stay(self):
        for spec, without in (
            ("a-4", "a-4"),
            ("a-4:order=halves", "a-4"),
            ("a-4:order=halves,b=c", "a-4:b=c"),
            ("a-4:b=c,order=halves,d", "a-4:b=c,d"),
        ):
            self.assertEqual(papers.in_order("SmolLM2", spec), spec)
            self.assertEqual(papers.in_order("Qwen2.5", spec), without)


class Ages(unittest.TestCase):
    """The list of measurements to repeat."""

    def git(self, *words):
        names = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        command = ["git", "-C", self.root, *names, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    @unittest.mock.patch.object(age, "OLDEST", 2)
    def test_old_unknown_and_misplaced_lines(self):
        with tempfile.TemporaryDirectory() as self.root:
            root = pathlib.Path(self.root)
            self.assertIn("cannot be known", *age.report(root, []))
            self.git("init", "-q")
            commits = []
            for number in range(age.OLDEST + 2):
                self.git("commit", "-q", "--allow-empty", "-m", str(number))
                if number in (0, 1, age.OLDEST + 1):
                    commits.append(self.git("rev-parse", "--short", "HEAD"))
            old, fresh, newest = ({"commit": commit} for commit in commits)
            lines = [Line(of, "a.csv", place) for place, of in enumerate((old, fresh, newest))]
            unknown = Line({"commit": "0123abc"}, "a.csv", 9)
            self.assertEqual(list(age.report(root, [(lines[1], []), (lines[2], [])])), [])
            self.assertEqual(
                list(age.report(root, [(lines[0], []), (unknown, [])]))[1:],
                ["  a.csv, 0123abc, not in this history: lines 9",
                 f"  a.csv, {old['commit']}, {age.OLDEST + 1} commits old: lines 0"],
            )  # fmt: skip
            self.assertIn("line 2 is of a later", next(age.report(root, [(lines[1], [lines[2]])])))

    def test_places_are_joined(self):
        self.assertEqual(list(age._ranges([2, 3, 4, 8])), ["2-4", "8"])


class Numbers(unittest.TestCase):
    def test_divergence(self):
        self.assertEqual(
            [divergence(x) for x in (-1e-8, 0.00359, 0.0996, 0.736, 4.9036)],
            ["0.0000", "0.0036", "0.100", "0.736", "4.90"],
        )

    def test_significant(self):
        self.assertEqual(
            [significant(x) for x in (0, 1234.5, 12.345, 0.012345, 0.01196, 9.999)],
            ["0", "1234", "12.3", "0.0123", "0.0120", "10.0"],
        )

    def test_empty_cells(self):
        self.assertEqual(table(["a", "b"], [None, 0]), ["| a | b |", "|---|---|", "| | 0 |"])

    def test_a_row_has_a_cell_per_heading(self):
        with self.assertRaises(ValueError):
            table(["a", "b"], ["x"])


if __name__ == "__main__":
    unittest.main()

"""Parts of the commands that are written in Python: command lines, progress, child processes, the
plan of a report. No model is needed.
"""

import contextlib
import io
import json
import os
import pathlib
import signal
import sys
import tempfile
import threading
import types
import unittest
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "integrations" / "python"))

from kvant import system  # noqa: E402
from kvant.commands import child, cli, report_file, report_plan  # noqa: E402
from kvant.commands.cli import Option  # noqa: E402


class CommandLine(unittest.TestCase):
    command = cli.Command(
        "thing",
        "",
        "About.",
        cli.options("""\
  -c, --ctx N             tokens
  -q, --quick             less
      --config FILE       a file
"""),
    )

    def test_table(self):
        """A table has the text of --help."""
        table = self.command._replace(
            options=cli.options("""\
  -c, --ctx N             tokens of a
                          context
      --a-very-long-option FILE
                          a file - or none
      --quick             less
""")
        )
        self.assertEqual(
            table.options,
            [
                Option("c", "ctx", "N", "tokens of a\ncontext"),
                Option(None, "a-very-long-option", "FILE", "a file - or none"),
                Option(None, "quick", None, "less"),
            ],
        )
        with contextlib.redirect_stdout(io.StringIO()) as said, self.assertRaises(cli.Leave):
            table.parse(["--help"])
        self.assertIn(
            "  -c, --ctx N             tokens of a\n                          context\n"
            "      --a-very-long-option FILE\n                          a file - or none\n",
            said.getvalue(),
        )

    def test_fields(self):
        settings = types.SimpleNamespace(n_ctx=1, quick=False)
        fields = {"ctx": ("n_ctx", cli.whole, 1, 9), "quick": ("quick",), "config": ("path",)}
        for option, value in (("ctx", "7"), ("quick", None), ("config", "a")):
            self.assertTrue(cli.accept(settings, fields, option, value))
        self.assertFalse(cli.accept(settings, fields, "other", "1"))
        self.assertEqual(vars(settings), {"n_ctx": 7, "quick": True, "path": "a"})
        with contextlib.redirect_stderr(io.StringIO()) as said, self.assertRaises(cli.Leave):
            cli.accept(settings, fields, "ctx", "10")
        self.assertIn("--ctx: '10' is not a whole number from 1 to 9", said.getvalue())

    def test_forms(self):
        for words, options in [
            (["-c", "5", "-q", "-c7"], [("ctx", "5"), ("quick", None), ("ctx", "7")]),
            (["-qc", "5"], [("quick", None), ("ctx", "5")]),
            (
                ["--ctx=", "--ct", "-1", "--conf", "-"],
                [("ctx", ""), ("ctx", "-1"), ("config", "-")],
            ),
            (["-q", "--"], [("quick", None)]),
            ([], []),
        ]:
            with self.subTest(words=words):
                self.assertEqual(self.command.parse(words), options)

    def test_words_that_are_no_options(self):
        for words in (["-q", "word"], ["--", "-q"], ["-"], ["-qx"], ["--c", "1"]):
            with self.subTest(words=words), contextlib.redirect_stderr(io.StringIO()) as said:
                with self.assertRaises(cli.Leave) as left:
                    self.command.parse(words)
                self.assertEqual(left.exception.code, cli.USAGE)
                self.assertIn("kvant thing --help lists the options", said.getvalue())


class Progress(unittest.TestCase):
    def follow(self, json):
        with (
            contextlib.redirect_stderr(io.StringIO()) as said,
            mock.patch("time.monotonic", side_effect=range(0, 100, 10)),
        ):
            progress = cli.Progress(200, json)
            progress.add(50, "one")
            progress.end()
        return said.getvalue().splitlines()

    def test_objects(self):
        events = [json.loads(line) for line in self.follow(json=True)]
        self.assertEqual([event["what"] for event in events], ["started", "one", "stopped"])
        self.assertEqual([event["fraction"] for event in events], [0, 0.25, 0.25])
        self.assertIsNone(events[0]["remaining_s"])
        self.assertEqual(events[1]["remaining_s"], 3 * events[1]["elapsed_s"])

    def test_lines(self):
        self.assertEqual(self.follow(json=False), [" 25 %  1:00 left  one"])


class Child(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def run_script(self, script, *words, progress=None, **environment):
        path = self.folder / "kvant"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        with mock.patch.dict(os.environ, KVANT_COMMAND=str(path), **environment):
            return child.run(list(words), progress, 8.0, "step")

    def test_rows_and_codes(self):
        for script, code, rows in [
            ("echo '[{\"a\": 1}]'", 0, [{"a": 1}]),
            ("echo '[{\"a\":'; exit 3", 3, None),
            ("echo '{}'", 0, None),
            ("kill -9 $$", 128 + 9, None),
        ]:
            with self.subTest(script=script):
                result = self.run_script(script)
                self.assertEqual((result.code, result.rows), (code, rows))

    def test_level_of_the_command(self):
        self.assertEqual(
            self.run_script('printf \'["%s"]\' "$*"', "eval", "-m", KVANT_CPU="avx2").rows,
            ["--cpu avx2 eval -m"],
        )

    def test_progress_is_shared(self):
        """Half of a child's work is half of its share. A child that ends well has done all of it,
        whatever it reported.
        """
        half = 'echo \'{"total": 4, "fraction": 0.5}\' >&2'
        for ending, done in (("", 8.0), ("; exit 1", 4.0)):
            progress = mock.Mock(spec=cli.Progress)
            self.run_script(half + ending, progress=progress)
            self.assertEqual(sum(call.args[0] for call in progress.add.call_args_list), done)
            self.assertEqual({call.args[1] for call in progress.add.call_args_list}, {"step"})

    def messages(self, stopping):
        child._passed_on.clear()
        lines = ("kvant: using a", "llama_decode: failed", "kvant: using a", "  hint: b")
        said = io.BytesIO()
        with (
            mock.patch.object(sys, "stderr", mock.Mock(buffer=said)),
            mock.patch.object(cli, "interrupted", return_value=stopping),  # and the script goes on
        ):
            self.run_script("".join(f"echo '{line}' >&2; " for line in lines))
        return said.getvalue().decode().splitlines()

    def test_messages_once_and_no_noise_of_what_was_stopped(self):
        self.assertEqual(
            self.messages(False), ["kvant: using a", "llama_decode: failed", "  hint: b"]
        )
        self.assertEqual(self.messages(True), ["kvant: using a", "  hint: b"])

    def test_interrupt_is_passed_on(self):
        self.addCleanup(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT))
        self.addCleanup(setattr, cli, "_stopping", False)
        cli.catch_interrupt()
        # A signal while the script waits, after it said that it waits.
        ready = self.folder / "ready"
        os.mkfifo(ready)

        def interrupt():
            ready.read_text()
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
        result = self.run_script(
            f"trap 'echo [1]; exit 130' INT; : > {ready}; while :; do sleep 0.05; done"
        )
        self.assertEqual((result.code, result.rows), (130, [1]))
        self.assertTrue(cli.interrupted())


class Plan(unittest.TestCase):
    request = {
        "model": "/models/m.gguf",
        "text": "./t.txt",
        "state": "r.state",
        "needles": "r.needles",
        "quick": False,
        "n_ctx": 2048,
        "n_chunks": 2,
        "longest": 4096,
        "n_ctx_train": 8192,
        "prefill_tps": 1000.0,
        "decode_tps": 10.0,
        "calibrated": False,
        "families": frozenset(
            [
                "int",
                "bdr",
                "kivi",
                "innerq",
                "hessian",
                "turboquant",
                "trellis",
                "octopus",
                "polar",
                "hqmq",
                "addvq",
            ]
        ),
    }

    def plan(self, **changes):
        return report_plan.make(report_plan.Request(**{**self.request, **changes}))

    def test_steps(self):
        self.assertEqual(
            [step.name for step in self.plan()],
            [
                "quality",
                "position",
                "sizes",
                "speed",
                "needle:512",
                "needle:1024",
                "needle:2048",
                "needle:4096",
            ],
        )
        short = self.plan(n_ctx_train=1000)
        self.assertEqual(
            [step.name for step in short], ["quality", "position", "sizes", "speed", "needle:512"]
        )
        # the measurement at the deepest context must still fit
        self.assertIn("0,125,500", short[3].words)

    def test_lists(self):
        quality, _, _, speed, needle, *_ = self.plan(calibrated=True)
        self.assertEqual(quality.words[-2:], ["-k", "hessian-4"])
        self.assertEqual(needle.words.count("--stock"), 2)
        # f16, which is the reference, and q8_0 with kvant's attention, whose quality is q8_0's.
        self.assertEqual(speed.words.count("--stock"), 4)
        self.assertEqual(speed.words[-3:], ["--stock", "q8_0", "--accel"])
        self.assertNotIn("hessian-4", self.plan()[0].words)

    def test_sizes_are_of_what_is_evaluated(self):
        """kvant inspect gets the same caches and no option about computing. The context is the
        model's, but at most 32768.
        """
        own = ["--codec-k", "int-8", "--fp32", "--stock", "q8_0", "--accel"]
        common = ["--threads", "2", "--runtime", "/lib"]
        sizes = self.plan(configs=own, common=common)[2]
        self.assertEqual(
            sizes.words,
            [
                *["inspect", "-m", "/models/m.gguf", "--json", "--runtime", "/lib", "-c", "8192"],
                *["--stock", "f16", "--codec-k", "int-8", "--stock", "q8_0"],
            ],
        )
        self.assertIn("32768", self.plan(n_ctx_train=131072)[2].words)
        quality, _, sizes = self.plan(calibrated=True)[:3]
        self.assertEqual(sizes.words[-20:], quality.words[-20:])

    def test_quick(self):
        steps = self.plan(quick=True, n_ctx=1024, longest=1024)
        self.assertEqual(
            [step.name for step in steps], ["quality", "position", "sizes", "speed", "needle:1024"]
        )
        self.assertEqual(
            [word for word in steps[0].words if word in ("quality", "balanced", "small", "q4_0")],
            ["q4_0", "quality", "balanced", "small"],
        )
        self.assertIn("0,1024", steps[3].words)
        self.assertEqual(
            steps[3].words[steps[3].words.index("-r") + 1], "3"
        )  # one round has no spread

    def test_builds_without_some_families(self):
        few = {"families": frozenset(["int", "turboquant", "trellis"]), "calibrated": True}
        words = self.plan(**few)[0].words
        self.assertNotIn("octopus-4", words)
        self.assertNotIn("hessian-4", words)
        self.assertIn("int-4:axis=channel,group=64", words)
        self.assertEqual(report_plan.absent_families(report_plan.Request(**self.request)), [])
        self.assertEqual(
            report_plan.absent_families(report_plan.Request(**{**self.request, **few})),
            ["addvq", "bdr", "hessian", "hqmq", "innerq", "kivi", "octopus", "polar"],
        )

    def test_own_configurations(self):
        own = [
            "--protect",
            "1",
            *(word for i in range(9) for word in ("--codec-k", f"int-{i}", "--fp32")),
        ]
        quality, _, _, needle, *_ = self.plan(
            configs=own, settings=["--config", "a.kvant"], calibrated=True
        )
        self.assertEqual(quality.words[-len(own) - 2 :], [*own, "--config", "a.kvant"])
        self.assertEqual(needle.words[-22:], [*own[:20], "--config", "a.kvant"])
        self.assertNotIn("--accel", self.plan(configs=own)[2].words)

    def test_times(self):
        """(f16 and two codecs of 1.6 times its cost) x 2 x 2048 tokens at 1000 a second, and the
        start.
        """
        quality, position, *_ = self.plan(configs=["--stock", "q8_0", "--stock", "q4_0"])
        self.assertAlmostEqual(quality.seconds, 2 + 4.096 * (1 + 2 * 1.6))
        self.assertEqual(position.seconds, 2)

    def test_command_lines_name_no_folders(self):
        line = self.plan(common=["--runtime", "/opt/llama"])[0].command_line()
        self.assertTrue(
            line.startswith(
                "kvant eval -m m.gguf --json --runtime llama -f t.txt -c 2048 --chunks 2 "
                "--resume r.state "
            ),
            line,
        )


class Results(unittest.TestCase):
    def test_steps(self):
        results = report_file.new()
        report_file.set_step(
            results, "a", "kvant a", "complete", 1, [{"calibration": "/home/x/m.kvcal"}]
        )
        report_file.set_step(results, "b", "kvant b", "partial", 1, [])
        report_file.set_step(
            results, "a", "kvant a -q", "complete", 2, [{"calibration": "/home/x/m.kvcal"}]
        )
        self.assertEqual([step["name"] for step in results["steps"]], ["a", "b"])
        self.assertEqual(results["steps"][0]["rows"], [{"calibration": "m.kvcal"}])
        self.assertTrue(report_file.has(results, "a", "kvant a -q"))
        self.assertFalse(report_file.has(results, "a", "kvant a"))
        self.assertFalse(report_file.has(results, "b", "kvant b"))
        # A resumed step takes as long as all its parts together. Another command line starts again.
        report_file.set_step(results, "b", "kvant b", "complete", 4, [])
        self.assertEqual([step["seconds"] for step in results["steps"]], [2, 5])


class Files(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name, "a name.json")

    def test_several_writers(self):
        """Each of them replaces the file as a whole, and none hinders another."""
        texts = [str(i) * 100_000 for i in range(4)]
        beside = self.path.with_name("a name.json.part")  # of another program
        beside.write_text("mine")
        failed = []

        def write(text):
            try:
                for _ in range(5):
                    report_file.replace(str(self.path), text)
                    self.assertIn(self.path.read_text(), texts)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=write, args=[text]) for text in texts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failed, [])
        self.assertEqual(beside.read_text(), "mine")
        self.assertEqual(
            {path.name for path in self.path.parent.iterdir()}, {self.path.name, beside.name}
        )

    @unittest.skipIf(os.name == "nt", "Windows has no such modes")
    def test_modes_and_errors(self):
        """Other users may read the file as far as the umask allows. An error leaves an older
        file.
        """
        old = os.umask(0o027)
        self.addCleanup(os.umask, old)
        system.write_file(self.path, b"text")
        self.assertEqual(self.path.stat().st_mode & 0o777, 0o640)
        with mock.patch.object(os, "replace", side_effect=OSError(28, "No space left on device")):
            with contextlib.redirect_stderr(io.StringIO()) as said, self.assertRaises(cli.Leave):
                report_file.replace(str(self.path), "other")
        self.assertIn("a name.json: No space left on device", said.getvalue())
        self.assertEqual([*self.path.parent.iterdir()], [self.path])
        self.assertEqual(self.path.read_bytes(), b"text")

    @unittest.skipIf(os.name == "nt", "Windows has no such pipes")
    def test_a_pipe_is_written_and_stays(self):
        pipe = self.path.with_name("pipe")
        os.mkfifo(pipe)
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        self.addCleanup(os.close, reader)
        system.write_file(pipe, b"text")
        self.assertEqual(os.read(reader, 9), b"text")
        self.assertTrue(pipe.is_fifo())


if __name__ == "__main__":
    unittest.main()

"""The conventions that commands in Python share with commands in C: options and help, error lines,
exit codes, Ctrl-C, progress.

Results go to stdout, everything else to stderr. Command lines are read as tools/args.c reads them:
options in order, and unique beginnings of long names."""

import contextlib
import difflib
import importlib
import json
import math
import os
import re
import signal
import sys
import time
from typing import NamedTuple, Optional

OK, RUNTIME, USAGE, INTERRUPTED = 0, 1, 2, 130

HELP_COLUMN = 26


class Leave(Exception):
    """Ends the command with an exit code, after all messages were printed."""

    def __init__(self, code):
        super().__init__(code)
        self.code = code


def plain(text):
    """A text that may come from a file. Control characters become blanks, so that they cannot
    change a terminal."""
    return re.sub("[\x00-\x1f\x7f-\x9f]", " ", str(text))


def complain(text):
    print(f"kvant: {plain(text)}", file=sys.stderr)


def hint(text):
    print(f"  hint: {plain(text)}", file=sys.stderr)


def fail(text, *hints, code=RUNTIME):
    """Prints an error of one line, with hints, and ends the command."""
    complain(text)
    for line in hints:
        hint(line)
    raise Leave(code)


class Option(NamedTuple):
    letter: Optional[str]  # None: long form only
    name: str  # without dashes
    value: Optional[str]  # the name of its value in the help; None for a switch
    help: str


HELP = Option("h", "help", None, "this text")


def options(text):
    """The options of a table that looks as --help prints it. A line without an option continues the
    help of the option above."""
    found = []
    for line in text.splitlines():
        option = re.match(r"  (?:-(\w),|   ) --([\w-]+)(?: (\S+))?(?:  +|$)(.*)", line)
        if option:
            found.append(Option(*option.groups()))
        else:
            words = f"{found[-1].help}\n{line.strip()}"
            found[-1] = found[-1]._replace(help=words.lstrip())
    return found


def accept(settings, fields, option, text):
    """Sets the attribute of settings that an option names. False if the fields do not have the
    option. fields: {option: (attribute, function that reads the text, its limits)}; without a
    function the attribute becomes the text itself, or True for a switch."""
    if option not in fields:
        return False
    name, *read = fields[option]
    value = True if text is None else text
    setattr(settings, name, read[0](f"--{option}", text, *read[1:]) if read else value)
    return True


class Command(NamedTuple):
    name: str  # "report", "bench distortion"
    usage: str  # the text after the name in the usage line
    about: str
    options: list
    notes: str = ""

    def parse(self, words):
        """The options in order, as pairs of the long name and the value (None for a switch). --help
        ends the command, and so do words that are not options."""
        given, others = self.parse_with_words(words)
        if others:
            self.misuse(f"unexpected word '{others[0]}'")
        return given

    def parse_with_words(self, words):
        """The same options, and the words before, between and behind them."""
        given, others, rest = [], [], list(words)
        if rest == ["--describe"]:  # prints the option table as JSON, as args.c does
            words = {"command": self.name, "usage": self.usage, "about": self.about}
            words |= {"notes": self.notes, "options": [o._asdict() for o in self.options]}
            print(json.dumps(words))
            raise Leave(OK)
        while rest:
            word = rest.pop(0)
            if word == "--":
                return given, others + rest
            if word == "-" or not word.startswith("-"):
                others.append(word)
                continue
            given.append(
                self._long(word, rest) if word.startswith("--") else self._short(word, rest)
            )
            if given[-1][0] == HELP.name:
                self._print_help()
                raise Leave(OK)
        return given, others

    def misuse(self, text, *hints):
        """Ends the command with an error about its command line."""
        fail(
            f"{self.name}: {text}",
            *hints,
            f"kvant {self.name} --help lists the options",
            code=USAGE,
        )

    def _long(self, word, rest):
        name, equals, value = word[2:].partition("=")
        names = [option.name for option in [*self.options, HELP]]
        found = [known for known in names if known == name] or [
            known for known in names if known.startswith(name)
        ]
        if len(found) > 1:
            self.misuse(f"--{name} is ambiguous: it may be --{found[0]} or --{found[1]}")
        if not found:
            self.misuse(
                f"unknown option --{name}",
                *(f"did you mean --{known}?" for known in closest(name, names)),
            )
        option = next(option for option in [*self.options, HELP] if option.name == found[0])
        if equals and option.value is None:
            self.misuse(f"--{option.name} takes no value")
        return option.name, value if equals else self._value(option, f"--{name}", rest)

    def _short(self, word, rest):
        """-c 512, -c512, and switches together."""
        option = next(
            (option for option in [*self.options, HELP] if option.letter == word[1]), None
        )
        if option is None:
            self.misuse(f"unknown option -{word[1]}")
        if word[2:]:
            rest.insert(0, word[2:] if option.value is not None else f"-{word[2:]}")
        return option.name, self._value(option, f"-{option.letter}", rest)

    def _value(self, option, written, rest):
        if option.value is None:
            return None
        if not rest:
            self.misuse(f"{written} needs a value")
        return rest.pop(0)

    def _print_help(self):
        print(f"usage: kvant {self.name} {self.usage}\n\n{self.about}\n\noptions:")
        for option in [*self.options, HELP]:
            left = (
                f"  -{option.letter}, --{option.name}"
                if option.letter
                else f"      --{option.name}"
            )
            left += f" {option.value}" if option.value else ""
            indent = "\n" + " " * HELP_COLUMN
            print(
                left.ljust(HELP_COLUMN)
                + (indent if len(left) >= HELP_COLUMN else "")
                + option.help.replace("\n", indent)
            )
        if self.notes:
            print(f"\n{self.notes}")


def closest(word, names):
    """At most one of the names: a beginning of the word, or a name with a typing error."""
    begun = [name for name in names if word.lower().startswith(name) and len(name) > 1]
    return begun[:1] or difflib.get_close_matches(word.lower(), names, 1)


def whole(option, text, least, most):
    """The whole number of an option, or an error that names the range."""
    try:
        number = int(text)
    except ValueError:
        number = None
    if number is None or not least <= number <= most:
        fail(f"{option}: '{text}' is not a whole number from {least} to {most}", code=USAGE)
    return number


def real(option, text, least, most):
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not least <= number <= most:
        fail(f"{option}: '{text}' is not a number from {least:g} to {most:g}", code=USAGE)
    return number


_stopping = False
_when_stopping = []


def catch_interrupt():
    """From now on the first Ctrl-C only makes interrupted() true, so that the command can print its
    complete results. The second Ctrl-C kills it."""

    def stop(_number, _frame):
        global _stopping
        _stopping = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        for action in _when_stopping:
            action()

    signal.signal(signal.SIGINT, stop)


def interrupted():
    return _stopping


@contextlib.contextmanager
def when_interrupted(action):
    """Within the block the first Ctrl-C calls the action, and so does a Ctrl-C that came before."""
    _when_stopping.append(action)
    try:
        if _stopping:
            action()
        yield
    finally:
        _when_stopping.remove(action)


class Progress:
    """Shows the share that is done and the time that is left. On a terminal it is one line that
    is written again, otherwise a line every few seconds. With json=True it is one JSON object
    per second (tools/progress.h). `total`: any unit of work of which every step costs about the
    same."""

    def __init__(self, total, json=False):
        self.total, self.done, self.visible = total, 0.0, False
        self.started = self.shown = time.monotonic()
        self.terminal = sys.stderr.isatty()
        self.json = json and not self.terminal
        self.every = 1.0 if self.json else 0.1 if self.terminal else 5.0
        if self.json:
            self._show("started")

    def add(self, amount, what):
        self.done += amount
        if time.monotonic() - self.shown >= self.every:
            self._show(what)

    def end(self):
        """Removes the line, so that results do not start in the middle of it."""
        if self.json:
            self._show("done" if self.done >= self.total else "stopped")
        else:
            self.clear()

    def clear(self):
        """Removes the line from a terminal, for a message; the next progress shows it again."""
        if self.terminal and self.visible:
            sys.stderr.write("\r\033[K")
        self.visible = False

    def _show(self, what):
        self.shown, self.visible = time.monotonic(), True
        share = self.done / self.total if self.done < self.total else 1.0
        elapsed = self.shown - self.started
        left = elapsed * (1 - share) / share if share > 0 else None
        sys.stderr.write(
            self._event(share, elapsed, left, what)
            if self.json
            else self._line(share, left or 0, what)
        )
        sys.stderr.flush()

    def _event(self, share, elapsed, left, what):
        event = {
            "done": round(self.done),
            "total": round(self.total),
            "fraction": round(share, 6),
            "elapsed_s": round(elapsed, 3),
            "remaining_s": left if left is None else round(left, 3),
            "what": what,
        }
        return json.dumps(event, separators=(",", ":")) + "\n"

    def _line(self, share, left, what):
        minutes, seconds = divmod(round(left), 60)
        time_left = (
            f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
            if minutes >= 60
            else f"{minutes}:{seconds:02}"
        )
        text = f"{100 * share:3.0f} %  {time_left} left  {what}"
        return "\r\033[K" + text if self.terminal else text + "\n"


def print_json(value):
    print(json.dumps(value, indent=1))


def check_can_write(command, path):
    """Checks that a file can be written, so that minutes of work do not end in "permission
    denied"."""
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path):
        fail(f"{command}: {path} is a folder: name a file in it")
    if not os.access(folder, os.W_OK | os.X_OK):
        why = "Permission denied" if os.path.isdir(folder) else "No such folder"
        fail(f"{command}: cannot write to the folder {folder}: {why}")


def _has_numpy():
    try:
        importlib.import_module("numpy")
    except ImportError:
        return False
    return True


def run(name, words):
    """Runs kvant.commands.NAME and returns the exit code. A full disk must not look like success,
    so results that cannot be written to stdout are an error."""
    for stream in (sys.stdout, sys.stderr):
        # Names of files are bytes. Results are the same bytes on every system.
        stream.reconfigure(encoding="utf-8", errors="surrogateescape", newline="\n")
    try:
        code = importlib.import_module(f"kvant.commands.{name}").main(words)
        sys.stdout.flush()
    except Leave as leave:
        code = leave.code
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except ImportError:
        if _has_numpy():
            raise
        complain(f"{name}: this Python has no NumPy")
        hint("apt install python3-numpy, or python3 -m pip install numpy in an environment")
        hint("KVANT_PYTHON=PATH names another Python")
        code = RUNTIME
    except OSError as error:
        if error.filename is not None:
            complain(f"{name}: {error.filename}: {error.strerror}")
        else:
            complain(f"cannot write to standard output: {error.strerror}")
            with contextlib.suppress(OSError):  # so that nobody tries to write the rest at exit
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = RUNTIME
    return code

"""Lists measurements that pages show and whose commit is far behind HEAD. Needs git history."""

import subprocess

OLDEST = 200  # commits; about what two weeks of work are


def _git(root, *words):
    command = ["git", "-C", str(root), *words]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None


class History:
    """How many commits lie between a commit and HEAD."""

    def __init__(self, root):
        listed = _git(root, "rev-list", "HEAD") if (root / ".git").exists() else None
        self.commits = (listed or "").split()
        self._ages = {}

    def age(self, short):
        """None for a commit that this history does not have."""
        if short not in self._ages:
            plain = short.partition("+")[0]  # a commit "+changes" is one with local changes
            ages = (age for age, commit in enumerate(self.commits) if commit.startswith(plain))
            self._ages[short] = next(ages, None) if plain else None
        return self._ages[short]


def _ranges(numbers):
    """Ranges of numbers as text: 2, 3, 4, 8 as "2-4", "8"."""
    first = last = numbers[0]
    for number in [*numbers[1:], None]:
        if number != last + 1:
            yield f"{first}-{last}" if last > first else str(first)
            first = number
        last = number


def report(root, used):
    """The lines of text that `make pages` prints about the measurements in use."""
    history = History(root)
    if not history.commits:
        yield "No git history here: how old measurements are cannot be known."
        return
    old = {}
    for line, older in used:
        commit = line.get("commit", "")
        age = history.age(commit)
        if age is None or age > OLDEST:
            behind = "not in this history" if age is None else f"{age} commits old"
            old.setdefault((line.file, commit, behind), set()).add(line.place)
        yield from _newer(history, line, older, age)
    if old:
        yield f"To measure again (more than {OLDEST} commits old):"
    for (file, commit, behind), lines in sorted(old.items()):
        places = ", ".join(_ranges(sorted(lines)))
        yield f"  {file}, {commit or 'no commit'}, {behind}: lines {places}"


def _newer(history, line, older, age):
    """A line with a later commit than the line that was taken stands in the wrong place."""
    for other in older:
        other_age = history.age(other.get("commit", ""))
        if age is not None and other_age is not None and other_age < age:
            yield (
                f"{line.file}: line {line.place} ({line['commit']}) was taken, but line "
                f"{other.place} is of a later commit ({other['commit']})"
            )

#!/usr/bin/env python3
"""Makes the files of a release from the commit that is checked out (`make release`).

    scripts/release.py OUT        writes the folder OUT
    scripts/release.py --check    only says whether this commit can be released

OUT gets the source, the tarball of `make dist`, the wheel of `make wheel`, SHA256SUMS and
RELEASE_NOTES.md. The two binaries are built from the unpacked source tarball, so that it lacks
nothing. The program signs and uploads nothing; it prints the commands that do.
"""

import argparse
import hashlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile

import version

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = 60  # lines of RELEASE_NOTES.md: one page when it is printed
LAST = 30  # lines of a command's output that are shown if it fails
# Signals that end a release before it is complete.
ENDS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
# Variables that would change what compilers write, or what a make inside make does.
FOREIGN = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "LDFLAGS", "CFLAGS", "CPPFLAGS")
NOTES = """# kvant {version}

{summary}

## Known limits

{limits}

## Files

| file | content |
|---|---|
| `{source}` | the source; `make` builds it, `make cuda` adds the kernels for NVIDIA GPUs |
| `{dist}` | the command, the library and the llama.cpp plug-in, without kernels for GPUs |
| `{wheel}` | the same with the Python package, for `pip install` |

The two binary files are for x86-64 Linux with glibc 2.28 or newer. `sha256sum -c SHA256SUMS` checks
the files. CHANGELOG.md in the source lists all changes.
"""


class Refused(Exception):
    """Why there is no release, and what to do, in one line."""


def git(root, *words):
    done = subprocess.run(["git", "-C", root, *words], capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().partition("\n")[0]
        raise Refused(f"git {words[0]} failed, run this in a clone: {said}")
    return done.stdout.strip()


def names(number):
    """The files that people download: source, tarball for Linux, wheel."""
    return {
        "source": f"kvant-{number}.tar.gz",
        "dist": f"kvant-{number}-linux-x86_64.tar.gz",
        "wheel": f"kvant-{number}-py3-none-manylinux_2_28_x86_64.whl",
    }


def section(changelog, number):
    """The text of this version's section. Nothing may be left under Unreleased."""
    parts = re.split(r"^## (.*)\n", changelog, flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2]))
    if sections.get("Unreleased", "").strip():
        raise Refused(
            f"CHANGELOG.md has changes under Unreleased: move them into the section of {number}"
        )
    for heading, text in sections.items():
        if re.fullmatch(re.escape(number) + r" - \d{4}-\d\d-\d\d", heading):
            return text
    raise Refused(
        f'CHANGELOG.md has no section of {number}: write one, headed "## {number} - YEAR-MONTH-DAY"'
    )


def notes(changelog, number):
    """The release notes: the summary that begins this version's section, and its known limits.
    Links to files of the tree become names, because the notes are read elsewhere.
    """
    parts = re.split(r"^### (.*)\n", section(changelog, number), flags=re.MULTILINE)
    limits = dict(zip(parts[1::2], parts[2::2])).get("Known limits", "").strip()
    if not parts[0].strip() or not limits:
        raise Refused(
            f"CHANGELOG.md's section of {number} needs a summary below its heading "
            'and a part "### Known limits": write both'
        )
    text = NOTES.format(version=number, summary=parts[0].strip(), limits=limits, **names(number))
    text = re.sub(r"\[([^\]]*)\]\((?!https?:)([^)]*)\)", r"\1 (\2)", text)
    if len(text.splitlines()) > PAGE:
        raise Refused(
            f"the release notes of {number} have {len(text.splitlines())} lines of {PAGE}: "
            "shorten the summary or the known limits in CHANGELOG.md"
        )
    return text


def tags(root, number):
    here = git(root, "tag", "--points-at", "HEAD").split()
    for tag in here:
        if re.match(r"v\d", tag) and tag != f"v{number}":
            raise Refused(
                f"this commit has the tag {tag}, but its version is {number}: "
                "move the tag, or change the version in CMakeLists.txt"
            )
    if f"v{number}" not in here and git(root, "tag", "--list", f"v{number}"):
        raise Refused(
            f"the tag v{number} is at another commit: raise the version in CMakeLists.txt "
            "and run scripts/version.py --write"
        )


def check(root):
    """The version that this commit can be released as, and its notes. Raises Refused."""
    top = git(root, "rev-parse", "--show-toplevel")
    if pathlib.Path(top).resolve() != root.resolve():
        raise Refused(f"{root} is not a git checkout: run this in a clone")
    changed = git(root, "status", "--porcelain").splitlines()
    if changed:
        raise Refused(
            f"{len(changed)} files differ from the commit ({changed[0].split()[-1]}): "
            "commit them, or put them away with git stash -u"
        )
    try:
        number = version.of(root)
        for difference in version.differences(root):
            raise Refused(difference)
    except version.Wrong as error:
        raise Refused(str(error)) from None
    tags(root, number)
    return number, notes((root / "CHANGELOG.md").read_text(), number)


def source_tarball(root, number, path):
    """Writes the files of HEAD. A commit always gives the same bytes: git sorts the files and gives
    them the commit's time, and the mask and gzip -n keep this machine's rights and clock out.
    """
    archive = ["git", "-C", root, "-c", "tar.umask=0022", "archive", "--format=tar"]
    archive += [f"--prefix=kvant-{number}/", "HEAD"]
    with subprocess.Popen(archive, stdout=subprocess.PIPE) as tar:
        with open(path, "wb") as file:
            zipped = subprocess.run(["gzip", "-9n"], stdin=tar.stdout, stdout=file).returncode
    if tar.returncode or zipped:
        raise Refused("git archive or gzip failed: see the line above")


def run(command, environment):
    """Runs a command and shows the end of its output if it fails. The command's processes form a
    session, so that an interrupted release leaves none of them behind.
    """
    # A signal that came before the command's process is known would leave it behind.
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS),
    ) as process:
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)
            said = wait_for(process)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.stdout.read()  # ends when the last process has ended, so none still writes
            raise
    if process.returncode:
        sys.stderr.write(b"".join(said.splitlines(True)[-LAST:]).decode(errors="replace"))
        raise Refused(f"`{' '.join(map(str, command))}` failed: mend what its output says")


def wait_for(process):
    """The output of a process that ends. Python handles a signal after a read from a pipe has
    begun, or has ended, but not if it comes in between. So no read waits for longer than a second.
    """
    while True:
        try:
            return process.communicate(timeout=1)[0]
        except subprocess.TimeoutExpired:
            pass


def build(root, number, scratch, made):
    """Puts the three files that people download into the folder `made`."""
    files = names(number)
    source_tarball(root, number, made / files["source"])
    subprocess.run(["tar", "-C", scratch, "-xf", made / files["source"]], check=True)
    tree = scratch / f"kvant-{number}"
    (scratch / "tmp").mkdir()
    environment = {name: value for name, value in os.environ.items() if name not in FOREIGN} | {
        "SOURCE_DATE_EPOCH": git(root, "log", "-1", "--format=%ct"),
        "TMPDIR": str(scratch / "tmp"),
    }
    jobs = os.environ.get("JOBS") or os.cpu_count()
    for target in ("dist", "wheel"):
        print(f"release: make {target} in the unpacked source", flush=True)
        run(
            ["make", "-C", tree, target, "BUILD=build", f"JOBS={jobs}", f"PYTHON={sys.executable}"],
            environment,
        )
        file = tree / "build" / target / files[target]
        if not file.exists():
            raise Refused(f"make {target} made no {file.name}: compare its names with release.py")
        file.rename(made / file.name)


def sums(folder):
    """The lines that sha256sum prints for the files of a folder."""
    for file in sorted(folder.iterdir()):
        yield f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n"


def make(root, out):
    """Writes the folder `out`: the whole release, or, if anything fails, nothing. All is made in a
    folder next to it, which is renamed at the end and removed otherwise.
    """
    number, text = check(root)
    if out.exists() and not (out / "SHA256SUMS").exists():
        raise Refused(f"{out} exists and is not a release: name another folder")
    os.umask(0o022)  # tar and wheel record the rights of files
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = pathlib.Path(tempfile.mkdtemp(prefix=f"{out.name}.partial-", dir=out.parent))
    try:
        made = scratch / "made"
        made.mkdir()
        build(root, number, scratch, made)
        (made / "SHA256SUMS").write_text("".join(sums(made)))
        (made / "RELEASE_NOTES.md").write_text(text)
        if out.exists():
            out.rename(scratch / "old")
        made.rename(out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return number


def report(root, out, number):
    """Prints the files, and the commands that a person has to run."""
    print(f"{out} has")
    for file in sorted(out.iterdir()):
        print(f"  {file.stat().st_size:>10,} bytes  {file.name}")
    commit = git(root, "rev-parse", "--short", "HEAD")
    print("Read RELEASE_NOTES.md. Two commands are left to you:")
    print(f"  git tag -s v{number} -m 'kvant {number}' {commit} && git push origin v{number}")
    print(
        f"  gh release create v{number} --verify-tag --title 'kvant {number}'"
        f" --notes-file {out}/RELEASE_NOTES.md {out}/SHA256SUMS {out}/kvant-{number}*"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("out", nargs="?", type=pathlib.Path, help="the folder to write")
    what.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    for end in ENDS - {signal.SIGINT}:
        if signal.getsignal(end) == signal.SIG_IGN:  # nohup
            continue
        signal.signal(end, lambda *_: sys.exit("release: ended, nothing was written"))
    try:
        if options.check:
            print(f"{check(ROOT)[0]} can be released")
        else:
            report(ROOT, options.out, make(ROOT, options.out.absolute()))
    except Refused as refused:
        sys.exit(f"release: {refused}")
    except KeyboardInterrupt:
        sys.exit("release: interrupted, nothing was written")


if __name__ == "__main__":
    main()

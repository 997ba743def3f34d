"""`make release` in two clones of this tree with different names and rights: both make the same
bytes, and the wheel says its version. Takes minutes, and the compiler that scripts/fetch.py zig
fetches.
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
import zipfile

import tree  # finds the modules of scripts

import release
import version

NUMBER = version.of(tree.ROOT)
FILES = release.names(NUMBER)
CACHE = pathlib.Path(os.environ.get("KVANT_CACHE", pathlib.Path.home() / ".cache" / "kvant"))


def clone(folder):
    """This tree without changes that are not released, as a repository."""
    head, _, rest = (tree.ROOT / "CHANGELOG.md").read_text().partition("## Unreleased\n")
    changes = f"{head}## Unreleased\n\n{rest[rest.index('## ') :]}"
    return tree.commit(folder, tree=tree.tracked(), **{"CHANGELOG.md": changes})


def made(clone, mask):
    """{name: bytes} of a release."""
    old = os.umask(mask)
    done = subprocess.run(
        ["make", "-C", clone, "release", "JOBS=2", f"PYTHON={sys.executable}"],
        env=tree.ENVIRONMENT | {"HOME": str(clone.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    os.umask(old)
    print(done.stdout)
    assert done.returncode == 0, "make release failed"
    out = clone / "build" / "release"
    subprocess.run(["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=out, check=True)
    return {path.name: path.read_bytes() for path in out.iterdir()}


@unittest.skipUnless((tree.ROOT / ".git").exists(), "not a checkout: files are not known")
@unittest.skipUnless(list(CACHE.glob("zig-*")), "scripts/fetch.py zig has not run")
class Whole(unittest.TestCase):
    def test_two_releases_of_one_commit(self):
        with tempfile.TemporaryDirectory() as name:
            # The clones and the downloads are below the home folder, as a person's are.
            folder = pathlib.Path(name)
            (folder / ".cache").symlink_to(pathlib.Path.home() / ".cache")
            clones = clone(folder / "first"), clone(folder / "another name")
            first = made(clones[0], 0o022)
            self.assertEqual(set(first), {*FILES.values(), "SHA256SUMS", "RELEASE_NOTES.md"})
            (folder / "wheel").write_bytes(first[FILES["wheel"]])
            with zipfile.ZipFile(folder / "wheel") as wheel:
                info = f"kvant-{NUMBER}.dist-info"
                metadata = wheel.read(f"{info}/METADATA").decode().splitlines()
                tags = wheel.read(f"{info}/WHEEL").decode().splitlines()
            self.assertIn(f"Version: {NUMBER}", metadata)
            self.assertIn("Tag: py3-none-manylinux_2_28_x86_64", tags)
            second = made(clones[1], 0o077)
            for file in first:
                self.assertEqual(first[file], second[file], f"{file} differs")


if __name__ == "__main__":
    unittest.main()

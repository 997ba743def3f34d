#!/bin/sh
# run.sh FOLDER: runs what tests/native/prepare.sh has made for Windows under Wine.
set -eu
[ $# = 1 ] || { echo "usage: run.sh FOLDER" >&2; exit 2; }
root=$(cd "$(dirname "$0")/../.." && pwd)

# Wine takes the names of files from the locale.
export WINEPREFIX="$(realpath "$1")/wine" WINEDEBUG=-all LANG=C.UTF-8
# No window asks for Mono or Gecko, and no debugger starts when a program crashes.
export WINEDLLOVERRIDES="mscoree,mshtml,winedbg.exe="
timeout 300 wine cmd /c ver >/dev/null 2>&1 || {
    echo "run: Wine does not start: wine cmd /c ver" >&2
    exit 1
}
exec python3 "$root/tests/native/run.py" "$1" wine

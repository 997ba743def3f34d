#!/bin/sh
# Every public header compiles alone, as C11 and as C++17, without warnings. tools/ and
# integrations/ include no private header. Folders of src/ include only the folders that the table
# in architecture.md allows; tests/docs/test_code.py compares may_use() with that table.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
warnings="-Wall -Wextra -Wpedantic -Werror"
for header in "$root"/include/kvant/*.h; do
    name=kvant/$(basename "$header")
    printf '#include <%s>\nint main(void) { return 0; }\n' "$name" >"$work/alone.c"
    cp "$work/alone.c" "$work/alone.cpp"
    # shellcheck disable=SC2086
    cc -std=c11 $warnings -I"$root/include" -c "$work/alone.c" -o "$work/alone.o"
    # shellcheck disable=SC2086
    c++ -std=c++17 $warnings -I"$root/include" -c "$work/alone.cpp" -o "$work/alone.o"
    echo "$name: C11 and C++17"
done
# The plug-in is linked to the static library and shares five headers of it. The plan of exact
# pages and the decisions about learning have no public interface, because they are policy and may
# change. parallel.h runs a loop on threads, which engines do with their own. attributes.h has
# compiler extensions.
# Everybody shares fnv.h, which is definitions alone: the checksum of files. The command and the
# plug-in have layers of the operating system of their own, which begin with src/base/os.h.
folders='src|base|blocks|math|page|kernels|codec|cache|cuda|device|index|attention'
folders="$folders|calibration|settings|store"
if grep -rnE "#include *\"[^\"]*($folders)/" \
    "$root/tools" "$root/integrations" --include='*.c' --include='*.h' |
    grep -vE 'integrations/llama.cpp/.*"[./]*src/store/(plan|learn|rules).h"' |
    grep -vE 'integrations/llama.cpp/.*"[./]*src/base/(attributes|parallel).h"' |
    grep -v '"[./]*src/base/fnv.h"' |
    grep -vE '/(host|host_windows|os|os_windows)\.[ch]:.*"[./]*src/base/os(_windows)?\.h"'; then
    echo "tools/ and integrations/ may include public headers only" >&2
    exit 1
fi

may_use() {
    case $1 in
    base) ;;
    math) echo base ;;
    page) echo base math ;;
    blocks) echo base ;;
    kernels) echo base math page blocks ;;
    calibration) echo base math kernels ;;
    codec) echo base math page kernels calibration ;;
    settings) echo base codec ;;
    store) echo base ;;
    cache) echo base math page kernels calibration codec device store ;;
    attention) echo base math page kernels blocks codec cache ;;
    device) echo base codec ;;
    index) echo base math kernels calibration codec device ;;
    cuda) echo base math codec device store ;;
    esac
}

# "from to file" of every include between folders of src/.
cd "$root/src"
find . -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' | xargs grep -HoE '^#include "[^"]+"' |
    awk -F: '{
        file = $1
        sub(/^#include "/, "", $2)
        sub(/"$/, "", $2)
        n = split(file, path, "/") - 1 # the folder of the file: path[2] ... path[n], behind "."
        for (parts = split($2, part, "/"); part[++k] == ".." && n > 1; n--) {}
        to = n > 1 ? path[2] : part[k]
        k = 0
        if (to != path[2] && (n > 1 || parts > 1))
            print path[2], to, file
    }' | sort -u | while read -r from to file; do
    ! [ -d "$to" ] || echo "$from $to $file"
done >"$work/arrows"
[ -s "$work/arrows" ] || {
    echo "no includes between folders were found: this check is broken" >&2
    exit 1
}
status=0
while read -r from to file; do
    case " $(may_use "$from") " in
    *" $to "*) ;;
    *)
        echo "src/${file#./}: src/$from may not use src/$to (architecture.md, Folders)" >&2
        status=1
        ;;
    esac
done <"$work/arrows"
cut -d' ' -f1,2 "$work/arrows" | sort | uniq -c
exit $status

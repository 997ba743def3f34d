#!/bin/sh
# Every public header compiles alone, as C11 and as C++17, without warnings; tools/ and integrations/ include no private one.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for header in "$root"/include/kvant/*.h; do
    name=kvant/$(basename "$header")
    printf '#include <%s>\nint main(void) { return 0; }\n' "$name" >"$work/alone.c"
    cp "$work/alone.c" "$work/alone.cpp"
    cc -std=c11 -Wall -Wextra -Wpedantic -Werror -I"$root/include" -c "$work/alone.c" -o "$work/alone.o"
    c++ -std=c++17 -Wall -Wextra -Wpedantic -Werror -I"$root/include" -c "$work/alone.cpp" -o "$work/alone.o"
    echo "$name: C11 and C++17"
done
if grep -rnE '#include *"[^"]*(src|base|math|page|kernels|codec|cache|attention|calibration|settings)/' "$root/tools" "$root/integrations" \
    --include='*.c' --include='*.h'; then
    echo "tools/ and integrations/ may include public headers only" >&2
    exit 1
fi

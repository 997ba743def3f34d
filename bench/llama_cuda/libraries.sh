# Finds the CUDA toolkit, which may lie in a Python package: to be sourced.
#
#   find_toolkit FOLDER     links the libraries in FOLDER; sets nvcc and cublas_headers (empty if
#                           they are not there)

first_file() { # name, folders: the first such file, or nothing
    local name=$1 folder found
    shift
    for folder in "$@"; do
        [ -d "$folder" ] || continue
        found=$(find -L "$folder" -maxdepth 9 -name "$name" -not -path '*/compat/*' \
            -not -path '*/stubs/*' 2>/dev/null | head -1)
        [ -z "$found" ] || { echo "$found"; return; }
    done
}

link_library() { # file, folder, names: nothing for a file that is not there
    local file=$1 folder=$2 name
    shift 2
    [ -n "$file" ] || { echo "missing: $1"; return; }
    for name in "$@"; do ln -sf "$file" "$folder/$name"; done
}

find_toolkit() {
    local to=$1 toolkit packages places driver
    nvcc=${CUDACXX:-$(command -v nvcc || ls /usr/local/cuda*/bin/nvcc 2>/dev/null | head -1)}
    toolkit=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
    packages=$(python3 -c 'import sys; print(" ".join(p for p in sys.path if "-packages" in p))' \
        2>/dev/null || true)
    places="$toolkit /usr/local/cuda $packages /opt/torch /usr/lib/x86_64-linux-gnu /usr/include"
    places="$places /usr/local"
    driver=$(ldconfig -p 2>/dev/null | sed -n 's/.*libcuda\.so\.1 .*=> //p' | head -1)
    [ -n "$driver" ] || driver=$(first_file 'libcuda.so*' /usr/local/nvidia /usr/lib64 \
        /usr/lib/x86_64-linux-gnu)
    cublas_headers=$(dirname "$(first_file cublas_v2.h $places)")
    mkdir -p "$to"
    link_library "$(first_file 'libcublas.so*' $places)" "$to" libcublas.so libcublas.so.13
    link_library "$(first_file 'libcublasLt.so*' $places)" "$to" libcublasLt.so libcublasLt.so.13
    link_library "$(first_file 'libcudart.so*' $places)" "$to" libcudart.so libcudart.so.13
    link_library "$driver" "$to" libcuda.so libcuda.so.1
}

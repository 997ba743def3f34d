# Warnings of everything that is compiled here.
set(KVANT_WARNINGS -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Wundef -Wvla -Wcast-qual)
# Kernels as C++ mix signed and unsigned indices; GCC leaves that out of -Wconversion there, clang does not.
set(KVANT_CXX_WARNINGS -Wno-sign-conversion)
set(KVANT_C_WARNINGS -Wstrict-prototypes -Wmissing-prototypes)
add_compile_options("$<$<COMPILE_LANGUAGE:C,CXX>:${KVANT_WARNINGS}>" "$<$<COMPILE_LANGUAGE:C>:${KVANT_C_WARNINGS}>"
    "$<$<COMPILE_LANGUAGE:CXX>:${KVANT_CXX_WARNINGS}>")

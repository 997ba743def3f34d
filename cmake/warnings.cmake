# Warnings of everything that is compiled here. Where tests are built, a warning is an error. A compiler that knows more
# warnings than ours can be let through with -DCMAKE_COMPILE_WARNING_AS_ERROR=OFF.
set(KVANT_WARNINGS -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Wundef -Wvla -Wcast-qual)
# Kernels as C++ mix signed and unsigned indices; GCC leaves that out of -Wconversion there, clang does not.
set(KVANT_CXX_WARNINGS -Wno-sign-conversion)
set(KVANT_C_WARNINGS -Wstrict-prototypes -Wmissing-prototypes)
add_compile_options("$<$<COMPILE_LANGUAGE:C,CXX>:${KVANT_WARNINGS}>" "$<$<COMPILE_LANGUAGE:C>:${KVANT_C_WARNINGS}>"
    "$<$<COMPILE_LANGUAGE:CXX>:${KVANT_CXX_WARNINGS}>")
if(KVANT_BUILD_TESTS AND NOT DEFINED CMAKE_COMPILE_WARNING_AS_ERROR)
    set(CMAKE_COMPILE_WARNING_AS_ERROR ON)
endif()

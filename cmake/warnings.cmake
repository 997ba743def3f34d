# Warnings of everything that is compiled here. Where tests are built, a warning is an error; a compiler that knows more
# of them than ours can be allowed to go on with -DCMAKE_COMPILE_WARNING_AS_ERROR=OFF.
set(KVANT_WARNINGS -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Wundef -Wvla -Wcast-qual)
set(KVANT_C_WARNINGS -Wstrict-prototypes -Wmissing-prototypes)
add_compile_options("$<$<COMPILE_LANGUAGE:C,CXX>:${KVANT_WARNINGS}>" "$<$<COMPILE_LANGUAGE:C>:${KVANT_C_WARNINGS}>")
if(KVANT_BUILD_TESTS AND NOT DEFINED CMAKE_COMPILE_WARNING_AS_ERROR)
    set(CMAKE_COMPILE_WARNING_AS_ERROR ON)
endif()

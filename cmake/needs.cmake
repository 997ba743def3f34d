# Finds the requirements of parts of the build other than a C compiler and threads, and says which
# part lacks one. Nothing is fetched or installed from here: scripts/deps.sh installs,
# scripts/fetch.py fetches, and `make` calls both.

# kvant_find_pkg(CMOCKA cmocka): sets CMOCKA_FOUND and the target PkgConfig::CMOCKA. Without
# pkg-config nothing is found.
macro(kvant_find_pkg prefix module)
    find_package(PkgConfig QUIET)
    set(${prefix}_FOUND FALSE)
    if(PkgConfig_FOUND)
        pkg_check_modules(${prefix} QUIET IMPORTED_TARGET GLOBAL ${module})
    endif()
endmacro()

# kvant_skipped_tests(REASON NAME...): registers each test as one that is skipped, with the reason,
# because this machine or this build cannot run it. Nobody would miss a test that is not
# registered.
function(kvant_skipped_tests reason)
    foreach(name IN LISTS ARGN)
        add_test(NAME ${name} COMMAND ${CMAKE_COMMAND} -E echo "skipped: ${reason}")
        set_tests_properties(${name} PROPERTIES SKIP_REGULAR_EXPRESSION "skipped: ")
    endforeach()
endfunction()

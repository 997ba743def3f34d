# kvant_exports(TARGET MAP): exports the global symbols of a version script from a DLL of Windows,
# and no other symbol. The linker reads their names from a section of an object file.
function(kvant_exports target map)
    file(STRINGS ${map} lines REGEX "^ +(global: )?[a-z][a-z0-9_]*;$")
    set(text "/* Made of ${map} by cmake/exports.cmake. */\n")
    foreach(line IN LISTS lines)
        string(REGEX MATCH "[a-z0-9_]+;$" name "${line}")
        string(REPLACE ";" "" name "${name}")
        string(APPEND text
            "__asm__(\".section .drectve,\\\"yn\\\"\\n.ascii \\\" -export:${name}\\\"\");\n")
    endforeach()
    set(file ${CMAKE_CURRENT_BINARY_DIR}/${target}_exports.c)
    file(CONFIGURE OUTPUT ${file} CONTENT "${text}" @ONLY)
    target_sources(${target} PRIVATE ${file})
    set_source_files_properties(${file} PROPERTIES COMPILE_OPTIONS -Wno-empty-translation-unit)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${map})
endfunction()

# Installs a wheel (pyproject.toml) into the Python package, which finds its library in lib/, and
# whose command finds the plug-in in ../lib. Only files for shells and man go to the data folder,
# which pip unpacks into sys.prefix.
set(CMAKE_INSTALL_BINDIR kvant/bin)
set(CMAKE_INSTALL_LIBDIR kvant/lib)
set(CMAKE_INSTALL_DATADIR kvant/share)
set(CMAKE_INSTALL_MANDIR ${SKBUILD_DATA_DIR}/share/man)
set(KVANT_SHELL_DATADIR ${SKBUILD_DATA_DIR}/share)

# Zip archives have no links, so the library has its plain name only.
function(kvant_install_wheel)
    foreach(library kvant_shared kvant_cuda)
        if(TARGET ${library})
            set_property(TARGET ${library} PROPERTY VERSION)
            set_property(TARGET ${library} PROPERTY SOVERSION)
            install(TARGETS ${library} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
                RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR}) # DLLs of Windows
        endif()
    endforeach()
    file(GLOB fetch ${PROJECT_SOURCE_DIR}/scripts/fetch*.py) # fetch.py and the modules it imports
    install(PROGRAMS ${fetch} DESTINATION ${CMAKE_INSTALL_DATADIR}/kvant)
endfunction()

# What other projects find: headers, libkvant, a CMake package and pkg-config files. All paths are
# relative, so that cmake --install --prefix and moved trees keep working.
include(CMakePackageConfigHelpers)
set(kvant_cmake_folder ${CMAKE_INSTALL_LIBDIR}/cmake/kvant)
set(kvant_pc_folder ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
file(RELATIVE_PATH KVANT_PC_TO_PREFIX ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig
    ${CMAKE_INSTALL_PREFIX})
# The loader searches folders of the system. Programs that link libkvant elsewhere are told where it
# is.
set(KVANT_PC_RPATH "-Wl,-rpath,\${libdir} ")
if(CMAKE_INSTALL_PREFIX MATCHES "^/(usr)?$")
    set(KVANT_PC_RPATH "")
endif()

install(DIRECTORY include/kvant DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
    FILES_MATCHING PATTERN "*.h")
install(TARGETS kvant_static kvant_shared EXPORT kvant-targets
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
    RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR}) # DLLs of Windows
install(EXPORT kvant-targets NAMESPACE kvant:: DESTINATION ${kvant_cmake_folder})
set(config ${PROJECT_BINARY_DIR}/kvant-config.cmake)
set(version ${PROJECT_BINARY_DIR}/kvant-config-version.cmake)
configure_package_config_file(cmake/kvant-config.cmake.in ${config}
    INSTALL_DESTINATION ${kvant_cmake_folder})
write_basic_package_version_file(${version} COMPATIBILITY SameMinorVersion)
install(FILES ${config} ${version} DESTINATION ${kvant_cmake_folder})

set(packages kvant kvant-static)
# libkvant opens libkvant_cuda at run time, nobody links it: target and package say where it is, and
# bring libkvant.
if(TARGET kvant_cuda)
    install(TARGETS kvant_cuda EXPORT kvant-cuda-targets
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
    install(EXPORT kvant-cuda-targets NAMESPACE kvant:: DESTINATION ${kvant_cmake_folder})
    list(APPEND packages kvant-cuda)
endif()
foreach(package IN LISTS packages)
    configure_file(cmake/${package}.pc.in ${PROJECT_BINARY_DIR}/${package}.pc @ONLY)
    install(FILES ${PROJECT_BINARY_DIR}/${package}.pc DESTINATION ${kvant_pc_folder})
endforeach()

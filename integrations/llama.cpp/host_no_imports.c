/* host_no_imports.c - imports of the process's modules (host.h) on systems where kvant finds none:
 * macOS and Windows. Saved states then have llama.cpp's nominal length. */
#include "host.h"

bool kvp_host_find_imports(kvp_import *imports, size_t n, const char **why)
{
    (void)imports;
    (void)n;
    *why = "kvant finds the functions that a program imports on Linux only";
    return false;
}

bool kvp_host_replace_imports(kvp_import *imports, size_t n)
{
    (void)imports;
    (void)n;
    return false;
}

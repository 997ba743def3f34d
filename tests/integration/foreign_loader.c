/* foreign_loader.c - offers the plug-in a ggml of a given version and API and checks that it declines.
 *
 *     foreign_loader VERSION|none API
 *
 * Exit status: 0 declined, 1 accepted, 2 could not try. */
#define _POSIX_C_SOURCE 200809L /* setenv */

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(int argc, char **argv)
{
    const char *path;
    void *library, *symbol;
    void *(*load)(const char *plugin);

    if (argc != 3)
        return 2;
    setenv("FOREIGN_GGML_VERSION", argv[1], 1);
    path = strcmp(argv[1], "none") == 0 ? KVANT_TEST_FOREIGN_NONE
           : argv[2][0] == '3'          ? KVANT_TEST_FOREIGN_3
                                        : KVANT_TEST_FOREIGN_2;
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    symbol = library ? dlsym(library, "foreign_load") : NULL;
    if (symbol == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        return 2;
    }
    memcpy(&load, &symbol, sizeof(symbol));
    return load(KVANT_TEST_PLUGIN) == NULL ? 0 : 1;
}

/* foreign_loader.c - offers the plug-in a ggml of a given version and API, and checks that the
 * plug-in declines it.
 *
 *     foreign_loader VERSION none|bare|whole|old|row     FOREIGN_ROW names the row that differs
 *
 * Exit status: 0 declined, 1 accepted, 2 could not try. */
#define _POSIX_C_SOURCE 200809L /* setenv */

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *path_of(const char *kind)
{
    static const struct {
        const char *kind, *path;
    } libraries[] = { { "none", KVANT_TEST_FOREIGN_NONE },
                      { "bare", KVANT_TEST_FOREIGN_BARE },
                      { "whole", KVANT_TEST_FOREIGN_WHOLE },
                      { "old", KVANT_TEST_FOREIGN_OLD },
                      { "row", KVANT_TEST_FOREIGN_ROW } };

    for (size_t i = 0; i < sizeof(libraries) / sizeof(libraries[0]); i++)
        if (strcmp(libraries[i].kind, kind) == 0)
            return libraries[i].path;
    return "";
}

int main(int argc, char **argv)
{
    void *library, *symbol;
    void *(*load)(const char *plugin);

    if (argc != 3)
        return 2;
    setenv("FOREIGN_GGML_VERSION", argv[1], 1);
    library = dlopen(path_of(argv[2]), RTLD_NOW | RTLD_LOCAL);
    symbol = library ? dlsym(library, "foreign_load") : NULL;
    if (symbol == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        return 2;
    }
    memcpy(&load, &symbol, sizeof(symbol));
    return load(KVANT_TEST_PLUGIN) == NULL ? 0 : 1;
}

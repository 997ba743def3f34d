/* foreign_ggml.c - a library that loads the plug-in as ggml does but is not a ggml that the plug-in
 * knows. With FOREIGN_VERSION 0 it has no ggml_version. FOREIGN_BACKENDS is a folder of back ends.
 * When it is linked with a real ggml, it is this ggml with another version; foreign_rows.c then
 * makes one row of its tables differ. FOREIGN_OLD hides a function that ggml has since 0.21. The
 * variable FOREIGN_BACKEND names a back end to load. */
#include <dlfcn.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

void *foreign_load(const char *plugin);

#if FOREIGN_VERSION
const char *ggml_version(void);
const char *ggml_commit(void);

const char *ggml_version(void)
{
    return getenv("FOREIGN_GGML_VERSION");
}

const char *ggml_commit(void)
{
    return "test";
}
#endif

#ifdef FOREIGN_BACKENDS
void ggml_backend_load_all_from_path(const char *folder);
void *ggml_backend_load(const char *path);
#endif

#ifdef FOREIGN_OLD
/* dlsym() finds this symbol first, and its address is NULL. */
__asm__(".globl ggml_op_alloc_size_may_expand\nggml_op_alloc_size_may_expand = 0");
#endif

/* Returns the result of ggml_backend_init, or the library itself when the function cannot be
 * called. */
void *foreign_load(const char *plugin)
{
    void *library = dlopen(plugin, RTLD_NOW | RTLD_LOCAL);
    void *symbol = library ? dlsym(library, "ggml_backend_init") : NULL;
    void *(*init)(void);
    void *volatile result =
        &init; /* volatile: the call must not become a jump out of this library */

#ifdef FOREIGN_BACKENDS
    /* the CPU's back end, which llama.cpp loads first, too */
    ggml_backend_load_all_from_path(FOREIGN_BACKENDS);
    if (getenv("FOREIGN_BACKEND") != NULL)
        ggml_backend_load(getenv("FOREIGN_BACKEND"));
#endif
    if (symbol != NULL) {
        memcpy(&init, &symbol, sizeof(symbol));
        result = init();
    }
    return result;
}

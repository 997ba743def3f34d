/* foreign_ggml.c - a library that loads the plug-in as ggml does but is not a ggml that the plug-in knows.
 * FOREIGN_VERSION 0 leaves ggml_version out, FOREIGN_API 3 exports the function by which API 3 is told. Linked with a real ggml it is that
 * one with another version; FOREIGN_TENSORS then makes its tensors larger, FOREIGN_BUFFERS gives its buffers another layout. */
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

#if FOREIGN_API == 3
void ggml_backend_buft_alloc_buffer_n(void);

void ggml_backend_buft_alloc_buffer_n(void)
{
}
#endif

#ifdef FOREIGN_TENSORS
size_t ggml_tensor_overhead(void);

size_t ggml_tensor_overhead(void)
{
    return 1000;
}
#endif

#ifdef FOREIGN_BUFFERS
void *ggml_backend_buffer_init(void);

/* Room enough for what the plug-in expects there, none of which it finds. */
void *ggml_backend_buffer_init(void)
{
    static char buffer[1024];

    return buffer;
}
#endif

/* What ggml_backend_init returned, or the library itself when it cannot be called. */
void *foreign_load(const char *plugin)
{
    void *library = dlopen(plugin, RTLD_NOW | RTLD_LOCAL);
    void *symbol = library ? dlsym(library, "ggml_backend_init") : NULL;
    void *(*init)(void);
    void *volatile result = &init; /* volatile: the call must not become a jump out of this library */

    if (symbol != NULL) {
        memcpy(&init, &symbol, sizeof(symbol));
        result = init();
    }
    return result;
}

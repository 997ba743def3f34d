/* llama_api.c - opens llama.cpp's libraries, binds the functions, refuses other layouts. */
#include "llama_api.h"

#include "command.h"
#include "os.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

/* A prototype in the list that differs from the header's does not compile. */
#define LLAMA_CHECK(result, name, parameters)                                                      \
    _Static_assert(_Generic(&name, result(*) parameters: 1, default: 0),                           \
                   #name " is not as llama.h has "                                                 \
                         "it");
LLAMA_FUNCTIONS(LLAMA_CHECK)

llama_api ll;

/* The name of the library: libllama.so, or libllama.v0.5.0.so in a package registry, or
 * libllama.so.0 in a distribution. Never libllama-common.so. */
static bool note_libllama(void *name, const char *file)
{
    const bool found = os_is_library(file, "llama") && strlen(file) < 256;
    if (found)
        strcpy(name, file);
    return found;
}

static bool find_libllama(const char *folder, char *path, size_t bytes)
{
    char name[256] = "";
    if (!os_each_file(folder, note_libllama, name))
        return complain("llama.cpp runtime %s: %s", folder, strerror(errno));
    if (name[0] != 0 && snprintf(path, bytes, "%s/%s", folder, name) < (int)bytes)
        return true;
    return complain("llama.cpp runtime %s: no " KVANT_OS_LIBRARY("llama*") " there", folder);
}

static bool bind(void *library, const char *name, void *member)
{
    void *symbol = kvant_os_symbol(library, name);
    if (symbol == NULL) {
        complain("the llama.cpp runtime lacks %s", name);
        return hint("kvant runs with llama.cpp from ggml 0.10 on; it was compiled for "
                    "llama.cpp " KVANT_LLAMA_VERSION " with ggml " KVANT_GGML_VERSION);
    }
    memcpy(member, &symbol,
           sizeof symbol); /* ISO C has no conversion from void * to a function pointer */
    return true;
}

static const char *no_version(void)
{
    return "(no version)";
}

/* llama.cpp before ggml 0.21 has no such function. */
static void bind_version(void *library)
{
    void *symbol = kvant_os_symbol(library, "llama_version");
    ll.llama_version = no_version;
    if (symbol != NULL)
        memcpy(&ll.llama_version, &symbol, sizeof symbol);
}

/* kvant reads tensors and hands a batch over. The plug-in looks closer (ggml_tables.c); here a
 * tensor's size stands for the rest of it. ggml counts a header of 32 bytes for each. */
static bool check_tensors(const char *folder)
{
    if (ll.ggml_tensor_overhead() == sizeof(struct ggml_tensor) + 32)
        return true;
    complain("%s is llama.cpp %s with ggml %s, whose tensors have another layout than in "
             "ggml " KVANT_GGML_VERSION,
             folder, ll.llama_version(), ll.ggml_version());
    return hint("use a runtime with ggml 0.10 to 0.27");
}

bool llama_api_load(const char *folder)
{
    char path[OS_MAX_PATH];
    if (folder[0] == 0)
        complain("no llama.cpp runtime is named");
    if (folder[0] == 0 || !find_libllama(folder, path, sizeof path))
        return hint(
            "scripts/fetch.py runtime fetches one; --runtime or KVANT_RUNTIME names the folder");
    /* Global, because back ends that are loaded later look for ggml's symbols there. */
    void *library = os_open_global(path);
    if (library == NULL)
        return complain("cannot load %s", kvant_os_library_error());
#define LLAMA_BIND(result, name, parameters)                                                       \
    if (!bind(library, #name, &ll.name))                                                           \
        return false;
    LLAMA_FUNCTIONS(LLAMA_BIND)
    LLAMA_SHAPED_FUNCTIONS(LLAMA_BIND)
    bind_version(library);
    return check_tensors(folder);
}

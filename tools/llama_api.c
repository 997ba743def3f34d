/* llama_api.c - opens llama.cpp's libraries, binds the functions, refuses other versions. */
#define _POSIX_C_SOURCE 200809L
#include "llama_api.h"

#include "command.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

/* A prototype in the list that differs from the header's does not compile. */
#define LLAMA_CHECK(result, name, parameters)                                                                      \
    _Static_assert(_Generic(&name, result(*) parameters : 1, default : 0), #name " is not as llama.h has "         \
                                                                                 "it");
LLAMA_FUNCTIONS(LLAMA_CHECK)

llama_api ll;

/* libllama.so, or libllama.v0.5.0.so and the like, as builds for package registries name it; never
 * libllama-common.so. */
static bool is_libllama(const char *name)
{
    const size_t n = strlen(name);
    return strncmp(name, "libllama.", 9) == 0 && n > 3 && strcmp(name + n - 3, ".so") == 0;
}

static bool find_libllama(const char *folder, char *path, size_t bytes)
{
    DIR *dir = opendir(folder);
    if (dir == NULL)
        return complain("llama.cpp runtime %s: %s", folder, strerror(errno));
    bool found = false;
    for (struct dirent *entry = readdir(dir); entry != NULL && !found; entry = readdir(dir))
        if (is_libllama(entry->d_name))
            found = snprintf(path, bytes, "%s/%s", folder, entry->d_name) < (int)bytes;
    closedir(dir);
    if (!found)
        complain("llama.cpp runtime %s: no libllama*.so there", folder);
    return found;
}

static bool bind(void *library, const char *name, void *member)
{
    void *symbol = dlsym(library, name);
    if (symbol == NULL) {
        complain("the llama.cpp runtime lacks %s", name);
        return hint("it must be llama.cpp " KVANT_LLAMA_VERSION " with ggml " KVANT_GGML_VERSION);
    }
    memcpy(member, &symbol, sizeof symbol); /* ISO C has no conversion from void * to a function pointer */
    return true;
}

/* "0.5.0-dev" and "0.5.0" are one source: the suffix says how it was built. */
static bool same_version(const char *loaded, const char *expected)
{
    const size_t n = strlen(expected);
    return strncmp(loaded, expected, n) == 0 && (loaded[n] == 0 || loaded[n] == '-');
}

static bool check_versions(const char *folder)
{
    const char *llama = ll.llama_version(), *ggml = ll.ggml_version();
    if (same_version(llama, KVANT_LLAMA_VERSION) && same_version(ggml, KVANT_GGML_VERSION))
        return true;
    complain("%s is llama.cpp %s with ggml %s, but this kvant was compiled for %s with ggml %s", folder, llama,
             ggml, KVANT_LLAMA_VERSION, KVANT_GGML_VERSION);
    return hint("use a runtime of that version, or configure kvant with that runtime's headers (KVANT_LLAMA_SRC)");
}

bool llama_api_load(const char *folder)
{
    char path[PATH_MAX];
    if (folder[0] == 0)
        complain("no llama.cpp runtime is named");
    if (folder[0] == 0 || !find_libllama(folder, path, sizeof path))
        return hint("scripts/fetch.py runtime fetches one; --runtime or KVANT_RUNTIME names the folder");
    /* Global, because back ends that are loaded later look for ggml's symbols there. */
    void *library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    if (library == NULL)
        return complain("cannot load %s", dlerror());
#define LLAMA_BIND(result, name, parameters)                                                                       \
    if (!bind(library, #name, &ll.name))                                                                           \
        return false;
    LLAMA_FUNCTIONS(LLAMA_BIND)
    return check_versions(folder);
}

/* selftest_driver.c - see selftest_driver.h. */
#include "selftest_driver.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

const gpu_driver *gpu_driver_load(char *why, size_t bytes)
{
    static gpu_driver driver;
    const struct {
        const char *name;
        void *slot;
    } symbols[] = {
#define ENTRY(member, name, parameters) { #name, &driver.member },
        GPU_DRIVER_FUNCTIONS(ENTRY)
#undef ENTRY
    };
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    snprintf(why, bytes, "no NVIDIA driver (libcuda.so.1)");
    for (size_t i = 0; library != NULL && i < sizeof symbols / sizeof *symbols; i++) {
        void *symbol = dlsym(library, symbols[i].name);
        if (symbol == NULL) {
            snprintf(why, bytes, "the NVIDIA driver is too old: it has no %s", symbols[i].name);
            return NULL;
        }
        memcpy(symbols[i].slot, &symbol,
               sizeof symbol); /* ISO C: no pointer to data becomes one to a function */
    }
    if (library == NULL)
        return NULL;
    const int error = driver.init(0);
    if (error != 0)
        snprintf(why, bytes,
                 "the NVIDIA driver does not start, or there is no GPU (error %d of cuInit)",
                 error);
    return error == 0 ? &driver : NULL;
}

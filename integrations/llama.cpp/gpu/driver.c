/* driver.c - see driver.h. */
#include "driver.h"

#include <stdio.h>
#include <string.h>

#include "../host.h"
#include "../log.h"

kvp_driver kvp_cu;

bool kvp_driver_load(char *err, size_t errlen)
{
    const struct {
        const char *name;
        void *slot;
    } symbols[] = {
#define ENTRY(member, name, parameters) { #name, &kvp_cu.member },
        KVP_CUDA_FUNCTIONS(ENTRY)
#undef ENTRY
    };
    void *library = kvant_os_open_library(KVANT_OS_CUDA_DRIVER);
    const size_t n = sizeof(symbols) / sizeof(symbols[0]);

    for (size_t i = 0; i < n; i++) {
        void *symbol = library != NULL ? kvant_os_symbol(library, symbols[i].name) : NULL;
        if (symbol == NULL && (library == NULL || i < n - 2)) {
            snprintf(err, errlen, "%s",
                     library == NULL ? "no NVIDIA driver (" KVANT_OS_CUDA_DRIVER ")"
                                     : "the NVIDIA driver is too old");
            return false;
        }
        memcpy(symbols[i].slot, &symbol, sizeof(symbol));
    }
    if (kvp_cu.init(0) == 0)
        return true;
    snprintf(err, errlen, "the NVIDIA driver does not start");
    return false;
}

bool kvp_cu_ok(int result, const char *what)
{
    const char *name = "an unknown error of the driver";

    if (result == 0)
        return true;
    kvp_cu.error_name(result, &name);
    kvp_error("the GPU failed at %s: %s", what, name);
    return false;
}

static cu_address address_of(const void *at)
{
    return (cu_address)(uintptr_t)at;
}

bool kvp_cu_write(void *to, const void *from, size_t bytes, cu_stream stream)
{
    return kvp_cu_ok(kvp_cu.copy_in(address_of(to), from, bytes, stream), "copying");
}

bool kvp_cu_read(void *to, const void *from, size_t bytes, cu_stream stream)
{
    return kvp_cu_ok(kvp_cu.copy_out(to, address_of(from), bytes, stream), "copying") &&
           kvp_cu_finish(stream, "copying");
}

bool kvp_cu_move(void *to, const void *from, size_t bytes, cu_stream stream)
{
    return kvp_cu_ok(kvp_cu.copy_within(address_of(to), address_of(from), bytes, stream),
                     "copying");
}

bool kvp_cu_clear(void *at, size_t bytes, cu_stream stream)
{
    return kvp_cu_ok(kvp_cu.fill(address_of(at), 0, bytes, stream), "clearing");
}

bool kvp_cu_finish(cu_stream stream, const char *what)
{
    return kvp_cu_ok(kvp_cu.stream_finish(stream), what);
}

/* gpu.c - loads the driver and libkvant_cuda, opens a device. */
#define _GNU_SOURCE /* PATH_MAX */
#include "gpu.h"

#include "command.h"
#include "plugin.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LIBRARY_FILE "libkvant_cuda.so"
#define LIBRARY_ENV "KVANT_CUDA_LIBRARY"
#define DRIVER_FILE "libcuda.so.1"

enum { ATTRIBUTE_L2_BYTES = 38, STREAM_NON_BLOCKING = 1 };

/* ISO C has no conversion from void * to a function pointer. */
static bool bind(void *library, const char *file, const char *name, void *member)
{
    void *symbol = dlsym(library, name);
    if (symbol == NULL) {
        complain("%s has no %s", file, name);
        return false;
    }
    memcpy(member, &symbol, sizeof symbol);
    return true;
}

static bool load_driver(gpu_driver *d)
{
    void *driver = dlopen(DRIVER_FILE, RTLD_NOW | RTLD_LOCAL);
    if (driver == NULL) {
        complain("no NVIDIA driver: %s", dlerror());
        hint("kvant bench cuda needs a machine with an NVIDIA GPU; kvant bench attention measures the CPU");
        return false;
    }
#define GPU_BIND(name, symbol, parameters)                                                                         \
    if (!bind(driver, DRIVER_FILE, symbol, &d->name)) {                                                            \
        hint("a driver of CUDA 12 or later is needed");                                                            \
        return false;                                                                                              \
    }
    GPU_DRIVER_FUNCTIONS(GPU_BIND)
#undef GPU_BIND
    return true;
}

static void *open_beside_command(char *path, size_t bytes)
{
    if (!library_beside_command(LIBRARY_FILE, path, bytes))
        return NULL;
    return dlopen(path, RTLD_NOW | RTLD_LOCAL);
}

static bool load_library(gpu_library *l, const char *path)
{
    static char found[PATH_MAX];
    if (path == NULL && getenv(LIBRARY_ENV) != NULL && getenv(LIBRARY_ENV)[0] != 0)
        path = getenv(LIBRARY_ENV);
    void *library = NULL;
    if (path == NULL && (library = open_beside_command(found, sizeof found)) != NULL)
        path = found;
    if (library == NULL)
        library = dlopen(path != NULL ? path : LIBRARY_FILE, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        complain("cannot load the library for GPUs: %s", dlerror());
        hint("`make cuda` builds " LIBRARY_FILE " (it needs nvcc, no GPU); --library or " LIBRARY_ENV
             " names it where it is elsewhere");
        return false;
    }
#define GPU_BIND(type, name, parameters)                                                                           \
    if (!bind(library, path != NULL ? path : LIBRARY_FILE, "kvant_cuda_" #name, &l->name)) {                       \
        hint("a " LIBRARY_FILE " of this version of kvant is needed");                                             \
        return false;                                                                                              \
    }
    GPU_LIBRARY_FUNCTIONS(GPU_BIND)
#undef GPU_BIND
    return true;
}

bool gpu_ok(const gpu *g, gpu_result result, const char *what)
{
    if (result == 0)
        return true;
    const char *text = NULL;
    if (g->driver.error_text(result, &text) != 0 || text == NULL)
        text = "an error that the driver has no words for";
    complain("%s: %s (%d)", what, text, result);
    return false;
}

bool gpu_library_ok(kvant_status status, const char *what)
{
    if (status == KVANT_OK)
        return true;
    complain("%s: %s", what, kvant_strerror(status));
    if (status == KVANT_ERR_CUDA)
        hint("the library may be built for other GPUs, or for a later driver");
    return false;
}

static bool choose_device(gpu *g, uint32_t ordinal)
{
    int count = 0, l2 = 0;
    if (!gpu_ok(g, g->driver.init(0), "starting the driver") ||
        !gpu_ok(g, g->driver.device_count(&count), "counting devices"))
        return false;
    if (ordinal >= (uint32_t)count) {
        complain("no device %u: this machine has %d", (unsigned)ordinal, count);
        return false;
    }
    if (!gpu_ok(g, g->driver.device_get(&g->device, (int)ordinal), "choosing the device") ||
        !gpu_ok(g, g->driver.device_name(g->name, (int)sizeof g->name, g->device), "asking for its name") ||
        !gpu_ok(g, g->driver.device_attribute(&l2, ATTRIBUTE_L2_BYTES, g->device), "asking for its cache") ||
        !gpu_ok(g, g->driver.driver_version(&g->driver_version), "asking for the driver's version"))
        return false;
    g->l2_bytes = (size_t)l2;
    return true;
}

bool gpu_open(gpu *g, const char *library, uint32_t ordinal)
{
    *g = (gpu){ .device = -1 };
    if (!load_library(&g->library, library) || !load_driver(&g->driver) || !choose_device(g, ordinal))
        return false;
    gpu_context context;
    if (!gpu_ok(g, g->driver.context_retain(&context, g->device), "opening the device"))
        return false;
    g->context = true;
    return gpu_ok(g, g->driver.context_set(context), "opening the device") &&
           gpu_ok(g, g->driver.stream_create(&g->stream, STREAM_NON_BLOCKING), "making a stream");
}

/* The libraries stay loaded: the process ends soon, and a driver does not like to be unloaded. */
void gpu_close(gpu *g)
{
    if (g->stream != NULL)
        g->driver.stream_destroy(g->stream);
    if (g->context)
        g->driver.context_release(g->device);
    g->stream = NULL;
    g->context = false;
}

gpu_address gpu_new(const gpu *g, size_t bytes)
{
    gpu_address address = 0;
    char what[64];
    snprintf(what, sizeof what, "%zu MiB of the device's memory", (bytes >> 20) + 1);
    return gpu_ok(g, g->driver.allocate(&address, bytes > 0 ? bytes : 1), what) ? address : 0;
}

gpu_address gpu_new_copy(const gpu *g, const void *from, size_t bytes)
{
    gpu_address address = gpu_new(g, bytes);
    if (address == 0 || gpu_ok(g, g->driver.upload(address, from, bytes), "copying to the device"))
        return address;
    g->driver.release(address);
    return 0;
}

/* gpu.c - names libkvant_cuda, loads the driver, opens a device. */
#define _GNU_SOURCE /* PATH_MAX, setenv */
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

/* libkvant opens the library that the variable names: the caller's, or the one beside the command. */
static bool name_library(const char *path)
{
    char beside[PATH_MAX];
    const char *named = getenv(LIBRARY_ENV);
    if (path == NULL && (named == NULL || named[0] == 0) &&
        library_beside_command(LIBRARY_FILE, beside, sizeof beside))
        path = beside;
    if (path == NULL || setenv(LIBRARY_ENV, path, 1) == 0)
        return true;
    complain("out of memory");
    return false;
}

static bool open_library(const char *path)
{
    char err[512] = "";
    if (!name_library(path))
        return false;
    if (kvant_cuda_available(err, sizeof err) == KVANT_OK)
        return true;
    complain("%s", err);
    hint("`make cuda` builds " LIBRARY_FILE " (it needs nvcc, no GPU); --library or " LIBRARY_ENV
         " names it where it is elsewhere");
    hint("kvant bench cuda needs a machine with an NVIDIA GPU; kvant bench attention measures the CPU");
    return false;
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
    if (!open_library(library) || !load_driver(&g->driver) || !choose_device(g, ordinal))
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

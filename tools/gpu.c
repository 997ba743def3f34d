/* gpu.c - names libkvant_cuda, loads the driver, opens a device, takes the time. */
#define _GNU_SOURCE /* PATH_MAX, setenv */
#include "gpu.h"

#include "command.h"
#include "plugin.h"
#include "stats.h"

#include <dlfcn.h>
#include <kvant/cuda.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LIBRARY_FILE "libkvant_cuda.so"
#define LIBRARY_ENV "KVANT_CUDA_LIBRARY"
#define DRIVER_FILE "libcuda.so.1"

enum { ATTRIBUTE_L2_BYTES = 38 };

static bool load_driver(gpu *g)
{
    void *driver = dlopen(DRIVER_FILE, RTLD_NOW | RTLD_LOCAL), *symbol;
    if (driver == NULL)
        return complain("no NVIDIA driver: %s", dlerror());
/* ISO C has no conversion from void * to a function pointer. */
#define GPU_BIND(name, text, parameters)                                                                           \
    if ((symbol = dlsym(driver, text)) == NULL) {                                                                  \
        complain(DRIVER_FILE " has no " text);                                                                     \
        hint("a driver of CUDA 12 or later is needed");                                                            \
        return false;                                                                                              \
    }                                                                                                              \
    memcpy(&g->name, &symbol, sizeof symbol);
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
    return complain("out of memory");
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
    return hint("kvant bench cuda needs a machine with an NVIDIA GPU; kvant bench attention measures the CPU");
}

bool gpu_ok(const gpu *g, gpu_result result, const char *what)
{
    if (result == 0)
        return true;
    const char *text = NULL;
    if (g->error_text(result, &text) != 0 || text == NULL)
        text = "an error that the driver has no words for";
    return complain("%s: %s (%d)", what, text, result);
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
    int count = 0, device, l2 = 0;
    gpu_context context;
    if (!gpu_ok(g, g->init(0), "starting the driver") || !gpu_ok(g, g->device_count(&count), "counting devices"))
        return false;
    if (ordinal >= (uint32_t)count)
        return complain("no device %u: this machine has %d", (unsigned)ordinal, count);
    if (!gpu_ok(g, g->device_get(&device, (int)ordinal), "choosing the device") ||
        !gpu_ok(g, g->device_name(g->device, (int)sizeof g->device, device), "asking for its name") ||
        !gpu_ok(g, g->device_attribute(&l2, ATTRIBUTE_L2_BYTES, device), "asking for its cache") ||
        !gpu_ok(g, g->driver_version(&g->version), "asking for the driver's version") ||
        !gpu_ok(g, g->context_retain(&context, device), "opening the device") ||
        !gpu_ok(g, g->context_set(context), "opening the device"))
        return false;
    const size_t least = (size_t)256 << 20, wanted = 4 * (size_t)l2;
    g->flush_bytes = wanted > least ? wanted : least;
    return true;
}

bool gpu_open(gpu *g, const char *library, uint32_t ordinal)
{
    *g = (gpu){ .begin = NULL };
    return open_library(library) && load_driver(g) && choose_device(g, ordinal) &&
           gpu_ok(g, g->event_create(&g->begin, 0), "making an event") &&
           gpu_ok(g, g->event_create(&g->end, 0), "making an event") &&
           (g->flush = gpu_new(g, g->flush_bytes)) != 0;
}

gpu_address gpu_new(const gpu *g, size_t bytes)
{
    gpu_address address = 0;
    char what[64];
    snprintf(what, sizeof what, "%zu MiB of the device's memory", (bytes >> 20) + 1);
    return gpu_ok(g, g->allocate(&address, bytes), what) ? address : 0;
}

bool gpu_time(const gpu *g, bool cold, gpu_result (*enqueue)(const gpu *g, void *work), void *work, double *seconds)
{
    float milliseconds = 0;
    if ((cold && !gpu_ok(g, g->fill(g->flush, 0x5a, g->flush_bytes, GPU_STREAM), "emptying the cache")) ||
        !gpu_ok(g, g->event_record(g->begin, GPU_STREAM), "timing") || !gpu_ok(g, enqueue(g, work), "work on the GPU") ||
        !gpu_ok(g, g->event_record(g->end, GPU_STREAM), "timing") || !gpu_ok(g, g->event_wait(g->end), "timing") ||
        !gpu_ok(g, g->event_elapsed(&milliseconds, g->begin, g->end), "timing"))
        return false;
    *seconds = milliseconds / 1e3;
    return true;
}

typedef struct copy_work {
    gpu_address from, to;
    size_t bytes;
} copy_work;

static gpu_result enqueue_copy(const gpu *g, void *work)
{
    const copy_work *w = work;
    return g->copy(w->to, w->from, w->bytes, GPU_STREAM);
}

/* Of 1 GiB, or of what there is. */
double gpu_copy_bandwidth(const gpu *g, uint32_t rounds)
{
    const size_t most = (size_t)1 << 30;
    size_t available, total;
    double *seconds = calloc(rounds, sizeof *seconds);
    if (seconds == NULL || !gpu_ok(g, g->memory_info(&available, &total), "asking for free memory")) {
        free(seconds);
        return 0;
    }
    copy_work w = { .bytes = available / 4 < most ? available / 4 / 512 * 512 : most };
    bool ok = (w.from = gpu_new(g, w.bytes)) != 0 && (w.to = gpu_new(g, w.bytes)) != 0 &&
              gpu_ok(g, g->fill(w.from, 0x5a, w.bytes, GPU_STREAM), "copy");
    for (uint32_t i = 0; i < rounds && ok; i++)
        ok = gpu_time(g, false, enqueue_copy, &w, &seconds[i]);
    if (w.from != 0)
        g->release(w.from);
    if (w.to != 0)
        g->release(w.to);
    const double bandwidth = ok ? 2 * (double)w.bytes / stats_percentile(seconds, rounds, 0.5) : 0;
    free(seconds);
    return bandwidth;
}

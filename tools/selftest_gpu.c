/* selftest_gpu.c - GPUs of `kvant selftest`: finds them, owns their memory, stream and errors.
 * Calls the CUDA driver, which is looked up in libcuda.so.1; kernels are libkvant_cuda's. */
#include "selftest_gpu.h"

#include "os.h"

#include <stdlib.h>
#include <string.h>

/* X(member, exported name, parameters); all return 0 for success. */
#define DRIVER_FUNCTIONS(X)                                                                        \
    X(init, cuInit, (unsigned flags))                                                              \
    X(version, cuDriverGetVersion, (int *version))                                                 \
    X(count, cuDeviceGetCount, (int *n))                                                           \
    X(device, cuDeviceGet, (int *device, int ordinal))                                             \
    X(name, cuDeviceGetName, (char *name, int bytes, int device))                                  \
    X(attribute, cuDeviceGetAttribute, (int *value, int attribute, int device))                    \
    X(context_retain, cuDevicePrimaryCtxRetain, (void **context, int device))                      \
    X(context_set, cuCtxSetCurrent, (void *context))                                               \
    X(memory_info, cuMemGetInfo_v2, (size_t * available, size_t * total))                          \
    X(memory_new, cuMemAlloc_v2, (gpu_address * memory, size_t bytes))                             \
    X(memory_free, cuMemFree_v2, (gpu_address memory))                                             \
    X(copy_in, cuMemcpyHtoDAsync_v2, (gpu_address to, const void *from, size_t bytes, void *s))    \
    X(copy_out, cuMemcpyDtoHAsync_v2, (void *to, gpu_address from, size_t bytes, void *s))         \
    X(copy_within, cuMemcpyDtoDAsync_v2, (gpu_address to, gpu_address from, size_t n, void *s))    \
    X(fill, cuMemsetD8Async, (gpu_address at, unsigned char value, size_t bytes, void *s))         \
    X(stream_new, cuStreamCreate, (void **stream, unsigned flags))                                 \
    X(stream_finish, cuStreamSynchronize, (void *stream))                                          \
    X(error_name, cuGetErrorName, (int error, const char **name))

static struct {
#define MEMBER(member, name, parameters) int(*member) parameters;
    DRIVER_FUNCTIONS(MEMBER)
#undef MEMBER
} driver;

/* False without a driver, or when it does not start (no GPU) or is too old. */
static bool load_driver(void)
{
    static const struct {
        const char *name;
        void *slot;
    } symbols[] = {
#define ENTRY(member, name, parameters) { #name, &driver.member },
        DRIVER_FUNCTIONS(ENTRY)
#undef ENTRY
    };
    void *library = kvant_os_open_library(KVANT_OS_CUDA_DRIVER);
    for (size_t i = 0; library != NULL && i < sizeof symbols / sizeof *symbols; i++) {
        void *symbol = kvant_os_symbol(library, symbols[i].name);
        if (symbol == NULL)
            return false;
        /* ISO C: no pointer to data becomes one to a function */
        memcpy(symbols[i].slot, &symbol, sizeof symbol);
    }
    return library != NULL && driver.init(0) == 0;
}

/* Errors and memory */

static bool ok(test_gpu *gpu, int result, const char *what)
{
    const char *name = "an unknown error";
    if (result != 0 && gpu->error[0] == 0) {
        driver.error_name(result, &name);
        snprintf(gpu->error, sizeof gpu->error, "%s: %s (%d)", what, name, result);
    }
    return gpu->error[0] == 0;
}

bool gpu_did(test_gpu *gpu, kvant_status status, const char *what)
{
    if (status != KVANT_OK && gpu->error[0] == 0)
        snprintf(gpu->error, sizeof gpu->error, "%s: %s", what, kvant_strerror(status));
    return gpu->error[0] == 0;
}

bool gpu_finish(test_gpu *gpu)
{
    return ok(gpu, driver.stream_finish(gpu->stream), "cuStreamSynchronize");
}

void gpu_begin(test_gpu *gpu)
{
    gpu->error[0] = 0;
    ok(gpu, driver.context_set(gpu->context), "cuCtxSetCurrent");
    ok(gpu, driver.stream_finish(gpu->stream), "an earlier error of this GPU");
    for (; gpu->n_spans > 0; gpu->n_spans--)
        driver.memory_free(gpu->spans[gpu->n_spans - 1]);
}

static gpu_address address_of(const void *memory)
{
    return (gpu_address)(uintptr_t)memory;
}

bool gpu_fill(test_gpu *gpu, void *at, int value, size_t bytes)
{
    return gpu->error[0] == 0 &&
           ok(gpu, driver.fill(address_of(at), (unsigned char)value, bytes, gpu->stream),
              "cuMemsetD8");
}

void *gpu_new(test_gpu *gpu, size_t bytes, int fill)
{
    gpu_address memory = 0;
    if (gpu->n_spans == GPU_MOST_SPANS)
        gpu_did(gpu, KVANT_ERR_MEMORY, "memory of the GPU");
    if (gpu->error[0] != 0 || !ok(gpu, driver.memory_new(&memory, bytes + 1), "cuMemAlloc"))
        return NULL;
    gpu->spans[gpu->n_spans++] = memory;
    gpu_fill(gpu, (void *)(uintptr_t)memory, fill, bytes + 1);
    return (void *)(uintptr_t)memory;
}

bool gpu_write(test_gpu *gpu, void *to, size_t at, const void *from, size_t bytes)
{
    return gpu->error[0] == 0 &&
           ok(gpu, driver.copy_in(address_of(to) + at, from, bytes, gpu->stream), "cuMemcpyHtoD") &&
           gpu_finish(gpu);
}

bool gpu_copy(test_gpu *gpu, void *to, const void *from, size_t bytes)
{
    return gpu->error[0] == 0 &&
           ok(gpu, driver.copy_within(address_of(to), address_of(from), bytes, gpu->stream),
              "cuMemcpyDtoD");
}

bool gpu_read(test_gpu *gpu, void *to, const void *from, size_t bytes)
{
    return gpu->error[0] == 0 &&
           ok(gpu, driver.copy_out(to, address_of(from), bytes, gpu->stream), "cuMemcpyDtoH") &&
           gpu_finish(gpu);
}

void *gpu_upload(test_gpu *gpu, const void *from, size_t bytes)
{
    void *memory = gpu_new(gpu, bytes, 0);
    gpu_write(gpu, memory, 0, from, bytes);
    return memory;
}

void *gpu_upload_bf16(test_gpu *gpu, const float *rows, size_t period, size_t n)
{
    uint16_t *halves = malloc(n * sizeof *halves);
    for (size_t i = 0; halves != NULL && i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &rows[i % period], sizeof bits);
        halves[i] = (uint16_t)(bits >> 16);
    }
    gpu_did(gpu, halves != NULL ? KVANT_OK : KVANT_ERR_MEMORY, "rows");
    void *memory = gpu_upload(gpu, halves, n * sizeof *halves);
    free(halves);
    return memory;
}

size_t gpu_free_bytes(test_gpu *gpu)
{
    size_t available = 0, total = 0;
    ok(gpu, driver.memory_info(&available, &total), "cuMemGetInfo");
    return available;
}

/* Devices */

static void describe(test_device *d, int device)
{
    static const int numbers[] = { 75, 76, 16, 97, 38 }; /* of CUdevice_attribute */
    int *const to[] = { &d->major, &d->minor, &d->multiprocessors, &d->shared_bytes, &d->l2_bytes };
    if (driver.name(d->name, TEST_NAME_BYTES, device) != 0)
        snprintf(d->name, sizeof d->name, "unknown");
    for (size_t i = 0; i < sizeof to / sizeof *to; i++)
        if (driver.attribute(to[i], numbers[i], device) != 0)
            *to[i] = 0;
    driver.version(&d->driver_cuda);
    snprintf(d->label, sizeof d->label, "GPU %d %.100s", d->ordinal, d->name);
}

/* The context that the CUDA runtime has, too: libkvant_cuda then works on this GPU. */
static void open_gpu(test_device *d, test_gpu *gpu, int device)
{
    enum { NON_BLOCKING = 1 };
    size_t available = 0, total = 0;
    if (ok(gpu, driver.context_retain(&gpu->context, device), "cuDevicePrimaryCtxRetain") &&
        ok(gpu, driver.context_set(gpu->context), "cuCtxSetCurrent") &&
        ok(gpu, driver.stream_new(&gpu->stream, NON_BLOCKING), "cuStreamCreate") &&
        driver.memory_info(&available, &total) == 0)
        d->memory_bytes = (double)total;
    snprintf(d->missing, sizeof d->missing, "%s", gpu->error);
}

size_t test_find_gpus(test_device *devices, size_t n)
{
    int found = 0;
    if (!load_driver() || driver.count(&found) != 0)
        return 0;
    for (int i = 0; i < found && i < (int)n; i++) {
        test_device *d = &devices[i];
        int device = 0;
        *d = (test_device){ .is_gpu = true, .ordinal = i, .gpu = calloc(1, sizeof *d->gpu) };
        if (driver.device(&device, i) != 0 || d->gpu == NULL)
            snprintf(d->missing, sizeof d->missing,
                     "the driver refuses it, or GPU memory is short");
        describe(d, device);
        if (d->missing[0] == 0 && kvant_cuda_available(d->missing, sizeof d->missing) == KVANT_OK)
            open_gpu(d, d->gpu, device);
    }
    return found < (int)n ? (size_t)found : n;
}

void test_gpu_close(test_gpu *gpu)
{
    if (gpu != NULL && gpu->stream != NULL)
        gpu_begin(gpu);
    free(gpu);
}

/* selftest_gpu.c - GPUs of `kvant selftest`: finds them, owns their memory, stream and errors.
 * selftest_gpu_check.c has what is checked on them, selftest_gpu_speed.c what is measured. */
#include "selftest_gpu.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int attribute(const gpu_driver *driver, int which, int device)
{
    int value = 0;
    return driver->attribute(&value, which, device) == 0 ? value : 0;
}

static void describe(test_device *d, const gpu_driver *driver)
{
    int device = 0;
    if (driver->device(&device, d->ordinal) != 0 ||
        driver->name(d->name, TEST_NAME_BYTES, device) != 0)
        snprintf(d->name, sizeof d->name, "unknown");
    d->major = attribute(driver, GPU_MAJOR, device);
    d->minor = attribute(driver, GPU_MINOR, device);
    d->multiprocessors = attribute(driver, GPU_MULTIPROCESSORS, device);
    d->shared_bytes = attribute(driver, GPU_SHARED_BYTES, device);
    d->l2_bytes = attribute(driver, GPU_L2_BYTES, device);
    driver->version(&d->driver_cuda);
    snprintf(d->label, sizeof d->label, "GPU %d %.100s", d->ordinal, d->name);
}

bool test_add_gpus(test_report *report)
{
    char why[TEST_WHY_BYTES];
    int n = 0;
    const gpu_driver *driver = gpu_driver_load(why, sizeof why);
    if (driver == NULL || driver->count(&n) != 0)
        return true;
    for (int i = 0; i < n; i++) {
        test_device *device = test_add_device(report);
        if (device == NULL)
            return false;
        device->gpu = true;
        device->ordinal = i;
        describe(device, driver);
    }
    return true;
}

bool gpu_ok(test_gpu *gpu, int result, const char *what)
{
    const char *name = "an unknown error";
    if (result != 0 && gpu->error[0] == 0) {
        gpu->driver->error_name(result, &name);
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

/* A kernel that failed makes every later call of the process fail: then the device is lost. */
void gpu_begin(test_gpu *gpu)
{
    gpu->error[0] = 0;
    if (!gpu_ok(gpu, gpu->driver->stream_finish(gpu->stream), "an earlier error of this GPU"))
        gpu->lost = true;
    for (; gpu->n_spans > 0; gpu->n_spans--)
        gpu->driver->memory_free(gpu->spans[gpu->n_spans - 1]);
}

void *gpu_new(test_gpu *gpu, size_t bytes, int fill)
{
    gpu_address memory = 0;
    if (gpu->n_spans == GPU_MOST_SPANS)
        gpu_did(gpu, KVANT_ERR_MEMORY, "memory of the GPU");
    if (gpu->error[0] != 0 ||
        !gpu_ok(gpu, gpu->driver->memory_new(&memory, bytes + 1), "cuMemAlloc"))
        return NULL;
    gpu->spans[gpu->n_spans++] = memory;
    gpu_ok(gpu, gpu->driver->fill(memory, (unsigned char)fill, bytes + 1, gpu->stream),
           "cuMemsetD8");
    return (void *)(uintptr_t)memory;
}

void *gpu_upload(test_gpu *gpu, const void *from, size_t bytes)
{
    void *memory = gpu_new(gpu, bytes, 0);
    if (memory != NULL &&
        gpu_ok(gpu, gpu->driver->copy_in(gpu_at(memory), from, bytes, gpu->stream), "cuMemcpyHtoD"))
        gpu_ok(gpu, gpu->driver->stream_finish(gpu->stream), "cuMemcpyHtoD");
    return memory;
}

void *gpu_upload_bf16(test_gpu *gpu, const float *rows, size_t n)
{
    uint16_t *halves = malloc(n * sizeof *halves);
    if (halves == NULL) {
        gpu_did(gpu, KVANT_ERR_MEMORY, "rows");
        return NULL;
    }
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &rows[i], sizeof bits);
        halves[i] = (uint16_t)(bits >> 16);
    }
    void *memory = gpu_upload(gpu, halves, n * sizeof *halves);
    free(halves);
    return memory;
}

bool gpu_read(test_gpu *gpu, void *to, const void *from, size_t bytes)
{
    return gpu->error[0] == 0 &&
           gpu_ok(gpu, gpu->driver->copy_out(to, gpu_at(from), bytes, gpu->stream),
                  "cuMemcpyDtoH") &&
           gpu_ok(gpu, gpu->driver->stream_finish(gpu->stream), "cuMemcpyDtoH");
}

void gpu_start(test_gpu *gpu)
{
    gpu_ok(gpu, gpu->driver->event_record(gpu->begin, gpu->stream), "cuEventRecord");
}

double gpu_stop(test_gpu *gpu)
{
    float milliseconds = NAN;
    gpu_ok(gpu, gpu->driver->event_record(gpu->end, gpu->stream), "cuEventRecord");
    gpu_ok(gpu, gpu->driver->event_finish(gpu->end), "cuEventSynchronize");
    return gpu_ok(gpu, gpu->driver->elapsed(&milliseconds, gpu->begin, gpu->end),
                  "cuEventElapsedTime")
               ? (double)milliseconds / 1e3
               : NAN;
}

/* The context that the CUDA runtime has, too: libkvant_cuda then works on this GPU. */
static bool start(test_gpu *gpu, const test_device *device)
{
    int number = 0;
    void *context = NULL;
    return gpu_ok(gpu, gpu->driver->device(&number, device->ordinal), "cuDeviceGet") &&
           gpu_ok(gpu, gpu->driver->context_retain(&context, number), "cuDevicePrimaryCtxRetain") &&
           gpu_ok(gpu, gpu->driver->context_set(context), "cuCtxSetCurrent") &&
           gpu_ok(gpu, gpu->driver->stream_new(&gpu->stream, GPU_NON_BLOCKING), "cuStreamCreate") &&
           gpu_ok(gpu, gpu->driver->event_new(&gpu->begin, 0), "cuEventCreate") &&
           gpu_ok(gpu, gpu->driver->event_new(&gpu->end, 0), "cuEventCreate");
}

test_gpu *test_gpu_open(test_device *device)
{
    test_gpu *gpu = calloc(1, sizeof *gpu);
    if (gpu == NULL) {
        snprintf(device->missing, TEST_WHY_BYTES, "%s", kvant_strerror(KVANT_ERR_MEMORY));
        return NULL;
    }
    gpu->driver = gpu_driver_load(device->missing, TEST_WHY_BYTES);
    device->missing[0] = 0;
    if (kvant_cuda_available(device->missing, TEST_WHY_BYTES) == KVANT_OK) {
        size_t available = 0, total = 0;
        device->missing[0] = 0;
        if (start(gpu, device) && gpu->driver->memory_info(&available, &total) == 0)
            device->memory_bytes = (double)total;
        if (gpu->error[0] != 0)
            snprintf(device->missing, TEST_WHY_BYTES, "%s", gpu->error);
    }
    if (device->missing[0] != 0) {
        free(gpu);
        return NULL;
    }
    return gpu;
}

void test_gpu_close(test_gpu *gpu)
{
    if (gpu != NULL)
        gpu_begin(gpu);
    free(gpu);
}

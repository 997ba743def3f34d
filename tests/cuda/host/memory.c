/* memory.c - memory of the mock device (host.h), which is the computer's own. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

kvant_status host_device_current(int *device)
{
    *device = 0;
    return KVANT_OK;
}

static bool fails(void)
{
    return host.no_memory && --host.no_memory == 0;
}

kvant_status host_memory_new(void **memory, size_t bytes)
{
    *memory = fails() ? NULL : aligned_alloc(256, (bytes + 255) / 256 * 256);
    if (*memory)
        memset(*memory, 0, bytes);
    return *memory ? KVANT_OK : KVANT_ERR_MEMORY;
}

void host_memory_free(void *memory)
{
    free(memory);
}

kvant_status host_host_new(void **memory, size_t bytes)
{
    *memory = fails() ? NULL : calloc(1, bytes);
    return *memory ? KVANT_OK : KVANT_ERR_MEMORY;
}

void host_host_free(void *memory)
{
    free(memory);
}

kvant_status host_memory_copy(void *to, const void *from, size_t bytes, kvant_cuda_stream stream)
{
    memcpy(to, from, bytes);
    return KVANT_OK;
}

kvant_status host_memory_read(void *to, const void *from, size_t bytes, kvant_cuda_stream stream)
{
    return host_memory_copy(to, from, bytes, stream);
}

kvant_status host_memory_clear(void *memory, size_t bytes, kvant_cuda_stream stream)
{
    memset(memory, 0, bytes);
    return KVANT_OK;
}

kvant_status host_note_rows(const kvant_cuda_note_args *a, kvant_cuda_stream stream)
{
    for (size_t i = 0; i < a->taken * a->width; i++) {
        const size_t row = a->seen + i / a->width, j = row % a->parts * a->width + i % a->width;
        const float read = a->rows[i / a->width * a->n / a->taken * a->stride + i % a->width],
                    x = isfinite(read) ? read : 0;
        a->sum[j] = row < a->parts ? x : a->sum[j] + x;
        a->min[j] = row < a->parts || x < a->min[j] ? x : a->min[j];
        a->max[j] = row < a->parts || x > a->max[j] ? x : a->max[j];
    }
    return KVANT_OK;
}

kvant_status host_largest(const kvant_cuda_values *numbers, float *out, kvant_cuda_stream stream)
{
    for (int i = 0; i < 2; i++) {
        const uint32_t bits =
            numbers->n[i] ? host_kernels()->magnitude(numbers->at[i], (uint32_t)numbers->n[i]) : 0;
        memcpy(&out[i], &bits, sizeof bits);
    }
    return KVANT_OK;
}

/* memory.h - memory of the GPU for the cache of src/cache: calls of libkvant_cuda.so, since
 * libkvant links no CUDA. Work is ordered on the legacy default stream of the current GPU. The
 * functions leave no message. */
#ifndef KVANT_DEVICE_MEMORY_H
#define KVANT_DEVICE_MEMORY_H

#include <kvant/cuda.h>

/* *device = number of the calling thread's current GPU. */
kvant_status kvant_cuda_device_current(int *device);

/* Zeroed; KVANT_ERR_MEMORY when there is not enough. *memory is NULL after an error. */
kvant_status kvant_cuda_memory_new(void **memory, size_t bytes);
void kvant_cuda_memory_free(void *memory); /* NULL is fine */

/* Host to device, device to device, or device to host, which waits for the work before it. */
kvant_status kvant_cuda_memory_copy(void *to, const void *from, size_t bytes);
kvant_status kvant_cuda_memory_clear(void *memory, size_t bytes);

#endif
